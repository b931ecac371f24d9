// Scattered copies between two pieces of memory, by offsets and an index array.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/thread_pool.h"
#include "shm/status.h"

namespace clover::shm {

// Copies of this many bytes and more in all are large: they go past the caches, where they would
// only drive out what is in use, and are shared out over threads. Below, a core's own caches are
// faster and waking others costs more than it brings.
constexpr int64_t kLargeCopy = 4 << 20;

// `count` pieces of one memory, all of one length that the caller knows; `offsets` in bytes.
template <typename Byte>
struct Pieces {
  Byte* base;
  size_t size;
  const int64_t* offsets;
  int64_t count;
};

// For each of `rows` pairs (s, d) in `index`: dst piece d = src piece s, `length` bytes each.
// Neighbours that adjoin on both sides become one copy. Everything is checked before the first byte
// moves: kOutOfRange leaves the destination as it was. The memories may overlap. Of a large copy's
// rows that write to one place, any may be the last. `pool` may be null.
Status copy_ranges(const Pieces<std::byte>& dst, const Pieces<const std::byte>& src, int64_t length,
                   const int32_t* index, int64_t rows, ThreadPool* pool);

}  // namespace clover::shm
