#include "shm/foreign.h"

namespace clover::shm {

size_t write_and_tell(Sender* sender, int64_t pid, const std::vector<ForeignPut>& puts,
                      int64_t timeout_ns) {
  size_t made = 0;
  for (const ForeignPut& put : puts) {
    const Status written =
        write_ranges(put.page, pid, put.to, put.from, put.length, put.index, put.rows);
    if (written != Status::kOk) break;
    if (sender->push({kNotice, put.notice, nullptr, 0}, timeout_ns) != Status::kOk) break;
    ++made;
  }
  return made;
}

}  // namespace clover::shm
