// The loading warpgroup of the prompt kernel: which items of the work are a block's, and their
// queries, keys and values on the way to shared memory.
#pragma once

#include "attention_cuda/params.h"
#include "attention_cuda/products.cuh"
#include "attention_cuda/prompt_plan.h"

namespace clover::cuda {

constexpr int kGroupThreads = 128;  // of a warpgroup

template <typename T_, int D_>
struct PromptConfig {
  using T = T_;
  static constexpr int D = D_;
  static constexpr int kKeys = D > 128 ? 64 : 128;  // of a tile
  static constexpr int kStages = 2;
  static constexpr int kPanels = (D + 63) / 64;
  static constexpr int kChunks = D / 8;  // of 16 bytes, in a row
  static constexpr int kPanelBytes = kKeys * 128;
  static constexpr int kMatrixBytes = kPanels * kPanelBytes;
  static constexpr int kQueryPanelBytes = kPromptCols * 128;
  static constexpr int kThreads = 3 * kGroupThreads;
};

template <class C>
struct PromptShared {
  alignas(1024) unsigned char queries[C::kPanels * C::kQueryPanelBytes];
  alignas(1024) unsigned char keys[C::kStages][C::kMatrixBytes];
  alignas(1024) unsigned char values[C::kStages][C::kMatrixBytes];
  // Filled by the loading warps, emptied by the computing ones.
  uint64_t queries_full, queries_empty;
  uint64_t keys_full[C::kStages], keys_empty[C::kStages];
  uint64_t values_full[C::kStages], values_empty[C::kStages];
  bool last;
};

// One warp's view of the work, all of whose lanes act together.
class PromptWork {
 public:
  __device__ __forceinline__ explicit PromptWork(const AttendParams& params) : params_(params) {
    const int lane = threadIdx.x % 32;
    rows_each_ = ceil_div(params.rows, 32);
    int items = 0, tiles = 0;
    for (int i = lane * rows_each_; i < least((lane + 1) * rows_each_, params.rows); ++i) {
      const int count = params.starts[i + 1] - params.starts[i], length = params.lengths[i];
      const int here = items_of(length, count);
      items += here;
      if (here > 0) tiles = most(tiles, plan_row(params.split, length, count).units);
    }
    int sum = items;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(0xffffffff, sum, step);
      if (lane >= step) sum += other;
      tiles = most(tiles, __shfl_xor_sync(0xffffffff, tiles, step));
    }
    before_ = sum - items;
    const int total = __shfl_sync(0xffffffff, sum, 31);
    splits_ = prompt_splits(total, tiles, gridDim.x, params.slots);
    parts_ = total * splits_;
  }

  __device__ __forceinline__ int splits() const { return splits_; }

  // This block's item `turn`; the way over the work turns back at its ends, so that whoever got a
  // long one gets a short one next.
  __device__ __forceinline__ PromptItem at(int turn) const {
    PromptItem item;
    item.row = -1;
    const int across = turn % 2 == 0 ? blockIdx.x : gridDim.x - 1 - blockIdx.x;
    const int index = turn * gridDim.x + across;
    if (index >= parts_) return item;
    item.unsplit = index / splits_;
    const int lane = __popc(__ballot_sync(0xffffffff, before_ <= item.unsplit)) - 1;
    int before = __shfl_sync(0xffffffff, before_, lane);
    item.row = lane * rows_each_;
    while (true) {
      item.start = params_.starts[item.row];
      item.count = params_.starts[item.row + 1] - item.start;
      item.length = params_.lengths[item.row];
      const int items = items_of(item.length, item.count);
      if (item.unsplit < before + items) break;
      before += items;
      ++item.row;
    }
    place_item(params_.split, splits_, index - before * splits_, item);
    return item;
  }

 private:
  __device__ __forceinline__ int items_of(int length, int count) const {
    return prompt_items(params_.split, length, count, params_.narrow);
  }

  const AttendParams& params_;
  int rows_each_, before_, splits_, parts_;
};

// Copies on their way, oldest first; what has landed is told to the computing warps.
class Arrivals {
 public:
  // The copies issued since the last call are what `barrier` tells of.
  __device__ __forceinline__ void add(uint64_t* told) {
    const uint32_t barrier = shared_address(told);
    commit_copies();
    if (waiting_ == 2) {
      wait_copies<2>();
      tell(first_);
      first_ = second_;
      second_ = barrier;
      return;
    }
    if (waiting_++ == 0)
      first_ = barrier;
    else
      second_ = barrier;
  }

  __device__ __forceinline__ void flush() {
    wait_copies<0>();
    if (waiting_ > 0) tell(first_);
    if (waiting_ > 1) tell(second_);
    waiting_ = 0;
  }

  // Waits until a place is free; whoever frees it may need what is on its way.
  __device__ __forceinline__ void claim(uint64_t* barrier, int parity) {
    if (__all_sync(0xffffffff, phase_done(barrier, parity))) return;
    flush();
    wait_phase(barrier, parity);
  }

 private:
  __device__ __forceinline__ void tell(uint32_t barrier) const {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    arrive_phase(barrier);
  }

  uint32_t first_ = 0, second_ = 0;  // addresses in shared memory
  int waiting_ = 0;
};

template <class C>
class PromptLoader {
 public:
  __device__ __forceinline__ PromptLoader(const AttendParams& params, PromptShared<C>& shared)
      : params_(params), shared_(shared) {}

  __device__ __forceinline__ void load(const PromptItem& item) {
    if (items_ > 0) arrivals_.claim(&shared_.queries_empty, (items_ - 1) % 2);
    ++items_;
    load_queries(item);
    arrivals_.add(&shared_.queries_full);
    if (item.begin == item.end) return;
    table_ = params_.tables + item.row * params_.table_stride;
    Slabs next = resolve(item, item.end - 1, fetch(item, item.end - 1)), now = next, before;
    int later = fetch(item, item.end - 2);
    for (int tile = item.end - 1; tile >= item.begin; --tile) {
      before = now;
      now = next;
      load_keys(now);
      if (tile > item.begin) {
        next = resolve(item, tile - 1, later);
        later = fetch(item, tile - 2);
      }
      if (tile < item.end - 1) load_values(before);
    }
    load_values(now);
  }

  __device__ __forceinline__ void finish() { arrivals_.flush(); }

 private:
  // The lane's slab of 16 keys of a tile: where it is; rows of the tile that are there.
  struct Slabs {
    const unsigned char* at;
    int low;
    int high;
  };

  // The block of the lane's slab; not read where no column sees it.
  __device__ __forceinline__ int fetch(const PromptItem& item, int tile) const {
    const int lane = threadIdx.x % 32, first = tile * C::kKeys + lane * kSlab;
    const bool there = lane < C::kKeys / kSlab && tile >= item.begin && first < item.length &&
                       first + kSlab > item.low;
    return there ? __ldg(table_ + first / params_.pool.block_size) : 0;
  }

  __device__ __forceinline__ Slabs resolve(const PromptItem& item, int tile, int block) const {
    const PoolView& pool = params_.pool;
    const int first = tile * C::kKeys + threadIdx.x % 32 * kSlab;
    Slabs slabs;
    if (block < 0 || block >= pool.num_blocks) {
      *params_.work.bad = kBadBlock;
      block = 0;
    }
    const int64_t row = int64_t{item.head} * pool.block_size + first % pool.block_size;
    slabs.at = pool.base + block * pool.block_bytes + row * (C::D * C::T::kBytes);
    slabs.low = item.low - tile * C::kKeys;
    slabs.high = item.length - tile * C::kKeys;
    return slabs;
  }

  __device__ __forceinline__ void load_keys(const Slabs& slabs) {
    const int stage = keys_ % C::kStages;
    load_matrix(shared_.keys[stage], &shared_.keys_full[stage], &shared_.keys_empty[stage], keys_,
                slabs, 0);
    ++keys_;
  }

  __device__ __forceinline__ void load_values(const Slabs& slabs) {
    const int stage = values_ % C::kStages;
    load_matrix(shared_.values[stage], &shared_.values_full[stage], &shared_.values_empty[stage],
                values_, slabs, params_.pool.values_at);
    ++values_;
  }

  __device__ __forceinline__ void load_matrix(unsigned char* to, uint64_t* full, uint64_t* empty,
                                              int loads, const Slabs& slabs, int64_t offset) {
    if (loads >= C::kStages) arrivals_.claim(empty, (loads / C::kStages - 1) % 2);
    if (slabs.low <= 0 && slabs.high >= C::kKeys)
      copy_matrix<true>(to, slabs, offset);
    else
      copy_matrix<false>(to, slabs, offset);
    arrivals_.add(full);
  }

  template <bool Whole>
  __device__ __forceinline__ void copy_matrix(unsigned char* to, const Slabs& slabs,
                                              int64_t offset) const {
    const int thread = threadIdx.x % kGroupThreads;
    const uint32_t target = shared_address(to);
    const uint64_t from = reinterpret_cast<uint64_t>(slabs.at) + offset;
    if constexpr (kGroupThreads / C::kChunks % 8 == 0 && kGroupThreads % C::kChunks == 0) {
      // A thread's rows are a multiple of eight apart, at one chunk: offsets are constants.
      constexpr int kStep = kGroupThreads / C::kChunks, kUnroll = 8;
      constexpr int kRowBytes = C::D * C::T::kBytes;
      const int row = thread / C::kChunks, chunk = thread % C::kChunks;
      const uint32_t place = target + chunk / 8 * C::kPanelBytes + panel_at(row, chunk % 8);
      const uint64_t start = from, mine = row * kRowBytes + chunk * 16;
#pragma unroll kUnroll
      for (int slab = 0; slab < C::kKeys / kSlab; ++slab) {
        const uint64_t source = __shfl_sync(0xffffffff, start, slab) + mine;
#pragma unroll
        for (int i = 0; i < kSlab / kStep; ++i) {
          const void* at = reinterpret_cast<const void*>(source + i * kStep * kRowBytes);
          const uint32_t to_row = place + slab * kSlab * 128 + i * kStep * 128;
          const int key = slab * kSlab + i * kStep + row;
          if constexpr (Whole)
            copy_async(to_row, at);
          else
            copy_async(to_row, at, key >= slabs.low && key < slabs.high);
        }
      }
    } else {
      static_assert(C::kKeys * C::kChunks % kGroupThreads == 0);
#pragma unroll 4
      for (int i = 0; i < C::kKeys * C::kChunks / kGroupThreads; ++i) {
        const int at = thread + i * kGroupThreads, row = at / C::kChunks, chunk = at % C::kChunks;
        const uint64_t slab = __shfl_sync(0xffffffff, from, row / kSlab);
        const void* source =
            reinterpret_cast<const void*>(slab + row % kSlab * (C::D * C::T::kBytes) + chunk * 16);
        const uint32_t place = target + chunk / 8 * C::kPanelBytes + panel_at(row, chunk % 8);
        if constexpr (Whole)
          copy_async(place, source);
        else
          copy_async(place, source, row >= slabs.low && row < slabs.high);
      }
    }
  }

  __device__ __forceinline__ void load_queries(const PromptItem& item) const {
    const int thread = threadIdx.x % kGroupThreads, group = params_.split.group;
    const int cols = item.count * group - item.col_tile * kPromptCols;
    const uint32_t target = shared_address(shared_.queries);
#pragma unroll 2
    for (int i = 0; i < kPromptCols * C::kChunks / kGroupThreads; ++i) {
      const int at = thread + i * kGroupThreads, row = at / C::kChunks, chunk = at % C::kChunks;
      const int col = item.col_tile * kPromptCols + row, token = col / group;
      const int head = item.head * group + col - token * group;
      const int64_t from = (item.start + token) * params_.q_stride + head * C::D + chunk * 8;
      copy_async(target + chunk / 8 * C::kQueryPanelBytes + panel_at(row, chunk % 8),
                 static_cast<const uint16_t*>(params_.q) + from, row < cols);
    }
  }

  const AttendParams& params_;
  PromptShared<C>& shared_;
  Arrivals arrivals_;
  const int32_t* table_ = nullptr;
  int items_ = 0, keys_ = 0, values_ = 0;  // loaded so far
};

}  // namespace clover::cuda
