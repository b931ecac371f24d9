#include "attention_cpu/thread_pool.h"

namespace clover::attention {

ThreadPool::ThreadPool(int threads) {
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

void ThreadPool::run(int count, Task task, void* context) {
  next_.store(0, std::memory_order_relaxed);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    count_ = count;
    task_ = task;
    context_ = context;
    open_ = true;
    ++job_;
  }
  wake_.notify_all();
  drain(0);
  // No task is left to take. Workers that have not joined never will; what those that joined
  // wrote is visible once the mutex has been taken after them.
  std::unique_lock<std::mutex> lock(mutex_);
  open_ = false;
  done_.wait(lock, [this] { return joined_ == 0; });
}

void ThreadPool::work(int thread) {
  std::unique_lock<std::mutex> lock(mutex_);
  for (unsigned long seen = 0;;) {
    wake_.wait(lock, [&] { return stopping_ || (open_ && job_ != seen); });
    if (stopping_) return;
    seen = job_;
    ++joined_;
    lock.unlock();
    drain(thread);
    lock.lock();
    if (--joined_ == 0) done_.notify_one();
  }
}

void ThreadPool::drain(int thread) {
  for (;;) {
    const int task = next_.fetch_add(1, std::memory_order_relaxed);
    if (task >= count_) return;
    task_(context_, task, thread);
  }
}

}  // namespace clover::attention
