// One warp and one tile of keys, of a slab of 16 or two: from the pool to shared memory, scores,
// softmax, values.
//
// Everything is computed transposed, S^T = K Q^T and O^T = V^T P^T, so that the few columns (query
// tokens x query heads of the group) fill the narrow side of the tensor cores' 16 x 8 products.
// Lane i holds columns 2 (i % 4) and the next of every 8, in scores and output alike: maxima, sums
// and rescaling stay within a lane but for the maximum over the 8 lanes that share its columns.
#pragma once

#include "attention_cuda/params.h"
#include "attention_cuda/primitives.cuh"

namespace clover::cuda {

// Type of the KV, head size, eights of columns, warps that compute.
template <typename T_, int D_, int NT_, int W_>
struct Config {
  using T = T_;
  static constexpr int D = D_, NT = NT_, W = W_;
  // Threads. With four computing warps three finish: eight warps in all leave a thread 255
  // registers where nine would leave it 168, as twelve do, since a multiprocessor shares them out
  // by four.
  static constexpr int kFinishers = W == 4 ? 96 : 128;
  static constexpr int kMeeting = W * 32 + kFinishers;
  static constexpr int kThreads = kMeeting + 32;  // the last warp plans
  static constexpr int kCols = NT * 8;
  static constexpr int kSteps = D / 16;  // products along the head size
  static constexpr int kRowBytes = D * T::kBytes;
  static constexpr int kRowChunks = kRowBytes / 16;
  // Rows are as long as in the pool: padding them would put the 32-byte sectors that copies write
  // across lines of shared memory, which costs 4 % of the bandwidth.
  static constexpr int kMatrixBytes = kSlab * kRowBytes;
  // Where rows are short two slabs make a tile: more bytes for the latency of a softmax.
  static constexpr int kSlabs = kRowBytes <= 128 && NT == 1 ? 2 : 1;
  static constexpr int kTile = kSlabs * kSlab;
  static constexpr int kSlabBytes = 2 * kMatrixBytes;  // keys, then values
  static constexpr int kStageBytes = kSlabs * kSlabBytes;
  static constexpr int kOutStride = D + 4;  // floats; rows of columns on different banks

  // Byte of a row's 16-byte chunk in a matrix: chunks of 8 rows fall on different banks where the
  // row's length allows, and else two on one.
  CLOVER_HD static int chunk_at(int row, int chunk) {
    if constexpr (kRowChunks % 8 == 0)
      chunk ^= row & 7;
    else if constexpr (kRowChunks == 4)
      chunk ^= (row >> 1) & 3;
    else if constexpr (kRowChunks % 4 == 0)
      chunk ^= row & 3;
    return row * kRowBytes + chunk * 16;
  }
};

// The lane's part of 16 keys or values, `rows` of which are from `low` to `high` valid; the others
// become zeros and are not read.
template <class C, bool Whole>
__device__ __forceinline__ void load_matrix(uint32_t to, const unsigned char* from, int lane,
                                            int low, int high) {
  constexpr int kChunks = kSlab * C::kRowChunks;
#pragma unroll
  for (int i = 0; i < (kChunks + 31) / 32; ++i) {
    const int chunk = lane + 32 * i;
    if (kChunks % 32 != 0 && chunk >= kChunks) break;
    const int row = chunk / C::kRowChunks;
    const uint32_t target = to + C::chunk_at(row, chunk % C::kRowChunks);
    if constexpr (Whole)
      copy_async(target, from + chunk * 16);
    else
      copy_async(target, from + chunk * 16, row >= low && row < high);
  }
}

// Fragments of the queries as the right-hand operand.
template <class C>
struct Queries {
  uint32_t part[C::NT][C::kSteps][2];
};

template <typename T>
__device__ __forceinline__ uint32_t load_pair(const void* q, int64_t at, bool from_bfloat16) {
  const uint32_t pair = *reinterpret_cast<const uint32_t*>(static_cast<const uint16_t*>(q) + at);
  if constexpr (std::is_same_v<T, Float8>) {
    if (from_bfloat16) {
      const float2 wide = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(pair));
      return pack<T>(wide.x, wide.y);
    }
  }
  return pair;
}

template <class C>
__device__ __forceinline__ void load_queries(Queries<C>& queries, const AttendParams& params,
                                             const Piece& piece, int lane) {
  const int group = params.split.group, cols = piece.count * group;
  const bool from_bfloat16 = params.q_dtype == DType::kBFloat16;
#pragma unroll
  for (int n = 0; n < C::NT; ++n) {
    const int col = piece.col_tile * C::kCols + n * 8 + lane / 4;
    const int token = col / group;
    const int64_t at = (piece.start + token) * params.q_stride +
                       int64_t{piece.head * group + col - token * group} * C::D;
#pragma unroll
    for (int s = 0; s < C::kSteps; ++s) {
      // float8 keys are widened four at a time, so positions along the head size are permuted.
      constexpr bool kWide = std::is_same_v<typename C::T, Float8>;
      const int first = s * 16 + (lane % 4) * (kWide ? 4 : 2);
      const int second = first + (kWide ? 2 : 8);
      queries.part[n][s][0] = queries.part[n][s][1] = 0;
      if (col < cols) {
        queries.part[n][s][0] = load_pair<typename C::T>(params.q, at + first, from_bfloat16);
        queries.part[n][s][1] = load_pair<typename C::T>(params.q, at + second, from_bfloat16);
      }
    }
  }
}

// S^T of a slab: 16 keys by the columns.
template <class C>
__device__ __forceinline__ void score_slab(float (&scores)[C::NT][4], const Queries<C>& queries,
                                           uint32_t keys, int lane) {
#pragma unroll
  for (int n = 0; n < C::NT; ++n) scores[n][0] = scores[n][1] = scores[n][2] = scores[n][3] = 0.f;
  const int row = lane & 15, high = lane >> 4;
  if constexpr (std::is_same_v<typename C::T, Float8>) {
#pragma unroll
    for (int s = 0; s < C::kSteps; s += 2) {
      uint32_t raw[4];
      // The second half of an odd last pair would be past the row: it reads the first again.
      load_matrices(raw, keys + C::chunk_at(row, s + 1 < C::kSteps ? s + high : s));
#pragma unroll
      for (int half = 0; half < 2 && s + half < C::kSteps; ++half) {
        const uint32_t low = raw[2 * half], high = raw[2 * half + 1];
        const uint32_t a[4] = {widen_float8(low), widen_float8(high), widen_float8(low >> 16),
                               widen_float8(high >> 16)};
#pragma unroll
        for (int n = 0; n < C::NT; ++n)
          multiply_add<typename C::T>(scores[n], a, queries.part[n][s + half][0],
                                      queries.part[n][s + half][1]);
      }
    }
  } else {
    // Two chains of products, since each waits for the one before it.
    float odd[C::NT][4] = {};
#pragma unroll
    for (int s = 0; s < C::kSteps; ++s) {
      uint32_t a[4];
      load_matrices(a, keys + C::chunk_at(row, 2 * s + high));
#pragma unroll
      for (int n = 0; n < C::NT; ++n)
        multiply_add<typename C::T>(C::NT == 1 && s % 2 ? odd[n] : scores[n], a,
                                    queries.part[n][s][0], queries.part[n][s][1]);
    }
    if constexpr (C::NT == 1)
      for (int i = 0; i < 4; ++i) scores[0][i] += odd[0][i];
  }
}

// The running softmax of a lane's columns, and O^T: [head size / 16][n] 16 x 8 fragments.
template <class C>
struct Running {
  float top[C::NT][2];
  float sum[C::NT][2];  // of this lane's keys
  float out[C::kSteps][C::NT][4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int n = 0; n < C::NT; ++n) {
#pragma unroll
      for (int j = 0; j < 2; ++j) top[n][j] = -INFINITY, sum[n][j] = 0.f;
#pragma unroll
      for (int s = 0; s < C::kSteps; ++s)
#pragma unroll
        for (int i = 0; i < 4; ++i) out[s][n][i] = 0.f;
    }
  }
};

// What masks and biases need to know of a lane's columns.
template <class C>
struct Columns {
  int position[C::NT][2];  // of the query token
  float slope[C::NT][2];   // in powers of two
  int lowest;
  int highest;

  __device__ __forceinline__ void set(const AttendParams& params, const Piece& piece, int lane) {
    const int group = params.split.group, before = piece.length - piece.count;
#pragma unroll
    for (int n = 0; n < C::NT; ++n)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int col = piece.col_tile * C::kCols + n * 8 + (lane % 4) * 2 + j;
        const int token = least(col / group, piece.count - 1);
        position[n][j] = before + token;
        slope[n][j] = 0.f;
        if (params.score.slopes != nullptr)
          slope[n][j] = params.score.slopes[piece.head * group + col % group] * 1.442695041f;
      }
    lowest = before + piece.col_tile * C::kCols / group;
    highest = before + least((piece.col_tile * C::kCols + C::kCols - 1) / group, piece.count - 1);
  }
};

// Scores in powers of two, hidden ones minus infinity.
template <class C>
__device__ __forceinline__ void finish_scores(float (&scores)[C::NT][4], const Columns<C>& columns,
                                              const AttendParams& params, int first, int lane) {
  const int key = first + lane / 4, window = params.split.window;
  const bool all_seen =
      first + kSlab - 1 <= columns.lowest && (window == 0 || first > columns.highest - window);
  const bool plain = params.score.softcap == 0.f && params.score.slopes == nullptr;
  const float scale = params.score.scale * 1.442695041f;
  if (plain && all_seen) {
#pragma unroll
    for (int n = 0; n < C::NT; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[n][i] *= scale;
    return;
  }
#pragma unroll
  for (int n = 0; n < C::NT; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int distance = columns.position[n][i & 1] - (key + (i >> 1) * 8);
      float score = scores[n][i] * scale;
      if (params.score.softcap != 0.f) {
        const float cap = params.score.softcap * 1.442695041f;
        score = cap * tanh_of(scores[n][i] * params.score.scale / params.score.softcap);
      }
      score -= columns.slope[n][i & 1] * static_cast<float>(distance);
      const bool seen = distance >= 0 && (window == 0 || distance < window);
      scores[n][i] = seen ? score : -INFINITY;
    }
}

// Folds a tile's finished scores into the running softmax; they become weights, packed as P^T.
template <class C>
__device__ __forceinline__ void weigh_tile(float (&scores)[C::kSlabs][C::NT][4],
                                           Running<C>& running,
                                           uint32_t (&weights)[C::kSlabs][C::NT][2]) {
  float factor[C::NT][2];
  bool rescale = false;
#pragma unroll
  for (int n = 0; n < C::NT; ++n)
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      float top = -INFINITY;
#pragma unroll
      for (int k = 0; k < C::kSlabs; ++k)
        top = fmaxf(top, fmaxf(scores[k][n][j], scores[k][n][j + 2]));
#pragma unroll
      for (int mask = 4; mask < 32; mask *= 2)
        top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, mask));
      top = fmaxf(top, running.top[n][j]);
      const float base = top == -INFINITY ? 0.f : top;
      factor[n][j] = exp2_fast(running.top[n][j] - base);
      rescale |= top > running.top[n][j];
      running.top[n][j] = top;
      running.sum[n][j] *= factor[n][j];
#pragma unroll
      for (int k = 0; k < C::kSlabs; ++k) {
        scores[k][n][j] = exp2_fast(scores[k][n][j] - base);
        scores[k][n][j + 2] = exp2_fast(scores[k][n][j + 2] - base);
        running.sum[n][j] += scores[k][n][j] + scores[k][n][j + 2];
      }
    }
  if (__any_sync(0xffffffff, rescale)) {
#pragma unroll
    for (int s = 0; s < C::kSteps; ++s)
#pragma unroll
      for (int n = 0; n < C::NT; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) running.out[s][n][i] *= factor[n][i & 1];
  }
#pragma unroll
  for (int k = 0; k < C::kSlabs; ++k)
#pragma unroll
    for (int n = 0; n < C::NT; ++n) {
      const float (&of)[4] = scores[k][n];
      weights[k][n][0] = transpose_matrix(pack<typename C::T>(of[0], of[1]));
      weights[k][n][1] = transpose_matrix(pack<typename C::T>(of[2], of[3]));
    }
}

// O^T += V^T P^T.
template <class C>
__device__ __forceinline__ void add_values(Running<C>& running, const uint32_t (&weights)[C::NT][2],
                                           uint32_t values, int lane) {
  if constexpr (std::is_same_v<typename C::T, Float8>) {
    const int row = lane & 15, high = lane >> 4;
#pragma unroll
    for (int s = 0; s < C::kSteps; s += 2) {
      uint32_t raw[4];
      load_matrices_transposed(raw, values + C::chunk_at(row, s + 1 < C::kSteps ? s + high : s));
#pragma unroll
      for (int half = 0; half < 2 && s + half < C::kSteps; ++half) {
        uint32_t a[4];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          // Two keys of an even and an odd element; rows of O^T are the even, then the odd ones.
          const uint32_t one = widen_float8(raw[2 * half + i]);
          const uint32_t next = widen_float8(raw[2 * half + i] >> 16);
          a[2 * i] = __byte_perm(one, next, 0x5410);
          a[2 * i + 1] = __byte_perm(one, next, 0x7632);
        }
#pragma unroll
        for (int n = 0; n < C::NT; ++n)
          multiply_add<typename C::T>(running.out[s + half][n], a, weights[n][0], weights[n][1]);
      }
    }
  } else {
    const int row = (lane & 7) + (lane >> 4) * 8, high = (lane >> 3) & 1;
#pragma unroll
    for (int s = 0; s < C::kSteps; ++s) {
      uint32_t a[4];
      load_matrices_transposed(a, values + C::chunk_at(row, 2 * s + high));
#pragma unroll
      for (int n = 0; n < C::NT; ++n)
        multiply_add<typename C::T>(running.out[s][n], a, weights[n][0], weights[n][1]);
    }
  }
}

// Element of the head size that row `lane / 4 + 8 * high` of O^T's fragment s is.
template <class C>
__device__ __forceinline__ int out_element(int s, int high, int lane) {
  if constexpr (std::is_same_v<typename C::T, Float8>) return s * 16 + 2 * (lane / 4) + high;
  return s * 16 + lane / 4 + 8 * high;
}

}  // namespace clover::cuda
