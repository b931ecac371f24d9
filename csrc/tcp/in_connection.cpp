#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "tcp/in_link.h"

namespace clover::tcp {
namespace {

constexpr size_t kReadBytes = 4 << 20;   // then the loop looks at its other sockets
constexpr size_t kAheadBytes = 4 << 10;  // of the next frame, read together with a payload's end
constexpr size_t kDiscardBytes = 64 << 10;

}  // namespace

InConnection::InConnection(std::shared_ptr<InLink> link, Loop* loop, Fd socket)
    : link_(std::move(link)), loop_(loop), number_(socket.get()), socket_(std::move(socket)) {}

void InConnection::ready(uint32_t events) {
  if (gone_) return;
  // A reset: the sender has given up what it was not told to be done, be it in the socket already.
  if ((events & EPOLLERR) != 0) link_->gone(false);
  if ((events & EPOLLOUT) != 0) {
    const std::lock_guard<std::mutex> lock(link_->mutex_);
    link_->send_answers();
  }
  if ((events & ~static_cast<uint32_t>(EPOLLOUT)) != 0) read();
}

void InConnection::read() {
  size_t turns = kReadBytes / kDiscardBytes;
  End end = End::kMore;
  while (end == End::kMore && turns-- > 0) {
    if (link_->over()) {
      end = End::kOver;
    } else if (link_->receiving_->inbox.full()) {
      pause();
      break;
    } else {
      end = read_once();
    }
  }
  link_->answer();
  if (end == End::kMalformed) link_->gone(true);
  if (end == End::kMalformed || end == End::kOver) leave();
}

void InConnection::pause() {
  // Both here and in send_answers(), which is another thread's, the latest word must be the last.
  const std::lock_guard<std::mutex> lock(link_->mutex_);
  if (paused_.exchange(true)) return;
  watch();
  // Whoever emptied the inbox before paused_ was set has not resumed this connection.
  if (!link_->receiving_->inbox.full()) {
    paused_ = false;
    watch();
  }
}

// What wakes the loop. A hang-up always does: edge-triggered, it does so once while paused. The
// link's lock is held.
void InConnection::watch() {
  uint32_t events = EPOLLET;
  if (!paused_) events = EPOLLIN | EPOLLRDHUP;
  if (link_->answer_blocked_) events |= EPOLLOUT;
  loop_->rewatch(number_, events);
}

void InConnection::leave() {
  // An end in the middle of a frame is no orderly end: the peer died, and the link with it.
  if (left_ > 0 || stage_begin_ != stage_end_) link_->gone(false);
  gone_ = true;
  region_.reset();
  op_.reset();
  loop_->retire(std::move(socket_));
  link_->left(this);
}

InConnection::End InConnection::read_once() { return left_ > 0 ? read_payload() : read_head(); }

InConnection::End InConnection::read_head() {
  if (stage_begin_ > 0) {
    std::memmove(stage_.data(), stage_.data() + stage_begin_, stage_end_ - stage_begin_);
    stage_end_ -= stage_begin_;
    stage_begin_ = 0;
  }
  const size_t room = stage_.size() - stage_end_;
  const ssize_t count = recv(number_, stage_.data() + stage_end_, room, MSG_DONTWAIT);
  if (count < 0) return errno == EAGAIN || errno == EINTR ? End::kDrained : End::kOver;
  if (count == 0) return End::kOver;
  if (!digest(static_cast<size_t>(count))) return End::kMalformed;
  return static_cast<size_t>(count) < room ? End::kDrained : End::kMore;
}

// The rest of the payload straight to where it belongs, and what follows it to the stage.
InConnection::End InConnection::read_payload() {
  thread_local std::vector<iovec> pieces;
  thread_local std::array<char, kDiscardBytes> discarded;
  pieces.clear();
  const bool discards = targets_.empty();
  uint64_t wanted = left_;
  if (discards) {
    wanted = std::min<uint64_t>(left_, discarded.size());
    pieces.push_back({discarded.data(), wanted});
  } else {
    gather(&pieces);
    pieces.push_back({stage_.data(), kAheadBytes});
    wanted += kAheadBytes;
  }
  ssize_t count = 0;
  if (region_ != nullptr) {
    const Region::Writing writing(region_.get());
    if (!writing) {
      discard();
      return End::kMore;
    }
    count = readv(number_, pieces.data(), static_cast<int>(pieces.size()));
  } else {
    count = readv(number_, pieces.data(), static_cast<int>(pieces.size()));
  }
  if (count < 0) return errno == EAGAIN || errno == EINTR ? End::kDrained : End::kOver;
  if (count == 0) return End::kOver;
  const auto got = static_cast<uint64_t>(count);
  const uint64_t payload = std::min(got, left_);
  placed(payload);
  if (got > payload && !digest(got - payload)) return End::kMalformed;
  return got < wanted ? End::kDrained : End::kMore;
}

void InConnection::gather(std::vector<iovec>* pieces) const {
  uint64_t offset = target_.offset;
  for (size_t i = target_.run; i < targets_.size(); ++i) {
    const Run& run = targets_[i];
    pieces->push_back({reinterpret_cast<void*>(run.offset + offset), run.length - offset});
    offset = 0;
  }
}

// `nbytes` of the payload are where they belong.
void InConnection::placed(uint64_t nbytes) {
  left_ -= nbytes;
  while (nbytes > 0 && !targets_.empty()) {
    const uint64_t step = std::min(nbytes, targets_[target_.run].length - target_.offset);
    target_.offset += step;
    nbytes -= step;
    if (target_.offset == targets_[target_.run].length) target_ = {target_.run + 1, 0};
  }
  if (left_ == 0) end_frame();
}

// Takes `staged` new bytes of the stage; false for what is no frame.
bool InConnection::digest(size_t staged) {
  stage_end_ += staged;
  while (true) {
    if (left_ > 0) place_staged();
    if (left_ > 0 || stage_end_ - stage_begin_ < sizeof(FrameHeader)) break;
    std::memcpy(&header_, stage_.data() + stage_begin_, sizeof(header_));
    if (!plausible(header_)) return false;
    if (stage_end_ - stage_begin_ < sizeof(FrameHeader) + header_.runs * sizeof(Run)) break;
    if (!begin_frame()) return false;
  }
  if (stage_begin_ == stage_end_) stage_begin_ = stage_end_ = 0;
  return true;
}

// A whole head is in the stage.
bool InConnection::begin_frame() {
  op_ = link_->begin(header_);
  if (op_ == nullptr) return false;
  const char* const head = stage_.data() + stage_begin_ + sizeof(FrameHeader);
  targets_.resize(header_.runs);
  if (header_.runs > 0) std::memcpy(targets_.data(), head, header_.runs * sizeof(Run));
  stage_begin_ += sizeof(FrameHeader) + header_.runs * sizeof(Run);
  region_ = nullptr;
  failed_ = false;
  target_ = {};
  left_ = header_.nbytes;
  if (header_.kind == Kind::kMessage && left_ > 0) {
    targets_.push_back(
        {reinterpret_cast<uint64_t>(op_->message.data()) + header_.offset, header_.nbytes});
  } else if (header_.kind == Kind::kPut) {
    region_ = link_->receiving_->regions.find(header_.region);
    const uint64_t limit = region_ != nullptr ? region_->nbytes() : kMaxPutBytes;
    if (!fits(header_, targets_.data(), limit)) return false;
    const uint64_t base = region_ != nullptr ? reinterpret_cast<uint64_t>(region_->base()) : 0;
    for (Run& run : targets_) run.offset += base;
    if (region_ == nullptr) discard();
  }
  if (left_ == 0) end_frame();
  return true;
}

// The region is unknown or closed: the rest of the frame goes nowhere.
void InConnection::discard() {
  failed_ = true;
  region_ = nullptr;
  targets_.clear();
}

void InConnection::end_frame() {
  // Also where nothing had to be written.
  if (region_ != nullptr && !Region::Writing(region_.get())) discard();
  region_ = nullptr;
  targets_.clear();
  link_->end(op_.get(), header_.nbytes, failed_);
  op_ = nullptr;
}

// Payload that came into the stage behind its head.
void InConnection::place_staged() {
  uint64_t nbytes = std::min<uint64_t>(left_, stage_end_ - stage_begin_);
  if (nbytes == 0) return;
  const char* from = stage_.data() + stage_begin_;
  stage_begin_ += nbytes;
  bool discarding = false;
  const auto place = [&] {
    uint64_t rest = nbytes;
    for (Cursor at = target_; rest > 0; at = {at.run + 1, 0}) {
      const Run& run = targets_[at.run];
      const uint64_t step = std::min(rest, run.length - at.offset);
      std::memcpy(reinterpret_cast<void*>(run.offset + at.offset), from, step);
      from += step;
      rest -= step;
    }
  };
  if (region_ != nullptr) {
    const Region::Writing writing(region_.get());
    if (writing) {
      place();
    } else {
      discarding = true;
    }
  } else if (!targets_.empty()) {
    place();
  }
  if (discarding) discard();
  placed(nbytes);
}

}  // namespace clover::tcp
