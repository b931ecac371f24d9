// The receiving end of a link: its connections, and the ops that have begun to arrive.
//
// Nothing is believed: every number in a frame is checked against the link's state and the
// registered regions before a byte is written. A peer that breaks a rule loses its link.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "tcp/frame.h"
#include "tcp/inbox.h"
#include "tcp/loop.h"
#include "tcp/regions.h"

namespace clover::tcp {

// What the links of an endpoint share.
struct Receiving {
  Regions regions;
  Inbox inbox;
  std::atomic<uint64_t> malformed{0};  // links dropped for what they sent
};

// An op of which at least one frame has begun.
struct InOp {
  FrameHeader first;
  uint64_t claimed = 0;   // bytes of payload that frames have announced
  uint64_t received = 0;  // bytes of payload that are in place
  bool failed = false;    // its region is closed or unknown; what still comes is thrown away
  std::string message;
};

class InConnection;

class InLink : public std::enable_shared_from_this<InLink> {
 public:
  InLink(uint64_t id, Receiving* receiving) : id_(id), receiving_(receiving) {}

  uint64_t id() const { return id_; }

  // Takes over a connected, non-blocking socket. False if the link is over.
  bool add(Fd socket, Loop* loop);
  // Ends all connections. What is in their threads' hands is over once Inbox tells kGone.
  void drop();
  // Ends them and waits until their threads have left every one: once it is true, nothing is
  // written for the link any more, and what its sockets still held is thrown away. False: not yet
  // at `until_ns`.
  bool fence(int64_t until_ns);
  // Lets go of the connections, whose threads have ended.
  void abandon();
  // Reads on after the inbox was full.
  void resume();
  bool over() const { return over_.load(std::memory_order_relaxed); }

 private:
  friend class InConnection;

  // The op of a new frame; nullptr where the header contradicts what came before.
  std::shared_ptr<InOp> begin(const FrameHeader& header);
  // `nbytes` more of the op are in place.
  void end(InOp* op, uint64_t nbytes, bool failed);
  void deliver(InOp* op);
  // Tells the sender what has been delivered since the last time.
  void answer();
  void send_answers();
  void gone(bool malformed);
  void left(InConnection* connection);

  const uint64_t id_;
  Receiving* const receiving_;
  std::atomic<bool> over_{false};
  std::mutex mutex_;
  std::condition_variable left_;  // no connection is left
  std::vector<std::shared_ptr<InConnection>> connections_;
  InConnection* answering_ = nullptr;      // the first connection
  std::deque<std::shared_ptr<InOp>> ops_;  // from next_seq_ on; nullptr: not begun
  uint64_t next_seq_ = 0;                  // to be delivered next
  uint64_t answered_ = 0;                  // answers below it are in unsent_ or sent
  uint64_t message_bytes_ = 0;             // of messages that have begun
  std::string unsent_;                     // answers that the socket has not taken
  std::atomic<bool> answer_blocked_{false};
};

// One connection of an InLink; everything runs in its loop's thread.
class InConnection : public Loop::Handler {
 public:
  InConnection(std::shared_ptr<InLink> link, Loop* loop, Fd socket);

  void ready(uint32_t events) override;

 private:
  friend class InLink;

  enum class End { kDrained, kMore, kOver, kMalformed };

  void read();
  End read_once();
  End read_head();
  End read_payload();
  void pause();
  void watch();
  bool digest(size_t staged);
  bool begin_frame();
  void end_frame();
  void discard();
  void place_staged();
  void placed(uint64_t nbytes);
  void gather(std::vector<iovec>* pieces) const;
  void leave();

  const std::shared_ptr<InLink> link_;
  Loop* const loop_;
  const int number_;  // of the socket, which closes in the loop's thread
  Fd socket_;
  bool gone_ = false;
  std::atomic<bool> paused_{false};  // the inbox is full

  std::array<char, 16 << 10> stage_;  // heads, and the payload that came with them
  size_t stage_begin_ = 0;
  size_t stage_end_ = 0;

  // The frame whose payload is being read.
  FrameHeader header_{};
  uint64_t left_ = 0;  // bytes of it to come
  std::shared_ptr<InOp> op_;
  std::shared_ptr<Region> region_;  // nullptr: a message, or thrown away
  bool failed_ = false;             // thrown away: the region is closed
  std::vector<Run> targets_;        // addresses; none where it is thrown away
  Cursor target_;
};

}  // namespace clover::tcp
