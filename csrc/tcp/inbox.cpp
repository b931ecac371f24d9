#include "tcp/inbox.h"

#include <utility>

namespace clover::tcp {

void Inbox::push(Event event) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    message_bytes_ += event.message.size();
    arrivals_.events.push_back(std::move(event));
    if (arrivals_.events.size() >= kMostEvents || message_bytes_ >= kMostBytes) full_ = true;
  }
  bell_.ring();
}

void Inbox::push(const std::vector<Finished>& finished) {
  if (finished.empty()) return;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    arrivals_.finished.insert(arrivals_.finished.end(), finished.begin(), finished.end());
  }
  bell_.ring();
}

Arrivals Inbox::poll(int64_t timeout_ns) {
  Arrivals arrivals = drain();
  if (!arrivals.empty() || timeout_ns <= 0) return arrivals;
  const uint32_t ticket = bell_.arm();
  arrivals = drain();
  if (arrivals.empty()) bell_.sleep(ticket, timeout_ns);
  bell_.disarm();
  return arrivals.empty() ? drain() : std::move(arrivals);
}

Arrivals Inbox::drain() {
  Arrivals arrivals;
  const std::lock_guard<std::mutex> lock(mutex_);
  std::swap(arrivals, arrivals_);
  message_bytes_ = 0;
  arrivals.were_full = full_.exchange(false);
  return arrivals;
}

}  // namespace clover::tcp
