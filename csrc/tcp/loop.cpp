#include "tcp/loop.h"

#include <pthread.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <system_error>

namespace clover::tcp {
namespace {

constexpr int64_t kMillisecond = 1'000'000;
constexpr int64_t kLongestWaitMs = 60'000;  // nothing waits for ever

int checked(int fd, const char* what) {
  if (fd < 0) throw std::system_error(errno, std::generic_category(), what);
  return fd;
}

}  // namespace

Fd::~Fd() {
  if (fd_ >= 0) close(fd_);
}

int64_t now_ns() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * int64_t{1'000'000'000} + now.tv_nsec;
}

Loop::Loop()
    : epoll_(checked(epoll_create1(EPOLL_CLOEXEC), "epoll_create1")),
      wake_(checked(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK), "eventfd")) {
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.fd = wake_.get();
  checked(epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, wake_.get(), &event), "epoll_ctl");
}

Loop::~Loop() { stop(); }

void Loop::start(std::function<int64_t(int64_t)> on_turn) {
  on_turn_ = std::move(on_turn);
  // Signals are for the process's own threads.
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  thread_ = std::thread([this] { run(); });
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void Loop::stop() {
  post([this] { stopped_ = true; });
  if (thread_.joinable()) thread_.join();
  handlers_.clear();
  std::vector<std::function<void()>> tasks;  // whose owners may post when they go
  const std::lock_guard<std::mutex> lock(mutex_);
  closed_ = true;
  tasks.swap(tasks_);
  wake_ = Fd();
  epoll_ = Fd();
}

void Loop::post(std::function<void()> task) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (closed_) return;
  tasks_.push_back(std::move(task));
  if (tasks_.size() > 1) return;  // it has been woken
  const uint64_t one = 1;
  // It can only fail where the counter is full, and then the loop is woken anyway.
  if (write(wake_.get(), &one, sizeof(one)) < 0) return;
}

void Loop::watch(int fd, uint32_t events, std::shared_ptr<Handler> handler) {
  post([this, fd, events, handler = std::move(handler)] {
    handlers_[fd] = handler;
    epoll_event event{};
    event.events = events;
    event.data.fd = fd;
    epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event);
  });
}

void Loop::rewatch(int fd, uint32_t events) {
  epoll_event event{};
  event.events = events;
  event.data.fd = fd;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!closed_) epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, fd, &event);
}

void Loop::retire(Fd fd) {
  if (fd.get() < 0) return;
  auto kept = std::make_shared<Fd>(std::move(fd));  // a task must be copyable
  post([this, kept] { handlers_.erase(kept->get()); });
}

void Loop::run_tasks() {
  std::vector<std::function<void()>> tasks;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    tasks.swap(tasks_);
  }
  for (const std::function<void()>& task : tasks) task();
}

int Loop::wait_ms(int64_t due) const {
  if (due == kNever) return kLongestWaitMs;
  const int64_t left = (due - now_ns() + kMillisecond - 1) / kMillisecond;
  return static_cast<int>(std::clamp<int64_t>(left, 0, kLongestWaitMs));
}

void Loop::run() {
  std::array<epoll_event, 64> events{};
  while (!stopped_) {
    const int64_t due = on_turn_ ? on_turn_(now_ns()) : kNever;
    int count = epoll_wait(epoll_.get(), events.data(), events.size(), wait_ms(due));
    // A process that was stopped and goes on is woken without events, maybe after its deadlines:
    // what has arrived meanwhile is read before anything is found to be late.
    if (count <= 0) count = epoll_wait(epoll_.get(), events.data(), events.size(), 0);
    for (int i = 0; i < count; ++i) {
      const int fd = events[i].data.fd;
      if (fd == wake_.get()) {
        uint64_t counter = 0;
        if (read(fd, &counter, sizeof(counter)) < 0) continue;
        continue;
      }
      // A handler that was retired in this round is not there any more.
      const auto found = handlers_.find(fd);
      if (found == handlers_.end()) continue;
      const std::shared_ptr<Handler> handler = found->second;
      handler->ready(events[i].events);
    }
    run_tasks();
  }
}

}  // namespace clover::tcp
