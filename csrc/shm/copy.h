// Scattered copies between two pieces of memory, by offsets and an index array.
#pragma once

#include <cstddef>
#include <cstdint>

#include "shm/status.h"

namespace clover::shm {

// `count` pieces of one memory, all of one length that the caller knows; `offsets` in bytes.
template <typename Byte>
struct Pieces {
  Byte* base;
  size_t size;
  const int64_t* offsets;
  int64_t count;
};

// For each of `rows` pairs (s, d) in `index`: dst piece d = src piece s, `length` bytes each, in
// order. Neighbours that adjoin on both sides become one copy. Everything is checked before the
// first byte moves: kOutOfRange leaves the destination as it was. The memories may overlap.
Status copy_ranges(const Pieces<std::byte>& dst, const Pieces<const std::byte>& src, int64_t length,
                   const int32_t* index, int64_t rows);

}  // namespace clover::shm
