#include "loop/layers.h"

#include "loop/timer.h"

namespace clover::loop {

Outcome Layers::run(int64_t timeout_ns) {
  for (;;) {
    if (!sent_) stage_and_send();
    Outcome outcome;
    {
      const Timer timer(&hop_seconds_);
      outcome = hop_->wait(layer_, timeout_ns);
    }
    if (outcome != Outcome::kDone || layer_ + 1 == dense_.layers) return outcome;
    ++layer_;
    sent_ = false;
  }
}

void Layers::restart(uint32_t notice) {
  hop_->restart(notice);
  layer_ = 0;
  sent_ = false;
  dense_seconds_ = hop_seconds_ = 0.0;
}

void Layers::stage_and_send() {
  const Turn turn(gate_);
  {
    const Timer timer(&dense_seconds_);
    const void* attended = layer_ == 0 ? nullptr : hop_->attended();
    Failure failure;
    require(dense_.stage(dense_.self, step_, layer_, attended, qkv_, &failure), failure);
  }
  sent_ = true;
  const Timer timer(&hop_seconds_);
  hop_->send(layer_);
}

}  // namespace clover::loop
