// Posts blocks of 64 KB through the rdma engine, or by a bare loop over verbs, for callgrind to
// count instructions: _rdma_post engine|bare BLOCKS DEVICE DEVICE. Both ends are in this process.
#include <poll.h>
#include <sys/socket.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "verbs/engine.h"

namespace {

using namespace clover;

constexpr int64_t kBlock = 64 << 10;
constexpr int64_t kDistinct = 32;  // blocks of memory, written again and again
constexpr int64_t kSecond = 1'000'000'000;

verbs::Settings settings(const char* device) {
  verbs::Settings made;
  made.device = device;
  made.gid_type = "auto";
  made.queue_pairs = 1;
  made.block_size = kBlock;  // no two blocks are one write
  made.timeout = 16;
  return made;
}

void require(bool good, const char* what) {
  if (good) return;
  std::fprintf(stderr, "%s\n", what);
  std::exit(1);
}

void by_engine(int64_t blocks, const char* from, const char* to) {
  verbs::Engine a(settings(from));
  verbs::Engine b(settings(to));
  std::vector<std::byte> source(kBlock * kDistinct);
  std::vector<std::byte> target(kBlock * kDistinct);
  a.add_region(1, source.data(), source.size());
  b.add_region(1, target.data(), target.size());
  int ends[2];
  require(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends) == 0, "socketpair");
  uint64_t link = 0;
  b.add_incoming(tcp::Fd(ends[0]));
  const int64_t deadline = tcp::now_ns() + 60 * kSecond;
  require(a.add_outgoing(tcp::Fd(ends[1]), deadline, &link) == verbs::Status::kOk, "no link");
  std::vector<int64_t> offsets(kDistinct);
  for (int64_t i = 0; i < kDistinct; ++i) offsets[i] = i * kBlock;
  // Scattered: neighbours on one side only, so that each block is a piece of its own.
  std::vector<int32_t> index(2 * blocks);
  for (int64_t i = 0; i < blocks; ++i) {
    index[2 * i] = static_cast<int32_t>(i * 7 % kDistinct);
    index[2 * i + 1] = static_cast<int32_t>(i % kDistinct);
  }
  const verbs::Slices slices{reinterpret_cast<uint64_t>(source.data()),
                             source.size(),
                             offsets.data(),
                             kDistinct,
                             1,
                             target.size(),
                             offsets.data(),
                             kDistinct,
                             kBlock};
  auto op = std::make_unique<verbs::Op>();
  op->id = 1;
  op->deadline_ns = deadline;
  require(a.make_put(1, slices, index.data(), blocks, op.get()) == verbs::Status::kOk, "make_put");
  require(a.submit(link, &op, deadline) == verbs::Status::kOk, "submit");
  verbs::Arrivals arrivals;
  while (arrivals.finished.empty() && tcp::now_ns() < deadline) arrivals = a.poll(kSecond);
  require(!arrivals.finished.empty() && arrivals.finished[0].status == verbs::Status::kOk, "put");
}

// What the engine's own loop does at the least: a write per block, every 16th signalled, and
// sleeping on the completion channel while the queue is full.
void by_hand(int64_t blocks, const char* from, const char* to) {
  const verbs::Context a(settings(from));
  const verbs::Context b(settings(to));
  std::vector<std::byte> source(kBlock * kDistinct);
  std::vector<std::byte> target(kBlock * kDistinct);
  const verbs::MemoryRegion local(a, source.data(), source.size());
  const verbs::MemoryRegion remote(b, target.data(), target.size());
  const int depth = a.settings().queue_depth;
  const verbs::OwnedCq queue = a.make_cq(depth, 1);
  const verbs::OwnedCq other = b.make_cq(depth, 1);
  verbs::QueuePair receiver(b, other.get(), 0, 1, 1);
  verbs::QueuePair sender(a, queue.get(), 0, 1, 1);
  receiver.connect(sender.info());
  sender.connect(receiver.info());
  int64_t posted = 0;
  int64_t completed = 0;
  const int64_t deadline = tcp::now_ns() + 60 * kSecond;
  while (completed < blocks && tcp::now_ns() < deadline) {
    while (posted < blocks && posted - completed < depth) {
      ibv_sge piece{reinterpret_cast<uint64_t>(source.data()) +
                        static_cast<uint64_t>(posted * 7 % kDistinct * kBlock),
                    static_cast<uint32_t>(kBlock), local.lkey()};
      ibv_send_wr request{};
      ++posted;
      request.wr_id = static_cast<uint64_t>(posted);
      request.sg_list = &piece;
      request.num_sge = 1;
      request.opcode = IBV_WR_RDMA_WRITE;
      if (posted % 16 == 0 || posted == blocks) request.send_flags = IBV_SEND_SIGNALED;
      request.wr.rdma.remote_addr =
          remote.address() + static_cast<uint64_t>((posted - 1) % kDistinct * kBlock);
      request.wr.rdma.rkey = remote.rkey();
      require(sender.post_raw(&request), "post");
    }
    ibv_req_notify_cq(queue.get(), 0);
    ibv_wc completions[32];
    const int count = ibv_poll_cq(queue.get(), 32, completions);
    for (int i = 0; i < count; ++i) {
      require(completions[i].status == IBV_WC_SUCCESS, "completion");
      completed = static_cast<int64_t>(completions[i].wr_id);
    }
    if (count > 0) continue;
    pollfd waiting{a.channel()->fd, POLLIN, 0};
    poll(&waiting, 1, 1000);
    ibv_cq* which = nullptr;
    void* context = nullptr;
    if (ibv_get_cq_event(a.channel(), &which, &context) == 0) ibv_ack_cq_events(which, 1);
  }
  require(completed == blocks, "not all completed");
}

}  // namespace

int main(int count, char** arguments) {
  require(count == 5, "usage: _rdma_post engine|bare BLOCKS DEVICE DEVICE");
  const int64_t blocks = std::atoll(arguments[2]);
  if (std::strcmp(arguments[1], "bare") == 0) {
    by_hand(blocks, arguments[3], arguments[4]);
  } else {
    by_engine(blocks, arguments[3], arguments[4]);
  }
  return 0;
}
