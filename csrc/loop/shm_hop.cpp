#include "loop/shm_hop.h"

#include <algorithm>
#include <chrono>
#include <cstring>

namespace clover::loop {
namespace {

// A ring has room for many thousand notices; one that is full is nobody's to read.
constexpr int64_t kPushNs = 100'000'000;

using Clock = std::chrono::steady_clock;

int64_t left_ns(Clock::time_point end) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(end - Clock::now()).count();
}

bool notify(shm::Sender* sender, uint64_t notice) {
  return sender->push({shm::kNotice, notice, nullptr, 0}, kPushNs) == shm::Status::kOk;
}

}  // namespace

ShmHop::ShmHop(shm::Mailbox* mailbox, std::vector<ShmSegment> segments, RowBytes bytes,
               const std::byte* rows, std::byte* o, uint32_t notice)
    : mailbox_(mailbox),
      segments_(std::move(segments)),
      bytes_(bytes),
      rows_(rows),
      o_(o),
      notice_(notice) {}

void ShmHop::send(int layer) {
  for (ShmSegment& segment : segments_) {
    std::memcpy(segment.there, rows_ + segment.first * bytes_.there, segment.count * bytes_.there);
    segment.waiting = true;
    // The push publishes the rows with the notice.
    segment.lost = !notify(segment.sender, notice_ | static_cast<uint32_t>(layer));
  }
}

Outcome ShmHop::wait(int layer, int64_t timeout_ns) {
  const auto end = Clock::now() + std::chrono::nanoseconds(timeout_ns);
  for (;;) {
    if (!waiting()) return Outcome::kDone;
    if (lost() || mailbox_->has_more()) return Outcome::kEvents;
    const int64_t left = left_ns(end);
    for (shm::Record& record : mailbox_->poll_new(left))
      if (!take(record, layer)) mailbox_->keep(std::move(record));
    if (left <= 0 && waiting() && !mailbox_->has_more()) return Outcome::kTimeout;
  }
}

bool ShmHop::take(const shm::Record& record, int layer) {
  if (record.kind != shm::kNotice || record.value != (notice_ | static_cast<uint32_t>(layer)))
    return false;
  for (ShmSegment& segment : segments_) {
    const auto& rings = segment.rings;
    if (std::find(rings.begin(), rings.end(), record.ring) == rings.end()) continue;
    const bool expected = segment.waiting;
    segment.waiting = false;
    return expected;
  }
  return false;
}

bool ShmHop::waiting() const {
  return std::any_of(segments_.begin(), segments_.end(), [](auto& s) { return s.waiting; });
}

bool ShmHop::lost() const {
  return std::any_of(segments_.begin(), segments_.end(), [](auto& s) { return s.lost; });
}

const void* ShmHop::attended() const {
  if (segments_.size() == 1) return segments_[0].back;
  for (const ShmSegment& segment : segments_)
    std::memcpy(o_ + segment.first * bytes_.back, segment.back, segment.count * bytes_.back);
  return o_;
}

void ShmHop::restart(uint32_t notice) {
  notice_ = notice;
  for (ShmSegment& segment : segments_) segment.waiting = segment.lost = false;
}

void ShmServer::know(int source, const std::vector<int>& rings, shm::Sender* sender) {
  for (const int ring : rings) sources_[ring] = source;
  senders_[source] = sender;
}

Outcome ShmServer::serve(int64_t timeout_ns) {
  const auto end = Clock::now() + std::chrono::nanoseconds(timeout_ns);
  for (;;) {
    if (mailbox_->has_more()) return Outcome::kEvents;
    const int64_t left = left_ns(end);
    bool kept = false;  // what follows something kept waits too, so that order holds
    for (shm::Record& record : mailbox_->poll_new(left)) {
      kept = kept || !answer(record);
      if (kept) mailbox_->keep(std::move(record));
    }
    if (left <= 0 && !mailbox_->has_more()) return Outcome::kTimeout;
  }
}

bool ShmServer::answer(const shm::Record& record) {
  if (record.kind != shm::kNotice || record.value > UINT32_MAX) return false;
  const auto source = sources_.find(record.ring);
  return source != sources_.end() && answer(source->second, static_cast<uint32_t>(record.value));
}

bool ShmServer::answer(int source, uint32_t notice) {
  const auto sender = senders_.find(source);
  if (sender == senders_.end()) return false;
  const uint32_t layer = notice & layer_mask_;
  if (!answerer_->answer({source, notice & ~layer_mask_}, static_cast<int>(layer))) return false;
  // The push publishes the output with the notice; where it fails the node sees it again.
  return notify(sender->second, notice);
}

}  // namespace clover::loop
