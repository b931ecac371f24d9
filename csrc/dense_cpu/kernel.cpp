// The kernels of the dense half: one source, compiled once per instruction set (CLOVER_ISA).
//
// A tile is a few panels by a few tokens, whose sums stay in registers: every vector of weights
// that is loaded serves all of the tile's tokens, every pair of inputs all of its panels. Inputs
// are gone through in spans, so that a span's weights come from memory with its first tokens and
// from the cache after that. Beside more than one token the next tile's are asked for meanwhile in
// order of address, so that reading and multiplying overlap. Quantised weights are multiplied as
// whole numbers, exactly, with rows as whole numbers; a group's sums become float32 with the scales
// of both.
//
// With AVX2, where every number has to be widened, more than a few tokens come as float32: a tile
// of one panel then widens a vector of weights for five products, beside them, and nothing else.
// The sums are the same to the bit, since each takes the same products in the same order.
//
// Nothing from the standard library with external linkage may be used here: the linker would keep
// one copy of it, perhaps the one that only newer processors can run.
#include "dense_cpu/kernel.h"

#include "common/simd.h"
#include "dense_cpu/codes.h"

#ifndef CLOVER_ISA
#error "compile with -DCLOVER_ISA=<name of the instruction set>"
#endif

namespace clover::dense::CLOVER_ISA {
namespace {

constexpr int kVecs = kBlock / kWidth;             // vectors of a panel's outputs
constexpr int kPanels = kVecs >= 4 ? 2 : 4;        // panels of a tile, at most
constexpr int kPanelsOfMany = kVecs >= 2 ? 2 : 4;  // of more than one token
constexpr int kPairs = 2 * kBlock;                 // numbers of a pair of inputs
constexpr int64_t kLine = 64;                      // bytes of a cache line
constexpr int64_t kSpan = 256;                     // inputs of a span
constexpr int kTokenBlock = 96;                    // tokens that go through a span together

// Tokens of a tile: as many as leave all sums in registers.
#if defined(__AVX512BF16__)
constexpr int kTokens = 6;
#elif defined(__AVX512F__)
constexpr int kTokens = 4;
#else
constexpr int kTokens = 2;
#endif

#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr int kWideFrom = 3;
#else
constexpr int kWideFrom = 0;
#endif
constexpr int kWideTokens = 5;  // of a tile of one panel

// The first or the second number of each pair.
CLOVER_INLINE Vec load_half(const uint16_t* p, bool odd) {
  UInts both;
  __builtin_memcpy(&both, p, sizeof both);
  return odd ? (Vec)(both & 0xffff0000u) : (Vec)(both << 16);
}

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
  return {load_half(p, false), load_half(p, true)};
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

// What is asked for while a tile is computed: `lines` cache lines each time, up to `end`.
struct Ahead {
  const uint8_t* at;
  const uint8_t* end;
  int lines;
};

CLOVER_INLINE void ask(Ahead& ahead) {
  if (ahead.at >= ahead.end) return;
  for (int i = 0; i < ahead.lines; ++i) __builtin_prefetch(ahead.at + i * kLine, 0, 2);
  ahead.at += ahead.lines * kLine;
}

// The panels of a tile at one input, and the tile's rows from that input on. Of quantised weights
// inputs are whole groups.
struct Tile {
  const uint8_t* panels[kPanels];
  int64_t inputs;
  Rows x;  // `count` is not read
};

// sums[t][c] += products over the tile's pairs; P panels, T tokens.
template <int P, int T>
CLOVER_INLINE void add_products(const Tile& tile, Ahead& ahead, Vec (&sums)[T][P * kVecs]) {
  for (int64_t k = 0; k < tile.inputs / 2; ++k) {
    ask(ahead);
    Pairs v[T];
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) v[t] = splat_pair(tile.x.data + t * tile.x.stride + 2 * k);
#pragma GCC unroll 8
    for (int c = 0; c < P * kVecs; ++c) {
      const uint16_t* panel = reinterpret_cast<const uint16_t*>(tile.panels[c / kVecs]);
      const Pairs w = load_pairs(panel + k * kPairs + c % kVecs * 2 * kWidth);
#pragma GCC unroll 8
      for (int t = 0; t < T; ++t) sums[t][c] = dot(sums[t][c], w, v[t]);
    }
  }
}

// Products of two pairs of inputs, `codes` being those of the panels and `x` of the first token.
template <Format F, int P, int T>
CLOVER_INLINE void add_codes(const uint8_t* const (&codes)[P], const uint16_t* x, int64_t stride,
                             Ints (&sums)[T][P * kVecs]) {
  Shorts v[2][T];
#pragma GCC unroll 8
  for (int t = 0; t < T; ++t) {
    v[0][t] = splat_codes(x + t * stride);
    v[1][t] = splat_codes(x + t * stride + 2);
  }
#pragma GCC unroll 8
  for (int c = 0; c < P * kVecs; ++c) {
    const uint8_t* at = codes[c / kVecs] + c % kVecs * 2 * kWidth;
    Shorts w[2];
    if (F == Format::kInt4) {
      const Shorts both = load_nibbles(at);
      w[0] = low_codes(both);
      w[1] = high_codes(both);
    } else {
      w[0] = load_codes(at);
      w[1] = load_codes(at + kPairs);
    }
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t)
      sums[t][c] = dot_codes(dot_codes(sums[t][c], w[0], v[0][t]), w[1], v[1][t]);
  }
}

// sums[t][c] += the products of a group of inputs, scaled.
template <Format F, int P, int T>
CLOVER_INLINE void add_group(const Tile& tile, int64_t g, Ahead& ahead, Vec (&sums)[T][P * kVecs]) {
  constexpr bool kMinima = F == Format::kInt4;
  constexpr int kStep = kMinima ? kPairs : 2 * kPairs;  // bytes of two pairs
  const uint8_t *halves[P], *codes[P];
  for (int p = 0; p < P; ++p) {
    halves[p] = tile.panels[p] + g * group_bytes(F);
    codes[p] = halves[p] + (kMinima ? 4 : 2) * kBlock;
  }
  const uint16_t* x = tile.x.data + g * kGroup;
  Ints whole[T][P * kVecs] = {};
  for (int k = 0; k < kGroup; k += 4) {
    ask(ahead);
    add_codes<F, P, T>(codes, x + k, tile.x.stride, whole);
    for (int p = 0; p < P; ++p) codes[p] += kStep;
  }
  for (int c = 0; c < P * kVecs; ++c) {
    const auto* half = reinterpret_cast<const Float16*>(halves[c / kVecs]) + c % kVecs * kWidth;
    const Vec scale = load(half);
    for (int t = 0; t < T; ++t) {
      const int64_t at = t * tile.x.groups + g;
      sums[t][c] += scale * tile.x.scales[at] * __builtin_convertvector(whole[t][c], Vec);
      if (kMinima) sums[t][c] += load(half + kBlock) * tile.x.sums[at];
    }
  }
}

// totals[t][o] += the products of a span.
template <Format F, int P, int T>
void span(const Tile& tile, Ahead ahead, float* totals) {
  constexpr int kStride = kPanels * kBlock;
  Vec sums[T][P * kVecs];
  for (int t = 0; t < T; ++t)
    for (int c = 0; c < P * kVecs; ++c) sums[t][c] = load(totals + t * kStride + c * kWidth);
  if constexpr (F == Format::kBFloat16) {
    add_products<P, T>(tile, ahead, sums);
  } else {
    for (int64_t g = 0; g < tile.inputs / kGroup; ++g) add_group<F, P, T>(tile, g, ahead, sums);
  }
  for (int t = 0; t < T; ++t)
    for (int c = 0; c < P * kVecs; ++c) store(totals + t * kStride + c * kWidth, sums[t][c]);
}

// A span of as many tokens and panels as a tile has: `T` and `P` count down to them.
template <Format F, int P, int T>
void span_of(int tokens, const Tile& tile, const Ahead& ahead, float* totals) {
  if (tokens == T) return span<F, P, T>(tile, ahead, totals);
  if constexpr (T > 1) span_of<F, P, T - 1>(tokens, tile, ahead, totals);
}

template <Format F, int P = kPanels>
void span(int panels, int tokens, const Tile& tile, const Ahead& ahead, float* totals) {
  constexpr int kMost = P > kPanelsOfMany ? 1 : kTokens;
  if (panels == P) return span_of<F, P, kMost>(tokens, tile, ahead, totals);
  if constexpr (P > 1) span<F, P - 1>(panels, tokens, tile, ahead, totals);
}

// totals[t][o] += the products of a span of one panel with T rows in float32.
template <int T>
void wide_span(const uint16_t* panel, int64_t inputs, const Rows& x, Ahead ahead, float* totals) {
  constexpr int kStride = kPanels * kBlock;
  Vec sums[T][kVecs];
  for (int t = 0; t < T; ++t)
    for (int c = 0; c < kVecs; ++c) sums[t][c] = load(totals + t * kStride + c * kWidth);
  for (int64_t k = 0; k < inputs; k += 2) {
    ask(ahead);
#pragma GCC unroll 2
    for (int odd = 0; odd < 2; ++odd) {
      Vec w[kVecs];
#pragma GCC unroll 8
      for (int c = 0; c < kVecs; ++c) w[c] = load_half(panel + k * kBlock + c * 2 * kWidth, odd);
#pragma GCC unroll 8
      for (int t = 0; t < T; ++t) {
        const Vec v = splat(x.wide[t * x.stride + k + odd]);
#pragma GCC unroll 8
        for (int c = 0; c < kVecs; ++c) sums[t][c] += w[c] * v;
      }
    }
  }
  for (int t = 0; t < T; ++t)
    for (int c = 0; c < kVecs; ++c) store(totals + t * kStride + c * kWidth, sums[t][c]);
}

// As many tokens as such a tile has: `T` counts down to them.
template <int T = kWideTokens>
void wide_span_of(int tokens, const uint16_t* panel, int64_t inputs, const Rows& x,
                  const Ahead& ahead, float* totals) {
  if (tokens == T) return wide_span<T>(panel, inputs, x, ahead, totals);
  if constexpr (T > 1) wide_span_of<T - 1>(tokens, panel, inputs, x, ahead, totals);
}

// Which panels a tile has, and where the weights lie that are wanted next (or null).
struct Panels {
  const uint8_t* at[kPanels];
  int count;
  const uint8_t* ahead;
};

// Part `i` of `count` of the `bytes` at `ahead` (null: nothing), to be asked for in `times` times.
CLOVER_INLINE Ahead share_of(const uint8_t* ahead, int64_t bytes, int i, int count, int64_t times) {
  if (!ahead) return {nullptr, nullptr, 0};
  const int64_t lines = (bytes + kLine - 1) / kLine, share = (lines + count - 1) / count;
  const int64_t last = (i + 1) * share < lines ? (i + 1) * share : lines;
  return {ahead + i * share * kLine, ahead + last * kLine,
          static_cast<int>((share + times - 1) / times)};
}

// One span for all of `x`'s tokens, a tile's at a time; each asks for its share of what is ahead.
template <Format F>
void span_of_rows(const Panels& panels, Tile tile, const Rows& x, const uint8_t* ahead,
                  float* totals) {
  constexpr int64_t kUnit = F == Format::kBFloat16 ? 2 : 4;  // inputs between two times of asking
  const int groups = static_cast<int>((x.count + kTokens - 1) / kTokens);
  const int64_t bytes = panels.count * panel_bytes(F, tile.inputs);
  for (int g = 0; g < groups; ++g) {
    const int64_t from = g * x.count / groups;
    tile.x = x.from(from);
    const Ahead asked = share_of(ahead, bytes, g, groups, tile.inputs / kUnit);
    const int tokens = static_cast<int>((g + 1) * x.count / groups - from);
    span<F>(panels.count, tokens, tile, asked, totals + from * kPanels * kBlock);
  }
}

// The same for rows in float32, a panel at a time, whose span stays in the first-level cache.
void span_of_wide_rows(const Panels& panels, const Tile& tile, const Rows& x, const uint8_t* ahead,
                       float* totals) {
  const int groups = static_cast<int>((x.count + kWideTokens - 1) / kWideTokens);
  const int64_t bytes = panels.count * panel_bytes(Format::kBFloat16, tile.inputs);
  for (int p = 0; p < panels.count; ++p) {
    const uint16_t* panel = reinterpret_cast<const uint16_t*>(tile.panels[p]);
    for (int g = 0; g < groups; ++g) {
      const int64_t from = g * x.count / groups;
      const Ahead asked =
          share_of(ahead, bytes, p * groups + g, panels.count * groups, tile.inputs / 2);
      const int tokens = static_cast<int>((g + 1) * x.count / groups - from);
      wide_span_of(tokens, panel, tile.inputs, x.from(from), asked,
                   totals + from * kPanels * kBlock + p * kBlock);
    }
  }
}

// totals[t][o], kPanels * kBlock a row.
template <Format F>
void multiply(const Matrix& m, const Panels& panels, const Rows& x, float* totals) {
  __builtin_memset(totals, 0, x.count * kPanels * kBlock * sizeof *totals);
  const int64_t inputs = round_up(m.inputs, F == Format::kBFloat16 ? 2 : kGroup);
  const int64_t step = x.wide || x.count > kTokens ? kSpan : inputs;
  for (int64_t k = 0; k < inputs; k += step) {
    Tile tile;
    for (int p = 0; p < panels.count; ++p) tile.panels[p] = panels.at[p] + panel_bytes(F, k);
    tile.inputs = inputs - k < step ? inputs - k : step;
    const uint8_t* ahead = panels.ahead ? panels.ahead + panels.count * panel_bytes(F, k) : nullptr;
    if (F == Format::kBFloat16 && kWideFrom && x.wide)
      span_of_wide_rows(panels, tile, x.at_input(k), ahead, totals);
    else
      span_of_rows<F>(panels, tile, x.at_input(k), ahead, totals);
  }
}

void multiply(const Matrix& m, const Panels& panels, const Rows& x, float* totals) {
  switch (m.format) {
    case Format::kBFloat16:
      return multiply<Format::kBFloat16>(m, panels, x, totals);
    case Format::kInt8:
      return multiply<Format::kInt8>(m, panels, x, totals);
    case Format::kInt4:
      return multiply<Format::kInt4>(m, panels, x, totals);
  }
}

// Calls `finish(first output, size, first token, tokens, totals)` for each tile of a part.
template <typename Finish>
CLOVER_INLINE void each_tile(const Matrix& m, const Rows& x, const Part& part,
                             const Finish& finish) {
  const int64_t begin = part.first / kBlock, end = (part.last + kBlock - 1) / kBlock;
  const int64_t wide = (x.count > 1 ? kPanelsOfMany : kPanels) / m.folds;
  const int64_t tiles = (end - begin + wide - 1) / wide;
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
      Rows some = x.from(t);
      some.count = tokens;
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

void encode_row(const uint16_t* x, int64_t size, uint16_t* codes, float* scales, float* sums) {
  static_assert(kGroup % kWidth == 0, "groups are whole vectors");
  for (int64_t i = 0; i < size; i += kGroup) {
    uint16_t filled[kGroup];
    const uint16_t* group = x + i;
    if (size - i < kGroup) {
      for (int64_t k = 0; k < kGroup; ++k) filled[k] = i + k < size ? x[i + k] : uint16_t{0};
      group = filled;
    }
    const Encoded made = encode(group, codes + i);
    scales[i / kGroup] = made.scale;
    sums[i / kGroup] = made.sum;
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

extern const RowKernels row_kernels;
extern const Kernels kernels;
const Kernels kernels = {CLOVER_STRING(CLOVER_ISA),
                         kWideFrom,
                         project,
                         gate_up,
                         encode_row,
                         norm,
                         rotate,
                         narrow,
                         widen,
                         &row_kernels};

}  // namespace clover::dense::CLOVER_ISA
