// Attention nodes in the same process: the dense node's own thread answers its hops, over their
// pools, so that no thread waits for another to wake up.
#pragma once

#include <vector>

#include "loop/answerer.h"
#include "loop/hop.h"

namespace clover::loop {

// Adjacent rows of a step, of one attention node.
struct NearSegment {
  Answerer* answerer;
  StepKey key;
  int64_t first;
  int64_t count;
  double seconds = 0.0;  // in which its layers were answered
};

class NearHop : public Hop {
 public:
  // `o` [tokens, row_bytes]; elements are of `element_bytes`.
  NearHop(std::vector<NearSegment> segments, const QkvRows& qkv, int64_t element_bytes, void* o,
          int64_t row_bytes)
      : segments_(std::move(segments)),
        qkv_(qkv),
        element_bytes_(element_bytes),
        o_(static_cast<unsigned char*>(o)),
        row_bytes_(row_bytes) {}

  void send(int) override {}
  Outcome wait(int layer, int64_t timeout_ns) override;
  const void* attended() const override { return o_; }
  void restart(uint32_t notice) override;

  const std::vector<NearSegment>& segments() const { return segments_; }

 private:
  QkvRows from(int64_t first) const;

  std::vector<NearSegment> segments_;
  QkvRows qkv_;
  int64_t element_bytes_;
  unsigned char* o_;
  int64_t row_bytes_;
};

}  // namespace clover::loop
