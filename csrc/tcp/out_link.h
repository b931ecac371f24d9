// The sending end of a link: puts, messages and queries to one peer, over several connections.
//
// An op of many frames is spread: each goes to whichever connection has room. An op of one frame
// takes the first connection. So that later puts overwrite earlier ones and never the reverse, an
// op waits while a spread one, or it being spread itself any one, still writes to the same bytes.
// An op is done once the peer has answered that everything is in its memory. A link that failed
// stays failed, and everything pending on it fails at once: what was lost is never passed over in
// silence.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "tcp/frame.h"
#include "tcp/inbox.h"
#include "tcp/loop.h"
#include "tcp/status.h"

namespace clover::tcp {

struct Op {
  Kind kind = Kind::kPut;
  uint64_t id = 0;  // what Finished calls a put; queries are numbered apart
  uint64_t total = 0;
  uint64_t region = 0;
  uint32_t notice = 0;
  int64_t deadline_ns = kNever;
  std::vector<Run> local;   // addresses; the memory stays as it is until the op is done
  std::vector<Run> remote;  // offsets in the region
  std::string message;

  // The link's own from here on.
  bool spread = false;         // of more than one frame
  bool started = false;        // some of it may be on its way
  std::vector<Run> by_offset;  // of a put: remote, sorted
  uint64_t seq = 0;            // once started
  uint64_t handed = 0;         // bytes given to connections
  Cursor local_at;
  Cursor remote_at;
  int frames_out = 0;  // frames that connections have not written whole
  Status status = Status::kOk;
};

class OutStream;

class OutLink : public std::enable_shared_from_this<OutLink> {
 public:
  explicit OutLink(Inbox* inbox) : inbox_(inbox) {}

  // Takes over connected, non-blocking sockets; stream i belongs to loop i modulo their number.
  void start(std::vector<Fd> sockets, const std::vector<std::unique_ptr<Loop>>& loops);

  // Waits for room until `give_up_ns`; kTimeout leaves `op` with the caller, kOk takes it.
  Status submit(std::unique_ptr<Op>* op, int64_t give_up_ns);
  // The same, and waits for the outcome of an op that Inbox is not told of.
  Status ask(std::unique_ptr<Op> op);

  // Fails what is past its deadline; returns the next deadline.
  int64_t expire(int64_t now);
  void fail(Status status);
  // Why the link is of no use; kOk while it is, as far as this side has heard.
  Status state();
  // Waits until nothing is pending; false where something still is at `until_ns`.
  bool drain(int64_t until_ns);

 private:
  friend class OutStream;

  void pump(OutStream* stream);
  bool fill(OutStream* stream);
  bool may_start(const Op& op);
  void start(Op* op);
  void nudge(const std::shared_ptr<OutStream>& stream);
  void add_frame(OutStream* stream, Op* op);
  void write(OutStream* stream, std::unique_lock<std::mutex>* lock);
  void kick(const Op& op, std::unique_lock<std::mutex>* lock);
  bool failed();
  void take_answer(const Answer& answer);
  void reap();
  void finish(std::unique_ptr<Op> op, Status status, std::vector<Finished>* finished);
  void fail_locked(Status status);
  void settle_failed();
  bool has_room(const Op& op) const;

  Inbox* const inbox_;
  std::mutex mutex_;
  std::condition_variable changed_;  // room for an op, or an answer
  std::vector<std::shared_ptr<OutStream>> streams_;
  std::deque<std::unique_ptr<Op>> ops_;  // in order; the first next_ are handed out whole
  size_t next_ = 0;
  std::vector<Op*> spread_;  // started and not answered
  bool held_ = false;        // the next op waits for answers to those before it
  uint64_t next_seq_ = 0;
  uint64_t answered_ = 0;  // ops below it are in the peer's memory
  uint64_t message_bytes_ = 0;
  int64_t earliest_ns_ = kNever;  // no pending op's deadline is before it
  Status state_ = Status::kOk;
  bool settled_ = false;  // failed, and everything that was pending was told
  std::deque<std::pair<uint64_t, Status>> asked_;  // outcomes that ask() has not fetched yet
};

}  // namespace clover::tcp
