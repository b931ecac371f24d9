// Quantised codes as bfloat16 numbers, which hold them exactly. Included by kernels alone; kernel.h
// has the order of the codes.
#pragma once

#include <cstdint>

#include "common/simd.h"
#include "dense_cpu/kernel.h"

namespace clover::dense {
namespace {

constexpr int kCodes = 64;  // numbers of four inputs of a panel

#if defined(__AVX512VBMI__)
// Bytes of the bfloat16 numbers 0 to 127.
struct alignas(64) ByteTables {
  uint8_t low[128];
  uint8_t high[128];
};

constexpr ByteTables make_tables() {
  ByteTables tables = {};
  for (int i = 1; i < 128; ++i) {
    int power = 0;
    while (i >> power > 1) ++power;
    const int bits = (127 + power) << 7 | ((i << 7 >> power) & 0x7f);
    tables.low[i] = static_cast<uint8_t>(bits);
    tables.high[i] = static_cast<uint8_t>(bits >> 8);
  }
  return tables;
}

constexpr ByteTables kBytes = make_tables();
#endif

#if defined(__AVX512VBMI__)
CLOVER_INLINE void unpack_codes(__m512i code, uint16_t* to) {
  const __m512i low = _mm512_permutex2var_epi8(_mm512_load_si512(kBytes.low), code,
                                               _mm512_load_si512(kBytes.low + kCodes));
  const __m512i high = _mm512_permutex2var_epi8(_mm512_load_si512(kBytes.high), code,
                                                _mm512_load_si512(kBytes.high + kCodes));
  // high | (code & the sign)
  const __m512i top = _mm512_ternarylogic_epi32(high, code, _mm512_set1_epi8(-128), 0xf8);
  _mm512_store_si512(to, _mm512_unpacklo_epi8(low, top));
  _mm512_store_si512(to + kCodes / 2, _mm512_unpackhi_epi8(low, top));
}
#else
struct Codes {
  uint8_t at[kCodes];
};

CLOVER_INLINE void unpack_codes(const Codes& codes, uint16_t* to) {
  for (int quad = 0; quad < 4; ++quad)
    for (int pair = 0; pair < 2; ++pair)
      for (int i = 0; i < 8; ++i) {
        const uint32_t code = codes.at[quad * 16 + pair * 8 + i];
        const float magnitude = static_cast<float>(static_cast<int>(code & 0x7f));
        uint32_t bits;
        __builtin_memcpy(&bits, &magnitude, sizeof bits);
        to[pair * 32 + quad * 8 + i] = static_cast<uint16_t>(bits >> 16 | (code & 0x80) << 8);
      }
}
#endif

CLOVER_INLINE void unpack_int8(const uint8_t* codes, uint16_t* to) {
#pragma GCC unroll 8
  for (int i = 0; i < kGroup * kBlock; i += kCodes) {
#if defined(__AVX512VBMI__)
    unpack_codes(_mm512_loadu_si512(codes + i), to + i);
#else
    Codes some;
    __builtin_memcpy(&some, codes + i, sizeof some);
    unpack_codes(some, to + i);
#endif
  }
}

CLOVER_INLINE void unpack_int4(const uint8_t* codes, uint16_t* to) {
#pragma GCC unroll 4
  for (int i = 0; i < kGroup * kBlock / 2; i += kCodes) {
#if defined(__AVX512VBMI__)
    const __m512i both = _mm512_loadu_si512(codes + i), mask = _mm512_set1_epi8(0x0f);
    unpack_codes(_mm512_and_si512(both, mask), to + 2 * i);
    unpack_codes(_mm512_and_si512(_mm512_srli_epi16(both, 4), mask), to + 2 * i + kCodes);
#else
    Codes low, high;
    for (int b = 0; b < kCodes; ++b) {
      low.at[b] = codes[i + b] & 0x0f;
      high.at[b] = static_cast<uint8_t>(codes[i + b] >> 4);
    }
    unpack_codes(low, to + 2 * i);
    unpack_codes(high, to + 2 * i + kCodes);
#endif
  }
}

}  // namespace
}  // namespace clover::dense
