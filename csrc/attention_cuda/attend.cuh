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

#include "attention_cuda/tile.cuh"

namespace clover::cuda {

constexpr int kPieces = 8;         // more than are planned, in work and being finished at a time
constexpr int kAhead = 3;          // pieces that are planned ahead of the one in work
constexpr int kMergedParts = 128;  // at a time

enum Barrier { kAll, kHanded, kTaken, kFinishing };

template <class C>
struct Shared {
  alignas(128) unsigned char ring[C::W][C::S][C::kStageBytes];
  float out[C::W][C::kCols][C::kOutStride];
  float2 top_sum[C::W][C::kCols];
  float4 merged[C::kFinishers];
  float2 parts[kMergedParts][C::kCols];  // of a merge: maximum and sum, then weight
  float2 merged_top_sum[C::kCols];
  Piece pieces[kPieces];
  volatile int planned;  // pieces so far
  volatile int started;  // the piece that the first warp is in
  bool last;
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
    int units = 0;
#pragma unroll 4
    for (int i = first; i < least(first + rows_each_, params_.rows); ++i) {
      const RowPlan plan = row(i);
      units += plan.units * plan.items;
    }
    int sum = units;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(0xffffffff, sum, step);
      if (lane >= step) sum += other;
    }
    before_ = sum - units;
    ranges_ = Ranges::of(__shfl_sync(0xffffffff, sum, 31), gridDim.x, params_.min_units);
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

// A warp's way through the tiles of one piece: those with its number modulo the number of warps.
template <class C>
struct Tiles {
  int next;
  int end;

  __device__ __forceinline__ void set(const AttendParams& params, const Piece& piece, int warp) {
    // Tiles that none of the columns sees are left out.
    const int before = piece.length - piece.count, group = params.split.group;
    const int from = piece.col_tile * C::kCols / group;
    const int to = least((piece.col_tile * C::kCols + C::kCols - 1) / group, piece.count - 1);
    const int window = params.split.window;
    const int low = window > 0 ? most(0, before + from - window + 1) : 0;
    const int begin = most(piece.begin, low / C::kTile);
    end = least(piece.end, (before + to) / C::kTile + 1);
    next = begin + ((warp - begin) % C::W + C::W) % C::W;
  }
};

// The loading side of a warp's ring.
template <class C>
class Loader {
 public:
  __device__ __forceinline__ Loader(const AttendParams& params, unsigned char* ring, int lane)
      : params_(params), ring_(shared_address(ring)), lane_(lane) {}

  int ahead = 0;  // tiles in flight or landed, not yet given back

  // Asks for the blocks of the piece that comes next, so that `start` need not wait for them.
  __device__ __forceinline__ void expect(const Piece& piece, int warp) {
    Tiles<C> tiles;
    tiles.set(params_, piece, warp);
    expected_ = fetch_blocks(params_.tables + piece.row * params_.table_stride, tiles.next,
                             tiles.end, piece.length);
  }

  // The piece that `expect` was told of last.
  __device__ __forceinline__ void start(const Piece& piece, int warp) {
    tiles_.set(params_, piece, warp);
    const int window = params_.split.window;
    low_ = window > 0 ? most(0, piece.length - piece.count - window + 1) : 0;
    high_ = piece.length;
    head_ = piece.head;
    table_ = params_.tables + piece.row * params_.table_stride;
    take_blocks(expected_);
  }

  // Issues the next tile of the piece; false: there is none.
  __device__ __forceinline__ bool issue() {
    if (tiles_.next >= tiles_.end) return false;
    if (known_ == 32) take_blocks(later_);
#pragma unroll
    for (int slab = 0; slab < C::kSlabs; ++slab) {
      const int block = __shfl_sync(0xffffffff, blocks_, known_++);
      issue_slab(tiles_.next * C::kSlabs + slab, block,
                 ring_ + stage_ * C::kStageBytes + slab * C::kSlabBytes);
    }
    tiles_.next += C::W;
    commit_copies();
    stage_ = stage_ + 1 == C::S ? 0 : stage_ + 1;
    ++ahead;
    return true;
  }

  // Waits for the oldest tile.
  __device__ __forceinline__ void wait() const {
    if (C::S >= 2 && ahead == C::S)
      wait_copies<C::S - 1>();
    else if (C::S >= 3 && ahead == C::S - 1)
      wait_copies<(C::S >= 2 ? C::S - 2 : 0)>();
    else if (C::S >= 4 && ahead == C::S - 2)
      wait_copies<(C::S >= 3 ? C::S - 3 : 0)>();
    else
      wait_copies<0>();
    __syncwarp();
  }

 private:
  __device__ __forceinline__ void issue_slab(int slab, int block, uint32_t to) const {
    const PoolView& pool = params_.pool;
    const int per_block = pool.block_size / kSlab;
    const int64_t matrix = int64_t{head_ * per_block + slab % per_block} * kSlab * C::kRowBytes;
    const unsigned char* keys = pool.base + (block < 0 ? 0 : block) * pool.block_bytes + matrix;
    const unsigned char* values = keys + pool.values_at;
    const int low = low_ - slab * kSlab, high = block < 0 ? -1 : high_ - slab * kSlab;
    if (low <= 0 && high >= kSlab) {
      load_matrix<C, true>(to, keys, lane_, low, high);
      load_matrix<C, true>(to + C::kMatrixBytes, values, lane_, low, high);
    } else {
      load_matrix<C, false>(to, keys, lane_, low, high);
      load_matrix<C, false>(to + C::kMatrixBytes, values, lane_, low, high);
    }
  }

  // A lane's slab of the 32 slabs from tile `tile` on.
  __device__ __forceinline__ int slab_of(int tile) const {
    return (tile + lane_ / C::kSlabs * C::W) * C::kSlabs + lane_ % C::kSlabs;
  }

  // Every lane's block of those slabs; -1 where the row ends before.
  __device__ __forceinline__ int fetch_blocks(const int32_t* table, int tile, int end,
                                              int length) const {
    const int first = slab_of(tile) * kSlab;
    const bool there = first < end * C::kTile && first < length;
    return there ? __ldg(table + first / params_.pool.block_size) : -1;
  }

  __device__ __forceinline__ void take_blocks(int blocks) {
    const int first = slab_of(tiles_.next) * kSlab;
    const bool there = first < tiles_.end * C::kTile && first < high_;
    if (there && (blocks < 0 || blocks >= params_.pool.num_blocks)) {
      *params_.work.bad = kBadBlock;
      blocks = -1;
    }
    blocks_ = blocks;
    known_ = 0;
    later_ = fetch_blocks(table_, tiles_.next + 32 / C::kSlabs * C::W, tiles_.end, high_);
  }

  const AttendParams& params_;
  uint32_t ring_;
  int lane_;
  Tiles<C> tiles_;
  const int32_t* table_ = nullptr;
  int low_ = 0, high_ = 0, head_ = 0;
  int blocks_ = -1, known_ = 0;     // of the next 32 tiles; how many of them were used
  int later_ = -1, expected_ = -1;  // of the 32 after those; of the next piece's first
  int stage_ = 0;
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

// Normalises one column's four elements and writes them; one thread per column also lse.
template <class C>
__device__ __forceinline__ void finish_column(const AttendParams& params, const Piece& piece,
                                              int local, int element, float top, float sum,
                                              float4 value) {
  const int group = params.split.group, col = piece.col_tile * C::kCols + local;
  const int head = piece.head * group + col % group;
  const int64_t at = int64_t{piece.start + col / group} * group * params.split.kv_heads + head;
  float scale = params.score.v_scale;
  if (params.score.sinks != nullptr) {
    const float sink = params.score.sinks[head] * 1.442695041f;
    const float base = fmaxf(top, sink), factor = exp2_fast(top - base);
    sum = sum * factor + exp2_fast(sink - base);
    scale *= factor;
    top = base;
  }
  scale = sum > 0.f ? scale / sum : 0.f;
  write_out(params, at * C::D, element,
            {value.x * scale, value.y * scale, value.z * scale, value.w * scale});
  if (element == 0) params.lse[at] = (top + log2f(sum)) * 0.6931471806f;
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

template <class C>
__device__ __forceinline__ int columns_of(const AttendParams& params, const Piece& piece) {
  return least(C::kCols, piece.count * params.split.group - piece.col_tile * C::kCols);
}

// A copy of a piece once it is planned; row -1: there are no more.
template <class C>
__device__ __forceinline__ Piece planned_piece(Shared<C>& shared, int index) {
  while (shared.planned <= index) __nanosleep(20);
  __threadfence_block();  // pairs with the one before `planned` is raised
  __syncwarp();
  return shared.pieces[index % kPieces];
}

// What the planning warp does.
template <class C>
__device__ __forceinline__ void plan_pieces(const AttendParams& params, Shared<C>& shared) {
  const int lane = threadIdx.x % 32;
  Planner planner(params);
  for (int index = 0;; ++index) {
    while (shared.started + kAhead < index) __nanosleep(40);  // its place is still in use
    const Piece piece = planner.next();
    if (lane == 0) {
      shared.pieces[index % kPieces] = piece;
      __threadfence_block();
      shared.planned = index + 1;
    }
    __syncwarp();
    if (piece.row < 0) break;
  }
}

// What finishing warps do.
template <class C>
__device__ __forceinline__ void finish_pieces(const AttendParams& params, Shared<C>& shared) {
  const int thread = threadIdx.x - C::W * 32;
  Piece piece = planned_piece(shared, 0);
  for (int index = 0; piece.row >= 0; ++index) {
    const int cols = columns_of<C>(params, piece);
    sync_barrier(kHanded, C::kMeeting);
    finish_piece<C>(params, shared, piece, thread, cols);
    const Piece next = planned_piece(shared, index + 1);
    if (next.row >= 0) arrive_barrier(kTaken, C::kMeeting);
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

// What computing warps do.
template <class C>
__device__ __forceinline__ void compute_pieces(const AttendParams& params, Shared<C>& shared) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  Loader<C> loader(params, &shared.ring[warp][0][0], lane);
  Queries<C> queries, next_queries;
  Running<C> running;
  Columns<C> columns;
  int stage = 0;  // to compute next
  // The queries of a piece come with its first tiles, where there are registers for two pieces'.
  const auto start = [&](const Piece& piece) {
    loader.start(piece, warp);
    if constexpr (C::NT == 1) load_queries(next_queries, params, piece, lane);
  };
  Piece piece = planned_piece(shared, 0), next;
  if (piece.row < 0) return;
  loader.expect(piece, warp);
  start(piece);
  for (int index = 0; piece.row >= 0; ++index) {
    if (threadIdx.x == 0) shared.started = index;
    if constexpr (C::NT == 1)
      queries = next_queries;
    else
      load_queries(queries, params, piece, lane);
    bool known = false, started = false;  // the next piece; its tiles' loading
    const auto learn = [&] {
      next = planned_piece(shared, index + 1);
      known = true;
      if (next.row >= 0) loader.expect(next, warp);
    };
    const auto fill = [&] {
      if (!known && __shfl_sync(0xffffffff, shared.planned, 0) > index + 1) learn();
      while (loader.ahead < C::S) {
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
      const uint32_t slabs = shared_address(&shared.ring[warp][stage][0]);
      float scores[C::kSlabs][C::NT][4];
      uint32_t weights[C::kSlabs][C::NT][2];
#pragma unroll
      for (int k = 0; k < C::kSlabs; ++k) {
        score_slab<C>(scores[k], queries, slabs + k * C::kSlabBytes, lane);
        finish_scores<C>(scores[k], columns, params, tiles.next * C::kTile + k * kSlab, lane);
      }
      weigh_tile<C>(scores, running, weights);
#pragma unroll
      for (int k = 0; k < C::kSlabs; ++k)
        add_values<C>(running, weights[k], slabs + k * C::kSlabBytes + C::kMatrixBytes, lane);
      __syncwarp();  // all lanes have read the stage
      stage = stage + 1 == C::S ? 0 : stage + 1;
      --loader.ahead;
      fill();
    }
    if (!known) learn();
    if (!started && next.row >= 0) start(next);
    if (index > 0) sync_barrier(kTaken, C::kMeeting);
    hand_over<C>(shared, running, columns_of<C>(params, piece), warp, lane);
    arrive_barrier(kHanded, C::kMeeting);
    piece = next;
  }
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1)
    attend_kernel(const __grid_constant__ AttendParams params) {
  extern __shared__ __align__(128) unsigned char memory[];
  Shared<C>& shared = *reinterpret_cast<Shared<C>*>(memory);
  if (threadIdx.x == 0) shared.planned = shared.started = 0;
  __syncthreads();
  if (threadIdx.x < C::W * 32)
    compute_pieces<C>(params, shared);
  else if (threadIdx.x < C::kMeeting)
    finish_pieces<C>(params, shared);
  else
    plan_pieces<C>(params, shared);
}

}  // namespace clover::cuda
