// One connection of an OutLink: the frames it is writing, and the answers it is reading.
#pragma once

#include <sys/uio.h>

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "tcp/frame.h"
#include "tcp/loop.h"
#include "tcp/out_link.h"

namespace clover::tcp {

// Everything but ready() and write_some() is called with the link's lock held. Whoever sets `busy`
// owns the frames until it clears it.
class OutStream : public Loop::Handler {
 public:
  OutStream(std::weak_ptr<OutLink> link, Loop* loop, Fd socket, bool answers);

  void ready(uint32_t events) override;

  // Frames are gathered into batches, so that small ones share a system call.
  bool batch_has_room() const;
  bool writing() const { return at_ < pieces_.size(); }
  void begin_batch();
  void add(const FrameHeader& header, const std::vector<Run>& remote, const std::vector<Run>& local,
           Op* op);
  // Bytes that the socket took, or -errno.
  ssize_t write_some();
  void advance(size_t written);

  int socket() const { return number_; }
  Loop* loop() const { return loop_; }
  // Closes the socket. `reset`: what it still holds is thrown away, rather than sent for as long as
  // the network takes.
  void retire(bool reset);

  bool busy = false;     // a thread is pumping
  bool again = false;    // the pumping thread should look once more
  bool blocked = false;  // the socket is full; EPOLLOUT will tell
  bool posted = false;   // the loop has been asked to pump

 private:
  void read_answers();

  const std::weak_ptr<OutLink> link_;
  Loop* const loop_;
  const int number_;  // of the socket, which closes in the loop's thread, after its last use there
  Fd socket_;
  const bool answers_;  // the peer answers here
  std::vector<char> heads_;
  std::vector<iovec> pieces_;
  size_t at_ = 0;
  uint64_t batch_bytes_ = 0;
  std::vector<Op*> batch_;
  std::array<char, 4096> unread_{};  // answers, of the loop's thread
  size_t unread_bytes_ = 0;
};

}  // namespace clover::tcp
