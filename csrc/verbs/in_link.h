// The receiving end of a link: queue pairs that the peer writes through, and what tells of it.
//
// The device writes bytes by itself; here arrive the immediate values of whole puts and the parts
// of messages. Destroying the queue pairs is the fence: nothing the peer has posted is written any
// more. What had completed before is still delivered.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_set>
#include <vector>

#include "shm/inbox.h"
#include "verbs/channel.h"
#include "verbs/context.h"
#include "verbs/memory_region.h"
#include "verbs/queue_pair.h"
#include "verbs/regions.h"
#include "verbs/status.h"

namespace clover::verbs {

// What links that lead in share.
struct Receiving {
  Regions regions;
  shm::Inbox<Status> inbox;
  std::atomic<uint64_t> malformed{0};  // links that were dropped for what they said
};

class InLink : public tcp::Loop::Handler, public std::enable_shared_from_this<InLink> {
 public:
  InLink(uint64_t id, const Context& context, tcp::Loop* loop, Receiving* receiving,
         tcp::Fd socket);

  void start();
  void ready(uint32_t events) override;
  // Looks at completions; `arm`: has the next one wake the poller.
  void progress(bool arm);
  // The poller was woken, which it is once.
  void disarmed();
  // `progress` for a thread that spins: at once, and not at all where another thread does it.
  void look();
  // Gives buffers back to the device after the inbox was full.
  void resume() { progress(false); }
  // Ends it; once this returns nothing is written for it any more.
  void end();
  // Asks the peer not to write to a region any more, where it knows that; `revoked` waits until it
  // says that it will not, or is gone. False: not by `until_ns`.
  void revoke(uint64_t region);
  bool revoked(uint64_t region, int64_t until_ns);

 private:
  void take(const Frame& frame);
  void set_up(const Setup& setup);
  void make_pairs(const Setup& setup);
  void answer(const Find& find);
  void advance(bool arm);
  void reap();
  bool deliver(const ibv_wc& completion);
  bool provide();
  void end_locked();

  const uint64_t id_;
  const Context& context_;
  tcp::Loop* const loop_;
  Receiving* const receiving_;
  Channel channel_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::byte> buffers_;  // for parts of messages; notices use one up as well
  std::unique_ptr<MemoryRegion> memory_;
  OwnedCq cq_;
  bool armed_ = false;                     // the next completion wakes the poller
  std::vector<QueuePair> pairs_;           // go before the queue
  std::vector<uint32_t> free_;             // buffers that the device does not have
  std::string message_;                    // what has arrived of one
  std::unordered_set<uint64_t> granted_;   // regions that the peer may write to
  std::unordered_set<uint64_t> revoking_;  // of them, those that it was asked to leave
  bool ended_ = false;
};

}  // namespace clover::verbs
