#include "verbs/op.h"

#include <algorithm>

namespace clover::verbs {
namespace {

// Whether `piece` names a slice inside its memory; `offset` is where.
bool find_slice(const int64_t* offsets, int64_t count, int32_t piece, const Slices& slices,
                uint64_t size, uint64_t* offset) {
  if (piece < 0 || piece >= count || offsets[piece] < 0) return false;
  *offset = static_cast<uint64_t>(offsets[piece]);
  const auto length = static_cast<uint64_t>(slices.length);
  return length <= size && *offset <= size - length;
}

// Appends in pieces of `most` bytes, filling up the one before where it adjoins.
void append(uint64_t local, uint64_t remote, uint64_t length, uint64_t most,
            std::vector<Piece>* pieces) {
  if (!pieces->empty()) {
    Piece& before = pieces->back();
    if (before.local + before.length == local && before.remote + before.length == remote) {
      const uint64_t more = std::min(length, most - before.length);
      before.length += static_cast<uint32_t>(more);
      local += more;
      remote += more;
      length -= more;
    }
  }
  while (length > 0) {
    const uint64_t part = std::min(length, most);
    pieces->push_back({local, remote, static_cast<uint32_t>(part)});
    local += part;
    remote += part;
    length -= part;
  }
}

}  // namespace

bool make_put(const Slices& slices, const int32_t* index, int64_t rows, uint64_t block_size,
              Op* op) {
  if (slices.length < 0) return false;
  const auto length = static_cast<uint64_t>(slices.length);
  op->region = slices.region;
  op->region_bytes = slices.region_bytes;
  op->pieces.reserve(static_cast<size_t>(rows));
  for (int64_t i = 0; i < rows; ++i) {
    uint64_t from = 0;
    uint64_t to = 0;
    if (!find_slice(slices.local, slices.num_local, index[2 * i], slices, slices.size, &from) ||
        !find_slice(slices.remote, slices.num_remote, index[2 * i + 1], slices, slices.region_bytes,
                    &to)) {
      return false;
    }
    append(slices.base + from, to, length, block_size, &op->pieces);
    op->total += length;
  }
  return true;
}

}  // namespace clover::verbs
