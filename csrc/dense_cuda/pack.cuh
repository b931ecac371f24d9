// Elements of the model's types, several to an access; arithmetic on them is float32.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/dtype.h"

namespace clover::cuda {

constexpr int kAccessBytes = 16;

// `V` neighbours, read and written in one access.
template <typename T, int V>
struct alignas(sizeof(T) * V) Pack {
  T values[V];
};

template <typename T>
constexpr int kWidth = kAccessBytes / static_cast<int>(sizeof(T));

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float widen(__half x) { return __half2float(x); }

template <typename T>
__device__ __forceinline__ T narrow(float x);
template <>
__device__ __forceinline__ float narrow<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ __nv_bfloat16 narrow<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}
template <>
__device__ __forceinline__ __half narrow<__half>(float x) {
  return __float2half_rn(x);
}

template <typename T, int V>
__device__ __forceinline__ Pack<T, V> load_pack(const void* data, int64_t element) {
  return *reinterpret_cast<const Pack<T, V>*>(static_cast<const T*>(data) + element);
}

template <typename T, int V>
__device__ __forceinline__ void store_pack(void* data, int64_t element, const Pack<T, V>& pack) {
  *reinterpret_cast<Pack<T, V>*>(static_cast<T*>(data) + element) = pack;
}

// Stands for a type, where one is chosen at run time.
template <typename T>
struct Of {
  using Type = T;
};

// What `call` says to the type of rows.
template <typename Call>
cudaError_t for_type(DType dtype, const Call& call) {
  switch (dtype) {
    case DType::kFloat32:
      return call(Of<float>());
    case DType::kBFloat16:
      return call(Of<__nv_bfloat16>());
    case DType::kFloat16:
      return call(Of<__half>());
    case DType::kFloat8E4M3:
      break;
  }
  return cudaErrorInvalidValue;
}

template <typename T, int V>
__device__ __forceinline__ float squares(const Pack<T, V>& x) {
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < V; ++i) sum += widen(x.values[i]) * widen(x.values[i]);
  return sum;
}

}  // namespace clover::cuda
