// An endpoint's mailbox: where its senders announce their rings and wake it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

#include "shm/bell.h"
#include "shm/ring.h"
#include "shm/status.h"

namespace clover::shm {

struct MailboxHeader {
  static constexpr uint32_t kMagic = 0x4d564c43;  // "CLVM"

  uint32_t magic;
  uint32_t version;
  int64_t pid;          // of the owner
  uint64_t start_time;  // of the owner's process, in clock ticks since boot: pids are used again
  std::atomic<uint32_t> closed;     // stored by the owner, once
  std::atomic<uint64_t> announced;  // rings that senders have made; only the change matters
  alignas(64) Bell bell;            // the owner sleeps here, senders ring
};

Status format_mailbox(std::byte* memory, size_t size, int64_t pid, uint64_t start_time);

// The mailbox in this memory, or nullptr where there is none.
MailboxHeader* mailbox_in(std::byte* memory, size_t size);

// A sender tells the owner that a new ring can be found by its name.
void announce_ring(MailboxHeader* mailbox);

// Pushes, waiting up to `timeout_ns` for room.
Status push(MailboxHeader* mailbox, RingWriter* ring, const Outgoing& record, int64_t timeout_ns);

// Waits until the receiver has read up to `position`.
Status wait_consumed(MailboxHeader* mailbox, RingWriter* ring, uint64_t position,
                     int64_t timeout_ns);

constexpr uint32_t kNotice = 1;  // kind of a record whose value is all that it says

// The sending end of one ring into one mailbox, for any number of threads.
class Sender {
 public:
  Sender(MailboxHeader* mailbox, RingHeader* ring) : mailbox_(mailbox), writer_(ring) {}

  Status push(const Outgoing& record, int64_t timeout_ns);
  Status wait_consumed(uint64_t position, int64_t timeout_ns);
  uint64_t position() const { return writer_.position(); }
  bool peer_closed() const { return mailbox_->closed.load(std::memory_order_acquire) != 0; }
  void announce() { announce_ring(mailbox_); }
  void close() { writer_.close(); }

 private:
  MailboxHeader* mailbox_;
  RingWriter writer_;
  std::mutex mutex_;  // of writing to the ring
};

// The owner's end; one thread.
class Mailbox {
 public:
  explicit Mailbox(MailboxHeader* header) : header_(header) {}

  int add_ring(RingHeader* ring);
  void remove_ring(int ring);
  // Not as long as something of it is kept.
  bool finished(int ring, bool sender_died) const;

  // What was kept and what has arrived, waiting up to `timeout_ns` for the first of it. Returns
  // early, with nothing, after a signal and when a ring has been announced.
  std::vector<Record> poll(int64_t timeout_ns);

  // The same without what was kept, for a reader that keeps what is not for it.
  std::vector<Record> poll_new(int64_t timeout_ns);
  void keep(Record record) { kept_.push_back(std::move(record)); }
  // Whether there is something for `poll`, or an announcement to take.
  bool has_more() const { return !kept_.empty() || announced(); }

  // Whether rings were announced since the last call; look for them after it, not before.
  bool take_announcement();
  uint64_t malformed() const;
  void close();

 private:
  std::vector<Record> drain();
  bool announced() const {
    // Acquire pairs with the release in announce_ring(): the ring's file is there to be found.
    return header_->announced.load(std::memory_order_acquire) != seen_;
  }

  MailboxHeader* header_;
  std::map<int, RingReader> rings_;
  std::vector<Record> kept_;
  int next_ring_ = 0;
  uint64_t seen_ = 0;
  uint64_t malformed_gone_ = 0;  // of rings that were removed
};

}  // namespace clover::shm
