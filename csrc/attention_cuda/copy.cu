// Keys and values into the pool, out of it, and whole blocks from place to place.
#include "attention_cuda/elements.cuh"
#include "attention_cuda/kernels.h"

namespace clover::cuda {
namespace {

constexpr int kThreads = 128;

// `size` elements, converted where the types differ; 16 bytes at a time where they do not and both
// ends are aligned. The threads of a block share the work from `first` on.
struct Span {
  void* to;
  int64_t to_at;
  DType to_dtype;
  const void* from;
  int64_t from_at;
  DType from_dtype;
  float scale;
};

__device__ __forceinline__ void copy_span(const Span& span, int size, int first, int step) {
  if (span.to_dtype != span.from_dtype) {
    for (int i = first; i < size; i += step) {
      const float value = load_element(span.from, span.from_at + i, span.from_dtype);
      store_element(span.to, span.to_at + i, span.to_dtype, value * span.scale);
    }
    return;
  }
  const int bytes = dtype_bytes(span.to_dtype);
  unsigned char* to = static_cast<unsigned char*>(span.to) + span.to_at * bytes;
  const unsigned char* from = static_cast<const unsigned char*>(span.from) + span.from_at * bytes;
  const uintptr_t both = reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from);
  if ((both | (size * bytes)) % 16 == 0) {
    for (int i = first; i < size * bytes / 16; i += step)
      reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(from)[i];
    return;
  }
  for (int i = first; i < size * bytes; i += step) to[i] = from[i];
}

// One block per token; a warp per head.
__global__ void __launch_bounds__(kThreads)
    append_kernel(const __grid_constant__ AppendParams params) {
  const PoolView& pool = params.pool;
  const int64_t slot = params.slots[blockIdx.x];
  if (slot == kNoSlot) return;
  if (slot < 0 || slot >= int64_t{pool.block_size} * pool.num_blocks) {
    if (threadIdx.x == 0) *params.bad = kBadSlot;
    return;
  }
  const int64_t block = slot / pool.block_size;
  const int offset = static_cast<int>(slot % pool.block_size), lane = threadIdx.x % 32;
  for (int head = threadIdx.x / 32; head < pool.kv_heads; head += kThreads / 32) {
    copy_span(
        {pool.base, key_at(pool, block, head, offset), pool.dtype, params.k,
         blockIdx.x * params.k_stride + head * pool.k_dim, params.dtype, 1.f / params.k_scale},
        pool.k_dim, lane, 32);
    copy_span(
        {pool.base, value_at(pool, block, head, offset), pool.dtype, params.v,
         blockIdx.x * params.v_stride + head * pool.v_dim, params.dtype, 1.f / params.v_scale},
        pool.v_dim, lane, 32);
  }
}

// One block per position; a warp per head.
__global__ void __launch_bounds__(kThreads)
    gather_kernel(const __grid_constant__ GatherParams params) {
  const PoolView& pool = params.pool;
  const int position = params.first + blockIdx.x, lane = threadIdx.x % 32;
  const int block = block_of(pool, params.table, position, params.bad);
  if (block < 0) return;
  const int offset = position % pool.block_size;
  for (int head = threadIdx.x / 32; head < pool.kv_heads; head += kThreads / 32) {
    const int64_t token = int64_t{head} * (params.length - params.first) + blockIdx.x;
    copy_span({params.k, token * pool.k_dim, params.dtype, pool.base,
               key_at(pool, block, head, offset), pool.dtype, params.k_scale},
              pool.k_dim, lane, 32);
    copy_span({params.v, token * pool.v_dim, params.dtype, pool.base,
               value_at(pool, block, head, offset), pool.dtype, params.v_scale},
              pool.v_dim, lane, 32);
  }
}

__global__ void __launch_bounds__(256) copy_kernel(const __grid_constant__ CopyParams params) {
  const int64_t i = blockIdx.x;
  const unsigned char* from =
      params.from + (params.from_index == nullptr ? i : params.from_index[i]) * params.bytes;
  unsigned char* to =
      params.to + (params.to_index == nullptr ? i : params.to_index[i]) * params.bytes;
  const uintptr_t all = reinterpret_cast<uintptr_t>(from) | reinterpret_cast<uintptr_t>(to) |
                        static_cast<uintptr_t>(params.bytes);
  if (all % 16 == 0) {
    for (int64_t at = threadIdx.x; at < params.bytes / 16; at += blockDim.x)
      reinterpret_cast<uint4*>(to)[at] = reinterpret_cast<const uint4*>(from)[at];
    return;
  }
  for (int64_t at = threadIdx.x; at < params.bytes; at += blockDim.x) to[at] = from[at];
}

}  // namespace

cudaError_t append(const AppendParams& params, cudaStream_t stream) {
  append_kernel<<<params.tokens, kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

cudaError_t gather(const GatherParams& params, cudaStream_t stream) {
  gather_kernel<<<params.length - params.first, kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

cudaError_t copy_blocks(const CopyParams& params, cudaStream_t stream) {
  copy_kernel<<<static_cast<unsigned>(params.count), 256, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace clover::cuda
