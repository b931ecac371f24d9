// Products with weights for few tokens: y[t, n] = x[t, k] w[n, k]^T, bound by reading w.
//
// The line of all (tile of w, step along k) units is cut into one range for each block, and each
// block has a multiprocessor to itself, so that all of them read the same number of bytes. One
// thread keeps a ring of stages filled by the copy engine, two warpgroups multiply. Weights do not
// depend on the kernel before: their first stages are on the way before this one waits for it. A
// tile in several ranges leaves partial sums in the workspace; the block that arrives last adds
// them up in the order of k, so results depend on the shape of w alone and not on timing.
#pragma once

#include "common/launch.cuh"
#include "dense_cuda/boxes.cuh"
#include "dense_cuda/gemm_params.h"
#include "dense_cuda/range.cuh"
#include "dense_cuda/wgmma.cuh"
#include "dense_cuda/widen.cuh"

namespace clover::cuda {

constexpr int kGroups = 2;  // warpgroups that multiply
constexpr int kMultiplying = kGroups * 128;
constexpr int kGemmThreads = kMultiplying + 32;
constexpr int kBoxBytes = 128;    // a row of a box, as wide as the swizzle
constexpr int kBoxInputs = 64;    // of x in it
constexpr int kSliceInputs = 16;  // of one product
constexpr int kMultiplyingBarrier = 1;

// What an instance is made for: the type of weights, columns (tokens) of a product, 64-row blocks
// of weights for each warpgroup, boxes of them along k to a stage, and whether rows are pairs of
// gate and up.
template <typename Weight, int Tokens, int Blocks, int Boxes, bool Gated>
struct GemmKind {
  static constexpr bool kFloat8 = std::is_same_v<Weight, Float8>;
  static constexpr int kTokens = Tokens;
  static constexpr int kBlocks = Blocks;
  static constexpr int kBoxes = Boxes;
  static constexpr bool kGated = Gated;
  static constexpr int kRows = kGroups * Blocks * 64;               // of w in a tile
  static constexpr int kWeightInputs = kBoxBytes / Weight::kBytes;  // in a box
  static constexpr int kInputBoxes = Boxes * kWeightInputs / kBoxInputs;
  static constexpr int kSlices = kInputBoxes * kBoxInputs / kSliceInputs;
  static constexpr int kWeightBox = kRows * kBoxBytes;
  static constexpr int kInputBox = Tokens * kBoxBytes;
  static constexpr int kStageBytes = Boxes * kWeightBox + kInputBoxes * kInputBox;
  static constexpr int kSums = Tokens / 2;  // of a block of rows, in a thread
  static constexpr int kThreadVectors = Blocks * kSums / 4;
};

// The stages in shared memory: weights of all of them, inputs of all, barriers.
template <typename Kind>
struct Stages {
  uint32_t base;
  int count;

  __device__ uint32_t weights(int stage) const {
    return base + stage * Kind::kBoxes * Kind::kWeightBox;
  }
  __device__ uint32_t inputs(int stage) const {
    return base + count * Kind::kBoxes * Kind::kWeightBox +
           stage * Kind::kInputBoxes * Kind::kInputBox;
  }
  __device__ uint32_t full(int stage) const { return base + count * Kind::kStageBytes + 8 * stage; }
  __device__ uint32_t empty(int stage) const { return full(stage) + 8 * count; }
};

// A place in the ring; `turn` counts how often it has gone round.
struct RingPlace {
  int stage = 0, turn = 0;

  __device__ void advance(int count) {
    if (++stage == count) {
      stage = 0;
      ++turn;
    }
  }
};

// The thread that asks for weights and inputs.
template <typename Kind>
class Loader {
 public:
  __device__ Loader(const GemmParams& params, const Stages<Kind>& stages)
      : params_(params), stages_(stages), range_(params.tiles, params.steps) {
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy_));
  }

  __device__ void run() {
    const int units = range_.end - range_.begin, first = min(units, stages_.count);
    asm volatile("prefetch.tensormap [%0];" ::"l"(&params_.x) : "memory");
    Cursor weights(range_), inputs(range_);
    RingPlace ring;
    for (int unit = 0; unit < first; ++unit) {
      load_weights_of(weights, ring.stage);
      weights.advance();
      ring.advance(stages_.count);
    }
    wait_for_previous();
    for (int stage = 0; stage < first; ++stage) {
      load_inputs_of(inputs, stage);
      inputs.advance();
    }
    for (int unit = first; unit < units; ++unit) {
      wait_until(stages_.empty(ring.stage), (ring.turn & 1) ^ 1);
      load_weights_of(weights, ring.stage);
      load_inputs_of(weights, ring.stage);
      weights.advance();
      ring.advance(stages_.count);
    }
  }

 private:
  __device__ void load_weights_of(const Cursor& unit, int stage) const {
    expect_bytes(stages_.full(stage), Kind::kStageBytes);
#pragma unroll
    for (int box = 0; box < Kind::kBoxes; ++box) {
      const uint32_t to = stages_.weights(stage) + box * Kind::kWeightBox;
      const int x = (unit.step() * Kind::kBoxes + box) * Kind::kWeightInputs;
      if constexpr (Kind::kGated) {
        load_gated_weights(to, params_.w, stages_.full(stage), x, unit.tile() * Kind::kRows / 16,
                           policy_);
      } else {
        load_weights(to, params_.w, stages_.full(stage), x, unit.tile() * Kind::kRows, policy_);
      }
    }
  }

  __device__ void load_inputs_of(const Cursor& unit, int stage) const {
#pragma unroll
    for (int box = 0; box < Kind::kInputBoxes; ++box)
      load_box(stages_.inputs(stage) + box * Kind::kInputBox, params_.x, stages_.full(stage),
               (unit.step() * Kind::kInputBoxes + box) * kBoxInputs, 0);
  }

  const GemmParams& params_;
  Stages<Kind> stages_;
  Range range_;
  uint64_t policy_;
};

// What two warpgroups do: multiply, merge, write.
template <typename Kind>
class Multiplier {
 public:
  __device__ Multiplier(const GemmParams& params, const Stages<Kind>& stages, int* last)
      : params_(params), stages_(stages), range_(params.tiles, params.steps), last_(last) {}

  __device__ void run() {
    wait_for_previous();
    for (int i = 0; i < range_.segments(); ++i) {
      const Segment segment = range_.segment(i);
      if (segment.count == 0) continue;
      if constexpr (Kind::kFloat8) ask_for_scales(segment.tile);
      accumulate(segment.count);
      if (segment.count == range_.steps || merge(segment)) write(segment.tile);
    }
  }

 private:
  __device__ void accumulate(int count) {
    int held = -1;
    for (int i = 0; i < count; ++i) {
      wait_until(stages_.full(ring_.stage), ring_.turn & 1);
      multiply(ring_.stage, i > 0);
      wait_products<1>();
      if (held >= 0) release(held);
      held = ring_.stage;
      ring_.advance(stages_.count);
    }
    wait_products<0>();
#pragma unroll
    for (int block = 0; block < Kind::kBlocks; ++block) hold(sums_[block]);
    if constexpr (Kind::kFloat8) hold_fragments();
    release(held);
  }

  __device__ void multiply(int stage, bool add) {
    const uint32_t rows = threadIdx.x / 128 * Kind::kBlocks * 64 * kBoxBytes;
    if constexpr (Kind::kFloat8) widen(stages_.weights(stage) + rows);
    const uint64_t a = describe_panels(stages_.weights(stage) + rows, 16);
    const uint64_t b = describe_panels(stages_.inputs(stage), 16);
#pragma unroll
    for (int block = 0; block < Kind::kBlocks; ++block) hold(sums_[block]);
    begin_products();
#pragma unroll
    for (int box = 0; box < Kind::kInputBoxes; ++box) {
#pragma unroll
      for (int k = 0; k < kBoxInputs / kSliceInputs; ++k) {
#pragma unroll
        for (int block = 0; block < Kind::kBlocks; ++block) {
          if constexpr (Kind::kFloat8)
            Product<Kind::kTokens>::run(
                sums_[block], fragments_[block][box * kBoxInputs / kSliceInputs + k],
                b + (box * Kind::kInputBox + 32 * k) / 16, add || box > 0 || k > 0);
          else
            Product<Kind::kTokens>::run(
                sums_[block], a + (box * Kind::kWeightBox + block * 64 * kBoxBytes + 32 * k) / 16,
                b + (box * Kind::kInputBox + 32 * k) / 16, add || box > 0 || k > 0);
        }
      }
    }
    commit_products();
  }

  // Fills the fragments, which the products before read until they are done, and those to come
  // only once all are filled.
  __device__ void widen(uint32_t rows) {
    static_assert(Kind::kBoxes == 1);
    uint32_t bytes[Kind::kBlocks][Kind::kSlices][2];
#pragma unroll
    for (int block = 0; block < Kind::kBlocks; ++block)
      read_panel(bytes[block], rows + block * 64 * kBoxBytes);
    wait_products<0>();
    hold_fragments();
#pragma unroll
    for (int block = 0; block < Kind::kBlocks; ++block)
      widen_panel(bytes[block], fragments_[block]);
    hold_fragments();
  }

  __device__ void hold_fragments() {
#pragma unroll
    for (int block = 0; block < Kind::kBlocks; ++block) {
#pragma unroll
      for (int slice = 0; slice < Kind::kSlices; ++slice) hold(fragments_[block][slice]);
    }
  }

  // Asked for before the products: after them nothing waits for memory.
  __device__ void ask_for_scales(int tile) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int block = 0; block < Kind::kBlocks; ++block) {
      const int row = first_row(tile, block) / (Kind::kGated ? 2 : 1) + lane / 4;
      const int other = row + (Kind::kGated ? params_.outputs : 8);
      const bool whole = (Kind::kGated ? row : other) < params_.outputs;
      scales_[block][0] = row < params_.outputs ? params_.scales[row] : 0.f;
      scales_[block][1] = whole ? params_.scales[other] : 0.f;
    }
  }

  // Of w, of a warp's 16.
  __device__ int first_row(int tile, int block) const {
    const int warp = threadIdx.x / 32;
    return tile * Kind::kRows + (warp / 4 * Kind::kBlocks + block) * 64 + warp % 4 * 16;
  }

  // Where w has scales: rows lane / 4 in sums 0, 1 of every four, eight rows on in 2, 3.
  __device__ void scale(int block) {
    if constexpr (Kind::kFloat8) {
#pragma unroll
      for (int i = 0; i < Kind::kSums; ++i) sums_[block][i] *= scales_[block][i / 2 % 2];
    }
  }

  __device__ void release(int stage) const {
    if constexpr (Kind::kFloat8) __syncwarp();  // every lane has read
    if (threadIdx.x % 32 == 0) arrive_at(stages_.empty(stage));
  }

  // Of a block's segment; `begins`: that which begins its tile.
  __device__ float4* partial(int block, bool begins) const {
    const int slot = 2 * block + begins;
    return params_.partials + int64_t{slot} * Kind::kThreadVectors * kMultiplying + threadIdx.x;
  }

  // Adds this block's sums to those of the others that share the tile. True for the one that
  // arrives last: it holds the whole sums then.
  __device__ bool merge(const Segment& segment) {
    const int first = range_.holding(segment.tile * range_.steps);
    const int last = range_.holding((segment.tile + 1) * range_.steps - 1);
    float4* mine = partial(blockIdx.x, segment.step == 0);
#pragma unroll
    for (int i = 0; i < Kind::kThreadVectors; ++i)
      __stcg(mine + i * kMultiplying, reinterpret_cast<const float4*>(sums_)[i]);
    sync_barrier(kMultiplyingBarrier, kMultiplying);
    if (threadIdx.x == 0) {
      int* counter = params_.counters + first;
      *last_ = arrive(counter) == last - first;
      if (*last_) *counter = 0;
    }
    sync_barrier(kMultiplyingBarrier, kMultiplying);
    if (!*last_) return false;
    add_up(first, last);
    return true;
  }

  // The sums of blocks first to last, in this order. Many vectors of a thread are asked for at a
  // time: those of several blocks where one has fewer.
  __device__ void add_up(int first, int last) {
    constexpr int kAtOnce = 16;
    constexpr int kVectors = Kind::kThreadVectors < kAtOnce ? Kind::kThreadVectors : kAtOnce;
    constexpr int kParts = kAtOnce / kVectors;
#pragma unroll
    for (int vector = 0; vector < Kind::kThreadVectors; vector += kVectors) {
      float* sums = sums_[0] + 4 * vector;
#pragma unroll
      for (int i = 0; i < 4 * kVectors; ++i) sums[i] = 0.f;
      for (int block = first; block <= last; block += kParts) {
        float4 parts[kParts][kVectors];
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          const float4* from = partial(block + part, block + part == first);
#pragma unroll
          for (int i = 0; i < kVectors; ++i)
            parts[part][i] = block + part <= last ? __ldcg(from + (vector + i) * kMultiplying)
                                                  : make_float4(0.f, 0.f, 0.f, 0.f);
        }
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
#pragma unroll
          for (int i = 0; i < kVectors; ++i) {
            sums[4 * i] += parts[part][i].x;
            sums[4 * i + 1] += parts[part][i].y;
            sums[4 * i + 2] += parts[part][i].z;
            sums[4 * i + 3] += parts[part][i].w;
          }
        }
      }
      asm volatile("" ::: "memory");  // no more than these in registers
    }
  }

  __device__ void write(int tile) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int block = 0; block < Kind::kBlocks; ++block) {
      const int row = first_row(tile, block);
      scale(block);
      if constexpr (Kind::kGated) {
        write_gated(sums_[block], row / 2, lane);
      } else {
        write_eight(sums_[block], 0, row, lane);
        write_eight(sums_[block], 1, row + 8, lane);
      }
    }
  }

  // Rows row to row + 7: sums 0, 1 of every four tokens (half 0), or 2, 3.
  __device__ void write_eight(const float (&sums)[Kind::kSums], int half, int row, int lane) const {
    const float bias = bias_of(row + lane / 4, params_.outputs);
#pragma unroll
    for (int eight = 0; eight < Kind::kTokens / 8; ++eight) {
      const float* s = sums + 4 * eight + 2 * half;
      store(pack<BFloat16>(s[0] + bias, s[1] + bias), 8 * eight, row, lane);
    }
  }

  // Rows of gate in sums 0, 1 of every four, the same rows of up in 2, 3.
  __device__ void write_gated(const float (&sums)[Kind::kSums], int row, int lane) const {
    const float gate = bias_of(row + lane / 4, params_.outputs);
    const float up = bias_of(params_.outputs + row + lane / 4, 2 * params_.outputs);
#pragma unroll
    for (int eight = 0; eight < Kind::kTokens / 8; ++eight) {
      const float* s = sums + 4 * eight;
      store(pack<BFloat16>(silu(s[0] + gate) * (s[2] + up), silu(s[1] + gate) * (s[3] + up)),
            8 * eight, row, lane);
    }
  }

  static __device__ float silu(float x) { return x / (1.f + exp2_fast(-1.442695041f * x)); }

  __device__ float bias_of(int row, int rows) const {
    return params_.bias != nullptr && row < rows ? __bfloat162float(params_.bias[row]) : 0.f;
  }

  // `pair`: two tokens of a row, rows along the lanes' fours; turned, so that a lane has two rows
  // of a token.
  __device__ void store(uint32_t pair, int token, int row, int lane) const {
    uint32_t turned = transpose_matrix(pair);
    token += lane / 4;
    row += 2 * (lane % 4);
    if (token >= params_.tokens || row >= params_.outputs) return;
    if (params_.residual != nullptr) {
      const __nv_bfloat162 more = *reinterpret_cast<const __nv_bfloat162*>(
          params_.residual + token * params_.residual_stride + row);
      const float2 a = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(turned));
      const float2 b = __bfloat1622float2(more);
      turned = pack<BFloat16>(a.x + b.x, a.y + b.y);
    }
    *reinterpret_cast<uint32_t*>(params_.y + token * params_.y_stride + row) = turned;
  }

  const GemmParams& params_;
  Stages<Kind> stages_;
  Range range_;
  int* last_;
  RingPlace ring_;
  uint32_t fragments_[Kind::kBlocks][Kind::kSlices][4];  // of float8 weights
  float scales_[Kind::kBlocks][2];                       // theirs
  float sums_[Kind::kBlocks][Kind::kSums];
};

template <typename Kind>
__global__ void __launch_bounds__(kGemmThreads, 1)
    gemm_kernel(const __grid_constant__ GemmParams params) {
  extern __shared__ unsigned char memory[];
  __shared__ int last;
  const Stages<Kind> stages = {(shared_address(memory) + 1023) & ~1023u, params.stages};
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < params.stages; ++stage) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(stages.full(stage)));
      asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(stages.empty(stage)),
                   "n"(kMultiplying / 32));
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  __syncthreads();
  // Its blocks find room as ours end, and begin with weights, which no kernel writes.
  let_next_start();
  if (threadIdx.x == kMultiplying) Loader<Kind>(params, stages).run();
  if (threadIdx.x < kMultiplying) Multiplier<Kind>(params, stages, &last).run();
}

}  // namespace clover::cuda
