// CRC-32C (Castagnoli, as in iSCSI, RFC 3720) of bytes and of equal slices of memory. Knows neither
// who sends nor what the bytes mean.
#pragma once

#include <cstddef>
#include <cstdint>

namespace clover::checksum {

// Of `size` bytes; `crc` is the checksum of what came before them, 0 at first.
uint32_t crc32c(const std::byte* data, size_t size, uint32_t crc = 0);
uint32_t crc32c_portable(const std::byte* data, size_t size, uint32_t crc = 0);

// Whether this processor has instructions for it.
bool has_hardware_crc32c();

// The checksum of the slices' own checksums (little-endian, in order): slice i is `length` bytes
// from `data + offsets[i]`. Slices are independent, so that several are under way at a time.
uint32_t crc32c_slices(const std::byte* data, const int64_t* offsets, size_t count, size_t length);

}  // namespace clover::checksum
