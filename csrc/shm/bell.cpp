#include "shm/bell.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>

namespace clover::shm {
namespace {

// Not FUTEX_PRIVATE_FLAG: the word is shared between processes.
void futex(std::atomic<uint32_t>* word, int operation, uint32_t value, const timespec* timeout) {
  // Every outcome (woken, value changed, time over, signal) means the same: look again.
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), operation, value, timeout, nullptr, 0);
}

}  // namespace

uint32_t Bell::arm() {
  sleeping_.store(1, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_seq_cst);  // pairs with the fence in ring()
  return count_.load(std::memory_order_relaxed);
}

void Bell::disarm() { sleeping_.store(0, std::memory_order_relaxed); }

void Bell::sleep(uint32_t ticket, int64_t timeout_ns) {
  constexpr int64_t kSecond = 1'000'000'000;
  const timespec timeout{static_cast<time_t>(timeout_ns / kSecond),
                         static_cast<long>(timeout_ns % kSecond)};
  // The kernel compares the word with `ticket` under its lock: a ring() since arm() returns at
  // once.
  futex(&count_, FUTEX_WAIT, ticket, &timeout);
}

void Bell::ring() {
  std::atomic_thread_fence(std::memory_order_seq_cst);  // pairs with the fence in arm()
  if (sleeping_.load(std::memory_order_relaxed) == 0) return;
  count_.fetch_add(1, std::memory_order_relaxed);  // ordering comes from the fences
  futex(&count_, FUTEX_WAKE, INT_MAX, nullptr);
}

}  // namespace clover::shm
