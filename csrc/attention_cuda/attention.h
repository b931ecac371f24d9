// Paged attention on a GPU: a pool described layer by layer, and the launchers of its kernels.
//
// Everything runs on the caller's stream and reads lengths and block tables on the device, so a
// call can be captured in a graph. One launch of a pool at a time: they share a workspace, which
// is allocated before the first call and grows, outside of captures, only where splits are fixed.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "attention_cuda/kernels.h"

namespace clover::cuda {

struct LayerConfig {
  DType dtype;
  int kv_heads;
  int group;
  int k_dim;
  int v_dim;
  float scale;
  int window;     // 0: none
  float softcap;  // 0: none
  float k_scale;  // of stored float8 values
  float v_scale;
  std::vector<float> sinks;
  std::vector<float> alibi_slopes;
};

struct AttendCall {
  const void* q;
  int64_t q_stride;  // elements
  DType q_dtype;     // of o too
  const int32_t* starts;
  const int32_t* tables;
  int64_t table_stride;
  const int32_t* lengths;
  int rows;
  int tokens;
  void* o;
  float* lse;
};

struct DeviceDeleter {
  void operator()(void* memory) const;
};
struct HostDeleter {
  void operator()(void* memory) const;
};

class Attention {
 public:
  // `pool` is device memory that must outlive this; std::invalid_argument for a size that cannot
  // be, std::runtime_error for what CUDA refuses.
  // `shared_limit`: bytes of shared memory that a thread block may take, where less than the
  // device's; 0: the device's.
  Attention(int device, void* pool, int64_t pool_bytes, int block_size, int num_blocks,
            bool fixed_splits, int shared_limit);

  // Adds the next layer, which lies after those before it in the pool.
  void add_layer(const LayerConfig& config);

  int layers() const { return static_cast<int>(layers_.size()); }
  const LayerConfig& config(int layer) const { return layers_.at(layer).config; }

  // `dtype` is of k and v: the layer's, or bfloat16 or float16 where that is float8.
  void append(int layer, const AppendParams& call, cudaStream_t stream);

  // Rotates queries where they are, and keys on their way to `slots`; k and v of `rows` are not
  // read.
  void append_rotated(int layer, const RotateParams& rows, const int64_t* slots,
                      cudaStream_t stream);

  void attend(int layer, const AttendCall& call, cudaStream_t stream);

  // Keys and values of positions first to length - 1 of one row, as they are stored: without the
  // scales of float8, whose values every other type holds.
  void gather(int layer, const GatherParams& call, cudaStream_t stream);

  void copy_blocks(const CopyParams& call, cudaStream_t stream);

  // What serves a call: columns of the tensor-core kernel, 0 for the plain one; 128 where rows of
  // many tokens have the prompt kernel.
  int columns(int layer, const AttendCall& call) const;

  // Promises that lengths, starts and tables of calls are not written by the launch just before
  // them, so that they are read before it has ended. Of a call right after an append, on the same
  // stream, that is always taken to be so: rows are written before anything is appended to them.
  void settle_rows(bool settled) { settled_ = settled; }

  // Takes that back for the next call, whose rows were changed after the append.
  void rows_changed() { appended_ = false; }

  // kBadBlock or kBadSlot where an index of a finished call was outside the pool, else 0; forgets.
  int take_bad();

 private:
  struct Layer {
    LayerConfig config;
    PoolView pool;
    std::unique_ptr<float, DeviceDeleter> sinks;
    std::unique_ptr<float, DeviceDeleter> slopes;
  };

  Kernel kernel_for(const Layer& layer, const AttendCall& call, int tokens) const;
  int tokens_of_rows(const Layer& layer, const AttendCall& call, bool prompts) const;
  Kernel prompt_for(const Layer& layer, const AttendCall& call) const;
  AttendParams describe_call(const Layer& layer, const AttendCall& call) const;
  void launch(const Kernel& kernel, AttendParams params, cudaStream_t stream) const;
  bool fits(const Kernel& kernel) const;
  void prepare(const Kernel& kernel) const;
  void reserve(int64_t slots, int64_t floats, cudaStream_t stream);
  void reserve_fixed(const Layer& layer, const AttendCall& call, int cols, cudaStream_t stream);

  int device_;
  unsigned char* pool_;
  int64_t pool_bytes_;
  int64_t used_bytes_ = 0;
  int block_size_;
  int num_blocks_;
  bool fixed_splits_;
  int processors_ = 0;
  int shared_limit_ = 0;
  bool hopper_ = false;        // compute capability 9.0
  bool early_launch_ = false;  // kernels may be launched before those before them have ended
  bool settled_ = false;
  bool appended_ = false;  // by the last launch
  cudaStream_t appended_on_ = nullptr;
  std::vector<Layer> layers_;
  int64_t slots_ = 0;
  int64_t floats_ = 0;
  std::unique_ptr<float, DeviceDeleter> partials_;
  std::unique_ptr<float, DeviceDeleter> maxima_sums_;
  std::unique_ptr<int, DeviceDeleter> counters_;
  std::unique_ptr<int, HostDeleter> bad_;  // host memory that the device writes to
};

// GPUs that this process can use; 0 where there is no driver.
int device_count();

// CUDA's version, 1000 times the major one and 10 times the minor one.
struct Versions {
  int driver;  // the newest that it serves; 0 where there is none
  int runtime;
};
Versions versions();

}  // namespace clover::cuda
