// Attention of rows of many query tokens, prompts and chunks of them, over the paged KV: for
// compute capability 9.0, whose tensor cores read their operands from shared memory.
//
// A thread block takes tiles of 128 columns (query tokens x query heads of a KV head) against all
// keys that they see. One warpgroup loads, two compute, 64 columns each: scores of the next keys
// are multiplied while the softmax of these is worked out. Lane i of a warp holds columns i / 4 and
// i / 4 + 8 of the warp's 16, and of every eight keys (or elements) two.
#pragma once

#include "attention_cuda/merge.cuh"
#include "attention_cuda/prompt_loader.cuh"

namespace clover::cuda {

enum PromptBarrier { kPromptAll, kPromptMerging };

constexpr int kComputing = 2 * kGroupThreads;

// What a thread knows of its two columns, and its running softmax.
template <class C>
class PromptColumns {
 public:
  __device__ __forceinline__ PromptColumns(const AttendParams& params, const PromptItem& item)
      : params_(params), item_(item), scale_(params.score.scale * 1.442695041f) {
    const int thread = threadIdx.x - kGroupThreads, group = params.split.group;
    first_ = thread / 32 * 16 + thread % 32 / 4;
    const int before = item.length - item.count;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int token = (item.col_tile * kPromptCols + first_ + 8 * j) / group;
      position_[j] = before + least(token, item.count - 1);
    }
    lowest_ = before + item.col_tile * kPromptCols / group;
    highest_ =
        before + least((item.col_tile * kPromptCols + kPromptCols - 1) / group, item.count - 1);
  }

  // The first and last tile whose keys every column sees; none where the last is before the first.
  __device__ __forceinline__ int first_whole() const {
    const int window = params_.split.window;
    return window == 0 ? 0 : ceil_div(most(0, highest_ - window + 1), C::kKeys);
  }
  __device__ __forceinline__ int last_whole() const { return (lowest_ + 1) / C::kKeys - 1; }

  // Hides keys that a column does not see.
  __device__ __forceinline__ void mask(float (&scores)[C::kKeys / 2], int tile) const {
    const int first = tile * C::kKeys, window = params_.split.window;
    const int key = first + threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < C::kKeys / 2; ++i) {
      const int distance = position_[i / 2 % 2] - (key + i / 4 * 8 + i % 2);
      if (distance < 0 || (window > 0 && distance >= window)) scores[i] = -INFINITY;
    }
  }

  // Folds a tile's scores into the running softmax: they become weights, packed as the left-hand
  // operand; `factor` is what older sums are worth.
  __device__ __forceinline__ void weigh(float (&scores)[C::kKeys / 2], float (&factor)[2]) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      float top = top_[j];
#pragma unroll
      for (int i = 0; i < C::kKeys / 8; ++i)
        top = fmaxf(top, fmaxf(scores[4 * i + 2 * j], scores[4 * i + 2 * j + 1]));
      top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, 1));
      top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, 2));
      const float base = top == -INFINITY ? 0.f : top * scale_;
      factor[j] = exp2_fast(top_[j] * scale_ - base);
      top_[j] = top;
      float sum = 0.f;
#pragma unroll
      for (int i = 0; i < C::kKeys / 8; ++i)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& score = scores[4 * i + 2 * j + e];
          score = exp2_fast(fmaf(score, scale_, -base));
          sum += score;
        }
      sum_[j] = sum_[j] * factor[j] + sum;
    }
  }

  // Writes the columns' results, or with several parts what the item's last part merges.
  __device__ __forceinline__ void write(const float (&out)[C::D / 2], int splits) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      sum_[j] += __shfl_xor_sync(0xffffffff, sum_[j], 1);
      sum_[j] += __shfl_xor_sync(0xffffffff, sum_[j], 2);
      const float top = top_[j] * scale_;
      const int local = first_ + 8 * j;
      if (splits == 1) {
        write_column(out, j, local, top);
        continue;
      }
      const int64_t at = int64_t{item_.unsplit * splits + item_.part} * kPromptCols + local;
      float2* to = reinterpret_cast<float2*>(params_.work.partials + at * C::D) + lane % 4;
#pragma unroll
      for (int i = 0; i < C::D / 8; ++i)
        __stcg(to + 4 * i, make_float2(out[4 * i + 2 * j], out[4 * i + 2 * j + 1]));
      if (lane % 4 == 0)
        __stcg(reinterpret_cast<float2*>(params_.work.maxima_sums) + at, make_float2(top, sum_[j]));
    }
  }

 private:
  __device__ __forceinline__ void write_column(const float (&out)[C::D / 2], int j, int local,
                                               float top) const {
    const int group = params_.split.group, col = item_.col_tile * kPromptCols + local;
    if (col >= item_.count * group) return;
    const int head = item_.head * group + col % group;
    const int64_t at = int64_t{item_.start + col / group} * group * params_.split.kv_heads + head;
    const Finished done = finish_sum(params_, head, top, sum_[j]);
    uint32_t* to = reinterpret_cast<uint32_t*>(params_.o) + at * (C::D / 2) + threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < C::D / 8; ++i)
      to[4 * i] =
          pack<typename C::T>(out[4 * i + 2 * j] * done.scale, out[4 * i + 2 * j + 1] * done.scale);
    if (threadIdx.x % 4 == 0) params_.lse[at] = done.lse;
  }

  const AttendParams& params_;
  const PromptItem& item_;
  float scale_;
  int first_;  // of the two columns, in the tile
  int position_[2], lowest_, highest_;
  float top_[2] = {-INFINITY, -INFINITY}, sum_[2] = {0.f, 0.f};
};

// A warpgroup's way through the rings.
template <class C>
class PromptComputer {
 public:
  __device__ __forceinline__ PromptComputer(const AttendParams& params, PromptShared<C>& shared)
      : params_(params), shared_(shared) {
    queries_ = shared_address(shared.queries) +
               (threadIdx.x / kGroupThreads - 1) * (kPromptCols / 2) * 128;
  }

  __device__ __forceinline__ void compute(const PromptItem& item, int splits) {
    float out[C::D / 2];
#pragma unroll
    for (int i = 0; i < C::D / 2; ++i) out[i] = 0.f;
    PromptColumns<C> columns(params_, item);
    wait_phase(&shared_.queries_full, items_++ % 2);
    if (item.begin < item.end) {
      float scores[C::kKeys / 2] = {};
      uint32_t weights[C::kKeys / 4];
      await_keys();
      start_scores(scores);
      wait_products<0>();
      hold(scores);
      release(&shared_.keys_empty[keys_++ % C::kStages]);
      columns.mask(scores, item.end - 1);
      float factor[2];
      columns.weigh(scores, factor);
      pack_weights(scores, weights);
      if (item.end - 1 > item.begin) await_keys();
      // Only some tiles at either end need a mask; a branch in the loop would have the compiler
      // wait for the products before the softmax.
      int tile = item.end - 2;
      for (; tile >= item.begin && tile > columns.last_whole(); --tile)
        step<true>(columns, scores, weights, out, tile, tile > item.begin);
      for (; tile >= most(item.begin, columns.first_whole()); --tile)
        step<false>(columns, scores, weights, out, tile, tile > item.begin);
      for (; tile >= item.begin; --tile)
        step<true>(columns, scores, weights, out, tile, tile > item.begin);
      release(&shared_.queries_empty);
      start_values(out, weights);
      wait_products<0>();
      hold(out);
      release(&shared_.values_empty[values_++ % C::kStages]);
    } else {
      release(&shared_.queries_empty);
    }
    columns.write(out, splits);
  }

 private:
  // Scores of tile `tile`, and the values of the one before.
  template <bool Masked>
  __device__ __forceinline__ void step(PromptColumns<C>& columns, float (&scores)[C::kKeys / 2],
                                       uint32_t (&weights)[C::kKeys / 4], float (&out)[C::D / 2],
                                       int tile, bool more) {
    float factor[2];
    start_scores(scores);
    start_values(out, weights);
    wait_products<1>();
    hold(scores);
    release(&shared_.keys_empty[keys_++ % C::kStages]);
    if constexpr (Masked) columns.mask(scores, tile);
    columns.weigh(scores, factor);
    // The wait for the next keys stands here for its branch, too: without one the compiler waits
    // for the values' products before the softmax.
    if (more) await_keys();
    wait_products<0>();
    hold(out);
    hold(weights);  // read until now
    release(&shared_.values_empty[values_++ % C::kStages]);
#pragma unroll
    for (int i = 0; i < C::D / 2; ++i) out[i] *= factor[i / 2 % 2];
    pack_weights(scores, weights);
  }

  __device__ __forceinline__ void await_keys() const {
    wait_phase(&shared_.keys_full[keys_ % C::kStages], keys_ / C::kStages % 2);
  }

  // S of the next keys, which are there.
  __device__ __forceinline__ void start_scores(float (&scores)[C::kKeys / 2]) {
    const int stage = keys_ % C::kStages;
    const uint32_t keys = shared_address(shared_.keys[stage]);
    hold(scores);
    begin_products();
#pragma unroll
    for (int s = 0; s < C::D / 16; ++s)
      multiply_rows<typename C::T, C::kKeys>(
          scores, describe_panels(queries_ + s / 4 * C::kQueryPanelBytes + s % 4 * 32, 16),
          describe_panels(keys + s / 4 * C::kPanelBytes + s % 4 * 32, 16), s > 0);
    commit_products();
  }

  // O += P V of the oldest values.
  __device__ __forceinline__ void start_values(float (&out)[C::D / 2],
                                               const uint32_t (&weights)[C::kKeys / 4]) {
    const int stage = values_ % C::kStages;
    wait_phase(&shared_.values_full[stage], values_ / C::kStages % 2);
    const uint32_t values = shared_address(shared_.values[stage]);
    constexpr int kWide = C::D > 128 ? 128 : C::D;  // of a product
    hold(out);
    begin_products();
#pragma unroll
    for (int s = 0; s < C::kKeys / 16; ++s) {
      const uint32_t a[4] = {weights[4 * s], weights[4 * s + 1], weights[4 * s + 2],
                             weights[4 * s + 3]};
#pragma unroll
      for (int w = 0; w < C::D / kWide; ++w)
        multiply_columns<typename C::T, kWide>(
            reinterpret_cast<float (&)[kWide / 2]>(out[w * kWide / 2]), a,
            describe_panels(values + w * 2 * C::kPanelBytes + s * 16 * 128, C::kPanelBytes));
    }
    commit_products();
  }

  __device__ __forceinline__ void pack_weights(const float (&scores)[C::kKeys / 2],
                                               uint32_t (&weights)[C::kKeys / 4]) const {
#pragma unroll
    for (int i = 0; i < C::kKeys / 4; ++i)
      weights[i] = pack<typename C::T>(scores[2 * i], scores[2 * i + 1]);
  }

  __device__ __forceinline__ void release(uint64_t* barrier) const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive_phase(barrier);
  }

  const AttendParams& params_;
  PromptShared<C>& shared_;
  uint32_t queries_;
  int items_ = 0, keys_ = 0, values_ = 0;  // done with so far
};

// The parts of an item, merged in order by its last block. A thread takes four elements of a
// column at a time.
template <class C>
__device__ __forceinline__ void merge_splits(const AttendParams& params, const PromptItem& item,
                                             int splits) {
  const int group = params.split.group;
  const float2* top_sums = reinterpret_cast<const float2*>(params.work.maxima_sums);
  for (int i = threadIdx.x - kGroupThreads; i < kPromptCols * (C::D / 4); i += kComputing) {
    const int local = i / (C::D / 4), element = i % (C::D / 4) * 4;
    const int col = item.col_tile * kPromptCols + local;
    if (col >= item.count * group) break;
    const int64_t at = int64_t{item.unsplit * splits} * kPromptCols + local;
    float top = -INFINITY, sum = 0.f;
    for (int s = 0; s < splits; ++s) top = fmaxf(top, __ldcg(top_sums + at + s * kPromptCols).x);
    float4 value = {0.f, 0.f, 0.f, 0.f};
    for (int s = 0; s < splits; ++s) {
      const int64_t from = at + s * kPromptCols;
      const float2 part = __ldcg(top_sums + from);
      const float factor = part_factor(part.x, top);
      sum += factor * part.y;
      add_scaled(
          value, factor,
          __ldcg(reinterpret_cast<const float4*>(params.work.partials + from * C::D + element)));
    }
    const int head = item.head * group + col % group;
    const int64_t to = int64_t{item.start + col / group} * group * params.split.kv_heads + head;
    const Finished done = finish_sum(params, head, top, sum);
    write_out(
        params, to * C::D, element,
        {value.x * done.scale, value.y * done.scale, value.z * done.scale, value.w * done.scale});
    if (element == 0) params.lse[to] = done.lse;
  }
}

template <class C>
__device__ __forceinline__ void compute_prompts(const AttendParams& params,
                                                PromptShared<C>& shared) {
  const PromptWork work(params);
  PromptComputer<C> computer(params, shared);
  const int splits = work.splits(), thread = threadIdx.x - kGroupThreads;
  PromptItem item = work.at(0);
  for (int turn = 0; item.row >= 0; ++turn) {
    computer.compute(item, splits);
    if (splits > 1) {
      sync_barrier(kPromptMerging, kComputing);  // partial results before the arrival that tells
      if (thread == 0) {
        int* arrivals = params.work.arrivals + item.unsplit;
        shared.last = arrive(arrivals) == splits - 1;
        if (shared.last) *arrivals = 0;
      }
      sync_barrier(kPromptMerging, kComputing);
      if (shared.last) merge_splits<C>(params, item, splits);
    }
    item = work.at(turn + 1);
  }
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1)
    prompt_kernel(const __grid_constant__ AttendParams params) {
  extern __shared__ __align__(1024) unsigned char prompt_memory[];
  PromptShared<C>& shared = *reinterpret_cast<PromptShared<C>*>(prompt_memory);
  if (threadIdx.x == 0) {
    init_phases(&shared.queries_full, kGroupThreads);
    init_phases(&shared.queries_empty, kComputing / 32);
    for (int i = 0; i < C::kStages; ++i) {
      init_phases(&shared.keys_full[i], kGroupThreads);
      init_phases(&shared.values_full[i], kGroupThreads);
      init_phases(&shared.keys_empty[i], kComputing / 32);
      init_phases(&shared.values_empty[i], kComputing / 32);
    }
  }
  __syncthreads();
  wait_for_previous();
  let_next_start();
  if (threadIdx.x < kGroupThreads) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
    const PromptWork work(params);
    PromptLoader<C> loader(params, shared);
    PromptItem item = work.at(0);
    for (int turn = 0; item.row >= 0; ++turn) {
      loader.load(item);
      item = work.at(turn + 1);
    }
    loader.finish();
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
    compute_prompts<C>(params, shared);
  }
}

}  // namespace clover::cuda
