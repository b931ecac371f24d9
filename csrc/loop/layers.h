// A step's layers, one after another, without Python in between: a stage of the dense half, the hop
// to attention and back, the next stage. The last stage and the logits are the caller's.
//
// It knows tables and hops, not models, pools or wires.
#pragma once

#include "loop/hop.h"

namespace clover::loop {

class Layers {
 public:
  // All that is handed in outlives this; `gate` may be null.
  Layers(const DenseTable& dense, void* step, const QkvRows& qkv, Hop* hop, Gate* gate)
      : dense_(dense), step_(step), qkv_(qkv), hop_(hop), gate_(gate) {}

  // Goes on where the last call ended. A call that waits for others ends after `timeout_ns`, and
  // std::invalid_argument is a stage's or attention's own refusal, after which there is no going
  // on.
  Outcome run(int64_t timeout_ns);

  // For another step like the last one: of the same `step`, which the dense half has begun anew.
  void restart(uint32_t notice);

  // The layer whose hop is under way, or is to be done by the caller.
  int layer() const { return layer_; }
  double dense_seconds() const { return dense_seconds_; }
  double hop_seconds() const { return hop_seconds_; }

 private:
  void stage_and_send();

  DenseTable dense_;
  void* step_;
  QkvRows qkv_;
  Hop* hop_;
  Gate* gate_;
  int layer_ = 0;
  bool sent_ = false;
  double dense_seconds_ = 0.0;
  double hop_seconds_ = 0.0;
};

}  // namespace clover::loop
