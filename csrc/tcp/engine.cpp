#include "tcp/engine.h"

#include <algorithm>
#include <utility>

namespace clover::tcp {
namespace {

// Whether `piece` names a slice that lies inside its memory; `offset` is where.
bool slice_at(const int64_t* offsets, int64_t count, int32_t piece, uint64_t length, uint64_t size,
              uint64_t* offset) {
  if (piece < 0 || piece >= count || offsets[piece] < 0) return false;
  *offset = static_cast<uint64_t>(offsets[piece]);
  return length <= size && *offset <= size - length;
}

void append(std::vector<Run>* runs, uint64_t offset, uint64_t length) {
  if (!runs->empty() && runs->back().offset + runs->back().length == offset) {
    runs->back().length += length;
  } else {
    runs->push_back({offset, length});
  }
}

}  // namespace

Engine::Engine(int num_loops) {
  for (int i = 0; i < num_loops; ++i) loops_.push_back(std::make_unique<Loop>());
  for (size_t i = 0; i < loops_.size(); ++i) {
    loops_[i]->start(i == 0 ? [this](int64_t now) { return expire(now); }
                            : std::function<int64_t(int64_t)>());
  }
}

Engine::~Engine() { close(0); }

void Engine::add_region(uint64_t number, std::byte* base, uint64_t nbytes) {
  receiving_.regions.add(number, base, nbytes);
}

void Engine::remove_region(uint64_t number) { receiving_.regions.remove(number); }

uint64_t Engine::add_outgoing(std::vector<Fd> sockets) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (closed_) return 0;
  auto link = std::make_shared<OutLink>(&receiving_.inbox);
  link->start(std::move(sockets), loops_);
  out_.emplace(next_link_, std::move(link));
  return next_link_++;
}

void Engine::drop_outgoing(uint64_t link) {
  const std::shared_ptr<OutLink> dropped = outgoing(link);
  if (dropped == nullptr) return;
  dropped->fail(Status::kDropped);
  const std::lock_guard<std::mutex> lock(mutex_);
  out_.erase(link);
}

uint64_t Engine::add_incoming(const std::string& key, bool first, Fd socket) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto known = keys_.find(key);
  if (closed_ || first != (known == keys_.end())) return 0;
  const uint64_t id = first ? next_link_++ : known->second;
  if (first) {
    in_.emplace(id, std::make_shared<InLink>(id, &receiving_));
    keys_.emplace(key, id);
  }
  Loop* const loop = loops_[next_loop_++ % loops_.size()].get();
  return in_.at(id)->add(std::move(socket), loop) ? id : 0;
}

bool Engine::fence_incoming(uint64_t link, int64_t until_ns) {
  std::shared_ptr<InLink> fenced;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = in_.find(link);
    if (found == in_.end()) return true;
    fenced = found->second;
  }
  return fenced->fence(until_ns);
}

Status Engine::state(uint64_t link) {
  const std::shared_ptr<OutLink> found = outgoing(link);
  return found == nullptr ? Status::kPeerGone : found->state();
}

Status Engine::make_put(const Slices& slices, const int32_t* index, int64_t rows, Op* op) {
  if (slices.length < 0) return Status::kOutOfRange;
  const auto length = static_cast<uint64_t>(slices.length);
  op->kind = Kind::kPut;
  op->region = slices.region;
  const auto base = reinterpret_cast<uint64_t>(slices.base);
  for (int64_t i = 0; i < rows; ++i) {
    uint64_t from = 0;
    uint64_t to = 0;
    if (!slice_at(slices.local, slices.num_local, index[2 * i], length, slices.size, &from) ||
        !slice_at(slices.remote, slices.num_remote, index[2 * i + 1], length, slices.region_size,
                  &to)) {
      return Status::kOutOfRange;
    }
    if (length == 0) continue;
    append(&op->local, base + from, length);
    append(&op->remote, to, length);
    op->total += length;
  }
  op->by_offset = op->remote;
  std::sort(op->by_offset.begin(), op->by_offset.end(),
            [](const Run& a, const Run& b) { return a.offset < b.offset; });
  return Status::kOk;
}

Status Engine::submit(uint64_t link, std::unique_ptr<Op>* op, int64_t give_up_ns) {
  const std::shared_ptr<OutLink> found = outgoing(link);
  if (found == nullptr) return Status::kPeerGone;
  return found->submit(op, give_up_ns);
}

Status Engine::query(uint64_t link, uint64_t region, uint64_t nbytes, int64_t deadline_ns) {
  const std::shared_ptr<OutLink> found = outgoing(link);
  if (found == nullptr) return Status::kPeerGone;
  auto op = std::make_unique<Op>();
  op->kind = Kind::kQuery;
  op->id = next_query_++;
  op->region = region;
  op->total = nbytes;
  op->deadline_ns = deadline_ns;
  return found->ask(std::move(op));
}

Arrivals Engine::poll(int64_t timeout_ns) {
  Arrivals arrivals = receiving_.inbox.poll(timeout_ns);
  if (arrivals.were_full) {
    for (const std::shared_ptr<InLink>& link : all_incoming()) link->resume();
  }
  for (const Event& event : arrivals.events) {
    if (event.kind != Event::Kind::kGone) continue;
    const std::lock_guard<std::mutex> lock(mutex_);
    in_.erase(event.link);
    const auto named = [&](const auto& one) { return one.second == event.link; };
    const auto key = std::find_if(keys_.begin(), keys_.end(), named);
    if (key != keys_.end()) keys_.erase(key);
  }
  return arrivals;
}

void Engine::close(int64_t timeout_ns) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (closed_) return;
    closed_ = true;
  }
  const int64_t until = now_ns() + timeout_ns;
  for (const std::shared_ptr<OutLink>& link : all_outgoing()) link->drain(until);
  for (const std::shared_ptr<OutLink>& link : all_outgoing()) link->fail(Status::kClosed);
  for (const std::shared_ptr<InLink>& link : all_incoming()) link->drop();
  for (const std::unique_ptr<Loop>& loop : loops_) loop->stop();
  for (const std::shared_ptr<InLink>& link : all_incoming()) link->abandon();
  const std::lock_guard<std::mutex> lock(mutex_);
  out_.clear();
  in_.clear();
}

std::shared_ptr<OutLink> Engine::outgoing(uint64_t link) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = out_.find(link);
  return found == out_.end() ? nullptr : found->second;
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
  int64_t next = kNever;
  for (const std::shared_ptr<OutLink>& link : all_outgoing()) {
    next = std::min(next, link->expire(now));
  }
  return next;
}

}  // namespace clover::tcp
