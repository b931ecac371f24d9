// int8 numbers multiplied as pairs of 16-bit integers: queries and softmax weights become 15 bits
// and a scale for each row, so that products and their sums are exact. Included by kernels alone.
#pragma once

#include "attention_cpu/dot.h"

namespace clover::attention {
namespace {

#if defined(__AVX512BW__)

// Two positions at a time, in the order of `Paired`.
struct Words {
  using Stored = Int8;
  using Number = int16_t;
  using Chunk = __m512i;
  static constexpr int kStep = 2 * kWidth;
  static constexpr bool kInOrder = false;

  CLOVER_HEADER_INLINE static Chunk take(const Int8* p) {
    return _mm512_maskz_cvtepi8_epi16(~0u, _mm256_loadu_si256((const __m256i*)p));
  }
  CLOVER_HEADER_INLINE static Chunk take_query(const int16_t* p) { return _mm512_loadu_si512(p); }
  CLOVER_HEADER_INLINE static __m512i add_words(__m512i sum, Chunk a, Chunk b) {
#if defined(__AVX512VNNI__)
    return _mm512_dpwssd_epi32(sum, a, b);
#else
    return _mm512_add_epi32(sum, _mm512_madd_epi16(a, b));
#endif
  }
  CLOVER_HEADER_INLINE static Vec add(Vec sum, Chunk a, Chunk b) {
    return (Vec)add_words((__m512i)sum, a, b);
  }
  CLOVER_HEADER_INLINE static Vec added(Vec sum) {
    return (Vec)_mm512_maskz_cvtepi32_ps(0xffff, (__m512i)sum);
  }
};

// Up to here sums of products cannot leave 32 bits: a lane adds up a sixteenth of a query's, each
// below 2^22.
constexpr int kMostWordsDim = 4096;

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
  for (int i = 0; i < count; i += kWidth) {
    const __m512i wide = _mm512_maskz_cvtps_epi32(0xffff, (__m512)(load(from + i) * steps));
    _mm256_storeu_si256((__m256i*)(to + i), _mm512_maskz_cvtsepi32_epi16(0xffff, wide));
  }
  return most / 32767.0f + sum(poison);
}

CLOVER_INLINE __m512i word_pair(const int16_t* p) {
  int both;
  __builtin_memcpy(&both, p, sizeof both);
  return _mm512_set1_epi32(both);
}

// The same as that of `Paired`. Sums of a tile are integers: at most 64 times 2^22.
template <int R, int E>
void add_up(const Sums<Words>& of, int e) {
  const auto& [tile, ahead, v_dim, weights, steps, decay, acc] = of;
  __m512i sums[R][2 * E] = {};
  for (int i = 0; i < tile.count; i += 2) {
    ahead.some();
    const __mmask32 second = i + 1 < tile.count ? ~0u : 0;
    __m512i v[2 * E];
    for (int j = 0; j < E; ++j) {
      const __m512i a = Words::take(tile.values[i] + e + j * 32);
      const __m256i* next = (const __m256i*)(tile.values[i + (second != 0)] + e + j * 32);
      const __m512i b = _mm512_maskz_cvtepi8_epi16(second, _mm256_loadu_si256(next));
      v[2 * j] = _mm512_maskz_unpacklo_epi16(~0u, a, b);
      v[2 * j + 1] = _mm512_maskz_unpackhi_epi16(~0u, a, b);
    }
    for (int r = 0; r < R; ++r) {
      const __m512i weight = word_pair(weights + r * kTile + i);
      for (int j = 0; j < 2 * E; ++j) sums[r][j] = Words::add_words(sums[r][j], weight, v[j]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < 2 * E; ++j) {
      float* at = acc + r * v_dim + e + j * kWidth;
      store(at, load(at) * decay[r] + Words::added((Vec)sums[r][j]) * steps[r]);
    }
}

#endif

}  // namespace
}  // namespace clover::attention
