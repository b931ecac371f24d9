// Two processes that wake each other and do nothing else: the floor of every latency between them.
#pragma once

#include <atomic>
#include <cstdint>

#include "shm/bell.h"

namespace clover::shm {

// In shared memory, zeroed at birth and good for one rally.
struct Rally {
  struct alignas(64) Side {
    std::atomic<uint64_t> count;  // how often the other side has played to this one
    Bell bell;
  };
  Side sides[2];
};

// Plays `rounds` times there and back; the first side (not `second`) opens. False: no answer within
// `timeout_ns`, counted from the call.
bool rally(Rally* table, bool second, int64_t rounds, int64_t timeout_ns);

}  // namespace clover::shm
