#include "shm/copy.h"

#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <functional>
#include <thread>
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

bool all_inside(const Pieces<std::byte>& dst, const Pieces<const std::byte>& src, int64_t length,
                const int32_t* index, int64_t rows) {
  if (length < 0) return false;
  for (int64_t i = 0; i < rows; ++i) {
    if (!inside(src, index[2 * i], length) || !inside(dst, index[2 * i + 1], length)) return false;
  }
  return true;
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

// Runs that one system call writes into another process.
class Batch {
 public:
  explicit Batch(pid_t pid) : pid_(pid) {}

  Status add(const Run& run) {
    for (int64_t done = 0; done < run.nbytes;) {
      const int64_t nbytes = std::min(run.nbytes - done, kMostBytes - bytes_);
      from_.push_back({const_cast<std::byte*>(run.from + done), static_cast<size_t>(nbytes)});
      to_.push_back({run.to + done, static_cast<size_t>(nbytes)});
      done += nbytes;
      bytes_ += nbytes;
      if (bytes_ == kMostBytes || from_.size() == kMostRuns) {
        const Status status = flush();
        if (status != Status::kOk) return status;
      }
    }
    return Status::kOk;
  }

  Status flush() {
    if (from_.empty()) return Status::kOk;
    const ssize_t written =
        process_vm_writev(pid_, from_.data(), from_.size(), to_.data(), to_.size(), 0);
    const bool whole = written == static_cast<ssize_t>(bytes_);
    from_.clear();
    to_.clear();
    bytes_ = 0;
    if (whole) return Status::kOk;
    return written < 0 && errno == EPERM ? Status::kDenied : Status::kClosed;
  }

 private:
  static constexpr int64_t kMostBytes = 1 << 30;  // the kernel cuts calls of 2 GiB and more
  static constexpr size_t kMostRuns = 1024;       // IOV_MAX

  pid_t pid_;
  std::vector<iovec> from_;
  std::vector<iovec> to_;
  int64_t bytes_ = 0;
};

// Counts this process among the page's writers while it lives.
class Writing {
 public:
  // Sequentially consistent, as in close_page(): either that sees the count, or this sees the page
  // closed.
  explicit Writing(CallersPage* page) : page_(page) {
    page_->writers.fetch_add(1);
    open_ = page_->open.load() == 1;
  }
  ~Writing() { page_->writers.fetch_sub(1); }
  Writing(const Writing&) = delete;
  Writing& operator=(const Writing&) = delete;

  bool open() const { return open_; }

 private:
  CallersPage* page_;
  bool open_;
};

}  // namespace

void open_page(CallersPage* page, uint64_t address, uint64_t size) {
  page->address = address;
  page->size = size;
  page->open.store(1);
}

bool close_page(CallersPage* page, int64_t timeout_ns) {
  page->open.store(0);
  const auto end = std::chrono::steady_clock::now() + std::chrono::nanoseconds(timeout_ns);
  while (page->writers.load() != 0) {
    if (std::chrono::steady_clock::now() >= end) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  return true;
}

Status write_ranges(CallersPage* page, int64_t pid, const Pieces<std::byte>& dst,
                    const Pieces<const std::byte>& src, int64_t length, const int32_t* index,
                    int64_t rows) {
  const Writing writing(page);
  if (!writing.open()) return Status::kClosed;
  // An address of the other process, never followed here.
  auto* base = reinterpret_cast<std::byte*>(static_cast<uintptr_t>(page->address));
  const Pieces<std::byte> there{base, static_cast<size_t>(page->size), dst.offsets, dst.count};
  if (!all_inside(there, src, length, index, rows)) return Status::kOutOfRange;
  if (length == 0) return Status::kOk;
  Batch batch(static_cast<pid_t>(pid));
  Status status = Status::kOk;
  for_runs(there, src, length, index, rows, [&](const Run& run) {
    if (status == Status::kOk) status = batch.add(run);
  });
  return status == Status::kOk ? batch.flush() : status;
}

Status may_write(CallersPage* page, int64_t pid) {
  const Writing writing(page);
  if (!writing.open()) return Status::kClosed;
  std::byte seen{};
  const iovec here{&seen, 1};
  const iovec there{reinterpret_cast<void*>(static_cast<uintptr_t>(page->address)), 1};
  // Reading and writing need the same right.
  if (process_vm_readv(static_cast<pid_t>(pid), &here, 1, &there, 1, 0) == 1) return Status::kOk;
  return errno == ESRCH ? Status::kClosed : Status::kDenied;
}

Status copy_ranges(const Pieces<std::byte>& dst, const Pieces<const std::byte>& src, int64_t length,
                   const int32_t* index, int64_t rows, ThreadPool* pool) {
  if (!all_inside(dst, src, length, index, rows)) return Status::kOutOfRange;
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
