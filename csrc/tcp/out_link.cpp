#include "tcp/out_link.h"

#include <poll.h>
#include <sys/epoll.h>

#include <algorithm>
#include <cassert>
#include <cerrno>
#include <chrono>
#include <utility>

#include "tcp/out_stream.h"

namespace clover::tcp {
namespace {

constexpr uint64_t kInlineBytes = 64 << 10;  // written by the caller's thread where there is room
constexpr uint64_t kFrameBytes = 512 << 10;  // handed to one connection at a time
constexpr size_t kPumpBytes = 4 << 20;       // then the loop looks at its other sockets
constexpr uint32_t kStreamEvents = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET;

std::chrono::steady_clock::time_point time_point(int64_t ns) {
  // steady_clock is CLOCK_MONOTONIC wherever epoll exists.
  return std::chrono::steady_clock::time_point(std::chrono::nanoseconds(ns));
}

bool several_frames(const Op& op) {
  if (op.kind == Kind::kQuery) return false;
  return op.total > kFrameBytes || op.local.size() > kMaxRuns || op.remote.size() > kMaxRuns;
}

}  // namespace

void OutLink::start(std::vector<Fd> sockets, const std::vector<std::unique_ptr<Loop>>& loops) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (size_t i = 0; i < sockets.size(); ++i) {
    Loop* const loop = loops[i % loops.size()].get();
    streams_.push_back(
        std::make_shared<OutStream>(weak_from_this(), loop, std::move(sockets[i]), i == 0));
    loop->watch(streams_.back()->socket(), kStreamEvents, streams_.back());
  }
}

bool OutLink::has_room(const Op& op) const {
  if (ops_.size() >= kMaxOpsInFlight) return false;
  return op.message.empty() || message_bytes_ == 0 ||
         message_bytes_ + op.message.size() <= kMaxMessageBytesInFlight;
}

Status OutLink::submit(std::unique_ptr<Op>* op, int64_t give_up_ns) {
  std::unique_lock<std::mutex> lock(mutex_);
  const bool room = changed_.wait_until(lock, time_point(give_up_ns),
                                        [&] { return state_ != Status::kOk || has_room(**op); });
  if (state_ != Status::kOk) return state_;
  if (!room) return Status::kTimeout;
  message_bytes_ += (*op)->message.size();
  (*op)->spread = several_frames(**op);
  ops_.push_back(std::move(*op));
  const Op& added = *ops_.back();
  if (added.deadline_ns < earliest_ns_) {
    earliest_ns_ = added.deadline_ns;
    streams_[0]->loop()->post([] {});  // it sleeps towards a later deadline
  }
  kick(added, &lock);
  return Status::kOk;
}

Status OutLink::ask(std::unique_ptr<Op> op) {
  const uint64_t id = op->id;
  const int64_t deadline = op->deadline_ns;
  const Status submitted = submit(&op, deadline);
  if (submitted != Status::kOk) return submitted;
  std::unique_lock<std::mutex> lock(mutex_);
  const auto mine = [&] {
    return std::find_if(asked_.begin(), asked_.end(), [&](const auto& o) { return o.first == id; });
  };
  // expire() gives every op an outcome at its deadline; a while later at the very latest.
  const auto latest = time_point(deadline) + std::chrono::seconds(1);
  if (!changed_.wait_until(lock, latest, [&] { return mine() != asked_.end(); })) {
    return Status::kTimeout;
  }
  const Status outcome = mine()->second;
  asked_.erase(mine());
  return outcome;
}

// Sees to it that enough connections write. Small ops go out from the caller's own thread.
void OutLink::kick(const Op& op, std::unique_lock<std::mutex>* lock) {
  OutStream* const first = streams_[0].get();
  if (op.total <= kInlineBytes && next_ + 1 == ops_.size() && !first->busy && !first->blocked) {
    const std::shared_ptr<OutStream> kept = streams_[0];
    lock->unlock();
    pump(kept.get());
    return;
  }
  nudge(streams_[0]);
}

// Has the stream look for work soon.
void OutLink::nudge(const std::shared_ptr<OutStream>& stream) {
  if (stream->busy) {
    stream->again = true;
  } else if (!stream->blocked && !stream->posted) {
    stream->posted = true;
    stream->loop()->post([link = shared_from_this(), stream] { link->pump(stream.get()); });
  }
}

void OutLink::pump(OutStream* stream) {
  std::unique_lock<std::mutex> lock(mutex_);
  stream->posted = false;
  if (stream->busy) {
    stream->again = true;
    return;
  }
  stream->busy = true;
  do {
    stream->again = false;
    write(stream, &lock);
  } while (stream->again);
  stream->busy = false;
  if (state_ != Status::kOk) settle_failed();
}

// Until the socket is full, nothing is left, or it is the turn of the loop's other sockets.
void OutLink::write(OutStream* stream, std::unique_lock<std::mutex>* lock) {
  size_t budget = kPumpBytes;
  while (state_ == Status::kOk && (stream->writing() || fill(stream))) {
    if (budget == 0) {
      stream->posted = true;
      stream->loop()->post([link = shared_from_this(), stream] { link->pump(stream); });
      return;
    }
    lock->unlock();
    const ssize_t written = stream->write_some();
    lock->lock();
    if (written == -EINTR) continue;
    if (written == -EAGAIN) {
      stream->blocked = !stream->again;  // unless EPOLLOUT has told already that there is room
      return;
    }
    if (written < 0) return fail_locked(Status::kPeerGone);
    stream->advance(static_cast<size_t>(written));
    if (answered_ > 0 && !ops_.empty() && ops_[0]->seq < answered_) reap();
    budget -= std::min(budget, static_cast<size_t>(written));
  }
}

bool OutLink::fill(OutStream* stream) {
  stream->begin_batch();
  while (next_ < ops_.size() && stream->batch_has_room()) {
    Op* const op = ops_[next_].get();
    if (!op->spread && stream != streams_[0].get()) {
      nudge(streams_[0]);
      break;
    }
    if (!op->started && !may_start(*op)) {
      held_ = true;  // reap() looks again
      break;
    }
    if (!op->started) start(op);
    add_frame(stream, op);
    if (op->handed == op->total || op->kind == Kind::kQuery) ++next_;
  }
  return stream->writing();
}

bool OutLink::may_start(const Op& op) {
  if (op.kind != Kind::kPut || (!op.spread && spread_.empty())) return true;
  const auto clashes = [&](const Op& other) {
    return other.kind == Kind::kPut && other.region == op.region &&
           overlap(other.by_offset, op.by_offset);
  };
  if (!op.spread) {
    return std::none_of(spread_.begin(), spread_.end(), [&](Op* one) { return clashes(*one); });
  }
  for (size_t i = 0; i < next_; ++i) {
    if (clashes(*ops_[i])) return false;
  }
  return true;
}

void OutLink::start(Op* op) {
  op->started = true;
  op->seq = next_seq_++;
  if (!op->spread) return;
  spread_.push_back(op);
  uint64_t frames = op->total / kFrameBytes;
  for (const std::shared_ptr<OutStream>& stream : streams_) {
    if (frames-- == 0) return;
    nudge(stream);
  }
}

void OutLink::add_frame(OutStream* stream, Op* op) {
  FrameHeader header{kFrameMagic, op->kind, op->seq, op->total, 0, op->region, op->notice, 0, 0, 0};
  std::vector<Run> local;
  std::vector<Run> remote;
  if (op->kind == Kind::kMessage) {
    header.offset = op->handed;
    header.nbytes = static_cast<uint32_t>(std::min(op->total - op->handed, kFrameBytes));
    if (header.nbytes > 0) {
      const auto base = reinterpret_cast<uint64_t>(op->message.data());
      local.push_back({base + op->handed, header.nbytes});
    }
  } else if (op->kind == Kind::kPut) {
    uint64_t nbytes = std::min(op->total - op->handed, kFrameBytes);
    nbytes = covered(op->local, op->local_at, nbytes, kMaxRuns);
    nbytes = covered(op->remote, op->remote_at, nbytes, kMaxRuns);
    take(op->local, &op->local_at, nbytes, &local);
    take(op->remote, &op->remote_at, nbytes, &remote);
    header.nbytes = static_cast<uint32_t>(nbytes);
    header.runs = static_cast<uint32_t>(remote.size());
  }
  op->handed += header.nbytes;
  stream->add(header, remote, local, op);
}

void OutLink::take_answer(const Answer& answer) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (state_ != Status::kOk) return;
  const bool known = answer.magic == kAnswerMagic && next_ > 0 && answer.seq >= ops_[0]->seq &&
                     answer.seq - ops_[0]->seq < next_;
  if (!known) return fail_locked(Status::kMalformed);
  const size_t index = answer.seq - ops_[0]->seq;
  switch (answer.outcome) {
    case Outcome::kNoRegion:
      ops_[index]->status = Status::kNoRegion;
      return;
    case Outcome::kDone:
      break;
    default:
      return fail_locked(Status::kMalformed);
  }
  answered_ = answer.seq + 1;
  reap();
}

// Finishes what was answered. A thread that has just written an op's last bytes may not have said
// so yet; it reaps itself once it has.
void OutLink::reap() {
  std::vector<Finished> finished;
  while (next_ > 0 && ops_[0]->seq < answered_ && ops_[0]->frames_out == 0) {
    const Status status = ops_[0]->status;
    finish(std::move(ops_[0]), status, &finished);
    ops_.pop_front();
    --next_;
  }
  if (held_) {
    held_ = false;
    nudge(streams_[0]);
  }
  changed_.notify_all();
  inbox_->push(finished);
}

void OutLink::finish(std::unique_ptr<Op> op, Status status, std::vector<Finished>* finished) {
  message_bytes_ -= op->message.size();
  if (op->spread && op->started) {
    spread_.erase(std::find(spread_.begin(), spread_.end(), op.get()));
  }
  if (op->kind == Kind::kPut) finished->push_back({op->id, status});
  if (op->kind == Kind::kQuery) asked_.emplace_back(op->id, status);
}

int64_t OutLink::expire(int64_t now) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (state_ != Status::kOk) return kNever;
  if (now < earliest_ns_) return earliest_ns_;
  earliest_ns_ = kNever;
  std::vector<Finished> finished;
  bool late = false;
  size_t kept = 0;
  for (size_t i = 0; i < ops_.size(); ++i) {
    Op* const op = ops_[i].get();
    const bool expired = op->deadline_ns <= now;
    if (expired && !op->started) {
      finish(std::move(ops_[i]), Status::kTimeout, &finished);
      continue;
    }
    if (expired) {
      op->status = Status::kTimeout;
      late = true;
    }
    earliest_ns_ = std::min(earliest_ns_, op->deadline_ns);
    if (kept != i) ops_[kept] = std::move(ops_[i]);
    ++kept;
  }
  ops_.resize(kept);
  inbox_->push(finished);
  changed_.notify_all();
  // Some of a late op is on its way or in the peer's memory. Only the end of its connections makes
  // sure that no more of it arrives after it was told to have failed.
  if (late) fail_locked(Status::kDropped);
  return earliest_ns_;
}

void OutLink::fail(Status status) {
  const std::lock_guard<std::mutex> lock(mutex_);
  fail_locked(status);
}

void OutLink::fail_locked(Status status) {
  if (state_ != Status::kOk) return;
  state_ = status;
  changed_.notify_all();
  settle_failed();
}

// Tells everything pending, once no thread is inside a system call with its memory.
void OutLink::settle_failed() {
  const auto busy = [](const std::shared_ptr<OutStream>& stream) { return stream->busy; };
  if (settled_ || std::any_of(streams_.begin(), streams_.end(), busy)) return;
  settled_ = true;
  const bool lost = !ops_.empty();
  std::vector<Finished> finished;
  for (std::unique_ptr<Op>& op : ops_) {
    const Status status = op->status == Status::kOk ? state_ : op->status;
    finish(std::move(op), status, &finished);
  }
  ops_.clear();
  next_ = 0;
  for (const std::shared_ptr<OutStream>& stream : streams_) stream->retire(lost);
  changed_.notify_all();
  inbox_->push(finished);
}

Status OutLink::state() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (state_ != Status::kOk) return state_;
  // The loop may not have come to it yet, and has the last answers to read first.
  pollfd first{streams_[0]->socket(), POLLRDHUP, 0};
  return poll(&first, 1, 0) > 0 ? Status::kPeerGone : Status::kOk;
}

bool OutLink::failed() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return state_ != Status::kOk;
}

bool OutLink::drain(int64_t until_ns) {
  std::unique_lock<std::mutex> lock(mutex_);
  return changed_.wait_until(lock, time_point(until_ns), [&] { return ops_.empty(); });
}

}  // namespace clover::tcp
