// The thread blocks that share a row, a cluster or one alone, and the numbers they tell each other.
#pragma once

#include <cooperative_groups.h>

namespace clover::cuda {

constexpr int kTeamThreads = 256;
constexpr int kTeamWarps = kTeamThreads / 32;
constexpr int kTeamNumbers = 16;

// Numbers are told in turns: what a block has told stays until the turn after the next, by when
// every block has read it, since all meet once a turn.
template <bool kCluster>
class Team {
 public:
  using Mail = double[2][kTeamNumbers];  // of each block, in shared memory

  __device__ explicit Team(Mail* mail) : mail_(mail) {}

  __device__ int blocks() const {
#if __CUDA_ARCH__ >= 900
    if constexpr (kCluster) return cooperative_groups::this_cluster().num_blocks();
#endif
    return 1;
  }

  __device__ int block() const {
#if __CUDA_ARCH__ >= 900
    if constexpr (kCluster) return cooperative_groups::this_cluster().block_rank();
#endif
    return 0;
  }

  __device__ void meet() const {
#if __CUDA_ARCH__ >= 900
    if constexpr (kCluster) {
      cooperative_groups::this_cluster().sync();
      return;
    }
#endif
    __syncthreads();
  }

  // By one thread per number, before the meeting of this turn.
  __device__ void tell(int number, double value) { (*mail_)[turn_][number] = value; }

  // After it.
  __device__ double told(int block, int number) const {
    const double* mine = &(*mail_)[turn_][number];
#if __CUDA_ARCH__ >= 900
    if constexpr (kCluster) return *cooperative_groups::this_cluster().map_shared_rank(mine, block);
#endif
    return *mine;
  }

  __device__ void end_turn() { turn_ ^= 1; }

 private:
  Mail* mail_;
  int turn_ = 0;
};

}  // namespace clover::cuda
