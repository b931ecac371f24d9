// What the launcher knows of the kernels: entry points and what a launch of them needs.
#pragma once

#include <cuda_runtime_api.h>

#include "attention_cuda/params.h"
#include "dense_cuda/kernels.h"

namespace clover::cuda {

// One instance of the tensor-core kernel; `function` is null where there is none.
struct Kernel {
  const void* function = nullptr;
  int cols = 0;
  int tile = 1;  // keys
  int threads = 0;
  int shared_bytes = 0;  // without tiles
  int stage_bytes = 0;   // of one tile in flight of every computing warp; 0: none are asked for

  // Tiles in flight with `limit` bytes of shared memory; 0: the kernel does not run.
  int stages(int limit) const { return stages_within(limit, shared_bytes, stage_bytes); }
  int bytes(int limit) const { return shared_bytes + stages(limit) * stage_bytes; }
};

// The instance for a head size: of eight columns where they do, else of the most there are.
Kernel bfloat16_kernel(int dim, int eights);
Kernel float16_kernel(int dim, int eights);
Kernel float8_kernel(int dim, int eights);

// The kernel for rows of many query tokens, of compute capability 9.0.
Kernel prompt_kernel_of(DType dtype, int dim);

// The plain kernel: any type, head size and block size.
cudaError_t attend_plain(const AttendParams& params, cudaStream_t stream);

constexpr int64_t kNoSlot = -1;  // of tokens that are not stored: they only fill up a call

struct AppendParams {
  PoolView pool;
  const void* k;  // [tokens, kv_heads, k_dim], contiguous within a token
  int64_t k_stride;
  const void* v;
  int64_t v_stride;
  DType dtype;    // of k and v: the pool's, or where that is float8 also bfloat16 or float16
  float k_scale;  // stored values times this are the real ones
  float v_scale;
  const int64_t* slots;
  int tokens;
  int* bad;
};

cudaError_t append(const AppendParams& params, cudaStream_t stream);

// Of `to` only the pool, the slots and what belongs to them count.
cudaError_t append_rotated(const RotateParams& rows, const AppendParams& to, const Target& target);

struct GatherParams {
  PoolView pool;
  const int32_t* table;
  int first;  // positions
  int length;
  void* k;  // [kv_heads, length - first, k_dim]
  void* v;
  DType dtype;  // of k and v: the pool's, or where that is float8 bfloat16 or float16
  float k_scale;
  float v_scale;
  int* bad;
};

cudaError_t gather(const GatherParams& params, cudaStream_t stream);

// `count` times `bytes` bytes, from from + from_index[i] * bytes to to + to_index[i] * bytes; a
// null index counts up.
struct CopyParams {
  const unsigned char* from;
  const int64_t* from_index;
  unsigned char* to;
  const int64_t* to_index;
  int64_t bytes;
  int64_t count;
};

cudaError_t copy_blocks(const CopyParams& params, cudaStream_t stream);

}  // namespace clover::cuda
