// Sleeping until another thread or process has published something, through a shared futex.
#pragma once

#include <atomic>
#include <cstdint>

#include "shm/status.h"

namespace clover::shm {

// Lives in shared memory, zeroed at birth. One sleeper, any number of ringers.
//
// Sleeper: arm() -> look for work -> sleep(ticket) if there is none -> disarm().
// Ringer:  publish work (a release store) -> ring().
//
// No wake-up is lost: arm() stores `sleeping`, then fences; ring() fences, then loads `sleeping`.
// Either the ringer sees `sleeping` and rings, or the sleeper's look, which follows its fence,
// sees what the ringer published before its own. A ringer that dies half way loses only its own
// wake-up, which is why ring() never clears `sleeping` on behalf of others.
class Bell {
 public:
  uint32_t arm();
  void disarm();
  // Until ring() is called after arm() gave `ticket`, or the time is over; a signal ends it too.
  void sleep(uint32_t ticket, int64_t timeout_ns);
  void ring();

 private:
  std::atomic<uint32_t> count_;
  std::atomic<uint32_t> sleeping_;
};

static_assert(std::atomic<uint32_t>::is_always_lock_free && sizeof(std::atomic<uint32_t>) == 4,
              "a futex word is 4 bytes, and atomics must work across processes");
static_assert(std::atomic<uint64_t>::is_always_lock_free, "atomics must work across processes");

}  // namespace clover::shm
