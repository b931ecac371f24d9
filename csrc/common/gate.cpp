#include "common/gate.h"

namespace clover {

bool Gate::try_enter() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (next_ != serving_) return false;
  ++next_;
  return true;
}

void Gate::enter() {
  std::unique_lock<std::mutex> lock(mutex_);
  const uint64_t ticket = next_++;
  changed_.wait(lock, [&] { return serving_ == ticket; });
}

void Gate::leave() {
  bool others;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    others = ++serving_ != next_;
  }
  if (others) changed_.notify_all();
}

int64_t Gate::waiting() {
  std::lock_guard<std::mutex> lock(mutex_);
  const uint64_t inside_and_waiting = next_ - serving_;
  return inside_and_waiting == 0 ? 0 : static_cast<int64_t>(inside_and_waiting) - 1;
}

}  // namespace clover
