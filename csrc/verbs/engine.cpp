#include "verbs/engine.h"

#include <algorithm>
#include <utility>

namespace clover::verbs {
namespace {

constexpr int64_t kRevokeNs = 1'000'000'000;  // that peers have to finish puts to a region
constexpr size_t kMostEvents = 64;
constexpr int64_t kLeaseNs = 5'000'000;  // that queues stay unarmed for a thread that spun on them

}  // namespace

Engine::Engine(const Settings& settings)
    : context_(settings),
      poller_(context_, {[this](uint64_t link) { completed(link); },
                         [this](ibv_event_type event, uint64_t link) { happened(event, link); },
                         [this](int64_t now) { return turned(now); }}) {}

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
    ++changes_;
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
  ++changes_;
}

uint64_t Engine::add_incoming(tcp::Fd socket) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (closed_ || failed_) return 0;
  const uint64_t id = next_link_++;
  auto link =
      std::make_shared<InLink>(id, context_, poller_.loop(), &receiving_, std::move(socket));
  in_.emplace(id, link);
  ++changes_;
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
  Arrivals arrivals =
      context_.settings().spin_us > 0 ? spin(timeout_ns) : receiving_.inbox.poll(timeout_ns);
  if (arrivals.were_full) {
    for (const std::shared_ptr<InLink>& link : all_incoming()) link->resume();
  }
  for (const shm::Event& event : arrivals.events) {
    if (event.kind != shm::Event::Kind::kGone) continue;
    const std::lock_guard<std::mutex> lock(mutex_);
    in_.erase(event.link);
    ++changes_;
  }
  return arrivals;
}

// Looks at every queue until something is there, and asleep after the time for that. Meanwhile, and
// for a while after it found something, queues are not armed, so that the poller is not woken for
// what this thread sees first.
Arrivals Engine::spin(int64_t timeout_ns) {
  const std::unique_lock<std::mutex> alone(polling_, std::try_to_lock);
  if (!alone.owns_lock()) return receiving_.inbox.poll(timeout_ns);
  const int64_t before = driven_until_ns_.exchange(tcp::kNever);
  const int64_t begun = tcp::now_ns();
  const int64_t until =
      begun + std::min<int64_t>(context_.settings().spin_us * int64_t{1000}, timeout_ns);
  Arrivals arrivals;
  int64_t now = begun;
  do {
    look_at_all();
    arrivals = receiving_.inbox.poll(0);
    now = tcp::now_ns();
  } while (arrivals.empty() && now < until);
  if (arrivals.empty() && now - begun < timeout_ns) {
    driven_until_ns_ = 0;
    arm_all();
    return receiving_.inbox.poll(timeout_ns - (now - begun));
  }
  driven_until_ns_ = now + kLeaseNs;
  if (before == 0) poller_.loop()->post([] {});  // to see when that is over
  return arrivals;
}

void Engine::look_at_all() {
  if (seen_ != changes_) {
    seen_ = changes_;
    seen_out_ = all_outgoing();
    seen_in_ = all_incoming();
  }
  for (const std::shared_ptr<OutLink>& link : seen_out_) link->look();
  for (const std::shared_ptr<InLink>& link : seen_in_) link->look();
}

void Engine::arm_all() {
  for (const std::shared_ptr<OutLink>& link : all_outgoing()) link->progress(true);
  for (const std::shared_ptr<InLink>& link : all_incoming()) link->progress(true);
}

// The poller takes queues back that nobody has looked at for a while.
int64_t Engine::turned(int64_t now) {
  const int64_t next = expire(now);
  int64_t until = driven_until_ns_;
  if (until == 0) return next;
  if (now < until && until != tcp::kNever) return std::min(next, until);
  if (until == tcp::kNever || !driven_until_ns_.compare_exchange_strong(until, 0)) {
    return std::min(next, now + kLeaseNs);
  }
  arm_all();
  return next;
}

void Engine::completed(uint64_t link) {
  // Who stops to look at queues says so, then arms all that are not: either this thread sees the
  // one, or that thread the other.
  if (const std::shared_ptr<OutLink> out = outgoing(link)) {
    out->disarmed();
    out->progress(driven_until_ns_ == 0);
  } else if (const std::shared_ptr<InLink> in = incoming(link)) {
    in->disarmed();
    in->progress(driven_until_ns_ == 0);
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
  ++changes_;
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
