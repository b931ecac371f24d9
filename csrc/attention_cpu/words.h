// int8 numbers multiplied as pairs of 16-bit integers: queries and softmax weights become 15 bits
// and a scale for each row, so that products and their sums are exact. Included by kernels alone.
#pragma once

#include "attention_cpu/dot.h"

namespace clover::attention {
namespace {

#if defined(__AVX512BW__)

using WordVec = __m512i;

CLOVER_INLINE WordVec load_words(const int16_t* p) { return _mm512_loadu_si512(p); }
CLOVER_INLINE WordVec load_words(const Int8* p) {
  return _mm512_maskz_cvtepi8_epi16(~0u, _mm256_loadu_si256((const __m256i*)p));
}
CLOVER_INLINE WordVec low_pairs(WordVec a, WordVec b) {
  return _mm512_maskz_unpacklo_epi16(~0u, a, b);
}
CLOVER_INLINE WordVec high_pairs(WordVec a, WordVec b) {
  return _mm512_maskz_unpackhi_epi16(~0u, a, b);
}
CLOVER_INLINE WordVec same_pairs(int both) { return _mm512_set1_epi32(both); }
CLOVER_INLINE WordVec add_words(WordVec sum, WordVec a, WordVec b) {
#if defined(__AVX512VNNI__)
  return _mm512_dpwssd_epi32(sum, a, b);
#else
  return _mm512_add_epi32(sum, _mm512_madd_epi16(a, b));
#endif
}
CLOVER_INLINE Vec to_floats(WordVec sum) { return (Vec)_mm512_maskz_cvtepi32_ps(0xffff, sum); }
CLOVER_INLINE void store_words(int16_t* p, Vec v) {
  const __m512i wide = _mm512_maskz_cvtps_epi32(0xffff, (__m512)v);
  _mm256_storeu_si256((__m256i*)p, _mm512_maskz_cvtsepi32_epi16(0xffff, wide));
}

#elif defined(__AVX2__)

using WordVec = __m256i;

CLOVER_INLINE WordVec load_words(const int16_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
CLOVER_INLINE WordVec load_words(const Int8* p) {
  return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p));
}
CLOVER_INLINE WordVec low_pairs(WordVec a, WordVec b) { return _mm256_unpacklo_epi16(a, b); }
CLOVER_INLINE WordVec high_pairs(WordVec a, WordVec b) { return _mm256_unpackhi_epi16(a, b); }
CLOVER_INLINE WordVec same_pairs(int both) { return _mm256_set1_epi32(both); }
CLOVER_INLINE WordVec add_words(WordVec sum, WordVec a, WordVec b) {
  return _mm256_add_epi32(sum, _mm256_madd_epi16(a, b));
}
CLOVER_INLINE Vec to_floats(WordVec sum) { return (Vec)_mm256_cvtepi32_ps(sum); }
CLOVER_INLINE void store_words(int16_t* p, Vec v) {
  const __m256i wide = _mm256_cvtps_epi32((__m256)v);
  const __m128i low = _mm256_castsi256_si128(wide), high = _mm256_extracti128_si256(wide, 1);
  _mm_storeu_si128((__m128i*)p, _mm_packs_epi32(low, high));
}

#endif

#if defined(__AVX512BW__) || defined(__AVX2__)
#define CLOVER_HAVE_WORDS

// Two positions at a time, in the order of `Paired`.
struct Words {
  using Stored = Int8;
  using Number = int16_t;
  static constexpr int kStep = 2 * kWidth;
  static constexpr int kParts = 1;
  static constexpr int kPositions = 2;
  static constexpr int kRun = 4;

  template <int>
  CLOVER_HEADER_INLINE static WordVec take(const Int8* p) {
    return load_words(p);
  }
  template <int>
  CLOVER_HEADER_INLINE static WordVec take_query(const int16_t* p) {
    return load_words(p);
  }
  CLOVER_HEADER_INLINE static Vec add(Vec sum, WordVec a, WordVec b) {
    return (Vec)add_words((WordVec)sum, a, b);
  }
  CLOVER_HEADER_INLINE static Vec added(Vec sum) { return to_floats((WordVec)sum); }
};

// Up to here sums of products cannot leave 32 bits: a lane adds up 256 of a query's, each at most
// 2^22.
constexpr int kMostWordsDim = 256 * kWidth;

// `count` numbers as 15 bits and sign; returns a step's size, which is NaN where a number is no
// number or infinite, as results of it are.
template <typename From>
CLOVER_INLINE float to_words(const From* from, int count, int16_t* to) {
  Vec top = {}, poison = {};
  for (int i = 0; i < count; i += kWidth) {
    const Vec x = load(from + i);
    top = bigger(bigger(x, -x), top);
    poison += x * 0.0f;
  }
  const float most = largest(top);
  const float steps = most > 0 ? 32767.0f / most : 0.0f;
  for (int i = 0; i < count; i += kWidth) store_words(to + i, load(from + i) * steps);
  return most / 32767.0f + sum(poison);
}

CLOVER_INLINE WordVec word_pair(const int16_t* p) {
  int both;
  __builtin_memcpy(&both, p, sizeof both);
  return same_pairs(both);
}

// The same as that of `Paired`, whose last position may be one that is not there: its weight is
// zero. Sums of a tile are integers: at most 64 times 2^22.
template <int R, int E>
void add_up(const Sums<Words>& of, int e) {
  const auto& [tile, ahead, v_dim, weights, steps, decay, acc] = of;
  WordVec sums[R][2 * E] = {};
  in_batches(ahead, tile.count, 2, [&](int i) __attribute__((always_inline)) {
    const auto& [tile, ahead, v_dim, weights, steps, decay, acc] = of;
    WordVec v[2 * E];
    for (int j = 0; j < E; ++j) {
      const WordVec a = load_words(tile.values[i] + e + j * Words::kStep);
      const WordVec b = load_words(tile.values[i + 1] + e + j * Words::kStep);
      v[2 * j] = low_pairs(a, b);
      v[2 * j + 1] = high_pairs(a, b);
    }
    for (int r = 0; r < R; ++r) {
      const WordVec weight = word_pair(weights + r * kTile + i);
      for (int j = 0; j < 2 * E; ++j) sums[r][j] = add_words(sums[r][j], weight, v[j]);
    }
  });
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < 2 * E; ++j) {
      float* at = acc + r * v_dim + e + j * kWidth;
      store(at, load(at) * decay[r] + to_floats(sums[r][j]) * steps[r]);
    }
}

#endif

}  // namespace
}  // namespace clover::attention
