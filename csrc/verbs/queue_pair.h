// A reliable connected queue pair, and how many of its requests are on their way.
#pragma once

#include <infiniband/verbs.h>

#include <array>
#include <cstdint>

#include "verbs/context.h"
#include "verbs/status.h"

namespace clover::verbs {

// What the other side must know of a queue pair; travels as it is.
struct QpInfo {
  uint32_t number;
  uint32_t psn;  // of its first packet
  uint16_t lid;
  uint16_t mtu;  // enum ibv_mtu
  uint32_t reserved;
  uint8_t gid[16];
};
static_assert(sizeof(QpInfo) == 32, "the wire's layout");

// The reason in a completion that is no success.
Status to_status(ibv_wc_status status);

class QueuePair {
 public:
  // `index` tells the queue pairs of a link apart in completions, whose async events name `link`.
  QueuePair(const Context& context, ibv_cq* cq, int index, int recv_depth, uint64_t link);

  QpInfo info() const;
  // Both directions, as RC is; Error where the device refuses.
  void connect(const QpInfo& remote);

  // Requests that the queue has room for.
  int room() const { return depth_ - static_cast<int>(posted_ - completed_); }
  uint64_t posted() const { return posted_; }
  uint64_t completed() const { return completed_; }
  bool idle() const { return posted_ == completed_; }

  static int index_of(uint64_t wr_id) { return static_cast<int>(wr_id >> kIndexShift); }
  // All requests up to that one are done, as a queue pair completes in order.
  void complete(uint64_t wr_id) { completed_ = wr_id & kNumberMask; }

  bool post_receive(ibv_recv_wr* first);
  // Past the count of requests and past Batch, for who keeps a count of their own.
  bool post_raw(ibv_send_wr* first);

 private:
  friend class Batch;
  static constexpr int kIndexShift = 56;
  static constexpr uint64_t kNumberMask = (uint64_t{1} << kIndexShift) - 1;

  void to_init();
  void to_rtr(const QpInfo& remote);
  void to_rts();

  const Context& context_;
  int index_;
  int depth_;
  uint32_t psn_;
  uint64_t posted_ = 0;
  uint64_t completed_ = 0;
  int unsignalled_ = 0;
  OwnedQp qp_;
};

// Requests that go to the device in one call.
class Batch {
 public:
  explicit Batch(QueuePair* qp) : qp_(qp) {}

  struct Local {
    uint64_t address;
    uint32_t length;
    uint32_t lkey;
  };
  struct Remote {
    uint64_t address;
    uint32_t rkey;
  };

  // The caller has seen that there is room. `notice`: with WRITE_WITH_IMM. `signal`: completes by
  // itself, and not only as every n-th does.
  void write(const Local& local, const Remote& remote, const uint32_t* notice, bool signal);
  // The last part of a message carries an (empty) immediate value.
  void send(const Local& local, bool last, bool signal);
  // False where the device did not take all.
  bool flush();

 private:
  ibv_send_wr* next(const Local& local, bool signal);

  static constexpr int kMost = 16;
  QueuePair* qp_;
  int count_ = 0;
  bool good_ = true;
  std::array<ibv_send_wr, kMost> requests_;
  std::array<ibv_sge, kMost> pieces_;
};

}  // namespace clover::verbs
