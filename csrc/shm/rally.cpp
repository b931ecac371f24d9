#include "shm/rally.h"

#include <chrono>

namespace clover::shm {
namespace {

using Clock = std::chrono::steady_clock;

void play(Rally::Side* to) {
  // Release pairs with the acquire loads in await().
  to->count.fetch_add(1, std::memory_order_release);
  to->bell.ring();
}

bool await(Rally::Side* own, uint64_t count, Clock::time_point end) {
  while (own->count.load(std::memory_order_acquire) < count) {
    const int64_t left = std::chrono::nanoseconds(end - Clock::now()).count();
    if (left <= 0) return false;
    const uint32_t ticket = own->bell.arm();
    if (own->count.load(std::memory_order_acquire) < count) own->bell.sleep(ticket, left);
    own->bell.disarm();
  }
  return true;
}

}  // namespace

bool rally(Rally* table, bool second, int64_t rounds, int64_t timeout_ns) {
  const auto end = Clock::now() + std::chrono::nanoseconds(timeout_ns);
  Rally::Side* own = &table->sides[second ? 1 : 0];
  Rally::Side* other = &table->sides[second ? 0 : 1];
  for (int64_t i = 1; i <= rounds; ++i) {
    if (!second) play(other);
    if (!await(own, static_cast<uint64_t>(i), end)) return false;
    if (second) play(other);
  }
  return true;
}

}  // namespace clover::shm
