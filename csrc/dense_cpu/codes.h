// Products of whole numbers: codes of quantised weights with codes of a row, two inputs a lane,
// sums in 32 bits. They are exact, so every instruction set gives the same. Included by kernels
// alone; kernel.h has the order of the codes.
#pragma once

#include <cstdint>

#include "common/simd.h"
#include "dense_cpu/kernel.h"

namespace clover::dense {
namespace {

typedef int16_t Shorts __attribute__((vector_size(kWidth * 4)));  // a pair for each output
typedef uint8_t Bytes __attribute__((vector_size(kWidth * 2)));
typedef int8_t SignedBytes __attribute__((vector_size(kWidth * 2)));

// Weights of a pair of inputs, from bytes with a sign.
CLOVER_INLINE Shorts load_codes(const uint8_t* p) {
#if defined(__AVX512F__)
  return (Shorts)_mm512_maskz_cvtepi8_epi16(~0u, _mm256_loadu_si256((const __m256i*)p));
#elif defined(__AVX2__)
  return (Shorts)_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p));
#else
  SignedBytes codes;
  __builtin_memcpy(&codes, p, sizeof codes);
  return __builtin_convertvector(codes, Shorts);
#endif
}

// Without a sign: two codes of four bits a number, to be told apart by low_codes and high_codes.
CLOVER_INLINE Shorts load_nibbles(const uint8_t* p) {
#if defined(__AVX512F__)
  return (Shorts)_mm512_maskz_cvtepu8_epi16(~0u, _mm256_loadu_si256((const __m256i*)p));
#elif defined(__AVX2__)
  return (Shorts)_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)p));
#else
  Bytes codes;
  __builtin_memcpy(&codes, p, sizeof codes);
  return __builtin_convertvector(codes, Shorts);
#endif
}

CLOVER_INLINE Shorts low_codes(Shorts both) { return both & 0x0f; }
CLOVER_INLINE Shorts high_codes(Shorts both) { return both >> 4; }

// A row's pair of inputs, for every output.
CLOVER_INLINE Shorts splat_codes(const uint16_t* p) {
  int32_t pair;
  __builtin_memcpy(&pair, p, sizeof pair);
#if defined(__AVX512F__)
  return (Shorts)_mm512_set1_epi32(pair);
#else
  return (Shorts)(pair - Ints{});
#endif
}

// sum + a.even * b.even + a.odd * b.odd in every lane.
CLOVER_INLINE Ints dot_codes(Ints sum, Shorts a, Shorts b) {
#if defined(__AVX512VNNI__)
  return (Ints)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#elif defined(__AVX512F__)
  return sum + (Ints)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return sum + (Ints)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
  const Ints even = ((Ints)a << 16 >> 16) * ((Ints)b << 16 >> 16);
  return sum + even + ((Ints)a >> 16) * ((Ints)b >> 16);
#endif
}

struct Encoded {
  float scale;
  float sum;  // of the group, as it is encoded
};

// A group of a row as codes. The scale is a power of two, so that codes are exact where inputs are
// within a factor of 128 of the group's largest, and else off by half a scale at most, 2^-15 of the
// largest. A group that holds an infinity or NaN has scale NaN.
CLOVER_INLINE Encoded encode(const uint16_t* x, uint16_t* codes) {
  constexpr int kVecsOfGroup = kGroup / kWidth;
  Vec inputs[kVecsOfGroup], most = {};
  for (int v = 0; v < kVecsOfGroup; ++v) {
    const UInts bits = load_halves(x + v * kWidth) << 16;
    inputs[v] = (Vec)bits;
    // Magnitudes halved, which leaves their order and makes infinities and NaNs large numbers.
    most = bigger(most, (Vec)((bits & 0x7fffffff) >> 1));
  }
  const float halved = largest(most);
  uint32_t stored;
  __builtin_memcpy(&stored, &halved, sizeof stored);
  constexpr uint32_t kLeast = 15, kInfinite = 255;  // exponents; below the first all codes are 0
  const uint32_t exponent = stored >> 22 < kLeast ? kLeast : stored >> 22;
  if (exponent == kInfinite) {
    __builtin_memset(codes, 0, kGroup * sizeof *codes);
    return {__builtin_nanf(""), __builtin_nanf("")};
  }
  const uint32_t up = (268 - exponent) << 23, down = (exponent - 14) << 23;
  float factor, scale;
  __builtin_memcpy(&factor, &up, sizeof factor);
  __builtin_memcpy(&scale, &down, sizeof scale);
  const float magic = 0x1.8p23f;  // adding it rounds to an integer, which lands in the low bits
  Vec total = {};
  for (int v = 0; v < kVecsOfGroup; ++v) {
    const Vec shifted = inputs[v] * factor + magic;
    const Halves made = __builtin_convertvector((UInts)shifted, Halves);
    __builtin_memcpy(codes + v * kWidth, &made, sizeof made);
    total += shifted - magic;
  }
  return {scale, sum(total) * scale};
}

}  // namespace
}  // namespace clover::dense
