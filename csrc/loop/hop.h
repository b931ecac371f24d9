// Where a layer's queries, keys and values go for attention, and where its output comes from.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <vector>

#include "common/gate.h"
#include "common/tables.h"

namespace clover::loop {

enum class Outcome {
  kDone,      // all layers are through
  kEvents,    // something else has come, which the caller is to look at before going on
  kTimeout,   // nothing has come in time; going on is fine
  kHandOver,  // this layer's hop, and what follows, is the caller's to do
};

// A step's way to attention. `send` runs in the dense half's turn of the gate, right after the
// stage; `wait` runs outside it, and again after kEvents or kTimeout.
class Hop {
 public:
  Hop() = default;
  virtual ~Hop() = default;
  Hop(const Hop&) = delete;
  Hop& operator=(const Hop&) = delete;
  virtual void send(int layer) = 0;
  virtual Outcome wait(int layer, int64_t timeout_ns) = 0;
  // The layer's output [tokens, heads, v_dim], contiguous, once `wait` has said kDone.
  virtual const void* attended() const = 0;
  // For another step of the same rows and ways, `notice` of whose layer 0 is given.
  virtual void restart(uint32_t notice) = 0;
};

inline void require(bool good, const Failure& failure) {
  if (!good) throw std::invalid_argument(failure.what);
}

// Attention in the same node: nothing to wait for.
class OwnHop : public Hop {
 public:
  OwnHop(const AttentionTable& table, const AttentionRows& rows, const QkvRows& qkv, void* o,
         float* lse)
      : table_(table), rows_(rows), qkv_(qkv), o_(o), lse_(lse) {}

  void send(int layer) override;
  Outcome wait(int, int64_t) override { return Outcome::kDone; }
  const void* attended() const override { return o_; }
  void restart(uint32_t) override { seconds_ = 0.0; }
  double seconds() const { return seconds_; }

 private:
  AttentionTable table_;
  AttentionRows rows_;
  QkvRows qkv_;
  void* o_;
  float* lse_;
  double seconds_ = 0.0;
};

}  // namespace clover::loop
