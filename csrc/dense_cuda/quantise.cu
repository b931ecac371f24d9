// Rows as float8 (e4m3) with a scale each: the row's largest becomes the type's largest.
#include <cuda_fp8.h>

#include "common/launch.cuh"
#include "dense_cuda/kernels.h"
#include "dense_cuda/pack.cuh"

namespace clover::cuda {
namespace {

constexpr int kThreads = 512;
constexpr float kLargest = 448.f;  // of e4m3

__device__ __forceinline__ float block_largest(float value) {
  __shared__ float of_warps[kThreads / 32];
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2)
    value = fmaxf(value, __shfl_xor_sync(0xffffffff, value, mask));
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = value;
  __syncthreads();
  value = of_warps[threadIdx.x % (kThreads / 32)];
#pragma unroll
  for (int mask = kThreads / 64; mask > 0; mask /= 2)
    value = fmaxf(value, __shfl_xor_sync(0xffffffff, value, mask));
  return value;
}

template <typename T, int V>
__device__ __forceinline__ float largest_of(const Pack<T, V>& x) {
  float largest = 0.f;
#pragma unroll
  for (int i = 0; i < V; ++i) largest = fmaxf(largest, fabsf(widen(x.values[i])));
  return largest;
}

// Of two neighbouring lanes, which hold 16 columns, what each stores: QuantiseParams has the order.
__device__ __forceinline__ uint2 interleave(uint2 mine) {
  const bool second = threadIdx.x % 2 != 0;
  const uint32_t theirs = __shfl_xor_sync(0xffffffff, second ? mine.x : mine.y, 1);
  const uint32_t low = second ? theirs : mine.x, high = second ? mine.y : theirs;
  return {__byte_perm(low, high, 0x5140), __byte_perm(low, high, 0x7362)};
}

// One block per row, which stays in registers where it is `N` packs per thread or fewer, and is
// read twice where it is more.
template <typename T, int V, int N>
__global__ void __launch_bounds__(kThreads)
    quantise_kernel(const __grid_constant__ QuantiseParams params) {
  let_next_start();
  wait_for_previous();
  const int64_t row = blockIdx.x;
  const int64_t from = row * params.stride, to = row * params.columns;
  Pack<T, V> x[N] = {};
  float largest = 0.f;
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const int column = (n * kThreads + threadIdx.x) * V;
    if (column >= params.columns) continue;
    x[n] = load_pack<T, V>(params.rows_in, from + column);
    largest = fmaxf(largest, largest_of(x[n]));
  }
  for (int at = (N * kThreads + threadIdx.x) * V; at < params.columns; at += kThreads * V)
    largest = fmaxf(largest, largest_of(load_pack<T, V>(params.rows_in, from + at)));
  largest = block_largest(largest);
  const float scale = largest > 0.f ? largest / kLargest : 1.f, factor = 1.f / scale;
  if (threadIdx.x == 0) params.scales[row] = scale;
  const auto store = [&](const Pack<T, V>& pack, int column) {  // by all lanes together
    Pack<__nv_fp8_storage_t, V> quantised;
#pragma unroll
    for (int i = 0; i < V; ++i)
      quantised.values[i] =
          __nv_cvt_float_to_fp8(widen(pack.values[i]) * factor, __NV_SATFINITE, __NV_E4M3);
    if constexpr (V == 8) {
      uint2& eight = reinterpret_cast<uint2&>(quantised);
      if (params.interleaved) eight = interleave(eight);
    }
    if (column < params.columns)
      store_pack<__nv_fp8_storage_t, V>(params.out, to + column, quantised);
  };
#pragma unroll
  for (int n = 0; n < N; ++n) store(x[n], (n * kThreads + threadIdx.x) * V);
  for (int begin = N * kThreads * V; begin < params.columns; begin += kThreads * V) {
    const int column = begin + threadIdx.x * V;
    if (column < params.columns) x[0] = load_pack<T, V>(params.rows_in, from + column);
    store(x[0], column);
  }
}

template <typename T>
cudaError_t quantise_of(const QuantiseParams& params, const Target& target) {
  constexpr int V = kWidth<T>;
  const auto addresses =
      reinterpret_cast<uintptr_t>(params.rows_in) | reinterpret_cast<uintptr_t>(params.out);
  const bool packed =
      addresses % kAccessBytes == 0 && params.columns % V == 0 && params.stride % V == 0;
  if (params.interleaved && (!packed || V != 8 || params.columns % 16 != 0))
    return cudaErrorInvalidValue;
  const Launch how = {dim3(params.rows), kThreads, target.stream, target.early};
  if (!packed) return launch(quantise_kernel<T, 1, 1>, how, params);
  return params.columns <= kThreads * V ? launch(quantise_kernel<T, V, 1>, how, params)
                                        : launch(quantise_kernel<T, V, 4>, how, params);
}

}  // namespace

cudaError_t quantise(const QuantiseParams& params, const Target& target) {
  return for_type(params.dtype, [&](auto of) {
    return quantise_of<typename decltype(of)::Type>(params, target);
  });
}

}  // namespace clover::cuda
