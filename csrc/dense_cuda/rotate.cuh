// Rotary positions on fused rows of queries, keys and values. Where keys and values go is the
// instance's: rows as they are, or a pool. A few neighbouring lanes share a head.
#pragma once

#include "common/launch.cuh"
#include "dense_cuda/kernels.h"
#include "dense_cuda/pack.cuh"

namespace clover::cuda {

constexpr int kRotateThreads = 128;
constexpr int kRotateBlocks = 12;  // of a multiprocessor at least, so that enough is in flight
constexpr int kWarpLanes = 32;

// What the kernel is told: `place` answers where a token's keys and values go, and whether that is
// a pool, over which attention follows.
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
template <typename T>
__device__ __forceinline__ float head_factor(const RotateParams& rows, int64_t from, bool active,
                                             int lane, int lanes) {
  float sum = 0.f;
  for (int at = lane; active && at < rows.head_dim; at += lanes)
    sum += squares(load_pack<T, 1>(rows.qkv, from + at));
  return rsqrtf(head_sum(sum, lanes) / static_cast<float>(rows.head_dim) + rows.eps);
}

// `V` elements of each half of a head, rotated against one another: of a token's row of the table,
// and a head's of the norm.
template <typename T, int V, bool kNormed>
__device__ __forceinline__ void rotate_pair(const RotateParams& rows, int64_t table, int64_t norm,
                                            int at, float factor, Pack<T, V>& low,
                                            Pack<T, V>& high) {
  const int half = rows.head_dim / 2;
  const Pack<T, V> cos = load_pack<T, V>(rows.cos, table + half + at);
  const Pack<T, V> sin = load_pack<T, V>(rows.sin, table + half + at);
  Pack<T, V> norm_low, norm_high;
  if constexpr (kNormed) {
    norm_low = load_pack<T, V>(rows.norm, norm + at);
    norm_high = load_pack<T, V>(rows.norm, norm + half + at);
  }
#pragma unroll
  for (int i = 0; i < V; ++i) {
    float a = widen(low.values[i]), b = widen(high.values[i]);
    if constexpr (kNormed) {
      a *= factor * widen(norm_low.values[i]);
      b *= factor * widen(norm_high.values[i]);
    }
    low.values[i] = narrow<T>(a * widen(cos.values[i]) - b * widen(sin.values[i]));
    high.values[i] = narrow<T>(b * widen(cos.values[i]) + a * widen(sin.values[i]));
  }
}

__device__ __forceinline__ int64_t table_row(const RotateParams& rows, int token) {
  const int64_t position = rows.positions[token];
  return (position < 0                 ? 0
          : position < rows.table_rows ? position
                                       : rows.table_rows - 1) *
         rows.head_dim;
}

template <typename T, int V, typename Place>
__device__ __forceinline__ void store_pair(const Rotation<Place>& params, int token, int head,
                                           int at, const Pack<T, V>& low, const Pack<T, V>& high) {
  const RotateParams& rows = params.rows;
  const int half = rows.head_dim / 2;
  if (head < rows.heads) {
    const int64_t to = token * rows.q_stride + int64_t{head} * rows.head_dim + at;
    store_pack<T, V>(rows.q, to, low);
    store_pack<T, V>(rows.q, to + half, high);
  } else {
    params.place.template key<T, V>(rows, token, head - rows.heads, at, low);
    params.place.template key<T, V>(rows, token, head - rows.heads, half + at, high);
  }
}

// Heads of all tokens stand in one line: a token's queries, keys and the values that are copied.
// In packs a lane has one of each half of its head; element by element, as many as there are.
template <typename T, int V, bool kNormed, typename Place>
__global__ void __launch_bounds__(kRotateThreads, kRotateBlocks)
    rotate_kernel(const __grid_constant__ Rotation<Place> params) {
  const RotateParams& rows = params.rows;
  if constexpr (!Place::kAppends) let_next_start();
  const int lanes = 1 << params.lanes_log2, lane = threadIdx.x % lanes, half = rows.head_dim / 2;
  const int rotated = rows.heads + rows.kv_heads, each = rotated + params.copied;
  const unsigned item = (blockIdx.x * kRotateThreads + threadIdx.x) >> params.lanes_log2;
  const int token = static_cast<int>(item / each), head = static_cast<int>(item % each);
  const bool active = token < rows.tokens && head < rotated;
  const int64_t from = token * rows.stride + int64_t{head} * rows.head_dim;
  const int64_t norm = int64_t{head} * rows.head_dim;
  wait_for_previous();
  // Attention, which follows, reads its rows' lengths before it waits: whoever wrote them has
  // ended.
  if constexpr (Place::kAppends) let_next_start();
  if (token < rows.tokens && head >= rotated)
    for (int at = lane * V; at < rows.head_dim; at += lanes * V)
      params.place.template value<T, V>(rows, token, head - rotated, at,
                                        load_pack<T, V>(rows.qkv, from + at));
  if constexpr (V > 1) {
    const int at = lane * V;
    const bool mine = active && at < half;
    Pack<T, V> low = {}, high = {};
    if (mine) {
      low = load_pack<T, V>(rows.qkv, from + at);
      high = load_pack<T, V>(rows.qkv, from + half + at);
    }
    float factor = 1.f;
    if constexpr (kNormed) {
      const float sum = head_sum(squares(low) + squares(high), lanes);
      factor = rsqrtf(sum / static_cast<float>(rows.head_dim) + rows.eps);
    }
    if (!mine) return;
    rotate_pair<T, V, kNormed>(rows, table_row(rows, token), norm, at, factor, low, high);
    store_pair<T, V>(params, token, head, at, low, high);
  } else {
    float factor = 1.f;
    if constexpr (kNormed) factor = head_factor<T>(rows, from, active, lane, lanes);
    for (int at = lane; active && at < half; at += lanes) {
      Pack<T, 1> low = load_pack<T, 1>(rows.qkv, from + at);
      Pack<T, 1> high = load_pack<T, 1>(rows.qkv, from + half + at);
      rotate_pair<T, 1, kNormed>(rows, table_row(rows, token), norm, at, factor, low, high);
      store_pair<T, 1>(params, token, head, at, low, high);
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
  return addresses % kAccessBytes == 0 && rows.head_dim / 2 % width == 0 &&
         rows.head_dim / 2 <= kWarpLanes * width && strides % width == 0;
}

template <typename T, int V, typename Place>
cudaError_t launch_rotation(Rotation<Place> params, const Target& target) {
  const RotateParams& rows = params.rows;
  params.lanes_log2 = 0;
  while ((1 << params.lanes_log2) < kWarpLanes && (V << params.lanes_log2) < rows.head_dim / 2)
    ++params.lanes_log2;
  const int64_t heads = int64_t{rows.tokens} * (rows.heads + rows.kv_heads + params.copied);
  const int64_t threads = heads << params.lanes_log2;
  if (threads > INT32_MAX) return cudaErrorInvalidValue;
  const int64_t blocks = (threads + kRotateThreads - 1) / kRotateThreads;
  const Launch how = {dim3(static_cast<unsigned>(blocks)), kRotateThreads, target.stream,
                      target.early};
  return rows.norm == nullptr ? launch(rotate_kernel<T, V, false, Place>, how, params)
                              : launch(rotate_kernel<T, V, true, Place>, how, params);
}

template <typename T, typename Place>
cudaError_t rotate_of(const Rotation<Place>& params, const Target& target) {
  constexpr int V = kWidth<T>;
  return rotates_in_packs(params.rows, V) ? launch_rotation<T, V>(params, target)
                                          : launch_rotation<T, 1>(params, target);
}

// `copied`: whether values are written where `place` says.
template <typename Place>
Rotation<Place> rotation_to(const RotateParams& rows, const Place& place, bool copied) {
  return {rows, place, 0, copied ? rows.kv_heads : 0};
}

}  // namespace clover::cuda
