// Two ways of multiplying and adding up: numbers widened to floats, and pairs of bfloat16 numbers
// by the instruction for them. Both add up in float32. Included by kernels alone.
#pragma once

#include "attention_cpu/tile.h"

namespace clover::attention {
namespace {

// Takes what is stored as floats, and so are the queries and the weights.
template <typename T>
struct Widened {
  using Stored = T;
  using Number = float;
  using Chunk = Vec;
  static constexpr int kStep = kWidth;
  static constexpr bool kInOrder = true;

  CLOVER_HEADER_INLINE static Vec take(const T* p) { return load(p); }
  CLOVER_HEADER_INLINE static Vec take_query(const float* p) { return load(p); }
  CLOVER_HEADER_INLINE static Vec add(Vec sum, Vec a, Vec b) { return sum + a * b; }
  CLOVER_HEADER_INLINE static Vec added(Vec sum) { return sum; }
};

// What is added up for some rows: acc[r] = acc[r] * decay[r] + sum of weights[r][i] * values[i].
template <typename K>
struct Sums {
  const Tile<typename K::Stored>& tile;
  Ahead<typename K::Stored>& ahead;
  int v_dim;
  const typename K::Number* weights;
  const float* steps;  // sizes of the weights' steps, where they are integers
  const float* decay;
  float* acc;
};

// Elements [e, e + E vectors) of R rows.
template <int R, int E, typename T>
void add_up(const Sums<Widened<T>>& of, int e) {
  const auto& [tile, ahead, v_dim, weights, steps, decay, acc] = of;
  Vec sums[R][E];
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < E; ++j) sums[r][j] = load(acc + r * v_dim + e + j * kWidth) * decay[r];
  for (int i = 0; i < tile.count; ++i) {
    ahead.some();
    const T* value = tile.values[i] + e;
    Vec v[E];
    for (int j = 0; j < E; ++j) v[j] = load(value + j * kWidth);
    for (int r = 0; r < R; ++r) {
      const float weight = weights[r * kTile + i];
      for (int j = 0; j < E; ++j) sums[r][j] += weight * v[j];
    }
  }
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < E; ++j) store(acc + r * v_dim + e + j * kWidth, sums[r][j]);
}

#if defined(__AVX512BF16__)

// Two positions at a time: their values are interleaved, so that sums of 32 elements lie in two
// vectors whose quarters take turns until `settle`.
struct Paired {
  using Stored = BFloat16;
  using Number = BFloat16;
  using Chunk = __m512bh;
  static constexpr int kStep = 2 * kWidth;
  static constexpr bool kInOrder = false;

  CLOVER_HEADER_INLINE static Chunk take(const BFloat16* p) { return (Chunk)_mm512_loadu_si512(p); }
  CLOVER_HEADER_INLINE static Chunk take_query(const BFloat16* p) { return take(p); }
  CLOVER_HEADER_INLINE static Vec add(Vec sum, Chunk a, Chunk b) {
    return (Vec)_mm512_dpbf16_ps((__m512)sum, a, b);
  }
  CLOVER_HEADER_INLINE static Vec added(Vec sum) { return sum; }
};

CLOVER_INLINE __m512bh weight_pair(const BFloat16* p) {
  uint32_t both;
  __builtin_memcpy(&both, p, sizeof both);
  return (__m512bh)_mm512_set1_epi32(static_cast<int>(both));
}

// The same for E times 32 elements.
template <int R, int E>
void add_up(const Sums<Paired>& of, int e) {
  const auto& [tile, ahead, v_dim, weights, steps, decay, acc] = of;
  Vec sums[R][2 * E];
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < 2 * E; ++j) sums[r][j] = load(acc + r * v_dim + e + j * kWidth) * decay[r];
  for (int i = 0; i < tile.count; i += 2) {
    ahead.some();
    const __mmask32 second = i + 1 < tile.count ? ~0u : 0;  // none, rather than 0 times infinity
    __m512bh v[2 * E];
    for (int j = 0; j < E; ++j) {
      const __m512i a = _mm512_loadu_si512(tile.values[i] + e + j * 32);
      const __m512i b = _mm512_maskz_loadu_epi16(second, tile.values[i + 1] + e + j * 32);
      v[2 * j] = (__m512bh)_mm512_maskz_unpacklo_epi16(~0u, a, b);
      v[2 * j + 1] = (__m512bh)_mm512_maskz_unpackhi_epi16(~0u, a, b);
    }
    for (int r = 0; r < R; ++r) {
      const __m512bh weight = weight_pair(weights + r * kTile + i);
      for (int j = 0; j < 2 * E; ++j)
        sums[r][j] = (Vec)_mm512_dpbf16_ps((__m512)sums[r][j], weight, v[j]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < 2 * E; ++j) store(acc + r * v_dim + e + j * kWidth, sums[r][j]);
}

#endif

#if defined(__AVX512BW__)

// Brings the sums of a row, multiples of 32 elements, into their order.
CLOVER_INLINE void settle(float* acc, int v_dim) {
  for (int e = 0; e < v_dim; e += 2 * kWidth) {
    const Vec low = load(acc + e), high = load(acc + e + kWidth);
    store(acc + e,
          CLOVER_SHUFFLE(low, high, 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23));
    store(acc + e + kWidth,
          CLOVER_SHUFFLE(low, high, 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31));
  }
}

#endif

}  // namespace
}  // namespace clover::attention
