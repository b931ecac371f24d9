#include "verbs/in_link.h"

#include <arpa/inet.h>
#include <sys/epoll.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <utility>

#include "verbs/out_link.h"

namespace clover::verbs {
namespace {

constexpr uint32_t kBuffers = 256;
constexpr size_t kAtOnce = 32;    // buffers, at the least, that the device gets back
constexpr int kCompletions = 32;  // looked at in one call

}  // namespace

InLink::InLink(uint64_t id, const Context& context, tcp::Loop* loop, Receiving* receiving,
               tcp::Fd socket)
    : id_(id), context_(context), loop_(loop), receiving_(receiving), channel_(std::move(socket)) {}

void InLink::start() { loop_->watch(channel_.fd(), EPOLLIN, shared_from_this()); }

void InLink::ready(uint32_t) {
  std::vector<Frame> frames;
  const bool good = channel_.read(&frames);
  for (const Frame& frame : frames) take(frame);
  if (!good) end();
}

void InLink::take(const Frame& frame) {
  Setup setup{};
  Find find{};
  Revoke revoked{};
  if (frame.kind == Kind::kSetup && frame.as(&setup) && setup.count >= 1 &&
      setup.count <= kMostPairs) {
    set_up(setup);
  } else if (frame.kind == Kind::kFind && frame.as(&find)) {
    answer(find);
  } else if (frame.kind == Kind::kRevoked && frame.as(&revoked)) {
    const std::lock_guard<std::mutex> lock(mutex_);
    granted_.erase(revoked.region);
    revoking_.erase(revoked.region);
    changed_.notify_all();
  } else {
    ++receiving_->malformed;
    end();
  }
}

void InLink::set_up(const Setup& setup) {
  std::string problem;
  if (setup.version != kVersion) {
    problem = "it speaks another version of the rdma wire: install the same CloverInfer on both";
  } else {
    try {
      make_pairs(setup);
      progress(true);
      return;
    } catch (const Error& error) {
      problem = error.what();
    }
  }
  channel_.write(Kind::kRefused, problem.data(), std::min<size_t>(problem.size(), 1024));
  end();
}

void InLink::make_pairs(const Setup& setup) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (ended_ || !pairs_.empty()) return;
  buffers_.resize(size_t{kBuffers} * kChunkBytes);
  memory_ = std::make_unique<MemoryRegion>(context_, buffers_.data(), buffers_.size());
  cq_ = context_.make_cq(kBuffers + 1, id_);
  pairs_.reserve(setup.count);
  Setup own{};
  own.version = kVersion;
  own.count = setup.count;
  for (uint32_t i = 0; i < setup.count; ++i) {
    pairs_.emplace_back(context_, cq_.get(), static_cast<int>(i), i == 0 ? kBuffers : 0, id_);
    own.pairs[i] = pairs_[i].info();
  }
  for (uint32_t i = 0; i < kBuffers; ++i) free_.push_back(i);
  if (!provide()) throw Error("the device takes no buffers");
  for (uint32_t i = 0; i < setup.count; ++i) pairs_[i].connect(setup.pairs[i]);
  channel_.write(Kind::kReady, own);
}

void InLink::answer(const Find& find) {
  Found found{find.number, 0, 0, 0};
  const std::lock_guard<std::mutex> lock(mutex_);
  const std::shared_ptr<MemoryRegion> region = receiving_->regions.find(find.region);
  if (region != nullptr && region->nbytes() == find.nbytes) {
    found = {find.number, region->address(), region->rkey(), 1};
    granted_.insert(find.region);
  }
  channel_.write(Kind::kFound, found);
}

void InLink::progress(bool arm) {
  const std::lock_guard<std::mutex> lock(mutex_);
  advance(arm);
}

void InLink::disarmed() {
  const std::lock_guard<std::mutex> lock(mutex_);
  armed_ = false;
}

void InLink::look() {
  const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
  if (lock.owns_lock()) advance(false);
}

void InLink::advance(bool arm) {
  if (ended_ || cq_ == nullptr) return;
  reap();
  if (!arm || armed_ || ended_) return;
  armed_ = ibv_req_notify_cq(cq_.get(), 0) == 0;
  reap();  // what completed between the last look and the arming wakes nobody
}

void InLink::reap() {
  std::array<ibv_wc, kCompletions> completions;
  int count = kCompletions;
  while (count == kCompletions) {
    count = ibv_poll_cq(cq_.get(), kCompletions, completions.data());
    for (int i = 0; i < count; ++i) {
      if (deliver(completions[static_cast<size_t>(i)])) continue;
      end_locked();
      return;
    }
    if (!provide()) count = -1;
  }
  if (count < 0) end_locked();
}

// False where the queue pair has failed, or the peer breaks the rules.
bool InLink::deliver(const ibv_wc& completion) {
  if (completion.status != IBV_WC_SUCCESS) return false;
  const auto buffer = static_cast<uint32_t>(completion.wr_id);
  free_.push_back(buffer);
  const bool immediate = (completion.wc_flags & IBV_WC_WITH_IMM) != 0;
  if (completion.opcode == IBV_WC_RECV_RDMA_WITH_IMM) {
    receiving_->inbox.push({shm::Event::Kind::kNotice, id_, ntohl(completion.imm_data), {}});
    return true;
  }
  if (message_.size() + completion.byte_len > kMaxMessageBytes) {
    ++receiving_->malformed;
    return false;
  }
  const std::byte* const chunk = buffers_.data() + size_t{buffer} * kChunkBytes;
  message_.append(reinterpret_cast<const char*>(chunk), completion.byte_len);
  if (immediate) {
    receiving_->inbox.push({shm::Event::Kind::kMessage, id_, 0, std::move(message_)});
    message_.clear();
  }
  return true;
}

// Hands free buffers to the device, unless so much waits to be polled that the peer should wait:
// its device tries again until there is a buffer.
bool InLink::provide() {
  if (free_.size() < kAtOnce || receiving_->inbox.full()) return true;
  std::array<ibv_recv_wr, kCompletions> requests;
  std::array<ibv_sge, kCompletions> pieces;
  while (!free_.empty()) {
    const size_t count = std::min<size_t>(free_.size(), requests.size());
    for (size_t i = 0; i < count; ++i) {
      const uint32_t buffer = free_.back();
      free_.pop_back();
      std::byte* const chunk = buffers_.data() + size_t{buffer} * kChunkBytes;
      pieces[i] = {reinterpret_cast<uint64_t>(chunk), kChunkBytes, memory_->lkey()};
      ibv_recv_wr* const next = i + 1 < count ? &requests[i + 1] : nullptr;
      requests[i] = {buffer, next, &pieces[i], 1};
    }
    if (!pairs_[0].post_receive(requests.data())) return false;
  }
  return true;
}

void InLink::end() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (ended_) return;
  // What has arrived whole. It may end the link by itself.
  if (cq_ != nullptr) reap();
  end_locked();
}

void InLink::end_locked() {
  if (ended_) return;
  ended_ = true;
  pairs_.clear();
  cq_.reset();
  memory_.reset();
  receiving_->inbox.push({shm::Event::Kind::kGone, id_, 0, {}});
  loop_->retire(channel_.end());
  changed_.notify_all();
}

void InLink::revoke(uint64_t region) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (ended_ || granted_.count(region) == 0) return;
  revoking_.insert(region);
  // Where it cannot be said the connection has ended, which the poller sees.
  channel_.write(Kind::kRevoke, Revoke{region});
}

bool InLink::revoked(uint64_t region, int64_t until_ns) {
  std::unique_lock<std::mutex> lock(mutex_);
  const auto done = [&] { return ended_ || revoking_.count(region) == 0; };
  const auto left = std::chrono::nanoseconds(std::max<int64_t>(until_ns - tcp::now_ns(), 0));
  return changed_.wait_for(lock, left, done);
}

}  // namespace clover::verbs
