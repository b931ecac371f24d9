#include "checksum/crc32c.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#define CLOVER_CRC32C_SSE42 1
#endif

namespace clover::checksum {
namespace {

constexpr uint32_t kPolynomial = 0x82F63B78;  // Castagnoli's, bits reversed
constexpr size_t kWord = 8;

using Tables = std::array<std::array<uint32_t, 256>, kWord>;

// tables[i][b]: what byte b leaves behind once i further bytes of zero have gone by.
constexpr Tables make_tables() {
  Tables tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) ? kPolynomial : 0);
    tables[0][byte] = crc;
  }
  for (size_t i = 1; i < kWord; ++i) {
    for (size_t byte = 0; byte < 256; ++byte) {
      const uint32_t before = tables[i - 1][byte];
      tables[i][byte] = (before >> 8) ^ tables[0][before & 0xFF];
    }
  }
  return tables;
}

constexpr Tables kTables = make_tables();

uint32_t step_byte(uint32_t state, std::byte byte) {
  return (state >> 8) ^ kTables[0][(state ^ static_cast<uint32_t>(byte)) & 0xFF];
}

// Byte by byte into a word of the order that the tables mean, on any processor.
uint64_t load_little_endian(const std::byte* data) {
  uint64_t word = 0;
  for (size_t i = 0; i < kWord; ++i) word |= static_cast<uint64_t>(data[i]) << (8 * i);
  return word;
}

uint32_t step_word(uint32_t state, uint64_t word) {
  word ^= state;
  uint32_t next = 0;
  for (size_t i = 0; i < kWord; ++i) next ^= kTables[kWord - 1 - i][(word >> (8 * i)) & 0xFF];
  return next;
}

#ifdef CLOVER_CRC32C_SSE42
constexpr size_t kStreams = 3;  // the instruction's latency in cycles, at one a cycle

uint64_t load(const std::byte* data) {
  uint64_t word;
  std::memcpy(&word, data, sizeof word);
  return word;
}

__attribute__((target("sse4.2"))) uint32_t crc32c_sse42(const std::byte* data, size_t size,
                                                        uint32_t crc) {
  uint64_t state = ~crc;
  for (; size >= kWord; data += kWord, size -= kWord) state = _mm_crc32_u64(state, load(data));
  uint32_t rest = static_cast<uint32_t>(state);
  for (; size > 0; ++data, --size) rest = _mm_crc32_u8(rest, static_cast<uint8_t>(*data));
  return ~rest;
}

// The checksums of three slices at once: each alone would wait for its own last instruction.
__attribute__((target("sse4.2"))) void crc32c_three_sse42(const std::byte* data,
                                                          const int64_t* offsets, size_t length,
                                                          uint32_t* crcs) {
  const std::byte* a = data + offsets[0];
  const std::byte* b = data + offsets[1];
  const std::byte* c = data + offsets[2];
  uint64_t x = ~0U, y = ~0U, z = ~0U;
  size_t at = 0;
  for (; at + kWord <= length; at += kWord) {
    x = _mm_crc32_u64(x, load(a + at));
    y = _mm_crc32_u64(y, load(b + at));
    z = _mm_crc32_u64(z, load(c + at));
  }
  const size_t rest = length - at;
  crcs[0] = crc32c_sse42(a + at, rest, ~static_cast<uint32_t>(x));
  crcs[1] = crc32c_sse42(b + at, rest, ~static_cast<uint32_t>(y));
  crcs[2] = crc32c_sse42(c + at, rest, ~static_cast<uint32_t>(z));
}
#endif

uint32_t append(uint32_t crc, uint32_t slice) {
  std::byte bytes[4];
  for (int i = 0; i < 4; ++i) bytes[i] = static_cast<std::byte>(slice >> (8 * i));
  return crc32c(bytes, sizeof bytes, crc);
}

}  // namespace

uint32_t crc32c_portable(const std::byte* data, size_t size, uint32_t crc) {
  uint32_t state = ~crc;
  for (; size >= kWord; data += kWord, size -= kWord) {
    state = step_word(state, load_little_endian(data));
  }
  for (; size > 0; ++data, --size) state = step_byte(state, *data);
  return ~state;
}

bool has_hardware_crc32c() {
#ifdef CLOVER_CRC32C_SSE42
  static const bool has = __builtin_cpu_supports("sse4.2");
  return has;
#else
  return false;
#endif
}

uint32_t crc32c(const std::byte* data, size_t size, uint32_t crc) {
#ifdef CLOVER_CRC32C_SSE42
  if (has_hardware_crc32c()) return crc32c_sse42(data, size, crc);
#endif
  return crc32c_portable(data, size, crc);
}

uint32_t crc32c_slices(const std::byte* data, const int64_t* offsets, size_t count, size_t length) {
  uint32_t crc = 0;
  size_t i = 0;
#ifdef CLOVER_CRC32C_SSE42
  if (has_hardware_crc32c()) {
    uint32_t slices[kStreams];
    for (; i + kStreams <= count; i += kStreams) {
      crc32c_three_sse42(data, offsets + i, length, slices);
      for (const uint32_t slice : slices) crc = append(crc, slice);
    }
  }
#endif
  for (; i < count; ++i) crc = append(crc, crc32c(data + offsets[i], length));
  return crc;
}

}  // namespace clover::checksum
