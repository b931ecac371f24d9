// Rotary positions on fused rows of queries, keys and values. Where keys and values go is the
// instance's: rows as they are, or a pool. A few neighbouring lanes share a head.
#pragma once

#include "dense_cuda/kernels.h"
#include "dense_cuda/launch.cuh"
#include "dense_cuda/pack.cuh"

namespace clover::cuda {

constexpr int kRotateThreads = 128;

// What the kernel is told: `place` answers where a token's keys and values go.
template <typename Place>
struct Rotation {
  RotateParams rows;
  Place place;
  int lanes_log2;  // lanes that share a head: 32 at most
  int copied;      // value heads to be copied: all, or none where they stay
};

// The sum over a head's lanes, the same in each.
__device__ __forceinline__ float head_sum(float value, int lanes) {
  for (int mask = lanes / 2; mask > 0; mask /= 2) value += __shfl_xor_sync(0xffffffff, value, mask);
  return value;
}

// One over the root of a head's mean square; of lanes without a head, anything.
template <typename T, int V>
__device__ __forceinline__ float head_factor(const RotateParams& rows, int64_t from, bool active,
                                             int lane, int lanes) {
  float sum = 0.f;
  for (int at = lane * V; active && at < rows.head_dim; at += lanes * V) {
    const Pack<T, V> x = load_pack<T, V>(rows.qkv, from + at);
#pragma unroll
    for (int i = 0; i < V; ++i) sum += widen(x.values[i]) * widen(x.values[i]);
  }
  return rsqrtf(head_sum(sum, lanes) / static_cast<float>(rows.head_dim) + rows.eps);
}

// `V` elements of each half of a head, rotated against one another.
template <typename T, int V>
__device__ __forceinline__ void rotate_pair(const RotateParams& rows, int64_t table, int64_t norm,
                                            int at, float factor, Pack<T, V>& low,
                                            Pack<T, V>& high) {
  const int half = rows.head_dim / 2;
  const Pack<T, V> cos_low = load_pack<T, V>(rows.cos, table + at);
  const Pack<T, V> cos_high = load_pack<T, V>(rows.cos, table + half + at);
  const Pack<T, V> sin_low = load_pack<T, V>(rows.sin, table + at);
  const Pack<T, V> sin_high = load_pack<T, V>(rows.sin, table + half + at);
  Pack<T, V> norm_low, norm_high;
  if (rows.norm != nullptr) {
    norm_low = load_pack<T, V>(rows.norm, norm + at);
    norm_high = load_pack<T, V>(rows.norm, norm + half + at);
  }
#pragma unroll
  for (int i = 0; i < V; ++i) {
    float a = widen(low.values[i]), b = widen(high.values[i]);
    if (rows.norm != nullptr) {
      a *= factor * widen(norm_low.values[i]);
      b *= factor * widen(norm_high.values[i]);
    }
    low.values[i] = narrow<T>(a * widen(cos_low.values[i]) + b * widen(sin_low.values[i]));
    high.values[i] = narrow<T>(b * widen(cos_high.values[i]) + a * widen(sin_high.values[i]));
  }
}

// Heads of all tokens stand in one line: a token's queries, keys and the values that are copied.
template <typename T, int V, typename Place>
__global__ void __launch_bounds__(kRotateThreads)
    rotate_kernel(const __grid_constant__ Rotation<Place> params) {
  const RotateParams& rows = params.rows;
  let_next_start();
  const int lanes = 1 << params.lanes_log2, lane = threadIdx.x % lanes, half = rows.head_dim / 2;
  const int rotated = rows.heads + rows.kv_heads, each = rotated + params.copied;
  const unsigned item = (blockIdx.x * kRotateThreads + threadIdx.x) >> params.lanes_log2;
  const int token = static_cast<int>(item / each), head = static_cast<int>(item % each);
  const bool active = token < rows.tokens;
  const int64_t from = token * rows.stride + int64_t{head} * rows.head_dim;
  wait_for_previous();
  float factor = 1.f;
  if (rows.norm != nullptr)
    factor = head_factor<T, V>(rows, from, active && head < rotated, lane, lanes);
  if (!active) return;
  if (head >= rotated) {
    for (int at = lane * V; at < rows.head_dim; at += lanes * V)
      params.place.template value<T, V>(rows, token, head - rotated, at,
                                        load_pack<T, V>(rows.qkv, from + at));
    return;
  }
  int64_t position = rows.positions[token];
  position = position < 0 ? 0 : position < rows.table_rows ? position : rows.table_rows - 1;
  for (int at = lane * V; at < half; at += lanes * V) {
    Pack<T, V> low = load_pack<T, V>(rows.qkv, from + at);
    Pack<T, V> high = load_pack<T, V>(rows.qkv, from + half + at);
    rotate_pair<T, V>(rows, position * rows.head_dim, int64_t{head} * rows.head_dim, at, factor,
                      low, high);
    if (head < rows.heads) {
      const int64_t to = token * rows.q_stride + int64_t{head} * rows.head_dim;
      store_pack<T, V>(rows.q, to + at, low);
      store_pack<T, V>(rows.q, to + half + at, high);
    } else {
      params.place.template key<T, V>(rows, token, head - rows.heads, at, low);
      params.place.template key<T, V>(rows, token, head - rows.heads, half + at, high);
    }
  }
}

inline bool rotates_in_packs(const RotateParams& rows, int width) {
  const auto addresses =
      reinterpret_cast<uintptr_t>(rows.qkv) | reinterpret_cast<uintptr_t>(rows.cos) |
      reinterpret_cast<uintptr_t>(rows.sin) | reinterpret_cast<uintptr_t>(rows.norm) |
      reinterpret_cast<uintptr_t>(rows.q) | reinterpret_cast<uintptr_t>(rows.k) |
      reinterpret_cast<uintptr_t>(rows.v);
  const int64_t strides = rows.stride | rows.q_stride | rows.k_stride | rows.v_stride;
  return addresses % kAccessBytes == 0 && rows.head_dim / 2 % width == 0 && strides % width == 0;
}

template <typename T, int V, typename Place>
cudaError_t launch_rotation(Rotation<Place> params, const Target& target) {
  const RotateParams& rows = params.rows;
  params.lanes_log2 = 0;
  while (params.lanes_log2 < 5 && (V << params.lanes_log2) < rows.head_dim / 2) ++params.lanes_log2;
  const int64_t heads = int64_t{rows.tokens} * (rows.heads + rows.kv_heads + params.copied);
  const int64_t threads = heads << params.lanes_log2;
  if (threads > INT32_MAX) return cudaErrorInvalidValue;
  const int64_t blocks = (threads + kRotateThreads - 1) / kRotateThreads;
  const Launch how = {dim3(static_cast<unsigned>(blocks)), kRotateThreads, target.stream,
                      target.early};
  return launch(rotate_kernel<T, V, Place>, how, params);
}

template <typename T, typename Place>
cudaError_t rotate_of(const Rotation<Place>& params, const Target& target) {
  constexpr int V = kWidth<T>;
  return rotates_in_packs(params.rows, V) ? launch_rotation<T, V>(params, target)
                                          : launch_rotation<T, 1>(params, target);
}

// `copied`: whether values are written where `place` says.
template <typename Place>
cudaError_t rotate_to(const RotateParams& rows, const Place& place, bool copied,
                      const Target& target) {
  const Rotation<Place> params = {rows, place, 0, copied ? rows.kv_heads : 0};
  switch (rows.dtype) {
    case DType::kFloat32:
      return rotate_of<float>(params, target);
    case DType::kBFloat16:
      return rotate_of<__nv_bfloat16>(params, target);
    case DType::kFloat16:
      return rotate_of<__half>(params, target);
    case DType::kFloat8E4M3:
      break;
  }
  return cudaErrorInvalidValue;
}

}  // namespace clover::cuda
