// A thread that waits on sockets and runs what they and others ask of it.
#pragma once

#include <sys/uio.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

namespace clover::tcp {

// A file descriptor, closed with its owner.
class Fd {
 public:
  explicit Fd(int fd = -1) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Fd();
  int get() const { return fd_; }

 private:
  int fd_;
};

// Nanoseconds on the monotonic clock.
int64_t now_ns();

constexpr int64_t kNever = INT64_MAX;

class Loop {
 public:
  class Handler {
   public:
    virtual ~Handler() = default;
    virtual void ready(uint32_t events) = 0;
  };

  Loop();
  ~Loop();
  Loop(const Loop&) = delete;
  Loop& operator=(const Loop&) = delete;

  // `on_turn`, where given, runs whenever the loop turns and at the time that it returned last.
  void start(std::function<int64_t(int64_t now)> on_turn);
  void stop();

  // From any thread: runs `task` in the loop's thread, or drops it where that has ended.
  void post(std::function<void()> task);
  // The events of `fd` go to `handler` until the fd is retired.
  void watch(int fd, uint32_t events, std::shared_ptr<Handler> handler);
  void rewatch(int fd, uint32_t events);
  // Closes `fd` in the loop's thread, after which its number may mean another.
  void retire(Fd fd);

 private:
  void run();
  void run_tasks();
  int wait_ms(int64_t due) const;

  Fd epoll_;
  Fd wake_;
  std::thread thread_;
  std::function<int64_t(int64_t)> on_turn_;
  std::unordered_map<int, std::shared_ptr<Handler>> handlers_;  // of the loop's thread
  std::mutex mutex_;
  std::vector<std::function<void()>> tasks_;
  bool stopped_ = false;  // of the loop's thread
  bool closed_ = false;   // the descriptors are not there any more
};

}  // namespace clover::tcp
