// Three ways of multiplying and adding up: numbers widened to floats one vector at a time, bfloat16
// numbers widened two vectors at a time, and pairs of them by the instruction for it. All add up in
// float32. Included by kernels alone.
#pragma once

#include "attention_cpu/tile.h"

namespace clover::attention {
namespace {

// A way takes chunks of `kStep` numbers in `kParts` vectors, `kPositions` rows of values at a time.
// Where kRun is not 0 the sums of a chunk lie in two vectors that take turns every kRun elements,
// until `settle`.

// Takes what is stored as floats, and so are the queries and the weights.
template <typename T>
struct Widened {
  using Stored = T;
  using Number = float;
  static constexpr int kStep = kWidth;
  static constexpr int kParts = 1;
  static constexpr int kPositions = 1;
  static constexpr int kRun = 0;

  template <int>
  CLOVER_HEADER_INLINE static Vec take(const T* p) {
    return load(p);
  }
  template <int>
  CLOVER_HEADER_INLINE static Vec take_query(const float* p) {
    return load(p);
  }
  CLOVER_HEADER_INLINE static Vec add(Vec sum, Vec a, Vec b) { return sum + a * b; }
  CLOVER_HEADER_INLINE static Vec added(Vec sum) { return sum; }
};

// Takes two vectors of bfloat16 at a time, those at even places and those at odd ones: two
// instructions, where two vectors in order take four. Queries lie in this order too.
struct Halved {
  using Stored = BFloat16;
  using Number = float;
  static constexpr int kStep = 2 * kWidth;
  static constexpr int kParts = 2;
  static constexpr int kPositions = 1;
  static constexpr int kRun = 1;

  template <int kPart>
  CLOVER_HEADER_INLINE static Vec take(const BFloat16* p) {
    UInts both;
    __builtin_memcpy(&both, p, sizeof both);
    return (Vec)(kPart == 0 ? both << 16 : both & 0xffff0000u);
  }
  template <int kPart>
  CLOVER_HEADER_INLINE static Vec take_query(const float* p) {
    return load(p + kPart * kWidth);
  }
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

// One part of E chunks: whichever are fewer, weights of R rows or vectors of values, are held in
// registers.
template <typename K, int kPart = 0, int R, int V>
CLOVER_INLINE void add_values(const typename K::Stored* value, const float* weights,
                              Vec (&sums)[R][V]) {
  constexpr int E = V / K::kParts;
  if constexpr (R > E) {
    Vec v[E];
    for (int j = 0; j < E; ++j) v[j] = K::template take<kPart>(value + j * K::kStep);
    for (int r = 0; r < R; ++r)
      for (int j = 0; j < E; ++j) sums[r][j * K::kParts + kPart] += weights[r * kTile] * v[j];
  } else {
    Vec w[R];
    for (int r = 0; r < R; ++r) w[r] = splat(weights[r * kTile]);
    for (int j = 0; j < E; ++j) {
      const Vec v = K::template take<kPart>(value + j * K::kStep);
      for (int r = 0; r < R; ++r) sums[r][j * K::kParts + kPart] += w[r] * v;
    }
  }
  if constexpr (kPart + 1 < K::kParts) add_values<K, kPart + 1>(value, weights, sums);
}

// Elements [e, e + E chunks) of R rows, by floats.
template <int R, int E, typename K>
void add_up(const Sums<K>& of, int e) {
  const auto& [tile, ahead, v_dim, weights, steps, decay, acc] = of;
  constexpr int kVectors = E * K::kParts;
  Vec sums[R][kVectors];
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < kVectors; ++j)
      sums[r][j] = load(acc + r * v_dim + e + j * kWidth) * decay[r];
  in_batches(ahead, tile.count, 1, [&](int i) __attribute__((always_inline)) {
    add_values<K>(of.tile.values[i] + e, of.weights + i, sums);
  });
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < kVectors; ++j) store(acc + r * v_dim + e + j * kWidth, sums[r][j]);
}

#if defined(__AVX512BF16__)

// Two positions at a time: their values are interleaved.
struct Paired {
  using Stored = BFloat16;
  using Number = BFloat16;
  static constexpr int kStep = 2 * kWidth;
  static constexpr int kParts = 1;
  static constexpr int kPositions = 2;
  static constexpr int kRun = 4;

  template <int>
  CLOVER_HEADER_INLINE static __m512bh take(const BFloat16* p) {
    return (__m512bh)_mm512_loadu_si512(p);
  }
  template <int>
  CLOVER_HEADER_INLINE static __m512bh take_query(const BFloat16* p) {
    return take<0>(p);
  }
  CLOVER_HEADER_INLINE static Vec add(Vec sum, __m512bh a, __m512bh b) {
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
  in_batches(ahead, tile.count, 2, [&](int i) __attribute__((always_inline)) {
    const auto& [tile, ahead, v_dim, weights, steps, decay, acc] = of;
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
  });
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < 2 * E; ++j) store(acc + r * v_dim + e + j * kWidth, sums[r][j]);
}

#endif

// Brings sums of `count` elements, or numbers in the same order, into their order.
template <int kRun>
CLOVER_INLINE void settle(float* acc, int count) {
  for (int e = 0; e < count; e += 2 * kWidth) {
    float turns[2 * kWidth];
    __builtin_memcpy(turns, acc + e, sizeof turns);
    for (int j = 0; j < kWidth; ++j) {
      const int at = e + j / kRun * 2 * kRun + j % kRun;
      acc[at] = turns[j];
      acc[at + kRun] = turns[kWidth + j];
    }
  }
}

// The way back.
template <int kRun>
CLOVER_INLINE void take_turns(float* numbers, int count) {
  for (int e = 0; e < count; e += 2 * kWidth) {
    float turns[2 * kWidth];
    for (int j = 0; j < kWidth; ++j) {
      const int at = e + j / kRun * 2 * kRun + j % kRun;
      turns[j] = numbers[at];
      turns[kWidth + j] = numbers[at + kRun];
    }
    __builtin_memcpy(numbers + e, turns, sizeof turns);
  }
}

}  // namespace
}  // namespace clover::attention
