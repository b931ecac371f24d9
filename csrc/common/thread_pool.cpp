#include "common/thread_pool.h"

#include <chrono>
#include <map>

namespace clover {
namespace {

// Awake for longer than the gap between two products, or than the hop to attention and back; short
// enough that an idle engine uses no core.
constexpr std::chrono::microseconds kAwake(100);

constexpr int64_t kLine = 64;  // bytes of a cache line
constexpr int kAtOnce = 4;     // lines that are asked for between two looks for a job

void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Whether `ready()` became true within kAwake.
template <typename Ready>
bool spin(Ready ready) {
  if (ready()) return true;
  const auto until = std::chrono::steady_clock::now() + kAwake;
  do {
    for (int i = 0; i < 16; ++i) {
      if (ready()) return true;
      pause();
    }
  } while (std::chrono::steady_clock::now() < until);
  return false;
}

}  // namespace

ThreadPool::ThreadPool(int threads) : shares_(new Share[threads]) {
  workers_.reserve(threads - 1);
  for (int i = 1; i < threads; ++i) workers_.emplace_back([this, i] { work(i); });
}

ThreadPool::~ThreadPool() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

std::shared_ptr<ThreadPool> ThreadPool::shared(int threads) {
  static std::mutex mutex;
  static std::map<int, std::weak_ptr<ThreadPool>> pools;
  std::lock_guard<std::mutex> lock(mutex);
  std::shared_ptr<ThreadPool> pool = pools[threads].lock();
  if (!pool) pools[threads] = pool = std::make_shared<ThreadPool>(threads);
  return pool;
}

void ThreadPool::run(int count, Task task, void* context, Asleep asleep) {
  std::unique_lock<std::mutex> turn(callers_, std::try_to_lock);
  if (!turn.owns_lock() || workers_.empty() || count == 1) {
    for (int i = 0; i < count; ++i) task(context, i, 0);
    return;
  }
  count_ = count;
  task_ = task;
  context_ = context;
  for (int64_t i = 0; i < threads(); ++i) {
    shares_[i].next.store(static_cast<int>(i * count / threads()), std::memory_order_relaxed);
    shares_[i].end = static_cast<int>((i + 1) * count / threads());
  }
  ++job_;  // opens it; pairs with is_new in await_job
  // A worker counts itself before it looks at job_ for the last time.
  if (asleep == Asleep::kWoken && sleepers_ != 0) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
    }
    wake_.notify_all();
  }
  drain(0);
  ++job_;  // every task is taken: whoever has not joined never will
  await_workers();
}

void ThreadPool::await_workers() {
  const auto gone = [this] { return joined_ == 0; };
  if (spin(gone)) return;
  std::unique_lock<std::mutex> lock(mutex_);
  caller_sleeps_ = true;  // a worker leaves before it looks at this
  done_.wait(lock, gone);
  caller_sleeps_ = false;
}

void ThreadPool::look_ahead(int thread, const uint8_t* from, const uint8_t* until) {
  shares_[thread].ahead.store(from, std::memory_order_relaxed);
  shares_[thread].ahead_end.store(until, std::memory_order_relaxed);
}

// The number of a job that is open and not `seen`; 0 at the end of the pool.
uint64_t ThreadPool::await_job(uint64_t seen, int thread) {
  const uint8_t* at = shares_[thread].ahead.load(std::memory_order_relaxed);
  const uint8_t* until = shares_[thread].ahead_end.load(std::memory_order_relaxed);
  const auto ready = [&] { return is_new(job_, seen) || stopping_; };
  const auto ready_or_ask = [&] {
    if (ready()) return true;
    for (int i = 0; i < kAtOnce && at < until; ++i, at += kLine) __builtin_prefetch(at, 0, 2);
    return false;
  };
  if (!spin(ready_or_ask)) {
    std::unique_lock<std::mutex> lock(mutex_);
    ++sleepers_;
    wake_.wait(lock, ready);
    --sleepers_;
  }
  if (stopping_) return 0;
  return job_;
}

void ThreadPool::work(int thread) {
  for (uint64_t seen = 0;;) {
    const uint64_t job = await_job(seen, thread);
    if (job == 0 && stopping_) return;
    if (!is_new(job, seen)) continue;  // closed in the meantime
    seen = job;
    ++joined_;
    if (job_ == job) drain(thread);
    if (--joined_ == 0 && caller_sleeps_) {
      {
        std::lock_guard<std::mutex> lock(mutex_);
      }
      done_.notify_one();
    }
  }
}

void ThreadPool::drain(int thread) {
  for (int i = 0; i < threads(); ++i) {
    Share& share = shares_[(thread + i) % threads()];
    for (;;) {
      const int task = share.next.fetch_add(1, std::memory_order_relaxed);
      if (task >= share.end) break;
      task_(context_, task, thread);
    }
  }
}

}  // namespace clover
