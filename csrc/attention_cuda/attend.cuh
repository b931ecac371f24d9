// The tensor-core kernel: paged attention of all query heads of a KV head in one pass over the KV.
//
// A launch is one thread block per multiprocessor. Each works out from the lengths, on the device,
// which range of the work is its own (plan.h). Its computing warps take tiles in turn,
// each with a ring of tiles in flight which runs ahead into the next piece of work, and hand over
// what a piece gave them; finishing warps merge that and write it out, and one warp plans what
// comes next, so that nobody who reads the KV waits for anything but the KV. Results of items in
// several pieces go through the workspace; the block that arrives last merges them, in order of
// position, so the same call gives the same bits.
#pragma once

#include "attention_cuda/loader.cuh"
#include "attention_cuda/merge.cuh"
#include "attention_cuda/planner.cuh"

namespace clover::cuda {

template <class C>
__device__ __forceinline__ int columns_of(const AttendParams& params, const Piece& piece) {
  return least(C::kCols, piece.count * params.split.group - piece.col_tile * C::kCols);
}

// What finishing warps do.
template <class C>
__device__ __forceinline__ void finish_pieces(const AttendParams& params, Shared<C>& shared) {
  const int thread = threadIdx.x - C::W * 32;
  wait_for_previous();
  let_next_start();
  Piece piece = shared.pieces.take(0);
  for (int index = 0; piece.row >= 0; ++index) {
    const int cols = columns_of<C>(params, piece);
    wait_phase(&shared.handed, index % 2);
    finish_piece<C>(params, shared, piece, thread, cols);
    const Piece next = shared.pieces.take(index + 1);
    arrive_phase(&shared.taken);
    if (piece.parts > 1) {
      sync_barrier(kFinishing, C::kFinishers);  // partial results before the arrival that tells
      if (thread == 0) {
        int* arrivals = params.work.arrivals + piece.counter;
        shared.last = arrive(arrivals) == piece.parts - 1;
        if (shared.last) *arrivals = 0;
      }
      sync_barrier(kFinishing, C::kFinishers);
      if (shared.last) merge_parts<C>(params, piece, shared, thread, cols);
    }
    piece = next;
  }
}

// Adds a landed tile, whose first key is `first`, to what its warp has.
template <class C>
__device__ __forceinline__ void compute_tile(const AttendParams& params, Running<C>& running,
                                             const Queries<C>& queries, const Columns<C>& columns,
                                             uint32_t slabs, int first) {
  const int lane = threadIdx.x % 32;
  float scores[C::kSlabs][C::NT][4];
  uint32_t weights[C::kSlabs][C::NT][2];
#pragma unroll
  for (int k = 0; k < C::kSlabs; ++k) {
    score_slab<C>(scores[k], queries, slabs + k * C::kSlabBytes, lane);
    finish_scores<C>(scores[k], columns, params, first + k * kSlab, lane);
  }
  weigh_tile<C>(scores, running, weights);
#pragma unroll
  for (int k = 0; k < C::kSlabs; ++k)
    add_values<C>(running, weights[k], slabs + k * C::kSlabBytes + C::kMatrixBytes, lane);
}

// What computing warps do.
template <class C>
__device__ __forceinline__ void compute_pieces(const AttendParams& params, Shared<C>& shared) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  unsigned char* ring = shared.ring() + warp * params.stages * C::kStageBytes;
  Loader<C> loader(params, ring, lane);
  Queries<C> queries, next_queries;
  Running<C> running;
  Columns<C> columns;
  int stage = 0;  // to compute next
  // The queries of a piece come with its first tiles, where there are registers for two pieces'.
  const auto start = [&](const Piece& piece) {
    loader.start(piece, warp);
    if constexpr (C::NT == 1) load_queries(next_queries, params, piece, lane);
  };
  Piece piece = shared.pieces.take(0), next;
  if (piece.row < 0) return;
  loader.expect(piece, warp);
  wait_for_previous();
  start(piece);
  for (int index = 0; piece.row >= 0; ++index) {
    if constexpr (C::NT == 1)
      queries = next_queries;
    else
      load_queries(queries, params, piece, lane);
    bool known = false, started = false;  // the next piece; its tiles' loading
    const auto learn = [&] {
      next = shared.pieces.take(index + 1);
      known = true;
      if (next.row >= 0) loader.expect(next, warp);
    };
    const auto fill = [&] {
      if (!known && shared.pieces.has(index + 1)) learn();
      while (loader.ahead < params.stages) {
        if (loader.issue()) continue;
        if (started || !known || next.row < 0) return;
        started = true;
        start(next);
      }
    };
    fill();
    columns.set(params, piece, lane);
    running.clear();
    Tiles<C> tiles;
    for (tiles.set(params, piece, warp); tiles.next < tiles.end; tiles.next += C::W) {
      loader.wait();
      const uint32_t slabs = shared_address(ring) + stage * C::kStageBytes;
      compute_tile<C>(params, running, queries, columns, slabs, tiles.next * C::kTile);
      __syncwarp();  // all lanes have read the stage
      stage = stage + 1 == params.stages ? 0 : stage + 1;
      --loader.ahead;
      fill();
    }
    if (!known) learn();
    if (!started && next.row >= 0) start(next);
    if (index > 0) wait_phase(&shared.taken, (index - 1) % 2);
    __syncwarp();
    hand_over<C>(shared, running, columns_of<C>(params, piece), warp, lane);
    arrive_phase(&shared.handed);
    piece = next;
  }
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1)
    attend_kernel(const __grid_constant__ AttendParams params) {
  extern __shared__ __align__(128) unsigned char memory[];
  Shared<C>& shared = *reinterpret_cast<Shared<C>*>(memory);
  if (threadIdx.x == 0) {
    shared.pieces.init(C::kMeeting / 32);
    init_phases(&shared.handed, C::W * 32);
    init_phases(&shared.taken, C::kFinishers);
  }
  __syncthreads();
  if (!params.early) wait_for_previous();
  if (threadIdx.x < C::W * 32)
    compute_pieces<C>(params, shared);
  else if (threadIdx.x < C::kMeeting)
    finish_pieces<C>(params, shared);
  else
    plan_pieces(params, shared.pieces);
}

}  // namespace clover::cuda
