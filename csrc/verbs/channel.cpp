#include "verbs/channel.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace clover::verbs {
namespace {

constexpr uint32_t kMagic = 0x52564c43;  // "CLVR"
constexpr uint32_t kMostBytes = 4096;    // of a payload

struct Head {
  uint32_t magic;
  Kind kind;
  uint32_t nbytes;
};

}  // namespace

int Channel::fd() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return socket_.get();
}

bool Channel::take(Frame* frame, bool* good) {
  Head head;
  if (read_.size() < sizeof(head)) return false;
  std::memcpy(&head, read_.data(), sizeof(head));
  if (head.magic != kMagic || head.nbytes > kMostBytes) {
    *good = false;
    return false;
  }
  if (read_.size() < sizeof(head) + head.nbytes) return false;
  frame->kind = head.kind;
  frame->payload = read_.substr(sizeof(head), head.nbytes);
  read_.erase(0, sizeof(head) + head.nbytes);
  return true;
}

bool Channel::read(std::vector<Frame>* frames) {
  bool good = true;
  char bytes[4096];
  while (good) {
    const ssize_t count = recv(fd(), bytes, sizeof(bytes), MSG_DONTWAIT);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) break;
    if (count <= 0) good = false;
    if (count > 0) read_.append(bytes, static_cast<size_t>(count));
    Frame frame;
    while (take(&frame, &good)) frames->push_back(std::move(frame));
  }
  return good;
}

Status Channel::wait(Frame* frame, int64_t deadline_ns) {
  while (true) {
    bool good = true;
    if (take(frame, &good)) return Status::kOk;
    if (!good) return Status::kMalformed;
    const int64_t left = deadline_ns - tcp::now_ns();
    if (left <= 0) return Status::kTimeout;
    pollfd waiting{socket_.get(), POLLIN, 0};
    const int64_t most_ms = 1000;
    ::poll(&waiting, 1, static_cast<int>(std::min(left / 1'000'000 + 1, most_ms)));
    char bytes[4096];
    const ssize_t count = recv(socket_.get(), bytes, sizeof(bytes), MSG_DONTWAIT);
    if (count > 0) read_.append(bytes, static_cast<size_t>(count));
    const bool later = count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR);
    if (count <= 0 && !later) return Status::kPeerGone;
  }
}

bool Channel::write(Kind kind, const void* payload, size_t nbytes) {
  const Head head{kMagic, kind, static_cast<uint32_t>(nbytes)};
  std::string bytes(reinterpret_cast<const char*>(&head), sizeof(head));
  bytes.append(static_cast<const char*>(payload), nbytes);
  const std::lock_guard<std::mutex> lock(mutex_);
  if (socket_.get() < 0) return false;
  // Frames are few and small: where the socket has no room for one the other side has long stopped
  // to read.
  const ssize_t sent =
      ::send(socket_.get(), bytes.data(), bytes.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
  return sent == static_cast<ssize_t>(bytes.size());
}

tcp::Fd Channel::end() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (socket_.get() >= 0) shutdown(socket_.get(), SHUT_RDWR);
  return std::move(socket_);
}

}  // namespace clover::verbs
