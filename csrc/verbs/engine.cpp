#include "verbs/engine.h"

#include <algorithm>
#include <utility>

namespace clover::verbs {
namespace {

constexpr int64_t kRevokeNs = 1'000'000'000;  // that peers have to finish puts to a region
constexpr size_t kMostEvents = 64;

}  // namespace

Engine::Engine(const Settings& settings)
    : context_(settings),
      poller_(context_, {[this](uint64_t link) { completed(link); },
                         [this](ibv_event_type event, uint64_t link) { happened(event, link); },
                         [this](int64_t now) { return expire(now); }}) {}

Engine::~Engine() { close(0); }

void Engine::add_region(uint64_t number, std::byte* base, uint64_t nbytes) {
  receiving_.regions.add(number, std::make_shared<MemoryRegion>(context_, base, nbytes));
}

void Engine::add_dma_buf(uint64_t number, int fd, uint64_t offset, std::byte* base,
                         uint64_t nbytes) {
  receiving_.regions.add(number,
                         std::make_shared<MemoryRegion>(context_, fd, offset, base, nbytes));
}

void Engine::remove_region(uint64_t number) {
  const std::shared_ptr<MemoryRegion> removed = receiving_.regions.remove(number);
  if (removed == nullptr) return;
  const int64_t until = tcp::now_ns() + kRevokeNs;
  const std::vector<std::shared_ptr<InLink>> links = all_incoming();
  for (const std::shared_ptr<InLink>& link : links) link->revoke(number);
  // A peer that does not answer in time may lose its link to a key that is gone: its own fault.
  for (const std::shared_ptr<InLink>& link : links) link->revoked(number, until);
}

Status Engine::add_outgoing(tcp::Fd socket, int64_t deadline_ns, uint64_t* link) {
  uint64_t id = 0;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (closed_) return Status::kClosed;
    if (failed_) return Status::kDevice;
    id = next_link_++;
  }
  auto made =
      std::make_shared<OutLink>(id, context_, poller_.loop(), &receiving_.inbox, std::move(socket));
  const Status status = made->open(deadline_ns);
  if (status != Status::kOk) return status;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    out_.emplace(id, made);
  }
  made->progress(true);  // an event before it stood in the table was nobody's
  *link = id;
  return Status::kOk;
}

void Engine::drop_outgoing(uint64_t link) {
  const std::shared_ptr<OutLink> dropped = outgoing(link);
  if (dropped == nullptr) return;
  dropped->fail(Status::kDropped);
  const std::lock_guard<std::mutex> lock(mutex_);
  out_.erase(link);
}

uint64_t Engine::add_incoming(tcp::Fd socket) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (closed_ || failed_) return 0;
  const uint64_t id = next_link_++;
  auto link =
      std::make_shared<InLink>(id, context_, poller_.loop(), &receiving_, std::move(socket));
  in_.emplace(id, link);
  link->start();
  return id;
}

void Engine::fence_incoming(uint64_t link) {
  const std::shared_ptr<InLink> fenced = incoming(link);
  if (fenced != nullptr) fenced->end();
}

Status Engine::state(uint64_t link) {
  const std::shared_ptr<OutLink> found = outgoing(link);
  return found == nullptr ? Status::kPeerGone : found->state();
}

Status Engine::make_put(uint64_t local, const Slices& slices, const int32_t* index, int64_t rows,
                        Op* op) {
  const auto block_size = static_cast<uint64_t>(context_.settings().block_size);
  if (!verbs::make_put(slices, index, rows, block_size, op)) return Status::kOutOfRange;
  const std::shared_ptr<MemoryRegion> memory = receiving_.regions.find(local);
  if (memory == nullptr) return Status::kLocalMemory;
  op->lkey = memory->lkey();
  return Status::kOk;
}

Status Engine::submit(uint64_t link, std::unique_ptr<Op>* op, int64_t give_up_ns) {
  const std::shared_ptr<OutLink> found = outgoing(link);
  return found == nullptr ? Status::kPeerGone : found->submit(op, give_up_ns);
}

Status Engine::query(uint64_t link, uint64_t region, uint64_t nbytes, int64_t deadline_ns) {
  const std::shared_ptr<OutLink> found = outgoing(link);
  return found == nullptr ? Status::kPeerGone : found->find(region, nbytes, deadline_ns);
}

Arrivals Engine::poll(int64_t timeout_ns) {
  const int64_t spin_ns =
      std::min<int64_t>(context_.settings().spin_us * int64_t{1000}, timeout_ns);
  Arrivals arrivals = spin_ns > 0 ? spin(tcp::now_ns() + spin_ns) : Arrivals();
  if (arrivals.empty()) arrivals = receiving_.inbox.poll(timeout_ns - spin_ns);
  if (arrivals.were_full) {
    for (const std::shared_ptr<InLink>& link : all_incoming()) link->resume();
  }
  for (const shm::Event& event : arrivals.events) {
    if (event.kind != shm::Event::Kind::kGone) continue;
    const std::lock_guard<std::mutex> lock(mutex_);
    in_.erase(event.link);
  }
  return arrivals;
}

// Looks at every queue until something is there. Meanwhile the poller leaves queues unarmed, so
// that it is not woken for what this thread sees first; then they are armed again.
Arrivals Engine::spin(int64_t until_ns) {
  ++spinning_;
  Arrivals arrivals;
  do {
    progress_all(false);
    arrivals = receiving_.inbox.poll(0);
  } while (arrivals.empty() && tcp::now_ns() < until_ns);
  if (--spinning_ == 0) progress_all(true);
  return arrivals;
}

void Engine::progress_all(bool arm) {
  for (const std::shared_ptr<OutLink>& link : all_outgoing()) link->progress(arm);
  for (const std::shared_ptr<InLink>& link : all_incoming()) link->progress(arm);
}

void Engine::completed(uint64_t link) {
  const bool arm = spinning_.load() == 0;
  if (const std::shared_ptr<OutLink> out = outgoing(link)) {
    out->progress(arm);
  } else if (const std::shared_ptr<InLink> in = incoming(link)) {
    in->progress(arm);
  }
}

void Engine::happened(ibv_event_type event, uint64_t link) {
  const std::string port =
      "port " + std::to_string(context_.settings().port) + " of " + context_.device();
  std::string text;
  switch (event) {
    case IBV_EVENT_PORT_ERR:
      text = port + " is down";
      break;
    case IBV_EVENT_PORT_ACTIVE:
      text = port + " is up again";
      break;
    case IBV_EVENT_DEVICE_FATAL:
      text = context_.device() + " has failed or was removed";
      break;
    case IBV_EVENT_QP_FATAL:
    case IBV_EVENT_CQ_ERR:
      if (const std::shared_ptr<OutLink> out = outgoing(link)) out->fail(Status::kQueuePair);
      fence_incoming(link);
      return;
    default:  // of no consequence, or told by completions as well
      return;
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (events_.size() < kMostEvents) events_.push_back(text);
    failed_ = failed_ || event == IBV_EVENT_DEVICE_FATAL;
  }
  if (event != IBV_EVENT_DEVICE_FATAL) return;
  for (const std::shared_ptr<OutLink>& one : all_outgoing()) one->fail(Status::kDevice);
  for (const std::shared_ptr<InLink>& one : all_incoming()) one->end();
}

std::vector<std::string> Engine::take_events() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return std::exchange(events_, {});
}

void Engine::close(int64_t timeout_ns) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (closed_) return;
    closed_ = true;
  }
  const int64_t until = tcp::now_ns() + timeout_ns;
  for (const std::shared_ptr<OutLink>& link : all_outgoing()) link->drain(until);
  for (const std::shared_ptr<OutLink>& link : all_outgoing()) link->fail(Status::kClosed);
  for (const std::shared_ptr<InLink>& link : all_incoming()) link->end();
  poller_.stop();
  const std::lock_guard<std::mutex> lock(mutex_);
  out_.clear();
  in_.clear();
}

std::shared_ptr<OutLink> Engine::outgoing(uint64_t link) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = out_.find(link);
  return found == out_.end() ? nullptr : found->second;
}

std::shared_ptr<InLink> Engine::incoming(uint64_t link) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = in_.find(link);
  return found == in_.end() ? nullptr : found->second;
}

std::vector<std::shared_ptr<OutLink>> Engine::all_outgoing() {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<std::shared_ptr<OutLink>> links;
  for (const auto& one : out_) links.push_back(one.second);
  return links;
}

std::vector<std::shared_ptr<InLink>> Engine::all_incoming() {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<std::shared_ptr<InLink>> links;
  for (const auto& one : in_) links.push_back(one.second);
  return links;
}

int64_t Engine::expire(int64_t now) {
  int64_t next = tcp::kNever;
  for (const std::shared_ptr<OutLink>& link : all_outgoing()) {
    next = std::min(next, link->expire(now));
  }
  return next;
}

}  // namespace clover::verbs
