// What becomes of a piece's results: what computing warps leave in shared memory, how finishing
// warps make it one and write it out, and how the parts of an item are merged.
#pragma once

#include "attention_cuda/planner.cuh"
#include "attention_cuda/tile.cuh"

namespace clover::cuda {

constexpr int kMergedParts = 128;  // at a time

enum Barrier { kAll, kFinishing };

template <class C>
struct Shared {
  alignas(128) float out[C::W][C::kCols][C::kOutStride];
  float2 top_sum[C::W][C::kCols];
  float4 merged[C::kFinishers];
  float2 parts[kMergedParts][C::kCols];  // of a merge: maximum and sum, then weight
  float2 merged_top_sum[C::kCols];
  PlannedPieces pieces;
  // Phases: a piece's results are there; they are taken. Every thread of one side arrives.
  uint64_t handed, taken;
  bool last;

  // The computing warps' rings of tiles, behind this: [warp][stage][bytes of a tile].
  __device__ __forceinline__ unsigned char* ring() {
    return reinterpret_cast<unsigned char*>(this + 1);
  }
};

// One query token and head's result.
__device__ __forceinline__ void write_out(const AttendParams& params, int64_t at, int element,
                                          float4 value) {
  if (params.q_dtype == DType::kBFloat16) {
    uint2 packed = {pack<BFloat16>(value.x, value.y), pack<BFloat16>(value.z, value.w)};
    *reinterpret_cast<uint2*>(static_cast<uint16_t*>(params.o) + at + element) = packed;
  } else {
    uint2 packed = {pack<Float16>(value.x, value.y), pack<Float16>(value.z, value.w)};
    *reinterpret_cast<uint2*>(static_cast<uint16_t*>(params.o) + at + element) = packed;
  }
}

// What a query token and head's sum of values is multiplied by, and the log of its denominator.
struct Finished {
  float scale;
  float lse;
};

// `top` and `sum`: the scores' maximum, in powers of two, and the softmax's sum against it.
__device__ __forceinline__ Finished finish_sum(const AttendParams& params, int head, float top,
                                               float sum) {
  float scale = params.score.v_scale;
  if (params.score.sinks != nullptr) {
    const float sink = params.score.sinks[head] * 1.442695041f;
    const float base = fmaxf(top, sink), factor = exp2_fast(top - base);
    sum = sum * factor + exp2_fast(sink - base);
    scale *= factor;
    top = base;
  }
  return {sum > 0.f ? scale / sum : 0.f, (top + log2f(sum)) * 0.6931471806f};
}

// Normalises one column's four elements and writes them; one thread per column also lse.
template <class C>
__device__ __forceinline__ void finish_column(const AttendParams& params, const Piece& piece,
                                              int local, int element, float top, float sum,
                                              float4 value) {
  const int group = params.split.group, col = piece.col_tile * C::kCols + local;
  const int head = piece.head * group + col % group;
  const int64_t at = int64_t{piece.start + col / group} * group * params.split.kv_heads + head;
  const Finished done = finish_sum(params, head, top, sum);
  write_out(
      params, at * C::D, element,
      {value.x * done.scale, value.y * done.scale, value.z * done.scale, value.w * done.scale});
  if (element == 0) params.lse[at] = done.lse;
}

// Weights one of several partial results: its maximum against that of all.
__device__ __forceinline__ float part_factor(float top, float base) {
  return top == -INFINITY ? 0.f : exp2_fast(top - base);
}

__device__ __forceinline__ void add_scaled(float4& sum, float factor, const float4& value) {
  sum.x += factor * value.x;
  sum.y += factor * value.y;
  sum.z += factor * value.z;
  sum.w += factor * value.w;
}

// Turns the parts' maxima into weights against the maximum of all; a warp per column. Leaves the
// maximum and the sum so far in `merged_top_sum`.
template <class C>
__device__ __forceinline__ void weigh_parts(Shared<C>& space, int thread, int cols, int parts) {
  const int lane = thread % 32;
  float2* top_sum = space.merged_top_sum;
  for (int col = thread / 32; col < cols; col += C::kFinishers / 32) {
    float top = top_sum[col].x, sum = 0.f;
    for (int i = lane; i < parts; i += 32) top = fmaxf(top, space.parts[i][col].x);
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2)
      top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, mask));
    for (int i = lane; i < parts; i += 32) {
      const float weight = part_factor(space.parts[i][col].x, top);
      sum += weight * space.parts[i][col].y;
      space.parts[i][col].x = weight;
    }
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) sum += __shfl_xor_sync(0xffffffff, sum, mask);
    __syncwarp();
    if (lane == 0) top_sum[col] = {top, sum + top_sum[col].y * part_factor(top_sum[col].x, top)};
    __syncwarp();
  }
}

// Merges the parts of an item out of the workspace, in order of position.
template <class C>
__device__ __forceinline__ void merge_parts(const AttendParams& params, const Piece& piece,
                                            Shared<C>& shared, int thread, int cols) {
  constexpr int kBatch = 24;  // loads on their way at a time
  float2* top_sum = shared.merged_top_sum;
  const float2* top_sums = reinterpret_cast<const float2*>(params.work.maxima_sums);
  const int items = cols * (C::D / 4);
  // Where there are more threads than items, several share one; not where splits are fixed, since
  // the number of columns, on which that depends, is not the row's alone.
  const int shares = params.split.fixed_tiles > 0 ? 1 : most(1, C::kFinishers / items);
  const int share = shares == 1 ? 0 : thread / items;
  const auto slot_of = [&](int part) {
    return part == 0 ? piece.first_slot : piece.slot_base + part * piece.slot_stride;
  };
  const auto sync = [] { sync_barrier(kFinishing, C::kFinishers); };
  for (int base = 0; base < items; base += C::kFinishers) {
    const int item = shares == 1 ? base + thread : thread % items;
    const bool mine = item < items && share < shares;
    const int col = mine ? item / (C::D / 4) : 0, element = item % (C::D / 4) * 4;
    float4 value = {0.f, 0.f, 0.f, 0.f};
    if (thread < cols) top_sum[thread] = {-INFINITY, 0.f};
    for (int first = 0; first < piece.parts; first += kMergedParts) {
      const int parts = least(kMergedParts, piece.parts - first);
      for (int i = thread; i < parts * cols; i += C::kFinishers) {
        const int64_t at = int64_t{slot_of(first + i / cols)} * C::kCols + i % cols;
        shared.parts[i / cols][i % cols] = __ldcg(top_sums + at);
      }
      sync();
      const float before = top_sum[col].x;
      sync();
      weigh_parts<C>(shared, thread, cols, parts);
      sync();
      const float factor = part_factor(before, top_sum[col].x);
      value = {value.x * factor, value.y * factor, value.z * factor, value.w * factor};
      if (mine) {
        for (int part = share; part < parts; part += shares * kBatch) {
          float4 values[kBatch];
#pragma unroll
          for (int i = 0; i < kBatch; ++i) {
            const int slot = slot_of(first + least(part + i * shares, parts - 1));
            const int64_t at = (int64_t{slot} * C::kCols + col) * C::D + element;
            values[i] = __ldcg(reinterpret_cast<const float4*>(params.work.partials + at));
          }
#pragma unroll
          for (int i = 0; i < kBatch; ++i)
            if (part + i * shares < parts)
              add_scaled(value, shared.parts[part + i * shares][col].x, values[i]);
        }
      }
      sync();
    }
    if (shares > 1) {
      shared.merged[thread] = value;
      sync();
      for (int i = 1; mine && share == 0 && i < shares; ++i)
        add_scaled(value, 1.f, shared.merged[thread + i * items]);
    }
    if (mine && share == 0)
      finish_column<C>(params, piece, col, element, top_sum[col].x, top_sum[col].y, value);
    sync();
  }
}

// A computing warp's result of a piece, to where the finishing warps take it.
template <class C>
__device__ __forceinline__ void hand_over(Shared<C>& shared, Running<C>& running, int cols,
                                          int warp, int lane) {
#pragma unroll
  for (int n = 0; n < C::NT; ++n)
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int col = n * 8 + (lane % 4) * 2 + j;
      float sum = running.sum[n][j];
#pragma unroll
      for (int mask = 4; mask < 32; mask *= 2) sum += __shfl_xor_sync(0xffffffff, sum, mask);
      if (col >= cols) continue;
      if (lane < 4) shared.top_sum[warp][col] = {running.top[n][j], sum};
#pragma unroll
      for (int s = 0; s < C::kSteps; ++s)
#pragma unroll
        for (int high = 0; high < 2; ++high)
          shared.out[warp][col][out_element<C>(s, high, lane)] = running.out[s][n][high * 2 + j];
    }
}

// The warps' results of a piece become one, which is written out or, where the item has other
// pieces, to the workspace.
template <class C>
__device__ __forceinline__ void finish_piece(const AttendParams& params, Shared<C>& shared,
                                             const Piece& piece, int thread, int cols) {
  for (int i = thread; i < cols * (C::D / 4); i += C::kFinishers) {
    const int col = i / (C::D / 4), element = i % (C::D / 4) * 4;
    float top = -INFINITY, sum = 0.f;
    float4 value = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int w = 0; w < C::W; ++w) top = fmaxf(top, shared.top_sum[w][col].x);
#pragma unroll
    for (int w = 0; w < C::W; ++w) {
      const float factor = part_factor(shared.top_sum[w][col].x, top);
      sum += factor * shared.top_sum[w][col].y;
      add_scaled(value, factor, *reinterpret_cast<const float4*>(&shared.out[w][col][element]));
    }
    if (piece.parts == 1) {
      finish_column<C>(params, piece, col, element, top, sum, value);
      continue;
    }
    const int64_t at = int64_t{piece.slot} * C::kCols + col;
    __stcg(reinterpret_cast<float4*>(params.work.partials + at * C::D + element), value);
    if (element == 0)
      __stcg(reinterpret_cast<float2*>(params.work.maxima_sums) + at, make_float2(top, sum));
  }
}

}  // namespace clover::cuda
