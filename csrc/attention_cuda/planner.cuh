// The planning warp: which pieces of the work are this block's, and their way to the other warps.
#pragma once

#include "attention_cuda/params.h"
#include "attention_cuda/primitives.cuh"

namespace clover::cuda {

constexpr int kPieces = 4;  // planned ahead, in work and being finished at a time

// The way of pieces from the warp that plans them to all others, in order. A place is written again
// only once every warp has its copy, so nobody reads what is being written.
class PlannedPieces {
 public:
  // One thread's, before a barrier of the block. `readers`: warps.
  __device__ __forceinline__ void init(int readers) {
    for (int i = 0; i < kPieces; ++i) {
      init_phases(&written_[i], 1);
      init_phases(&copied_[i], readers);
    }
  }

  // The planning warp's; pieces come with their index, from 0 on.
  __device__ __forceinline__ void put(const Piece& piece, int index) {
    const int at = index % kPieces, round = index / kPieces;
    if (round > 0) wait_phase(&copied_[at], (round - 1) % 2);
    if (threadIdx.x % 32 == 0) {
      pieces_[at] = piece;
      arrive_phase(&written_[at]);
    }
    __syncwarp();
  }

  // Whether `take` would not wait; the same for all lanes of a warp.
  __device__ __forceinline__ bool has(int index) {
    const bool done = phase_done(&written_[index % kPieces], index / kPieces % 2);
    return __all_sync(0xffffffff, done);
  }

  // Waits for a piece, which a warp takes once; all of its lanes get it. One lane reads it, the
  // same that tells so: tools that look for races take an arrival for its own thread's only.
  __device__ __forceinline__ Piece take(int index) {
    constexpr int kWords = sizeof(Piece) / sizeof(int);
    const int at = index % kPieces;
    int words[kWords] = {};
    if (threadIdx.x % 32 == 0) {
      wait_phase(&written_[at], index / kPieces % 2);
#pragma unroll
      for (int i = 0; i < kWords; ++i) words[i] = reinterpret_cast<const int*>(&pieces_[at])[i];
      arrive_phase(&copied_[at]);
    }
    Piece piece;
#pragma unroll
    for (int i = 0; i < kWords; ++i)
      reinterpret_cast<int*>(&piece)[i] = __shfl_sync(0xffffffff, words[i], 0);
    return piece;
  }

 private:
  uint64_t written_[kPieces];
  uint64_t copied_[kPieces];
  Piece pieces_[kPieces];
};

// Finds a block's pieces of the work: one warp's, all of whose lanes act together.
class Planner {
 public:
  __device__ __forceinline__ explicit Planner(const AttendParams& params) : params_(params) {
    rows_each_ = ceil_div(params.rows, 32);
    scan();
    if (static_cast<int>(blockIdx.x) < ranges_.count) enter(blockIdx.x);
  }

  // Piece with row -1: nothing is left.
  __device__ __forceinline__ Piece next() {
    Piece piece;
    piece.row = -1;
    if (cursor_.unit == cursor_.end) return piece;
    const RowPlan row = settle();
    piece = take_piece(params_.split, ranges_, row, cursor_);
    piece.length = params_.lengths[piece.row];
    piece.start = params_.starts[piece.row];
    piece.count = params_.starts[piece.row + 1] - piece.start;
    return piece;
  }

 private:
  __device__ __forceinline__ RowPlan row(int index) const {
    const int count = params_.starts[index + 1] - params_.starts[index];
    return plan_row(params_.split, params_.lengths[index], count);
  }

  // Every lane adds up `rows_each_` rows.
  __device__ __forceinline__ void scan() {
    const int lane = threadIdx.x % 32, first = lane * rows_each_;
    Work work;
#pragma unroll 4
    for (int i = first; i < least(first + rows_each_, params_.rows); ++i) work.add(row(i));
    int sum = work.units;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(0xffffffff, sum, step);
      if (lane >= step) sum += other;
    }
    before_ = sum - work.units;
    work.units = __shfl_sync(0xffffffff, sum, 31);
    work.items = __reduce_add_sync(0xffffffff, work.items);
    work.longest = __reduce_max_sync(0xffffffff, work.longest);
    ranges_ = Ranges::of(work, gridDim.x, params_.min_units);
  }

  __device__ __forceinline__ void enter(int range) {
    cursor_.range = range;
    cursor_.unit = ranges_.begin(range);
    cursor_.end = ranges_.end(range);
    const int lane = __popc(__ballot_sync(0xffffffff, before_ <= cursor_.unit)) - 1;
    cursor_.before = __shfl_sync(0xffffffff, before_, lane);
    cursor_.row = lane * rows_each_;
  }

  // Moves the cursor to the row that it stands in.
  __device__ __forceinline__ RowPlan settle() {
    while (true) {
      const RowPlan plan = row(cursor_.row);
      const int units = plan.units * plan.items;
      if (cursor_.unit < cursor_.before + units) return plan;
      cursor_.before += units;
      ++cursor_.row;
    }
  }

  const AttendParams& params_;
  Ranges ranges_;
  Cursor cursor_ = {0, 0, 0, 0, 0};
  int rows_each_;
  int before_;  // units before this lane's rows
};

// What the planning warp does. The last piece has row -1.
__device__ __forceinline__ void plan_pieces(const AttendParams& params, PlannedPieces& pieces) {
  Planner planner(params);
  for (int index = 0;; ++index) {
    const Piece piece = planner.next();
    pieces.put(piece, index);
    if (piece.row < 0) break;
  }
  wait_for_previous();  // so that whoever waits for this launch has waited for those before
}

}  // namespace clover::cuda
