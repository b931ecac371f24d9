// The loading side of a computing warp: which tiles of a piece are its own, and their way through
// its ring in shared memory, which no other warp touches.
#pragma once

#include "attention_cuda/tile.cuh"

namespace clover::cuda {

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
    stage_ = stage_ + 1 == params_.stages ? 0 : stage_ + 1;
    ++ahead;
    return true;
  }

  // Waits for the oldest tile.
  __device__ __forceinline__ void wait() const {
    static_assert(kMostStages == 4);
    if (ahead == 4)
      wait_copies<3>();
    else if (ahead == 3)
      wait_copies<2>();
    else if (ahead == 2)
      wait_copies<1>();
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

}  // namespace clover::cuda
