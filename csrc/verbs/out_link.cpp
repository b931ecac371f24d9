#include "verbs/out_link.h"

#include <sys/epoll.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <utility>

namespace clover::verbs {
namespace {

constexpr size_t kChunks = 64;
constexpr size_t kMostWaiting = 16384;
constexpr uint64_t kMostMessageBytes = 128 << 20;
constexpr int kCompletions = 32;  // looked at in one call

std::chrono::nanoseconds until(int64_t deadline_ns) {
  constexpr int64_t kLongest = 3'600'000'000'000;
  return std::chrono::nanoseconds(std::clamp<int64_t>(deadline_ns - tcp::now_ns(), 0, kLongest));
}

}  // namespace

OutLink::OutLink(uint64_t id, const Context& context, tcp::Loop* loop, Inbox* inbox, tcp::Fd socket)
    : id_(id),
      context_(context),
      loop_(loop),
      inbox_(inbox),
      channel_(std::move(socket)),
      chunks_(kChunks * kChunkBytes),
      chunk_memory_(context, chunks_.data(), chunks_.size()),
      chunk_requests_(kChunks, 0) {
  const int count = context.settings().queue_pairs;
  cq_ = context.make_cq(count * context.settings().queue_depth, id);
  pairs_.reserve(static_cast<size_t>(count));
  for (int i = 0; i < count; ++i) pairs_.emplace_back(context, cq_.get(), i, 0, id);
}

Status OutLink::open(int64_t deadline_ns) {
  Setup setup{};
  setup.version = kVersion;
  setup.count = static_cast<uint32_t>(pairs_.size());
  for (size_t i = 0; i < pairs_.size(); ++i) setup.pairs[i] = pairs_[i].info();
  if (!channel_.write(Kind::kSetup, setup)) return Status::kPeerGone;
  Frame frame;
  const Status status = channel_.wait(&frame, deadline_ns);
  if (status != Status::kOk) return status;
  if (frame.kind == Kind::kRefused) throw Error("the peer refused: " + frame.payload);
  if (frame.kind != Kind::kReady || !frame.as(&setup) || setup.version != kVersion ||
      setup.count != pairs_.size()) {
    return Status::kMalformed;
  }
  for (size_t i = 0; i < pairs_.size(); ++i) pairs_[i].connect(setup.pairs[i]);
  loop_->watch(channel_.fd(), EPOLLIN, shared_from_this());
  progress(true);
  return Status::kOk;
}

bool OutLink::has_room(const Op& op) const {
  if (waiting_.size() >= kMostWaiting) return false;
  return message_bytes_ == 0 || message_bytes_ + op.message.size() <= kMostMessageBytes;
}

Status OutLink::submit(std::unique_ptr<Op>* op, int64_t give_up_ns) {
  ++submitting_;
  std::unique_lock<std::mutex> lock(mutex_);
  --submitting_;
  if (!(*op)->is_message) {
    const Status status = resolve(&lock, op->get(), give_up_ns);
    if (status != Status::kOk) return status;
  }
  const auto free = [&] { return state_ != Status::kOk || has_room(**op); };
  if (!changed_.wait_for(lock, until(give_up_ns), free)) return Status::kTimeout;
  if (state_ != Status::kOk) return state_;
  Op& taken = **op;
  if (!taken.is_message && targets_.at(taken.region).closed) return Status::kNoRegion;
  taken.striped = pairs_.size() > 1 && taken.total >= kStripeBytes;
  taken.serial = next_serial_++;
  message_bytes_ += taken.message.size();
  if (taken.deadline_ns < earliest_ns_) {
    earliest_ns_ = taken.deadline_ns;
    loop_->post([] {});  // it may have meant to sleep for longer
  }
  waiting_.push_back(std::move(*op));
  pending_ = true;
  if (waiting_.size() > 1) return Status::kOk;
  pump();
  // Completions make room for what does not fit now; the poller posts it then.
  if (!waiting_.empty()) advance(true);
  return Status::kOk;
}

Status OutLink::resolve(std::unique_lock<std::mutex>* lock, Op* op, int64_t deadline_ns) {
  const Status status = find_locked(lock, {0, op->region, op->region_bytes}, deadline_ns);
  if (status != Status::kOk) return status;
  const Target& target = targets_.at(op->region);
  op->remote_base = target.address;
  op->rkey = target.rkey;
  return Status::kOk;
}

Status OutLink::find(uint64_t region, uint64_t nbytes, int64_t deadline_ns) {
  std::unique_lock<std::mutex> lock(mutex_);
  return find_locked(&lock, {0, region, nbytes}, deadline_ns);
}

Status OutLink::find_locked(std::unique_lock<std::mutex>* lock, const Find& wanted,
                            int64_t deadline_ns) {
  const uint64_t region = wanted.region;
  const uint64_t nbytes = wanted.nbytes;
  if (state_ != Status::kOk) return state_;
  const auto known = targets_.find(region);
  if (known != targets_.end()) {
    const bool good = !known->second.closed && known->second.nbytes == nbytes;
    return good ? Status::kOk : Status::kNoRegion;
  }
  const uint64_t number = next_question_++;
  questions_[number] = Found{};
  if (!channel_.write(Kind::kFind, Find{number, region, nbytes})) return Status::kPeerGone;
  const auto answered = [&] { return state_ != Status::kOk || questions_.at(number).number != 0; };
  const bool in_time = changed_.wait_for(*lock, until(deadline_ns), answered);
  const Found found = questions_.at(number);
  questions_.erase(number);
  if (!in_time) return Status::kTimeout;
  if (state_ != Status::kOk) return state_;
  if (found.there == 0) return Status::kNoRegion;
  // The owner may have closed it since: then the revocation has made an entry of its own.
  targets_.insert({region, {found.address, nbytes, found.rkey, false}});
  return targets_.at(region).closed ? Status::kNoRegion : Status::kOk;
}

void OutLink::progress(bool arm) {
  const std::lock_guard<std::mutex> lock(mutex_);
  advance(arm);
}

void OutLink::disarmed() {
  const std::lock_guard<std::mutex> lock(mutex_);
  armed_ = false;
}

void OutLink::look() {
  if (!pending_ || submitting_ > 0) return;
  const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
  if (lock.owns_lock()) advance(false);
}

void OutLink::advance(bool arm) {
  if (state_ != Status::kOk) return;
  reap();
  pump();
  // Nobody may look for a while, and these cannot wait for that.
  arm = arm || !waiting_.empty() || !revoking_.empty() || draining_ > 0;
  if (!arm || armed_ || state_ != Status::kOk) return;
  armed_ = ibv_req_notify_cq(cq_.get(), 0) == 0;
  reap();  // what completed between the last look and the arming wakes nobody
  pump();
}

void OutLink::reap() {
  std::array<ibv_wc, kCompletions> completions;
  int count = kCompletions;
  bool any = false;
  Status problem = Status::kOk;
  while (count == kCompletions) {
    count = ibv_poll_cq(cq_.get(), kCompletions, completions.data());
    for (int i = 0; i < count; ++i) {
      const ibv_wc& one = completions[static_cast<size_t>(i)];
      any = true;
      if (one.status == IBV_WC_SUCCESS) {
        pairs_[static_cast<size_t>(QueuePair::index_of(one.wr_id))].complete(one.wr_id);
      } else if (problem == Status::kOk || problem == Status::kQueuePair) {
        problem = to_status(one.status);  // the first tells why; the rest were flushed
      }
    }
  }
  if (count < 0) problem = Status::kQueuePair;
  if (any) {
    std::vector<Finished> finished;
    while (!flying_.empty() && flying_.front()->last_request <= pairs_[0].completed()) {
      if (!flying_.front()->is_message) finished.push_back({flying_.front()->id, Status::kOk});
      flying_.pop_front();
    }
    pending_ = !flying_.empty() || !waiting_.empty();
    inbox_->push(finished);
    if (!revoking_.empty()) answer_revocations();
    changed_.notify_all();
  }
  if (problem != Status::kOk) fail_locked(problem);
}

void OutLink::pump() {
  while (state_ == Status::kOk && !waiting_.empty()) {
    Op* const op = waiting_.front().get();
    if (!post(op)) return;
    op->last_request = pairs_[0].posted();
    message_bytes_ -= op->message.size();
    flying_.push_back(std::move(waiting_.front()));
    waiting_.pop_front();
  }
}

// Posts what there is room for; whether that was the last of it.
bool OutLink::post(Op* op) {
  if (op->is_message) return post_message(op);
  return op->striped ? post_striped(op) : post_pieces(op, &pairs_[0], true);
}

// `whole`: the last piece carries the notice.
bool OutLink::post_pieces(Op* op, QueuePair* qp, bool whole) {
  Batch batch(qp);
  while (op->next < op->pieces.size() && qp->room() > 0) {
    op->started = true;
    const Piece& piece = op->pieces[op->next++];
    const bool last = whole && op->next == op->pieces.size();
    batch.write({piece.local, piece.length, op->lkey}, {op->remote_base + piece.remote, op->rkey},
                last ? &op->notice : nullptr, last);
  }
  if (!batch.flush()) fail_locked(Status::kQueuePair);
  if (state_ != Status::kOk || op->next < op->pieces.size()) return false;
  if (!whole || !op->pieces.empty()) return true;
  if (qp->room() == 0) return false;
  post_notice(op);
  return state_ == Status::kOk;
}

void OutLink::post_notice(Op* op) {
  Batch batch(&pairs_[0]);
  op->started = true;
  batch.write({0, 0, 0}, {op->remote_base, op->rkey}, &op->notice, true);
  if (!batch.flush()) fail_locked(Status::kQueuePair);
}

bool OutLink::nothing_on_its_way() const {
  return std::all_of(pairs_.begin(), pairs_.end(), [](const QueuePair& qp) { return qp.idle(); });
}

// Piece by piece to each queue pair in turn; every one completes by itself, so that the last of
// each queue pair does.
bool OutLink::post_striped(Op* op) {
  if (!op->started && !nothing_on_its_way()) return false;
  op->started = true;
  bool room = true;
  while (room && op->next < op->pieces.size()) {
    room = false;
    for (QueuePair& qp : pairs_) {
      if (op->next == op->pieces.size() || qp.room() == 0) continue;
      room = true;
      const Piece& piece = op->pieces[op->next++];
      Batch batch(&qp);
      batch.write({piece.local, piece.length, op->lkey}, {op->remote_base + piece.remote, op->rkey},
                  nullptr, true);
      if (!batch.flush()) fail_locked(Status::kQueuePair);
      if (state_ != Status::kOk) return false;
    }
  }
  if (op->next < op->pieces.size() || !nothing_on_its_way()) return false;
  post_notice(op);
  return state_ == Status::kOk;
}

bool OutLink::post_message(Op* op) {
  QueuePair& qp = pairs_[0];
  Batch batch(&qp);
  bool last = false;
  while (!last && qp.room() > 0 && chunk_requests_[next_chunk_] <= qp.completed()) {
    op->started = true;
    const size_t length = std::min<size_t>(op->message.size() - op->next, kChunkBytes);
    std::byte* const chunk = chunks_.data() + next_chunk_ * kChunkBytes;
    std::memcpy(chunk, op->message.data() + op->next, length);
    op->next += length;
    last = op->next == op->message.size();
    // A chunk is free again only once its request has completed, so the last of them must tell.
    batch.send(
        {reinterpret_cast<uint64_t>(chunk), static_cast<uint32_t>(length), chunk_memory_.lkey()},
        last, last || next_chunk_ % (kChunks / 4) == 0);
    chunk_requests_[next_chunk_] = qp.posted();
    next_chunk_ = (next_chunk_ + 1) % kChunks;
  }
  if (!batch.flush()) fail_locked(Status::kQueuePair);
  return last && state_ == Status::kOk;
}

int64_t OutLink::expire(int64_t now) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (state_ != Status::kOk) return tcp::kNever;
  if (now < earliest_ns_) return earliest_ns_;
  reap();  // before anything is found to be late
  if (state_ != Status::kOk) return tcp::kNever;
  std::vector<Finished> finished;
  uint64_t late = 0;
  earliest_ns_ = tcp::kNever;
  const auto is_over = [&](const std::unique_ptr<Op>& op) {
    if (op->deadline_ns > now) {
      earliest_ns_ = std::min(earliest_ns_, op->deadline_ns);
      return false;
    }
    // Of a put that has not started nothing arrives later, so it fails alone. No message is passed
    // over in silence.
    const bool alone = !op->is_message && !op->started;
    if (alone) finished.push_back({op->id, Status::kTimeout});
    if (!alone) late = op->serial;
    return alone;
  };
  for (const std::unique_ptr<Op>& op : flying_) is_over(op);
  waiting_.erase(std::remove_if(waiting_.begin(), waiting_.end(), is_over), waiting_.end());
  inbox_->push(finished);
  if (late != 0) fail_locked(Status::kDropped, late);
  return earliest_ns_;
}

void OutLink::fail(Status status) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (state_ != Status::kOk) return;
  reap();  // what had arrived before is done
  fail_locked(status);
}

void OutLink::fail_locked(Status status, uint64_t late) {
  if (state_ != Status::kOk) return;
  state_ = status;
  pairs_.clear();  // from here on the device touches nothing of it
  cq_.reset();
  std::vector<Finished> finished;
  for (std::deque<std::unique_ptr<Op>>* ops : {&flying_, &waiting_}) {
    for (const std::unique_ptr<Op>& op : *ops) {
      if (op->is_message) continue;
      finished.push_back({op->id, op->serial == late ? Status::kTimeout : status});
    }
  }
  flying_.clear();
  waiting_.clear();
  pending_ = false;
  inbox_->push(finished);
  loop_->retire(channel_.end());
  changed_.notify_all();
}

Status OutLink::state() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return state_;
}

bool OutLink::drain(int64_t until_ns) {
  std::unique_lock<std::mutex> lock(mutex_);
  const auto done = [&] { return state_ != Status::kOk || (waiting_.empty() && flying_.empty()); };
  ++draining_;
  advance(true);
  const bool drained = changed_.wait_for(lock, until(until_ns), done);
  --draining_;
  return drained;
}

void OutLink::ready(uint32_t) {
  std::vector<Frame> frames;
  const bool good = channel_.read(&frames);
  for (const Frame& frame : frames) take(frame);
  if (!good) fail(Status::kPeerGone);
}

void OutLink::take(const Frame& frame) {
  Found found{};
  Revoke revoked{};
  if (frame.kind == Kind::kFound && frame.as(&found)) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto asked = questions_.find(found.number);
    if (asked != questions_.end()) asked->second = found;
    changed_.notify_all();
  } else if (frame.kind == Kind::kRevoke && frame.as(&revoked)) {
    revoke(revoked.region);
  } else {
    fail(Status::kMalformed);
  }
}

void OutLink::revoke(uint64_t region) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (state_ != Status::kOk) return;
  targets_[region].closed = true;
  std::vector<Finished> finished;
  for (auto one = waiting_.begin(); one != waiting_.end();) {
    const Op& op = **one;
    const bool refused = !op.is_message && op.region == region && !op.started;
    if (refused) finished.push_back({op.id, Status::kNoRegion});
    one = refused ? waiting_.erase(one) : one + 1;
  }
  inbox_->push(finished);
  revoking_.push_back(region);
  answer_revocations();
  advance(false);
}

bool OutLink::is_pending(uint64_t region) const {
  const auto names = [&](const std::unique_ptr<Op>& op) {
    return !op->is_message && op->region == region;
  };
  return std::any_of(flying_.begin(), flying_.end(), names) ||
         std::any_of(waiting_.begin(), waiting_.end(), names);
}

void OutLink::answer_revocations() {
  const auto answered = [&](uint64_t region) {
    if (is_pending(region)) return false;
    // Where this cannot be sent the connection has ended, which answers it too.
    channel_.write(Kind::kRevoked, Revoke{region});
    return true;
  };
  revoking_.erase(std::remove_if(revoking_.begin(), revoking_.end(), answered), revoking_.end());
}

}  // namespace clover::verbs
