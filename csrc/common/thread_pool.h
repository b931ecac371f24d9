// Threads for jobs of many tasks, with little between one job and the next: a thread that has run
// out of tasks waits awake for about a hundred microseconds, then sleeps until there is work.
//
// Each thread has a contiguous share of the tasks and helps with the other shares when its own is
// done. Which thread runs which task is left to chance, so results must not depend on it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace clover {

class ThreadPool {
 public:
  // Task number, then the number of the thread that runs it (0 is the caller).
  using Task = void (*)(void* context, int task, int thread);

  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  // The process's pool of this size, made where there is none and ended by its last owner: kernels
  // that take turns share threads, so that those awake for one are there for the next.
  static std::shared_ptr<ThreadPool> shared(int threads);

  int threads() const { return static_cast<int>(workers_.size()) + 1; }

  // What becomes of workers that are asleep when a job comes.
  enum class Asleep { kWoken, kLeftAsleep };

  // Runs tasks 0 to `count` - 1 on the caller and the workers; returns when all are done. Tasks
  // must not throw. While another caller has the workers, this one runs its tasks alone.
  void run(int count, Task task, void* context, Asleep asleep = Asleep::kWoken);

  // Memory [from, until) that a worker brings into its second-level cache while it waits, awake,
  // for the job after the next one run: what that will read, which else begins cold. Stays until
  // said otherwise; for the caller of `run` to say, before it.
  void look_ahead(int thread, const uint8_t* from, const uint8_t* until);

 private:
  struct alignas(64) Share {
    std::atomic<int> next{0};
    int end = 0;
    // A worker that missed a job may read one of these of that job and one of another, and bring in
    // what nobody wants.
    std::atomic<const uint8_t*> ahead{nullptr};
    std::atomic<const uint8_t*> ahead_end{nullptr};
  };

  bool is_new(uint64_t job, uint64_t seen) const { return job % 2 == 1 && job != seen; }
  uint64_t await_job(uint64_t seen, int thread);
  void await_workers();
  void work(int thread);
  void drain(int thread);

  std::mutex callers_;
  // Raised to an odd number when a job opens and to an even one when no task of it is left to take.
  alignas(64) std::atomic<uint64_t> job_{0};
  // Workers that may be at the open job. A worker first joins, then looks whether the job is still
  // open; the caller first closes it, then waits for nobody to be joined (both in one total order),
  // so a job's fields change only while no worker reads them.
  alignas(64) std::atomic<int> joined_{0};
  std::atomic<int> sleepers_{0};
  std::atomic<bool> caller_sleeps_{false};
  std::atomic<bool> stopping_{false};
  int count_ = 0;
  Task task_ = nullptr;
  void* context_ = nullptr;
  std::unique_ptr<Share[]> shares_;
  // For those asleep only.
  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable done_;
  std::vector<std::thread> workers_;
};

}  // namespace clover
