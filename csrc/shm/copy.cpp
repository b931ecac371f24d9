#include "shm/copy.h"

#include <cstring>

namespace clover::shm {
namespace {

template <typename Byte>
bool inside(const Pieces<Byte>& pieces, int32_t piece, int64_t length) {
  if (piece < 0 || piece >= pieces.count) return false;
  const int64_t offset = pieces.offsets[piece];
  const auto size = static_cast<int64_t>(pieces.size);
  return offset >= 0 && length <= size && offset <= size - length;
}

}  // namespace

Status copy_ranges(const Pieces<std::byte>& dst, const Pieces<const std::byte>& src, int64_t length,
                   const int32_t* index, int64_t rows) {
  if (length < 0) return Status::kOutOfRange;
  for (int64_t i = 0; i < rows; ++i) {
    if (!inside(src, index[2 * i], length) || !inside(dst, index[2 * i + 1], length)) {
      return Status::kOutOfRange;
    }
  }
  for (int64_t i = 0; i < rows;) {
    const int64_t from = src.offsets[index[2 * i]];
    const int64_t to = dst.offsets[index[2 * i + 1]];
    int64_t run = length;
    for (++i; i < rows; ++i, run += length) {
      if (src.offsets[index[2 * i]] != from + run) break;
      if (dst.offsets[index[2 * i + 1]] != to + run) break;
    }
    // memmove: a loopback put may name overlapping ranges of one region.
    std::memmove(dst.base + to, src.base + from, static_cast<size_t>(run));
  }
  return Status::kOk;
}

}  // namespace clover::shm
