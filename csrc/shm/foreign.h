// Puts into memory of another process that is not shared, each followed by its notice.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "shm/copy.h"
#include "shm/mailbox.h"

namespace clover::shm {

struct ForeignPut {
  CallersPage* page;
  Pieces<std::byte> to;  // base and size are the page's
  Pieces<const std::byte> from;
  int64_t length;
  const int32_t* index;
  int64_t rows;
  uint64_t notice;
};

// In order; how many were made. It ends at the first that cannot be written, or whose notice finds
// no room within `timeout_ns`.
size_t write_and_tell(Sender* sender, int64_t pid, const std::vector<ForeignPut>& puts,
                      int64_t timeout_ns);

}  // namespace clover::shm
