// Scattered copies between two pieces of memory, by offsets and an index array.
#pragma once

#include <atomic>
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

// How other processes reach memory of this one that is not shared: in the region's own page of
// shared memory, written by its owner. Zeroed at birth.
struct CallersPage {
  std::atomic<uint32_t> open;     // 1 from open_page() to close_page()
  std::atomic<uint32_t> writers;  // processes that are writing; counted by them
  uint64_t address;
  uint64_t size;
};

void open_page(CallersPage* page, uint64_t address, uint64_t size);

// Nobody begins to write any more; waits up to `timeout_ns` for those who do. False: somebody may
// still be writing, or died while it was.
bool close_page(CallersPage* page, int64_t timeout_ns);

// As copy_ranges, into the memory of process `pid` that `page` names, by the kernel. `dst.base` and
// `dst.size` are taken from the page. kDenied: this process may not write there; kClosed: the page
// is closed, or the process is gone.
Status write_ranges(CallersPage* page, int64_t pid, const Pieces<std::byte>& dst,
                    const Pieces<const std::byte>& src, int64_t length, const int32_t* index,
                    int64_t rows);

// Whether this process may write there: kOk, kDenied or kClosed.
Status may_write(CallersPage* page, int64_t pid);

}  // namespace clover::shm
