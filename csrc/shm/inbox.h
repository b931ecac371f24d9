// What has arrived for an endpoint and which of its puts have finished, until it polls. `Status` is
// the enum of the wire whose inbox it is.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "shm/bell.h"

namespace clover::shm {

struct Event {
  enum class Kind { kNotice, kMessage, kGone };  // kGone: nothing more will come from the link
  Kind kind;
  uint64_t link;
  uint32_t notice;
  std::string message;
};

template <class Status>
struct Finished {
  uint64_t op;
  Status status;
};

template <class Status>
struct Arrivals {
  std::vector<Event> events;
  std::vector<Finished<Status>> finished;
  bool were_full = false;  // connections may have stopped to read
  bool empty() const { return events.empty() && finished.empty(); }
};

// Any number of threads push, one polls.
template <class Status>
class Inbox {
 public:
  void push(Event event) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      message_bytes_ += event.message.size();
      arrivals_.events.push_back(std::move(event));
      if (arrivals_.events.size() >= kMostEvents || message_bytes_ >= kMostBytes) full_ = true;
      any_.store(true, std::memory_order_relaxed);
    }
    bell_.ring();
  }

  void push(const std::vector<Finished<Status>>& finished) {
    if (finished.empty()) return;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      arrivals_.finished.insert(arrivals_.finished.end(), finished.begin(), finished.end());
      any_.store(true, std::memory_order_relaxed);
    }
    bell_.ring();
  }

  // Waits, asleep, up to `timeout_ns` for the first arrival; a signal ends the wait early.
  Arrivals<Status> poll(int64_t timeout_ns) {
    Arrivals<Status> arrivals = drain();
    if (!arrivals.empty() || timeout_ns <= 0) return arrivals;
    const uint32_t ticket = bell_.arm();
    arrivals = drain();
    if (arrivals.empty()) bell_.sleep(ticket, timeout_ns);
    bell_.disarm();
    return arrivals.empty() ? drain() : std::move(arrivals);
  }

  // Whether so much waits to be polled that connections should be read no further.
  bool full() const { return full_.load(std::memory_order_relaxed); }

 private:
  static constexpr size_t kMostEvents = 1 << 20;
  static constexpr size_t kMostBytes = 256 << 20;

  Arrivals<Status> drain() {
    Arrivals<Status> arrivals;
    // Looked at often by who spins. What a push stores before it rings is seen after arm().
    if (!any_.load(std::memory_order_relaxed)) return arrivals;
    const std::lock_guard<std::mutex> lock(mutex_);
    any_.store(false, std::memory_order_relaxed);
    std::swap(arrivals, arrivals_);
    message_bytes_ = 0;
    arrivals.were_full = full_.exchange(false);
    return arrivals;
  }

  std::mutex mutex_;
  Arrivals<Status> arrivals_;
  size_t message_bytes_ = 0;
  std::atomic<bool> any_{false};   // written under the mutex
  std::atomic<bool> full_{false};  // a hint: whoever acts on it too late loses nothing
  Bell bell_{};
};

}  // namespace clover::shm
