#include "shm/copy.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <vector>

#include "shm/stream.h"

namespace clover::shm {
namespace {

constexpr int64_t kTaskBytes = 1 << 20;  // enough for the cost of taking a task to vanish

struct Run {
  std::byte* to;
  const std::byte* from;
  int64_t nbytes;
};

template <typename Byte>
bool inside(const Pieces<Byte>& pieces, int32_t piece, int64_t length) {
  if (piece < 0 || piece >= pieces.count) return false;
  const int64_t offset = pieces.offsets[piece];
  const auto size = static_cast<int64_t>(pieces.size);
  return offset >= 0 && length <= size && offset <= size - length;
}

bool overlap(const Pieces<std::byte>& dst, const Pieces<const std::byte>& src) {
  const std::less<const std::byte*> before;
  return before(dst.base, src.base + src.size) && before(src.base, dst.base + dst.size);
}

// Calls `take` with every run of rows that adjoin on both sides.
template <typename Take>
void for_runs(const Pieces<std::byte>& dst, const Pieces<const std::byte>& src, int64_t length,
              const int32_t* index, int64_t rows, Take take) {
  for (int64_t i = 0; i < rows;) {
    const int64_t from = src.offsets[index[2 * i]];
    const int64_t to = dst.offsets[index[2 * i + 1]];
    int64_t nbytes = length;
    for (++i; i < rows; ++i, nbytes += length) {
      if (src.offsets[index[2 * i]] != from + nbytes) break;
      if (dst.offsets[index[2 * i + 1]] != to + nbytes) break;
    }
    take(Run{dst.base + to, src.base + from, nbytes});
  }
}

// A large copy: its runs, none longer than a task, and where in them each task begins.
struct Work {
  std::vector<Run> runs;
  std::vector<size_t> starts{0};
  int64_t open_bytes = 0;  // of the task that is being filled

  void add(const Run& run) {
    for (int64_t done = 0; done < run.nbytes;) {
      const int64_t nbytes = std::min(run.nbytes - done, kTaskBytes - open_bytes);
      runs.push_back({run.to + done, run.from + done, nbytes});
      done += nbytes;
      open_bytes += nbytes;
      if (open_bytes == kTaskBytes) end_task();
    }
  }

  void end_task() {
    if (open_bytes > 0) starts.push_back(runs.size());
    open_bytes = 0;
  }

  static void run_task(void* context, int task, int /*thread*/) {
    const Work& work = *static_cast<const Work*>(context);
    for (size_t i = work.starts[task]; i < work.starts[task + 1]; ++i) {
      const Run& run = work.runs[i];
      stream_copy(run.to, run.from, static_cast<size_t>(run.nbytes));
    }
    stream_fence();
  }
};

}  // namespace

Status copy_ranges(const Pieces<std::byte>& dst, const Pieces<const std::byte>& src, int64_t length,
                   const int32_t* index, int64_t rows, ThreadPool* pool) {
  if (length < 0) return Status::kOutOfRange;
  for (int64_t i = 0; i < rows; ++i) {
    if (!inside(src, index[2 * i], length) || !inside(dst, index[2 * i + 1], length)) {
      return Status::kOutOfRange;
    }
  }
  if (length == 0 || rows < (kLargeCopy + length - 1) / length || overlap(dst, src)) {
    // memmove: a put within one region may name overlapping ranges of it.
    for_runs(dst, src, length, index, rows, [](const Run& run) {
      std::memmove(run.to, run.from, static_cast<size_t>(run.nbytes));
    });
    return Status::kOk;
  }
  Work work;
  work.runs.reserve(static_cast<size_t>(rows));
  for_runs(dst, src, length, index, rows, [&](const Run& run) { work.add(run); });
  work.end_task();
  const int tasks = static_cast<int>(work.starts.size()) - 1;
  if (pool != nullptr) {
    pool->run(tasks, &Work::run_task, &work);
  } else {
    for (int task = 0; task < tasks; ++task) Work::run_task(&work, task, 0);
  }
  return Status::kOk;
}

}  // namespace clover::shm
