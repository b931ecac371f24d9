// One endpoint's device: the links that lead out and in, its regions and its inbox.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "verbs/context.h"
#include "verbs/in_link.h"
#include "verbs/op.h"
#include "verbs/out_link.h"
#include "verbs/poller.h"
#include "verbs/regions.h"
#include "verbs/status.h"

namespace clover::verbs {

using Arrivals = shm::Arrivals<Status>;

class Engine {
 public:
  // Error where there is no such device.
  explicit Engine(const Settings& settings);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  const Context& context() const { return context_; }

  // Error where the device cannot register it.
  void add_region(uint64_t number, std::byte* base, uint64_t nbytes);
  void add_dma_buf(uint64_t number, int fd, uint64_t offset, std::byte* base, uint64_t nbytes);
  // Peers are asked to write there no more; then the key goes, which keeps off the others.
  void remove_region(uint64_t number);

  // Takes over a connected socket that the peer's engine has the other end of; Error where no link
  // comes about. `*link` is its number.
  Status add_outgoing(tcp::Fd socket, int64_t deadline_ns, uint64_t* link);
  void drop_outgoing(uint64_t link);
  // 0: this endpoint is closed.
  uint64_t add_incoming(tcp::Fd socket);
  // Ends it: nothing that the peer has posted is written any more.
  void fence_incoming(uint64_t link);

  Status state(uint64_t link);
  // Fills in `op` from the rows of `index`; kOutOfRange where one names no slice, kLocalMemory
  // where `local` is no region of this endpoint.
  Status make_put(uint64_t local, const Slices& slices, const int32_t* index, int64_t rows, Op* op);
  // kTimeout leaves the op with the caller.
  Status submit(uint64_t link, std::unique_ptr<Op>* op, int64_t give_up_ns);
  Status query(uint64_t link, uint64_t region, uint64_t nbytes, int64_t deadline_ns);

  Arrivals poll(int64_t timeout_ns);
  uint64_t malformed() const { return receiving_.malformed.load(); }
  // What the device has said of itself since the last call, each as a sentence.
  std::vector<std::string> take_events();
  // Waits up to `timeout_ns` for what is pending, then ends everything.
  void close(int64_t timeout_ns);

 private:
  std::shared_ptr<OutLink> outgoing(uint64_t link);
  std::shared_ptr<InLink> incoming(uint64_t link);
  std::vector<std::shared_ptr<OutLink>> all_outgoing();
  std::vector<std::shared_ptr<InLink>> all_incoming();
  void completed(uint64_t link);
  void happened(ibv_event_type event, uint64_t link);
  int64_t turned(int64_t now);
  int64_t expire(int64_t now);
  Arrivals spin(int64_t timeout_ns);
  void look_at_all();
  void arm_all();

  Context context_;
  Receiving receiving_;
  // Who looks at the queues. 0: the poller, which each completion wakes. kNever: a thread that
  // polls. Else that thread, which is likely to be back by then.
  std::atomic<int64_t> driven_until_ns_{0};
  std::mutex polling_;  // of the thread that spins, and what follows
  uint64_t seen_ = 0;   // the table of links as of then
  std::vector<std::shared_ptr<OutLink>> seen_out_;
  std::vector<std::shared_ptr<InLink>> seen_in_;
  std::atomic<uint64_t> changes_{1};  // of the table of links
  std::mutex mutex_;
  bool closed_ = false;
  bool failed_ = false;  // the device
  uint64_t next_link_ = 1;
  std::unordered_map<uint64_t, std::shared_ptr<OutLink>> out_;
  std::unordered_map<uint64_t, std::shared_ptr<InLink>> in_;
  std::vector<std::string> events_;
  Poller poller_;  // last: its thread uses what stands above
};

}  // namespace clover::verbs
