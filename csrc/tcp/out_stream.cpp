#include "tcp/out_stream.h"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cassert>
#include <cerrno>
#include <cstring>
#include <utility>

namespace clover::tcp {
namespace {

constexpr size_t kHeadBytes = 64 << 10;  // of one batch
constexpr size_t kBatchBytes = 512 << 10;
constexpr size_t kBatchPieces = 1024;  // IOV_MAX

}  // namespace

OutStream::OutStream(std::weak_ptr<OutLink> link, Loop* loop, Fd socket, bool answers)
    : link_(std::move(link)),
      loop_(loop),
      number_(socket.get()),
      socket_(std::move(socket)),
      answers_(answers) {
  heads_.reserve(kHeadBytes);  // never grows: pieces_ point into it
}

bool OutStream::batch_has_room() const {
  return batch_bytes_ < kBatchBytes && heads_.size() + kMaxHeadBytes <= kHeadBytes &&
         pieces_.size() + 1 + kMaxRuns <= kBatchPieces;
}

void OutStream::begin_batch() {
  assert(!writing());
  for (Op* op : batch_) --op->frames_out;
  batch_.clear();
  heads_.clear();
  pieces_.clear();
  at_ = 0;
  batch_bytes_ = 0;
}

void OutStream::add(const FrameHeader& header, const std::vector<Run>& remote,
                    const std::vector<Run>& local, Op* op) {
  const size_t begin = heads_.size();
  const auto append = [this](const void* bytes, size_t nbytes) {
    const char* const from = static_cast<const char*>(bytes);
    heads_.insert(heads_.end(), from, from + nbytes);
  };
  append(&header, sizeof(header));
  append(remote.data(), remote.size() * sizeof(Run));
  char* const head = heads_.data() + begin;
  const size_t head_bytes = heads_.size() - begin;
  // Heads of frames without payload adjoin: one piece.
  if (!pieces_.empty() &&
      static_cast<char*>(pieces_.back().iov_base) + pieces_.back().iov_len == head) {
    pieces_.back().iov_len += head_bytes;
  } else {
    pieces_.push_back({head, head_bytes});
  }
  for (const Run& run : local) {
    pieces_.push_back({reinterpret_cast<void*>(run.offset), static_cast<size_t>(run.length)});
  }
  batch_bytes_ += header.nbytes;
  batch_.push_back(op);
  ++op->frames_out;
}

ssize_t OutStream::write_some() {
  msghdr message{};
  message.msg_iov = pieces_.data() + at_;
  message.msg_iovlen = std::min(pieces_.size() - at_, kBatchPieces);
  const ssize_t written = sendmsg(number_, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  return written < 0 ? -errno : written;
}

void OutStream::advance(size_t written) {
  while (written > 0) {
    iovec& piece = pieces_[at_];
    const size_t step = std::min(written, piece.iov_len);
    piece.iov_base = static_cast<char*>(piece.iov_base) + step;
    piece.iov_len -= step;
    written -= step;
    if (piece.iov_len == 0) ++at_;
  }
  if (!writing()) begin_batch();  // lets go of the ops
}

void OutStream::retire(bool reset) {
  if (reset) {
    const linger at_once{1, 0};
    setsockopt(number_, SOL_SOCKET, SO_LINGER, &at_once, sizeof(at_once));
  }
  loop_->retire(std::move(socket_));
}

void OutStream::ready(uint32_t events) {
  const std::shared_ptr<OutLink> link = link_.lock();
  if (link == nullptr) return;
  if ((events & ~static_cast<uint32_t>(EPOLLOUT)) != 0) read_answers();
  if ((events & EPOLLOUT) == 0) return;
  {
    const std::lock_guard<std::mutex> lock(link->mutex_);
    blocked = false;
  }
  link->pump(this);
}

void OutStream::read_answers() {
  const std::shared_ptr<OutLink> link = link_.lock();
  while (!link->failed()) {
    const ssize_t count =
        recv(number_, unread_.data() + unread_bytes_, unread_.size() - unread_bytes_, MSG_DONTWAIT);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0 && errno == EAGAIN) return;
    if (count <= 0) return link->fail(Status::kPeerGone);
    if (!answers_) return link->fail(Status::kMalformed);
    unread_bytes_ += static_cast<size_t>(count);
    size_t begin = 0;
    for (; unread_bytes_ - begin >= sizeof(Answer); begin += sizeof(Answer)) {
      Answer answer;
      std::memcpy(&answer, unread_.data() + begin, sizeof(answer));
      link->take_answer(answer);
    }
    unread_bytes_ -= begin;
    std::memmove(unread_.data(), unread_.data() + begin, unread_bytes_);
  }
}

}  // namespace clover::tcp
