// A fair lock, first come first served, for whoever shares cores: with an unfair one, a thread that
// comes back at once would keep others waiting for as long as it has work.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>

namespace clover {

class Gate {
 public:
  bool try_enter();
  void enter();
  void leave();
  int64_t waiting();

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  uint64_t next_ = 0;     // ticket of the next to come
  uint64_t serving_ = 0;  // ticket of who is inside, or of the next to enter
};

// Inside `gate` for as long as this lives; null: there is nobody to share with.
class Turn {
 public:
  explicit Turn(Gate* gate) : gate_(gate) {
    if (gate_) gate_->enter();
  }
  ~Turn() {
    if (gate_) gate_->leave();
  }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

 private:
  Gate* gate_;
};

}  // namespace clover
