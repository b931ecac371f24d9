#include "tcp/in_link.h"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <utility>

namespace clover::tcp {
namespace {

bool same_op(const FrameHeader& a, const FrameHeader& b) {
  return a.kind == b.kind && a.total == b.total && a.region == b.region && a.notice == b.notice;
}

}  // namespace

bool InLink::add(Fd socket, Loop* loop) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (over()) return false;
  auto connection = std::make_shared<InConnection>(shared_from_this(), loop, std::move(socket));
  loop->watch(connection->number_, EPOLLIN | EPOLLRDHUP, connection);
  if (answering_ == nullptr) answering_ = connection.get();
  connections_.push_back(std::move(connection));
  return true;
}

void InLink::drop() { gone(false); }

bool InLink::fence(int64_t until_ns) {
  drop();
  const std::chrono::nanoseconds most(std::max<int64_t>(until_ns - now_ns(), 0));
  std::unique_lock<std::mutex> lock(mutex_);
  return left_.wait_for(lock, most, [this] { return connections_.empty(); });
}

void InLink::gone(bool malformed) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (over_.exchange(true)) return;
  if (malformed) ++receiving_->malformed;
  // Each connection's own thread sees the end and leaves.
  for (const std::shared_ptr<InConnection>& one : connections_) shutdown(one->number_, SHUT_RDWR);
}

void InLink::left(InConnection* connection) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto mine = [&](const auto& one) { return one.get() == connection; };
  connections_.erase(std::find_if(connections_.begin(), connections_.end(), mine));
  if (connection == answering_) answering_ = nullptr;
  if (!connections_.empty()) return;
  over_ = true;
  ops_.clear();
  left_.notify_all();
  receiving_->inbox.push({Event::Kind::kGone, id_, 0, {}});
}

void InLink::abandon() {
  const std::lock_guard<std::mutex> lock(mutex_);
  connections_.clear();
}

void InLink::resume() {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const std::shared_ptr<InConnection>& one : connections_) {
    one->paused_ = false;
    one->watch();
  }
}

std::shared_ptr<InOp> InLink::begin(const FrameHeader& header) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (header.seq < next_seq_ || header.seq - next_seq_ >= kMaxOpsInFlight) return nullptr;
  const size_t index = header.seq - next_seq_;
  if (index >= ops_.size()) ops_.resize(index + 1);
  std::shared_ptr<InOp>& op = ops_[index];
  if (op == nullptr) {
    op = std::make_shared<InOp>();
    op->first = header;
    if (header.kind == Kind::kMessage) {
      message_bytes_ += header.total;
      if (message_bytes_ > 2 * kMaxMessageBytesInFlight) return nullptr;
      op->message.resize(header.total);
    }
  } else if (!same_op(op->first, header) || header.nbytes == 0) {
    return nullptr;
  }
  op->claimed += header.nbytes;
  const uint64_t most = header.kind == Kind::kQuery ? 0 : header.total;
  return op->claimed <= most ? op : nullptr;
}

void InLink::end(InOp* op, uint64_t nbytes, bool failed) {
  const std::lock_guard<std::mutex> lock(mutex_);
  op->received += nbytes;
  op->failed = op->failed || failed;
  const auto whole = [](const InOp& one) {
    return one.first.kind == Kind::kQuery || one.received == one.first.total;
  };
  while (!ops_.empty() && ops_[0] != nullptr && whole(*ops_[0])) {
    deliver(ops_[0].get());
    ops_.pop_front();
    ++next_seq_;
  }
}

// In the order of the ops; whatever a put has written is visible to who takes its notice from the
// inbox, whose lock orders both.
void InLink::deliver(InOp* op) {
  switch (op->first.kind) {
    case Kind::kPut:
      if (!op->failed) {
        receiving_->inbox.push({Event::Kind::kNotice, id_, op->first.notice, {}});
      }
      break;
    case Kind::kMessage:
      message_bytes_ -= op->message.size();
      receiving_->inbox.push({Event::Kind::kMessage, id_, 0, std::move(op->message)});
      break;
    case Kind::kQuery: {
      const std::shared_ptr<Region> region = receiving_->regions.find(op->first.region);
      op->failed = region == nullptr || region->nbytes() != op->first.total;
      break;
    }
  }
  if (!op->failed) return;
  const Answer answer{kAnswerMagic, Outcome::kNoRegion, next_seq_};
  unsent_.append(reinterpret_cast<const char*>(&answer), sizeof(answer));
}

void InLink::answer() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!answer_blocked_) send_answers();
}

void InLink::send_answers() {
  if (answering_ == nullptr) return;
  if (answered_ < next_seq_) {
    const Answer answer{kAnswerMagic, Outcome::kDone, next_seq_ - 1};
    unsent_.append(reinterpret_cast<const char*>(&answer), sizeof(answer));
    answered_ = next_seq_;
  }
  if (unsent_.empty()) return;
  const ssize_t sent =
      send(answering_->number_, unsent_.data(), unsent_.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  // A broken connection shows itself to its reader.
  unsent_.erase(0, static_cast<size_t>(std::max<ssize_t>(sent, 0)));
  const bool blocked = !unsent_.empty();
  if (blocked != answer_blocked_.exchange(blocked)) answering_->watch();
}

}  // namespace clover::tcp
