#include "shm/mailbox.h"

#include <chrono>
#include <new>

namespace clover::shm {
namespace {

constexpr uint32_t kVersion = 1;

bool closed(const MailboxHeader* mailbox) {
  // Acquire pairs with the release store in Mailbox::close().
  return mailbox->closed.load(std::memory_order_acquire) != 0;
}

class Deadline {
 public:
  explicit Deadline(int64_t timeout_ns)
      : end_(std::chrono::steady_clock::now() + std::chrono::nanoseconds(timeout_ns)) {}
  int64_t left_ns() const {
    const auto left = end_ - std::chrono::steady_clock::now();
    return std::chrono::duration_cast<std::chrono::nanoseconds>(left).count();
  }

 private:
  std::chrono::steady_clock::time_point end_;
};

// Sleeps on the ring's `space` until `ready` no longer says kTimeout. A signal does not end it, so
// callers wait in short slices, which they need anyway to see whether the receiver still lives.
template <typename Ready>
Status wait_for_space(MailboxHeader* mailbox, RingWriter* ring, int64_t timeout_ns, Ready ready) {
  const Deadline deadline(timeout_ns);
  Bell& space = ring->space();
  for (;;) {
    const uint32_t ticket = space.arm();
    const Status status = closed(mailbox) ? Status::kClosed : ready();
    const int64_t left = deadline.left_ns();
    if (status == Status::kTimeout && left > 0) space.sleep(ticket, left);
    space.disarm();
    if (status != Status::kTimeout || left <= 0) return status;
  }
}

}  // namespace

Status format_mailbox(std::byte* memory, size_t size, int64_t pid, uint64_t start_time) {
  if (size < sizeof(MailboxHeader)) return Status::kMalformed;
  auto* header = new (memory) MailboxHeader{};
  header->version = kVersion;
  header->pid = pid;
  header->start_time = start_time;
  header->magic = MailboxHeader::kMagic;
  return Status::kOk;
}

MailboxHeader* mailbox_in(std::byte* memory, size_t size) {
  if (size < sizeof(MailboxHeader)) return nullptr;
  auto* header = reinterpret_cast<MailboxHeader*>(memory);
  return header->magic == MailboxHeader::kMagic && header->version == kVersion ? header : nullptr;
}

void announce_ring(MailboxHeader* mailbox) {
  // Release pairs with the acquire load in Mailbox::announced().
  mailbox->announced.fetch_add(1, std::memory_order_release);
  mailbox->bell.ring();
}

Status push(MailboxHeader* mailbox, RingWriter* ring, const Outgoing& record, int64_t timeout_ns) {
  const auto attempt = [&] { return ring->try_push(record); };
  Status status = closed(mailbox) ? Status::kClosed : attempt();
  if (status == Status::kTimeout) status = wait_for_space(mailbox, ring, timeout_ns, attempt);
  if (status == Status::kOk) mailbox->bell.ring();
  return status;
}

Status wait_consumed(MailboxHeader* mailbox, RingWriter* ring, uint64_t position,
                     int64_t timeout_ns) {
  return wait_for_space(mailbox, ring, timeout_ns, [&] {
    return ring->consumed() >= position ? Status::kOk : Status::kTimeout;
  });
}

Status Sender::push(const Outgoing& record, int64_t timeout_ns) {
  std::lock_guard<std::mutex> lock(mutex_);
  return shm::push(mailbox_, &writer_, record, timeout_ns);
}

Status Sender::wait_consumed(uint64_t position, int64_t timeout_ns) {
  std::lock_guard<std::mutex> lock(mutex_);
  return shm::wait_consumed(mailbox_, &writer_, position, timeout_ns);
}

int Mailbox::add_ring(RingHeader* ring) {
  rings_.emplace(next_ring_, RingReader(ring));
  return next_ring_++;
}

void Mailbox::remove_ring(int ring) {
  malformed_gone_ += rings_.at(ring).malformed();
  rings_.erase(ring);
}

bool Mailbox::finished(int ring, bool sender_died) const {
  for (const Record& record : kept_)
    if (record.ring == ring) return false;
  return rings_.at(ring).finished(sender_died);
}

std::vector<Record> Mailbox::poll(int64_t timeout_ns) {
  if (kept_.empty()) return poll_new(timeout_ns);
  std::vector<Record> records = std::move(kept_);
  kept_.clear();
  for (Record& record : drain()) records.push_back(std::move(record));
  return records;
}

std::vector<Record> Mailbox::poll_new(int64_t timeout_ns) {
  std::vector<Record> records = drain();
  if (!records.empty() || timeout_ns <= 0 || announced()) return records;
  const Deadline deadline(timeout_ns);
  Bell& bell = header_->bell;
  const uint32_t ticket = bell.arm();
  records = drain();
  const int64_t left = deadline.left_ns();
  if (records.empty() && !announced() && left > 0) {
    bell.sleep(ticket, left);
    records = drain();
  }
  bell.disarm();
  return records;
}

std::vector<Record> Mailbox::drain() {
  std::vector<Record> records;
  for (auto& [id, ring] : rings_) ring.drain(id, &records);
  return records;
}

bool Mailbox::take_announcement() {
  const bool fresh = announced();
  seen_ = header_->announced.load(std::memory_order_acquire);
  return fresh;
}

uint64_t Mailbox::malformed() const {
  uint64_t sum = malformed_gone_;
  for (const auto& [id, ring] : rings_) sum += ring.malformed();
  return sum;
}

void Mailbox::close() {
  // Release pairs with the acquire load in closed(). A sender that looked before this store and
  // sleeps since is woken; one whose ring was never added wakes at the end of its slice.
  header_->closed.store(1, std::memory_order_release);
  for (auto& [id, ring] : rings_) ring.space().ring();
}

}  // namespace clover::shm
