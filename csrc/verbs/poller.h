// The thread that an endpoint's devices and control connections wake. It sleeps on the completion
// channel, and handles what the device says of itself.
#pragma once

#include <infiniband/verbs.h>

#include <cstdint>
#include <functional>
#include <memory>

#include "tcp/loop.h"
#include "verbs/context.h"

namespace clover::verbs {

class Poller {
 public:
  // What it calls, in its thread.
  struct Calls {
    std::function<void(uint64_t link)> completed;  // the link's queue has something
    // `link`: 0 where the event is the whole device's.
    std::function<void(ibv_event_type event, uint64_t link)> happened;
    std::function<int64_t(int64_t now)> turned;  // as Loop's
  };

  Poller(const Context& context, Calls calls);
  tcp::Loop* loop() { return &loop_; }
  void stop() { loop_.stop(); }

 private:
  class Completions;
  class Happenings;

  Calls calls_;
  tcp::Loop loop_;
};

}  // namespace clover::verbs
