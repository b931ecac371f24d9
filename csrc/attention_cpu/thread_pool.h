// Threads that sleep until there is work. Which thread runs which task is left to chance, so tasks
// must not depend on it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

namespace clover::attention {

class ThreadPool {
 public:
  // Task number, then the number of the thread that runs it (0 is the caller).
  using Task = void (*)(void* context, int task, int thread);

  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const { return static_cast<int>(workers_.size()) + 1; }

  // Runs tasks 0 to `count` - 1 on the caller and the workers; returns when all are done. Tasks
  // must not throw. One caller at a time.
  void run(int count, Task task, void* context);

 private:
  void work(int thread);
  void drain(int thread);

  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable done_;
  // Guarded by mutex_: a worker joins a job only while it is open, and the caller closes it before
  // it waits for those that joined. Job fields are written before `open_` under the same mutex.
  bool open_ = false;
  bool stopping_ = false;
  unsigned long job_ = 0;
  int joined_ = 0;
  int count_ = 0;
  Task task_ = nullptr;
  void* context_ = nullptr;
  std::atomic<int> next_{0};
  std::vector<std::thread> workers_;
};

}  // namespace clover::attention
