// The hop between processes of one host: rows are copied into the other node's memory, and notices
// go through its mailbox. Either side speaks with the other's Python as well as with its loop.
#pragma once

#include <cstddef>
#include <map>
#include <vector>

#include "loop/answerer.h"
#include "loop/hop.h"
#include "shm/mailbox.h"

namespace clover::loop {

// Adjacent rows of a step, of one attention node.
struct ShmSegment {
  shm::Sender* sender;
  std::vector<int> rings;  // of the mailbox, by which the node's notices come
  int64_t first;
  int64_t count;
  std::byte* there;       // where the node wants the rows' q, k and v
  const std::byte* back;  // where it leaves their output
  bool waiting = false;
  bool lost = false;
};

struct RowBytes {
  int64_t there;
  int64_t back;
};

// The dense node's side; the mailbox is its own.
class ShmHop : public Hop {
 public:
  // `rows`: q, k and v of the step's tokens as stages write them, `bytes.there` each. `o`: room for
  // the output, used where it comes from several nodes. `notice`: of layer 0.
  ShmHop(shm::Mailbox* mailbox, std::vector<ShmSegment> segments, RowBytes bytes,
         const std::byte* rows, std::byte* o, uint32_t notice);

  void send(int layer) override;
  Outcome wait(int layer, int64_t timeout_ns) override;
  const void* attended() const override;
  void restart(uint32_t notice) override;

  const std::vector<ShmSegment>& segments() const { return segments_; }

 private:
  bool take(const shm::Record& record, int layer);
  bool waiting() const;
  bool lost() const;

  shm::Mailbox* mailbox_;
  std::vector<ShmSegment> segments_;
  RowBytes bytes_;
  const std::byte* rows_;
  std::byte* o_;
  uint32_t notice_;
};

// The attention node's side: reads its mailbox and answers hops for as long as nothing else comes.
class ShmServer {
 public:
  // A notice's lowest `layer_bits` bits are its layer.
  ShmServer(shm::Mailbox* mailbox, Answerer* answerer, int layer_bits)
      : mailbox_(mailbox), answerer_(answerer), layer_mask_((1u << layer_bits) - 1) {}

  // Notices of these rings come from `source`, whose answers go to `sender`.
  void know(int source, const std::vector<int>& rings, shm::Sender* sender);
  // One hop that came by another way; false: the node's own to answer.
  bool answer(int source, uint32_t notice);
  // kEvents, or kTimeout once `timeout_ns` have passed.
  Outcome serve(int64_t timeout_ns);

 private:
  bool answer(const shm::Record& record);

  shm::Mailbox* mailbox_;
  Answerer* answerer_;
  uint32_t layer_mask_;
  std::map<int, int> sources_;           // by ring
  std::map<int, shm::Sender*> senders_;  // by source
};

}  // namespace clover::loop
