#include "loop/near_hop.h"

#include <algorithm>

#include "loop/timer.h"

namespace clover::loop {
namespace {

// A plan is on its way to the attention node while the first stage runs. One that has not come by
// then is waited for as any hop is, by the node.
constexpr int64_t kPlanNs = 50'000'000;

}  // namespace

QkvRows NearHop::from(int64_t first) const {
  const auto move = [&](void*& rows, int64_t stride) {
    rows = static_cast<unsigned char*>(rows) + first * stride * element_bytes_;
  };
  QkvRows rows = qkv_;
  move(rows.q, rows.q_stride);
  move(rows.k, rows.k_stride);
  move(rows.v, rows.v_stride);
  return rows;
}

Outcome NearHop::wait(int layer, int64_t timeout_ns) {
  for (NearSegment& segment : segments_) {
    if (layer == 0 && !segment.answerer->await(segment.key, std::min(timeout_ns, kPlanNs)))
      return Outcome::kHandOver;
    const Timer timer(&segment.seconds);
    if (!segment.answerer->answer(segment.key, layer, from(segment.first), segment.count,
                                  o_ + segment.first * row_bytes_))
      return Outcome::kHandOver;
  }
  return Outcome::kDone;
}

void NearHop::restart(uint32_t notice) {
  for (NearSegment& segment : segments_) {
    segment.key.notice = notice;
    segment.seconds = 0.0;
  }
}

}  // namespace clover::loop
