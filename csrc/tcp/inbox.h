// What has arrived for an endpoint and which of its puts have finished, until it polls.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "shm/bell.h"
#include "tcp/status.h"

namespace clover::tcp {

struct Event {
  enum class Kind { kNotice, kMessage, kGone };  // kGone: nothing more will come from the link
  Kind kind;
  uint64_t link;
  uint32_t notice;
  std::string message;
};

struct Finished {
  uint64_t op;
  Status status;
};

struct Arrivals {
  std::vector<Event> events;
  std::vector<Finished> finished;
  bool were_full = false;  // connections may have stopped to read
  bool empty() const { return events.empty() && finished.empty(); }
};

// Any number of threads push, one polls.
class Inbox {
 public:
  void push(Event event);
  void push(const std::vector<Finished>& finished);

  // Waits, asleep, up to `timeout_ns` for the first arrival; a signal ends the wait early.
  Arrivals poll(int64_t timeout_ns);

  // Whether so much waits to be polled that connections should be read no further.
  bool full() const { return full_.load(std::memory_order_relaxed); }

 private:
  static constexpr size_t kMostEvents = 1 << 20;
  static constexpr size_t kMostBytes = 256 << 20;

  Arrivals drain();

  std::mutex mutex_;
  Arrivals arrivals_;
  size_t message_bytes_ = 0;
  std::atomic<bool> full_{false};  // a hint: whoever acts on it too late loses nothing
  shm::Bell bell_{};
};

}  // namespace clover::tcp
