// The kernels of the dense half: one source, compiled once per instruction set (CLOVER_ISA).
//
// A tile is four outputs by a few tokens: every vector of weights that is loaded serves all its
// tokens. A block's weights come from memory with its first tokens and from the cache after that,
// and the next block's are asked for in steps over all of the block's tiles, so that reading and
// multiplying overlap.
//
// Nothing from the standard library with external linkage may be used here: the linker would keep
// one copy of it, perhaps the one that only newer processors can run.
#include "dense_cpu/kernel.h"

#include "common/simd.h"

#ifndef CLOVER_ISA
#error "compile with -DCLOVER_ISA=<name of the instruction set>"
#endif

namespace clover::dense::CLOVER_ISA {
namespace {

constexpr int kStep = 2 * kWidth;  // bfloat16 numbers in a vector
constexpr int kRows = 4;           // outputs of a tile

// Tokens of a tile: as many as leave all sums in registers.
#if defined(__AVX512BF16__)
constexpr int kTokens = 6;
#elif defined(__AVX512F__)
constexpr int kTokens = 4;
#else
constexpr int kTokens = 2;
#endif

// A vector of bfloat16 numbers, ready to be multiplied.
#if defined(__AVX512BF16__)
typedef __m512bh Pairs;

CLOVER_INLINE Pairs load_pairs(const uint16_t* p) { return (Pairs)_mm512_loadu_si512(p); }

CLOVER_INLINE Vec dot(Vec sum, Pairs a, Pairs b) {
  return (Vec)_mm512_dpbf16_ps((__m512)sum, a, b);
}
#else
struct Pairs {
  Vec even;
  Vec odd;
};

CLOVER_INLINE Pairs load_pairs(const uint16_t* p) {
  UInts both;
  __builtin_memcpy(&both, p, sizeof both);
  return {(Vec)(both << 16), (Vec)(both & 0xffff0000u)};
}

CLOVER_INLINE Vec dot(Vec sum, Pairs a, Pairs b) {
  sum += a.even * b.even;
  sum += a.odd * b.odd;
  return sum;
}
#endif

CLOVER_INLINE Pairs load_last_pairs(const uint16_t* p, int64_t count) {
  uint16_t padded[kStep] = {};
  __builtin_memcpy(padded, p, count * sizeof *p);
  return load_pairs(padded);
}

CLOVER_INLINE float widened(uint16_t x) {
  const uint32_t bits = uint32_t{x} << 16;
  float y;
  __builtin_memcpy(&y, &bits, sizeof y);
  return y;
}

// Sums of four vectors, one after the other.
CLOVER_INLINE void store_sums(const Vec* sums, float* y) {
  const Vec quads = fold_four(sums[0], sums[1], sums[2], sums[3]);
#if defined(__AVX512F__)
  const __m256 half = _mm512_maskz_extractf32x8_ps(0xff, (__m512)quads, 0) +
                      _mm512_maskz_extractf32x8_ps(0xff, (__m512)quads, 1);
  const __m128 sum = _mm256_castps256_ps128(half) + _mm256_extractf128_ps(half, 1);
#elif defined(__AVX2__)
  const __m128 sum =
      _mm256_castps256_ps128((__m256)quads) + _mm256_extractf128_ps((__m256)quads, 1);
#else
  const Vec sum = quads;
#endif
  __builtin_memcpy(y, &sum, sizeof sum);
}

// Weights of a tile, and what of the next block's is asked for meanwhile: `lines` times `size`
// elements from `ahead` on, in order of address, as the processor's own prefetcher likes it.
struct Tile {
  const uint16_t* rows[kRows];
  int64_t size;
  const uint16_t* ahead;
  int lines;
};

// y[t * kBlock + r] for the tile's four rows and T tokens of `x`.
template <int T>
void multiply(const Tile& tile, const uint16_t* x, int64_t x_stride, float* y) {
  const int64_t size = tile.size;
  Vec sums[T][kRows] = {};
  int64_t k = 0;
  for (; k + kStep <= size; k += kStep) {
    for (int i = 0; i < tile.lines; ++i)
      __builtin_prefetch(tile.ahead + tile.lines * k + i * kStep, 0, 2);
    Pairs w[kRows];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) w[r] = load_pairs(tile.rows[r] + k);
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) {
      const Pairs v = load_pairs(x + t * x_stride + k);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) sums[t][r] = dot(sums[t][r], w[r], v);
    }
  }
  if (k < size) {
    Pairs w[kRows];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) w[r] = load_last_pairs(tile.rows[r] + k, size - k);
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) {
      const Pairs v = load_last_pairs(x + t * x_stride + k, size - k);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) sums[t][r] = dot(sums[t][r], w[r], v);
    }
  }
#pragma GCC unroll 8
  for (int t = 0; t < T; ++t) store_sums(sums[t], y + t * kBlock);
}

void multiply(int tokens, const Tile& tile, const uint16_t* x, int64_t x_stride, float* y) {
  static_assert(kTokens <= 6, "a case for each number of tokens");
  switch (tokens) {
    case 1:
      return multiply<1>(tile, x, x_stride, y);
    case 2:
      return multiply<2>(tile, x, x_stride, y);
#if defined(__AVX512F__)
    case 3:
      return multiply<3>(tile, x, x_stride, y);
    case 4:
      return multiply<4>(tile, x, x_stride, y);
#endif
#if defined(__AVX512BF16__)
    case 5:
      return multiply<5>(tile, x, x_stride, y);
    case 6:
      return multiply<6>(tile, x, x_stride, y);
#endif
  }
}

// y[t * kBlock + o] = the product for the outputs from `first` on; where there are fewer than a
// block's, the last is repeated. `ahead`: where the next block's weights lie.
void block(const Matrix& m, const Rows& x, int64_t first, int64_t last, const uint16_t* ahead,
           float* y) {
  const int groups = (x.count + kTokens - 1) / kTokens;
  const int share = (kRows + groups - 1) / groups;  // rows of each four that a group asks for
  for (int g = 0; g < groups; ++g) {
    const int64_t from = int64_t{g} * x.count / groups;
    const int tokens = static_cast<int>(int64_t{g + 1} * x.count / groups - from);
    for (int r = 0; r < kBlock; r += kRows) {
      Tile tile;
      for (int i = 0; i < kRows; ++i) {
        const int64_t row = first + r + i;
        tile.rows[i] = m.weight + (row < last ? row : last - 1) * m.inputs;
      }
      tile.size = m.inputs;
      tile.ahead = ahead + (r + g * share) * m.inputs;
      const int left = kRows - g * share;
      tile.lines = left < 0 ? 0 : left < share ? left : share;
      multiply(tokens, tile, x.data + from * x.stride, x.stride, y + from * kBlock + r);
    }
  }
}

CLOVER_INLINE const uint16_t* block_after(const Matrix& m, const Part& part, int64_t first) {
  const int64_t after = first + kBlock;
  return after < part.last ? m.weight + after * m.inputs : part.next;
}

CLOVER_INLINE int block_size(const Part& part, int64_t first) {
  return part.last - first < kBlock ? static_cast<int>(part.last - first) : kBlock;
}

void project(const Matrix& m, const Rows& x, const Part& part, const float* residual, float* y,
             int64_t y_stride) {
  float sums[kMaxTokens * kBlock];
  for (int64_t first = part.first; first < part.last; first += kBlock) {
    block(m, x, first, part.last, block_after(m, part, first), sums);
    const int size = block_size(part, first);
    float bias[kBlock] = {};
    for (int o = 0; m.bias && o < size; ++o) bias[o] = widened(m.bias[first + o]);
    for (int t = 0; t < x.count; ++t) {
      const float* sum = sums + t * kBlock;
      float* to = y + t * y_stride + first;
      const float* add = residual ? residual + t * y_stride + first : nullptr;
      for (int o = 0; o < size; ++o) to[o] = sum[o] + bias[o] + (add ? add[o] : 0.0f);
    }
  }
}

void gate_up(const Matrix& m, const Rows& x, const Part& part, uint16_t* y, int64_t y_stride) {
  static_assert(kBlock % kWidth == 0, "blocks are whole vectors");
  Matrix up = m;
  up.weight += m.outputs * m.inputs;
  if (m.bias) up.bias += m.outputs;
  float gates[kMaxTokens * kBlock], ups[kMaxTokens * kBlock];
  for (int64_t first = part.first; first < part.last; first += kBlock) {
    const uint16_t* ahead = block_after(m, part, first);
    const bool inner = first + kBlock < part.last;
    block(m, x, first, part.last, ahead, gates);
    block(up, x, first, part.last, inner ? block_after(up, part, first) : ahead, ups);
    const int size = block_size(part, first);
    float bias[2][kBlock] = {};
    for (int o = 0; m.bias && o < size; ++o) {
      bias[0][o] = widened(m.bias[first + o]);
      bias[1][o] = widened(up.bias[first + o]);
    }
    for (int t = 0; t < x.count; ++t) {
      BFloat16 made[kBlock];
      for (int o = 0; o < kBlock; o += kWidth) {
        const Vec gate = load(gates + t * kBlock + o) + load(bias[0] + o);
        const Vec value = load(ups + t * kBlock + o) + load(bias[1] + o);
        const Vec inverse = 1.0f + exponential(-bigger(gate, splat(-80.0f)));
        store(made + o, gate / inverse * value);
      }
      __builtin_memcpy(y + t * y_stride + first, made, size * sizeof *y);
    }
  }
}

// 1 / sqrt(mean(x^2) + eps)
CLOVER_INLINE float inverse_rms(const float* x, int64_t size, float eps) {
  Vec squares = {};
  int64_t i = 0;
  for (; i + kWidth <= size; i += kWidth) {
    const Vec v = load(x + i);
    squares += v * v;
  }
  float total = sum(squares);
  for (; i < size; ++i) total += x[i] * x[i];
  return 1.0f / __builtin_sqrtf(total / static_cast<float>(size) + eps);
}

void narrow(const float* x, int64_t size, uint16_t* y) {
  BFloat16* to = reinterpret_cast<BFloat16*>(y);
  int64_t i = 0;
  for (; i + kWidth <= size; i += kWidth) store(to + i, load(x + i));
  if (i < size) {
    float padded[kWidth] = {};
    BFloat16 made[kWidth];
    __builtin_memcpy(padded, x + i, (size - i) * sizeof *x);
    store(made, load(padded));
    __builtin_memcpy(to + i, made, (size - i) * sizeof *y);
  }
}

void widen(const uint16_t* x, int64_t size, float* y) {
  for (int64_t i = 0; i < size; ++i) y[i] = widened(x[i]);
}

constexpr int64_t kPiece = 256;  // elements that are worked on between two conversions

void norm(const float* x, const uint16_t* weight, int64_t size, float eps, uint16_t* y) {
  const float factor = inverse_rms(x, size, eps);
  float piece[kPiece];
  for (int64_t i = 0; i < size; i += kPiece) {
    const int64_t count = size - i < kPiece ? size - i : kPiece;
    for (int64_t j = 0; j < count; ++j) piece[j] = x[i + j] * factor * widened(weight[i + j]);
    narrow(piece, count, y + i);
  }
}

void rotate(const float* x, const uint16_t* weight, float eps, const uint16_t* cos,
            const uint16_t* sin, int64_t head_dim, uint16_t* y) {
  const float factor = weight ? inverse_rms(x, head_dim, eps) : 1.0f;
  const int64_t half = head_dim / 2;
  float low[kPiece], high[kPiece];
  for (int64_t i = 0; i < half; i += kPiece) {
    const int64_t count = half - i < kPiece ? half - i : kPiece;
    for (int64_t j = 0; j < count; ++j) {
      const int64_t a = i + j, b = a + half;
      const float xa = weight ? x[a] * factor * widened(weight[a]) : x[a];
      const float xb = weight ? x[b] * factor * widened(weight[b]) : x[b];
      low[j] = xa * widened(cos[a]) + xb * widened(sin[a]);
      high[j] = xb * widened(cos[b]) + xa * widened(sin[b]);
    }
    narrow(low, count, y + i);
    narrow(high, count, y + half + i);
  }
}

#define CLOVER_STRING_(x) #x
#define CLOVER_STRING(x) CLOVER_STRING_(x)

}  // namespace

extern const Kernels kernels;
const Kernels kernels = {CLOVER_STRING(CLOVER_ISA), project, gate_up, norm, rotate, narrow, widen};

}  // namespace clover::dense::CLOVER_ISA
