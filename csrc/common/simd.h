// Vectors of floats as wide as the instruction set that a file is compiled for, and the stored
// types' way in and out of them. Included by kernels alone: all of it has internal linkage, so
// that no object compiled for a newer processor lends its code to the others.
#pragma once

#include <cstdint>

#if defined(__AVX2__) || defined(__F16C__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define CLOVER_INLINE [[gnu::always_inline]] static inline

namespace {

#if defined(__AVX512F__)
constexpr int kWidth = 16;
constexpr int kMaxHeads = 4;     // query heads in registers at a time
constexpr int kSumVectors = 16;  // vectors of sums in registers at a time
#elif defined(__AVX2__)
constexpr int kWidth = 8;
constexpr int kMaxHeads = 4;
constexpr int kSumVectors = 12;
#else
constexpr int kWidth = 4;
#if defined(__aarch64__)
constexpr int kMaxHeads = 4;
constexpr int kSumVectors = 16;
#else
constexpr int kMaxHeads = 2;
constexpr int kSumVectors = 8;
#endif
#endif

typedef float Vec __attribute__((vector_size(kWidth * 4)));
typedef int32_t Ints __attribute__((vector_size(kWidth * 4)));
typedef uint32_t UInts __attribute__((vector_size(kWidth * 4)));
typedef uint16_t Halves __attribute__((vector_size(kWidth * 2)));

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};
struct Int8 {
  int8_t value;
};

// GCC had only __builtin_shuffle before version 12.
#if defined(__clang__) || __GNUC__ >= 12
#define CLOVER_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define CLOVER_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (Ints){__VA_ARGS__})
#endif

CLOVER_INLINE Vec splat(float x) { return x - Vec{}; }

CLOVER_INLINE Vec load(const float* p) {
  Vec v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}

// Zero-extended. Spelled out because GCC 12 widens vectors by halves, in five instructions for one.
CLOVER_INLINE UInts load_halves(const void* p) {
#if defined(__AVX512F__)
  return (UInts)_mm512_maskz_cvtepu16_epi32(0xffff, _mm256_loadu_si256((const __m256i*)p));
#elif defined(__AVX2__)
  return (UInts)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
#else
  Halves h;
  __builtin_memcpy(&h, p, sizeof h);
  return __builtin_convertvector(h, UInts);
#endif
}

CLOVER_INLINE Vec load(const BFloat16* p) { return (Vec)(load_halves(p) << 16); }

CLOVER_INLINE Vec load(const Float16* p) {
#if defined(__AVX512F__)
  // The unmasked intrinsics read an undefined vector in GCC 12's headers, which it then warns of.
  return (Vec)_mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256((const __m256i*)p));
#elif defined(__F16C__)
  return (Vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#elif defined(__aarch64__)
  return (Vec)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16((const uint16_t*)p)));
#else
  const UInts h = load_halves(p);
  // A multiplication moves the exponent's bias, and makes subnormal numbers normal.
  const UInts scaled = (UInts)((Vec)((h & 0x7fff) << 13) * 0x1p112f);
  const UInts special = (UInts)((h & 0x7c00) == 0x7c00) & 0x7f800000;  // infinity, NaN
  return (Vec)(scaled | special | (h & 0x8000) << 16);
#endif
}

CLOVER_INLINE Vec load(const Int8* p) {
#if defined(__AVX512F__)
  const __m512i wide = _mm512_maskz_cvtepi8_epi32(0xffff, _mm_loadu_si128((const __m128i*)p));
  return (Vec)_mm512_maskz_cvtepi32_ps(0xffff, wide);
#elif defined(__AVX2__)
  return (Vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#else
  Vec v;
  for (int i = 0; i < kWidth; ++i) v[i] = p[i].value;
  return v;
#endif
}

CLOVER_INLINE void store(float* p, Vec v) { __builtin_memcpy(p, &v, sizeof v); }

CLOVER_INLINE void store(BFloat16* p, Vec v) {
  const UInts u = (UInts)v;
  const UInts rounded = (u + 0x7fff + (u >> 16 & 1)) >> 16;  // to nearest, ties to even
  const UInts nan = (UInts)(v != v);
  const UInts bits = (rounded & ~nan) | ((u >> 16 | 0x40) & nan);
  const Halves h = __builtin_convertvector(bits, Halves);
  __builtin_memcpy(p, &h, sizeof h);
}

// To nearest, ties to even; after Giesen's float_to_half_fast3_rtne.
[[maybe_unused]] CLOVER_INLINE uint16_t to_float16(uint32_t u) {
  const uint16_t sign = u >> 16 & 0x8000;
  u &= 0x7fffffff;
  if (u >= 0x47800000) return sign | (u > 0x7f800000 ? 0x7e00 : 0x7c00);
  if (u >= 0x38800000) return sign | (u + 0xc8000fff + (u >> 13 & 1)) >> 13;
  float magnitude;
  __builtin_memcpy(&magnitude, &u, sizeof u);
  magnitude += 0.5f;  // the addition rounds subnormal numbers
  __builtin_memcpy(&u, &magnitude, sizeof u);
  return sign | (u - 0x3f000000);
}

CLOVER_INLINE void store(Float16* p, Vec v) {
#if defined(__AVX512F__)
  _mm256_storeu_si256((__m256i*)p,
                      _mm512_maskz_cvtps_ph(0xffff, (__m512)v, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__aarch64__)
  vst1_u16((uint16_t*)p, vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)v)));
#else
  for (int i = 0; i < kWidth; ++i) p[i].bits = to_float16(((UInts)v)[i]);
#endif
}

CLOVER_INLINE Vec bigger(Vec a, Vec b) { return a > b ? a : b; }

// Combines all lanes by halves.
template <typename F>
CLOVER_INLINE float over_lanes(Vec v, const F& f) {
#if defined(__AVX512F__)
  v = f(v, CLOVER_SHUFFLE(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
  v = f(v, CLOVER_SHUFFLE(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
  v = f(v, CLOVER_SHUFFLE(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
  v = f(v, CLOVER_SHUFFLE(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14));
#elif defined(__AVX2__)
  v = f(v, CLOVER_SHUFFLE(v, v, 4, 5, 6, 7, 0, 1, 2, 3));
  v = f(v, CLOVER_SHUFFLE(v, v, 2, 3, 0, 1, 6, 7, 4, 5));
  v = f(v, CLOVER_SHUFFLE(v, v, 1, 0, 3, 2, 5, 4, 7, 6));
#else
  v = f(v, CLOVER_SHUFFLE(v, v, 2, 3, 0, 1));
  v = f(v, CLOVER_SHUFFLE(v, v, 1, 0, 3, 2));
#endif
  return v[0];
}

CLOVER_INLINE float sum(Vec v) {
  return over_lanes(v, [](Vec a, Vec b) { return a + b; });
}

CLOVER_INLINE float largest(Vec v) {
  return over_lanes(v, [](Vec a, Vec b) { return bigger(a, b); });
}

// Folds four vectors into one whose every four lanes are partial sums of a, b, c, d in turn.
CLOVER_INLINE Vec fold_four(Vec a, Vec b, Vec c, Vec d) {
#if defined(__AVX512F__)
#define CLOVER_LOW 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29
#define CLOVER_HIGH 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31
#define CLOVER_EVEN 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29
#define CLOVER_ODD 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31
#elif defined(__AVX2__)
#define CLOVER_LOW 0, 8, 1, 9, 4, 12, 5, 13
#define CLOVER_HIGH 2, 10, 3, 11, 6, 14, 7, 15
#define CLOVER_EVEN 0, 1, 8, 9, 4, 5, 12, 13
#define CLOVER_ODD 2, 3, 10, 11, 6, 7, 14, 15
#else
#define CLOVER_LOW 0, 4, 1, 5
#define CLOVER_HIGH 2, 6, 3, 7
#define CLOVER_EVEN 0, 1, 4, 5
#define CLOVER_ODD 2, 3, 6, 7
#endif
  const Vec ab = CLOVER_SHUFFLE(a, b, CLOVER_LOW) + CLOVER_SHUFFLE(a, b, CLOVER_HIGH);
  const Vec cd = CLOVER_SHUFFLE(c, d, CLOVER_LOW) + CLOVER_SHUFFLE(c, d, CLOVER_HIGH);
  return CLOVER_SHUFFLE(ab, cd, CLOVER_EVEN) + CLOVER_SHUFFLE(ab, cd, CLOVER_ODD);
}

// The sums of kWidth vectors, one a lane, from kWidth / 4 results of fold_four.
CLOVER_INLINE Vec fold_quads(const Vec* quads) {
#if defined(__AVX512F__)
#define CLOVER_EVEN4 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27
#define CLOVER_ODD4 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31
  const Vec ab = CLOVER_SHUFFLE(quads[0], quads[1], CLOVER_EVEN4) +
                 CLOVER_SHUFFLE(quads[0], quads[1], CLOVER_ODD4);
  const Vec cd = CLOVER_SHUFFLE(quads[2], quads[3], CLOVER_EVEN4) +
                 CLOVER_SHUFFLE(quads[2], quads[3], CLOVER_ODD4);
  return CLOVER_SHUFFLE(ab, cd, CLOVER_EVEN4) + CLOVER_SHUFFLE(ab, cd, CLOVER_ODD4);
#elif defined(__AVX2__)
  return CLOVER_SHUFFLE(quads[0], quads[1], 0, 1, 2, 3, 8, 9, 10, 11) +
         CLOVER_SHUFFLE(quads[0], quads[1], 4, 5, 6, 7, 12, 13, 14, 15);
#else
  return quads[0];
#endif
}

// The sums of three or four rows at kWidth positions, rows `stride` floats apart, from kWidth
// results of fold_four: a position's sums of the four rows each.
template <int kRows>
CLOVER_INLINE void store_turned(const Vec* folded, float* to, int stride) {
  Vec at[4];  // of positions j, j + 4, ...: four rows of each
  for (int j = 0; j < 4; ++j) {
    Vec quads[kWidth / 4];
    for (int i = 0; i < kWidth / 4; ++i) quads[i] = folded[j + 4 * i];
    at[j] = fold_quads(quads);
  }
  const Vec low[] = {CLOVER_SHUFFLE(at[0], at[1], CLOVER_LOW),
                     CLOVER_SHUFFLE(at[2], at[3], CLOVER_LOW)};
  const Vec high[] = {CLOVER_SHUFFLE(at[0], at[1], CLOVER_HIGH),
                      CLOVER_SHUFFLE(at[2], at[3], CLOVER_HIGH)};
  store(to, CLOVER_SHUFFLE(low[0], low[1], CLOVER_EVEN));
  store(to + stride, CLOVER_SHUFFLE(low[0], low[1], CLOVER_ODD));
  store(to + 2 * stride, CLOVER_SHUFFLE(high[0], high[1], CLOVER_EVEN));
  if constexpr (kRows == 4) store(to + 3 * stride, CLOVER_SHUFFLE(high[0], high[1], CLOVER_ODD));
}

// e^x for x <= 88, within 2 units in the last place (Cephes' expf); 0 below -87.
CLOVER_INLINE Vec exponential(Vec x) {
  const Vec clamped = bigger(x, splat(-87.0f));
  const float magic = 0x1.8p23f;  // adding it rounds to an integer, which lands in the low bits
  const Vec shifted = clamped * 1.44269504f + magic;
  const Vec n = shifted - magic;
  const Vec r = clamped - n * 0.693359375f + n * 2.12194440e-4f;
  Vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const Vec power = (Vec)(((UInts)shifted << 23) + 0x3f800000u);
  return x < -87.0f ? Vec{} : p * power;
}

// Absolute error about 1e-7.
CLOVER_INLINE Vec tanh_of(Vec x) {
  const Vec limited = x > 20.0f ? splat(20.0f) : x;
  return 1.0f - 2.0f / (exponential(2.0f * limited) + 1.0f);
}

}  // namespace
