// The sending end of a link: puts and messages to one peer, over several queue pairs.
//
// The first queue pair carries notices, messages and ordinary puts, in order. A put of kStripeBytes
// and more is spread over all of them: it starts when nothing is on its way, and its notice is
// posted once all its bytes are there, as queue pairs are not ordered among each other. What finds
// no room in the queues waits here. A completion means that the bytes are in the peer's memory. A
// link that failed stays failed, and everything pending on it fails at once, when the queue pairs
// are gone: the device then neither reads local memory for it nor sends any more.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "shm/inbox.h"
#include "verbs/channel.h"
#include "verbs/context.h"
#include "verbs/memory_region.h"
#include "verbs/op.h"
#include "verbs/queue_pair.h"
#include "verbs/status.h"

namespace clover::verbs {

using Inbox = shm::Inbox<Status>;
using Finished = shm::Finished<Status>;

constexpr uint64_t kStripeBytes = 4 << 20;
constexpr uint32_t kChunkBytes = 8192;  // of a message: size of the peer's buffers
constexpr uint64_t kMaxMessageBytes = 64 << 20;

class OutLink : public tcp::Loop::Handler, public std::enable_shared_from_this<OutLink> {
 public:
  // Error where the device has no queue pairs for it.
  OutLink(uint64_t id, const Context& context, tcp::Loop* loop, Inbox* inbox, tcp::Fd socket);

  // Brings the queue pairs up with the peer's; Error says why it refused.
  Status open(int64_t deadline_ns);

  // Waits for room until `give_up_ns`; kTimeout leaves `op` with the caller, kOk takes it.
  Status submit(std::unique_ptr<Op>* op, int64_t give_up_ns);
  // kOk where the peer has this region of this size.
  Status find(uint64_t region, uint64_t nbytes, int64_t deadline_ns);

  // Looks at completions; `arm`: has the next one wake the poller.
  void progress(bool arm);
  // The poller was woken, which it is once.
  void disarmed();
  // `progress` for a thread that spins: at once, and not at all where nothing is pending or another
  // thread is at it.
  void look();
  // The control connection has something to read, or has ended.
  void ready(uint32_t events) override;
  // Fails what is past its deadline; returns the next deadline.
  int64_t expire(int64_t now);
  void fail(Status status);
  Status state();
  // Waits until nothing is pending; false where something still is at `until_ns`.
  bool drain(int64_t until_ns);

 private:
  struct Target {
    uint64_t address;
    uint64_t nbytes;
    uint32_t rkey;
    bool closed;
  };

  Status find_locked(std::unique_lock<std::mutex>* lock, const Find& wanted, int64_t deadline_ns);
  void advance(bool arm);
  void reap();
  void pump();
  bool post(Op* op);
  bool post_pieces(Op* op, QueuePair* qp, bool whole);
  bool post_striped(Op* op);
  bool post_message(Op* op);
  void post_notice(Op* op);
  bool nothing_on_its_way() const;
  Status resolve(std::unique_lock<std::mutex>* lock, Op* op, int64_t deadline_ns);
  void take(const Frame& frame);
  void revoke(uint64_t region);
  bool is_pending(uint64_t region) const;
  void answer_revocations();
  void fail_locked(Status status, uint64_t late = 0);
  bool has_room(const Op& op) const;

  const uint64_t id_;
  const Context& context_;
  tcp::Loop* const loop_;
  Inbox* const inbox_;
  Channel channel_;
  std::atomic<int> submitting_{0};    // threads that want the mutex: who spins lets them have it
  std::atomic<bool> pending_{false};  // whether any op is; written under the mutex
  std::mutex mutex_;
  std::condition_variable changed_;  // room for an op, or an answer
  std::vector<std::byte> chunks_;    // messages as they are sent
  MemoryRegion chunk_memory_;
  std::vector<uint64_t> chunk_requests_;  // the request that reads each chunk last
  size_t next_chunk_ = 0;
  OwnedCq cq_;
  bool armed_ = false;                       // the next completion wakes the poller
  std::vector<QueuePair> pairs_;             // go before the queue
  std::deque<std::unique_ptr<Op>> waiting_;  // in order; only the first may have started
  std::deque<std::unique_ptr<Op>> flying_;   // posted whole
  uint64_t message_bytes_ = 0;               // in waiting_
  std::unordered_map<uint64_t, Target> targets_;
  std::unordered_map<uint64_t, Found> questions_;  // number 0: not answered yet
  uint64_t next_question_ = 1;
  uint64_t next_serial_ = 1;
  int64_t earliest_ns_ = tcp::kNever;  // no pending op's deadline is before it
  std::vector<uint64_t> revoking_;     // regions whose owner waits for our last put to them
  int draining_ = 0;                   // threads that wait until nothing is pending
  Status state_ = Status::kOk;
};

}  // namespace clover::verbs
