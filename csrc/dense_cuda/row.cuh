// A row of logits under one draw: who reads which part of it, and what each logit weighs.
//
// A distance is how far a logit is below the row's largest, in float32: as bits, which order like
// the numbers.
#pragma once

#include "dense_cuda/pack.cuh"
#include "dense_cuda/team.cuh"

namespace clover::cuda {

constexpr int kWarp = 32;
constexpr uint32_t kFarthest = 0x7f800000;  // infinity
constexpr double kUnderflow = -746.0;       // the exponential of less is 0

// A block's part of a row.
template <typename T>
struct Slice {
  const T* data;
  int first;  // of the row's elements
  int count;
  int run;  // elements of each warp
  bool packed;
};

// A row's parameters, and what is known of its distances so far.
struct Draw {
  float top;       // the largest logit
  double inverse;  // of the temperature
  double min_p;
  uint32_t farthest;  // that is kept

  __device__ __forceinline__ uint32_t distance(float logit) const {
    return __float_as_uint(logit - top) & 0x7fffffff;
  }

  // Relative to the largest logit's, which is 1.
  __device__ __forceinline__ double weight(uint32_t distance) const {
    if (distance > farthest) return 0.0;
    if (distance == 0) return 1.0;
    const double score = -static_cast<double>(__uint_as_float(distance)) * inverse;
    if (score < kUnderflow) return 0.0;
    const double weight = exp(score);
    return weight < min_p ? 0.0 : weight;
  }
};

// Calls `visit(logit, index into the slice)` for this lane's elements of its warp's run, upwards.
template <typename T, typename Visit>
__device__ __forceinline__ void visit_run(const Slice<T>& slice, Visit&& visit) {
  constexpr int V = kWidth<T>;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int begin = warp * slice.run;
  const int end = min(begin + slice.run, slice.count);
  for (int at = begin + lane * V; at < end; at += kWarp * V) {
    if (slice.packed && at + V <= end) {
      const Pack<T, V> pack = load_pack<T, V>(slice.data, at);
#pragma unroll
      for (int i = 0; i < V; ++i) visit(widen(pack.values[i]), at + i);
    } else {
      for (int i = at; i < end && i < at + V; ++i) visit(widen(slice.data[i]), i);
    }
  }
}

template <typename T>
__device__ __forceinline__ void copy_slice(const T* from, T* to, int count, bool packed) {
  constexpr int V = kWidth<T>;
  const int whole = packed ? count / V * V : 0;
  for (int at = threadIdx.x * V; at < whole; at += kTeamThreads * V) {
    const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(to + at));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(from + at));
  }
  for (int at = whole + threadIdx.x; at < count; at += kTeamThreads) to[at] = from[at];
  asm volatile("cp.async.wait_all;" ::: "memory");
}

}  // namespace clover::cuda
