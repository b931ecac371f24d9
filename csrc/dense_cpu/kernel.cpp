// The kernels of the dense half: one source, compiled once per instruction set (CLOVER_ISA).
//
// A tile is a few panels by a few tokens, whose sums stay in registers: every vector of weights
// that is loaded serves all of the tile's tokens, every pair of inputs all of its panels. Inputs
// are gone through in spans, so that a span's weights come from memory with its first tokens and
// from the cache after that. The next tile's are asked for meanwhile in order of address, so that
// reading and multiplying overlap. Quantised weights become bfloat16, exactly, a group at a time.
//
// Nothing from the standard library with external linkage may be used here: the linker would keep
// one copy of it, perhaps the one that only newer processors can run.
#include "dense_cpu/kernel.h"

#include "common/simd.h"
#include "dense_cpu/unpack.h"

#ifndef CLOVER_ISA
#error "compile with -DCLOVER_ISA=<name of the instruction set>"
#endif

namespace clover::dense::CLOVER_ISA {
namespace {

constexpr int kVecs = kBlock / kWidth;               // vectors of a panel's outputs
constexpr int kPanels = kVecs >= 4 ? 2 : 4 / kVecs;  // panels of a tile
constexpr int kPairs = 2 * kBlock;                   // numbers of a pair of inputs
constexpr int64_t kLine = 64;                        // bytes of a cache line
constexpr int64_t kSpan = 256;                       // inputs of a span
constexpr int kTokenBlock = 96;                      // tokens that go through a span together

// Tokens of a tile: as many as leave all sums in registers.
#if defined(__AVX512BF16__)
constexpr int kTokens = 6;
#elif defined(__AVX512F__)
constexpr int kTokens = 4;
#else
constexpr int kTokens = 2;
#endif

// Pairs of bfloat16 numbers, a lane each, ready to be multiplied.
#if defined(__AVX512BF16__)
typedef __m512bh Pairs;

CLOVER_INLINE Pairs load_pairs(const uint16_t* p) { return (Pairs)_mm512_loadu_si512(p); }

CLOVER_INLINE Pairs splat_pair(const uint16_t* p) {
  int32_t pair;
  __builtin_memcpy(&pair, p, sizeof pair);
  return (Pairs)_mm512_set1_epi32(pair);
}

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

CLOVER_INLINE float widened(uint16_t x) {
  const uint32_t bits = uint32_t{x} << 16;
  float y;
  __builtin_memcpy(&y, &bits, sizeof y);
  return y;
}

#if !defined(__AVX512BF16__)
CLOVER_INLINE Pairs splat_pair(const uint16_t* p) {
  return {splat(widened(p[0])), splat(widened(p[1]))};
}
#endif

// What is asked for while a tile is computed: `lines` cache lines of each step, from `at` on.
struct Ahead {
  const uint8_t* at;
  int lines;
};

CLOVER_INLINE void ask(Ahead& ahead) {
  for (int i = 0; i < ahead.lines; ++i) __builtin_prefetch(ahead.at + i * kLine, 0, 2);
  ahead.at += ahead.lines * kLine;
}

// The panels of a tile at one input, and the tile's rows from that input on.
struct Tile {
  const uint16_t* panels[kPanels];
  int64_t pairs;  // of inputs
  const uint16_t* x;
  int64_t x_stride;
};

// sums[t][c] += products over the tile's pairs; P panels, T tokens.
template <int P, int T>
CLOVER_INLINE void add_products(const Tile& tile, Ahead& ahead, Vec (&sums)[T][P * kVecs]) {
  for (int64_t k = 0; k < tile.pairs; ++k) {
    ask(ahead);
    Pairs v[T];
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) v[t] = splat_pair(tile.x + t * tile.x_stride + 2 * k);
#pragma GCC unroll 8
    for (int c = 0; c < P * kVecs; ++c) {
      const uint16_t* at = tile.panels[c / kVecs] + k * kPairs + c % kVecs * 2 * kWidth;
      const Pairs w = load_pairs(at);
#pragma GCC unroll 8
      for (int t = 0; t < T; ++t) sums[t][c] = dot(sums[t][c], w, v[t]);
    }
  }
}

// Scales and minima of a group of a tile's outputs.
struct Scales {
  float scale[kPanels * kBlock];
  float minimum[kPanels * kBlock];
  const float* row_sums;  // of the group, for the tile's first token; null: no minima
  int64_t row_sums_stride;
};

// totals[t][o] += the products of a span, scaled where `scales` is not null.
template <int P, int T>
void span(const Tile& tile, Ahead ahead, const Scales* scales, float* totals) {
  constexpr int kStride = kPanels * kBlock;
  Vec sums[T][P * kVecs] = {};
  if (!scales)
    for (int t = 0; t < T; ++t)
      for (int c = 0; c < P * kVecs; ++c) sums[t][c] = load(totals + t * kStride + c * kWidth);
  add_products<P, T>(tile, ahead, sums);
  for (int t = 0; t < T; ++t) {
    float* to = totals + t * kStride;
    for (int c = 0; scales && c < P * kVecs; ++c) {
      Vec total = load(to + c * kWidth) + load(scales->scale + c * kWidth) * sums[t][c];
      if (scales->row_sums)
        total += load(scales->minimum + c * kWidth) * scales->row_sums[t * scales->row_sums_stride];
      sums[t][c] = total;
    }
    for (int c = 0; c < P * kVecs; ++c) store(to + c * kWidth, sums[t][c]);
  }
}

template <int P>
void span(int tokens, const Tile& tile, const Ahead& ahead, const Scales* scales, float* totals) {
  static_assert(kTokens <= 6, "a case for each number of tokens");
  switch (tokens) {
    case 1:
      return span<P, 1>(tile, ahead, scales, totals);
    case 2:
      return span<P, 2>(tile, ahead, scales, totals);
#if defined(__AVX512F__)
    case 3:
      return span<P, 3>(tile, ahead, scales, totals);
    case 4:
      return span<P, 4>(tile, ahead, scales, totals);
#endif
#if defined(__AVX512BF16__)
    case 5:
      return span<P, 5>(tile, ahead, scales, totals);
    case 6:
      return span<P, 6>(tile, ahead, scales, totals);
#endif
  }
}

void span(int panels, int tokens, const Tile& tile, const Ahead& ahead, const Scales* scales,
          float* totals) {
  static_assert(kPanels == 2 || kPanels == 4, "a case for each number of panels");
  switch (panels) {
    case 1:
      return span<1>(tokens, tile, ahead, scales, totals);
    case 2:
      return span<2>(tokens, tile, ahead, scales, totals);
#if defined(__AVX512F__)
    case 3:
      return span<3>(tokens, tile, ahead, scales, totals);
    case 4:
      return span<4>(tokens, tile, ahead, scales, totals);
#endif
  }
}

// Which panels a tile has, and where the weights lie that are wanted next (or null).
struct Panels {
  const uint8_t* at[kPanels];
  int count;
  const uint8_t* ahead;
};

// One span for all of `x`'s tokens, a tile's at a time; each asks for its share of what is ahead.
void span_of_rows(const Panels& panels, Tile tile, const Rows& x, int64_t k, Scales* scales,
                  const uint8_t* ahead, int lines, float* totals) {
  const int groups = static_cast<int>((x.count + kTokens - 1) / kTokens);
  const int share = (lines + groups - 1) / groups;
  for (int g = 0; g < groups; ++g) {
    const int64_t from = g * x.count / groups;
    const int tokens = static_cast<int>((g + 1) * x.count / groups - from);
    tile.x = x.data + from * x.stride + k;
    tile.x_stride = x.stride;
    const int left = ahead ? lines - g * share : 0;
    const Ahead asked = {ahead + g * share * tile.pairs * kLine, left < 0       ? 0
                                                                 : left < share ? left
                                                                                : share};
    if (scales && scales->row_sums)
      scales->row_sums = x.sums + from * scales->row_sums_stride + k / kGroup;
    span(panels.count, tokens, tile, asked, scales, totals + from * kPanels * kBlock);
  }
}

void multiply_plain(const Matrix& m, const Panels& panels, const Rows& x, float* totals) {
  const int64_t inputs = round_up(m.inputs, 2);
  const int64_t step = x.count > kTokens ? kSpan : inputs;
  for (int64_t k = 0; k < inputs; k += step) {
    Tile tile;
    for (int p = 0; p < panels.count; ++p)
      tile.panels[p] = reinterpret_cast<const uint16_t*>(panels.at[p]) + k * kBlock;
    tile.pairs = (inputs - k < step ? inputs - k : step) / 2;
    const uint8_t* ahead = panels.ahead ? panels.ahead + panels.count * k * kBlock * 2 : nullptr;
    span_of_rows(panels, tile, x, k, nullptr, ahead, panels.count, totals);
  }
}

void multiply_grouped(const Matrix& m, const Panels& panels, const Rows& x, float* totals) {
  alignas(64) uint16_t plain[kPanels][kGroup * kBlock];
  const int64_t groups = m.groups(), bytes = group_bytes(m.format);
  const bool minima = m.format == Format::kInt4;
  Scales scales;
  scales.row_sums_stride = groups;
  for (int64_t g = 0; g < groups; ++g) {
    Tile tile;
    tile.pairs = kGroup / 2;
    for (int p = 0; p < panels.count; ++p) {
      const uint8_t* group = panels.at[p] + g * bytes;
      const Float16* halves = reinterpret_cast<const Float16*>(group);
      for (int o = 0; o < kBlock; o += kWidth) {
        store(scales.scale + p * kBlock + o, load(halves + o));
        if (minima) store(scales.minimum + p * kBlock + o, load(halves + kBlock + o));
      }
      for (int64_t i = 0; panels.ahead && i < bytes; i += kLine)
        __builtin_prefetch(panels.ahead + (g * panels.count + p) * bytes + i, 0, 2);
      if (minima)
        unpack_int4(group + 4 * kBlock, plain[p]);
      else
        unpack_int8(group + 2 * kBlock, plain[p]);
      tile.panels[p] = plain[p];
    }
    scales.row_sums = minima ? x.sums : nullptr;
    span_of_rows(panels, tile, x, g * kGroup, &scales, nullptr, 0, totals);
  }
}

// totals[t][o], kPanels * kBlock a row.
void multiply(const Matrix& m, const Panels& panels, const Rows& x, float* totals) {
  __builtin_memset(totals, 0, x.count * kPanels * kBlock * sizeof *totals);
  return m.format == Format::kBFloat16 ? multiply_plain(m, panels, x, totals)
                                       : multiply_grouped(m, panels, x, totals);
}

// Calls `finish(first output, size, first token, tokens, totals)` for each tile of a part.
template <typename Finish>
CLOVER_INLINE void each_tile(const Matrix& m, const Rows& x, const Part& part,
                             const Finish& finish) {
  const int64_t begin = part.first / kBlock, end = (part.last + kBlock - 1) / kBlock;
  const int64_t wide = kPanels / m.folds, tiles = (end - begin + wide - 1) / wide;
  float totals[kTokenBlock * kPanels * kBlock];
  for (int64_t i = 0; i < tiles; ++i) {
    const int64_t from = begin + i * (end - begin) / tiles;
    const int64_t until = begin + (i + 1) * (end - begin) / tiles;
    Panels panels;
    panels.count = static_cast<int>(until - from) * m.folds;
    for (int p = 0; p < panels.count; ++p)
      panels.at[p] = m.weight + from * m.block() + p * m.panel();
    const int64_t last = until * kBlock < part.last ? until * kBlock : part.last;
    for (int64_t t = 0; t < x.count; t += kTokenBlock) {
      panels.ahead = i + 1 < tiles ? m.weight + until * m.block() : part.next;
      if (!part.next || t != 0) panels.ahead = nullptr;
      const int64_t tokens = x.count - t < kTokenBlock ? x.count - t : kTokenBlock;
      const Rows some = {x.data + t * x.stride, x.stride, tokens,
                         x.sums ? x.sums + t * m.groups() : nullptr};
      multiply(m, panels, some, totals);
      finish(from * kBlock, static_cast<int>(last - from * kBlock), t, tokens, totals);
    }
  }
}

void project(const Matrix& m, const Rows& x, const Part& part, const float* residual, float* y,
             int64_t y_stride) {
  each_tile(m, x, part, [&](int64_t first, int size, int64_t t, int64_t tokens, float* totals) {
    float bias[kPanels * kBlock] = {};
    for (int o = 0; m.bias && o < size; ++o) bias[o] = widened(m.bias[first + o]);
    for (int64_t i = 0; i < tokens; ++i) {
      const float* sum = totals + i * kPanels * kBlock;
      float* to = y + (t + i) * y_stride + first;
      if (residual) {
        const float* add = residual + (t + i) * y_stride + first;
        for (int o = 0; o < size; ++o) to[o] = sum[o] + bias[o] + add[o];
      } else {
        for (int o = 0; o < size; ++o) to[o] = sum[o] + bias[o];
      }
    }
  });
}

CLOVER_INLINE Vec silu(Vec x) { return x / (1.0f + exponential(-bigger(x, splat(-80.0f)))); }

void gate_up(const Matrix& m, const Rows& x, const Part& part, uint16_t* y, int64_t y_stride) {
  each_tile(m, x, part, [&](int64_t first, int size, int64_t t, int64_t tokens, float* totals) {
    constexpr int kHalf = kPanels / 2 * kBlock;
    float bias[2][kHalf] = {};
    for (int o = 0; m.bias && o < size; ++o) {
      bias[0][o] = widened(m.bias[first + o]);
      bias[1][o] = widened(m.bias[m.outputs + first + o]);
    }
    for (int64_t i = 0; i < tokens; ++i) {
      BFloat16 made[kHalf];
      for (int o = 0; o < size; o += kWidth) {
        const float* sum = totals + i * kPanels * kBlock + o + o / kBlock * kBlock;
        const Vec gate = load(sum) + load(bias[0] + o);
        store(made + o, silu(gate) * (load(sum + kBlock) + load(bias[1] + o)));
      }
      __builtin_memcpy(y + (t + i) * y_stride + first, made, size * sizeof *y);
    }
  });
}

void group_sums(const uint16_t* x, int64_t size, float* y) {
  static_assert(kGroup % kWidth == 0, "groups are whole vectors");
  for (int64_t i = 0; i < size; i += kGroup) {
    Vec sums = {};
    for (int k = 0; k < kGroup; k += kWidth)
      sums += load(reinterpret_cast<const BFloat16*>(x + i + k));
    y[i / kGroup] = sum(sums);
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
const Kernels kernels = {
    CLOVER_STRING(CLOVER_ISA), project, gate_up, group_sums, norm, rotate, narrow, widen};

}  // namespace clover::dense::CLOVER_ISA
