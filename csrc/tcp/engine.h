// One endpoint's sockets: its loops, the links that lead out and in, its regions and its inbox.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "tcp/in_link.h"
#include "tcp/loop.h"
#include "tcp/out_link.h"
#include "tcp/status.h"

namespace clover::tcp {

// Equal-sized pieces on both sides of a put, checked rows by rows when it is made.
struct Slices {
  const std::byte* base;
  uint64_t size;  // bytes of local memory
  const int64_t* local;
  int64_t num_local;
  uint64_t region;
  uint64_t region_size;
  const int64_t* remote;
  int64_t num_remote;
  int64_t length;
};

class Engine {
 public:
  explicit Engine(int num_loops);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  void add_region(uint64_t number, std::byte* base, uint64_t nbytes);
  void remove_region(uint64_t number);

  // Take over connected sockets; each answers the link's number.
  uint64_t add_outgoing(std::vector<Fd> sockets);
  void drop_outgoing(uint64_t link);
  // `key` names the link among connections; 0: the link is over, the socket is closed.
  uint64_t add_incoming(const std::string& key, bool first, Fd socket);
  // Ends the link; true once nothing is written for it any more, false where that is not so yet at
  // `until_ns`.
  bool fence_incoming(uint64_t link, int64_t until_ns);

  Status state(uint64_t link);
  // An op from the rows of `index` [rows, 2]; kOutOfRange where one names no slice.
  static Status make_put(const Slices& slices, const int32_t* index, int64_t rows, Op* op);
  // kTimeout leaves the op with the caller.
  Status submit(uint64_t link, std::unique_ptr<Op>* op, int64_t give_up_ns);
  Status query(uint64_t link, uint64_t region, uint64_t nbytes, int64_t deadline_ns);

  Arrivals poll(int64_t timeout_ns);
  uint64_t malformed() const { return receiving_.malformed.load(); }

  // Waits up to `timeout_ns` for what is pending, then ends everything.
  void close(int64_t timeout_ns);

 private:
  std::shared_ptr<OutLink> outgoing(uint64_t link);
  std::vector<std::shared_ptr<OutLink>> all_outgoing();
  std::vector<std::shared_ptr<InLink>> all_incoming();
  int64_t expire(int64_t now);

  Receiving receiving_;
  std::vector<std::unique_ptr<Loop>> loops_;
  std::atomic<uint64_t> next_query_{1};
  std::mutex mutex_;
  bool closed_ = false;
  uint64_t next_link_ = 1;
  size_t next_loop_ = 0;
  std::unordered_map<uint64_t, std::shared_ptr<OutLink>> out_;
  std::unordered_map<uint64_t, std::shared_ptr<InLink>> in_;
  std::unordered_map<std::string, uint64_t> keys_;  // of links that lead in
};

}  // namespace clover::tcp
