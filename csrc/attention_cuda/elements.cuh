// Elements of any type as float32, one at a time: for the kernels that are not tuned.
#pragma once

#include "attention_cuda/params.h"
#include "attention_cuda/primitives.cuh"

namespace clover::cuda {

__device__ __forceinline__ float load_element(const void* data, int64_t at, DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return static_cast<const float*>(data)[at];
    case DType::kBFloat16:
      return __bfloat162float(static_cast<const __nv_bfloat16*>(data)[at]);
    case DType::kFloat16:
      return __half2float(static_cast<const __half*>(data)[at]);
    case DType::kFloat8E4M3: {
      const __nv_fp8_storage_t bits = static_cast<const __nv_fp8_storage_t*>(data)[at];
      return __half2float(__half(__nv_cvt_fp8_to_halfraw(bits, __NV_E4M3)));
    }
  }
  return 0.f;
}

// float8 saturates.
__device__ __forceinline__ void store_element(void* data, int64_t at, DType dtype, float value) {
  switch (dtype) {
    case DType::kFloat32:
      static_cast<float*>(data)[at] = value;
      return;
    case DType::kBFloat16:
      static_cast<__nv_bfloat16*>(data)[at] = __float2bfloat16_rn(value);
      return;
    case DType::kFloat16:
      static_cast<__half*>(data)[at] = __float2half_rn(value);
      return;
    case DType::kFloat8E4M3:
      static_cast<__nv_fp8_storage_t*>(data)[at] =
          __nv_cvt_float_to_fp8(value, __NV_SATFINITE, __NV_E4M3);
      return;
  }
}

// Where a token's keys (and, past values_at, values) of a head are, in elements from the pool's
// base; `size` is k_dim or v_dim.
__device__ __forceinline__ int64_t key_at(const PoolView& pool, int64_t block, int head,
                                          int offset) {
  return block * (pool.block_bytes / dtype_bytes(pool.dtype)) +
         (int64_t{head} * pool.block_size + offset) * pool.k_dim;
}

__device__ __forceinline__ int64_t value_at(const PoolView& pool, int64_t block, int head,
                                            int offset) {
  const int size = dtype_bytes(pool.dtype);
  return block * (pool.block_bytes / size) + pool.values_at / size +
         (int64_t{head} * pool.block_size + offset) * pool.v_dim;
}

// The block that holds a position; -1, and a mark, where the table names none of the pool's.
__device__ __forceinline__ int block_of(const PoolView& pool, const int32_t* table, int position,
                                        int* bad) {
  const int block = table[position / pool.block_size];
  if (block >= 0 && block < pool.num_blocks) return block;
  *bad = kBadBlock;
  return -1;
}

}  // namespace clover::cuda
