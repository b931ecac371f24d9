// One-way times of a put of 4 KB with its notice, there and back, through the rdma engine or by
// bare verbs: _rdma_ping engine|bare ROUNDS DEVICE DEVICE. A thread for each end, which spins.
// Prints microseconds, half of a round trip at the median.
#include <sys/socket.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "verbs/engine.h"

namespace {

using namespace clover;

constexpr int64_t kBytes = 4096;
constexpr int64_t kSecond = 1'000'000'000;

verbs::Settings settings(const char* device) {
  verbs::Settings made;
  made.device = device;
  made.gid_type = "auto";
  made.queue_pairs = 1;
  made.timeout = 16;
  made.spin_us = 1'000'000;
  return made;
}

void require(bool good, const char* what) {
  if (good) return;
  std::fprintf(stderr, "%s\n", what);
  std::exit(1);
}

// Puts from `here` to `there`, and what has come from there.
class EngineEnd {
 public:
  EngineEnd(verbs::Engine* here, verbs::Engine* there, std::byte* memory)
      : engine_(here), memory_(memory) {
    int ends[2];
    require(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends) == 0, "socketpair");
    there->add_incoming(tcp::Fd(ends[0]));
    const int64_t deadline = tcp::now_ns() + 60 * kSecond;
    require(here->add_outgoing(tcp::Fd(ends[1]), deadline, &link_) == verbs::Status::kOk, "link");
  }

  void put(uint32_t notice) {
    const verbs::Slices slices{
        reinterpret_cast<uint64_t>(memory_), kBytes, &at_, 1, 1, kBytes, &at_, 1, kBytes};
    const int32_t index[2] = {0, 0};
    auto op = std::make_unique<verbs::Op>();
    op->id = notice;
    op->notice = notice;
    op->deadline_ns = tcp::now_ns() + 60 * kSecond;
    require(engine_->make_put(1, slices, index, 1, op.get()) == verbs::Status::kOk, "make_put");
    require(engine_->submit(link_, &op, op->deadline_ns) == verbs::Status::kOk, "submit");
  }

  void wait() {
    while (true) {
      ++polls;
      for (const shm::Event& event : engine_->poll(60 * kSecond).events) {
        require(event.kind == shm::Event::Kind::kNotice, "event");
        return;
      }
    }
  }
  int64_t polls = 0;

 private:
  verbs::Engine* engine_;
  std::byte* memory_;
  int64_t at_ = 0;
  uint64_t link_ = 0;
};

// The same by hand.
class BareEnd {
 public:
  BareEnd(const char* device, std::byte* memory)
      : context_(settings(device)),
        memory_(context_, memory, kBytes),
        queue_(context_.make_cq(64, 1)),
        pair_(context_, queue_.get(), 0, 16, 1) {}

  void connect(const BareEnd& other) {
    for (int i = 0; i < 8; ++i) receive();
    pair_.connect(other.pair_.info());
    there_ = &other.memory_;
  }

  void put(uint32_t notice) {
    ibv_sge piece{memory_.address(), static_cast<uint32_t>(kBytes), memory_.lkey()};
    ibv_send_wr request{};
    request.sg_list = &piece;
    request.num_sge = 1;
    request.opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
    request.imm_data = notice;
    request.send_flags = IBV_SEND_SIGNALED;
    request.wr.rdma.remote_addr = there_->address();
    request.wr.rdma.rkey = there_->rkey();
    require(pair_.post_raw(&request), "post");
  }

  void wait() {
    ibv_wc completion{};
    while (true) {
      const int count = ibv_poll_cq(queue_.get(), 1, &completion);
      require(count >= 0 && completion.status == IBV_WC_SUCCESS, "completion");
      if (count == 1 && completion.opcode == IBV_WC_RECV_RDMA_WITH_IMM) return receive();
    }
  }

 private:
  void receive() {
    ibv_recv_wr request{};
    require(pair_.post_receive(&request), "receive");
  }

  verbs::Context context_;
  verbs::MemoryRegion memory_;
  verbs::OwnedCq queue_;
  verbs::QueuePair pair_;
  const verbs::MemoryRegion* there_ = nullptr;
};

template <class End>
double ping(End* a, End* b, int rounds) {
  constexpr int kWarm = 5;
  std::thread other([&] {
    for (int i = 0; i < rounds + kWarm; ++i) {
      b->wait();
      b->put(static_cast<uint32_t>(i));
    }
  });
  std::vector<double> times;
  for (int i = 0; i < rounds + kWarm; ++i) {
    const int64_t begun = tcp::now_ns();
    a->put(static_cast<uint32_t>(i));
    a->wait();
    if (i >= kWarm) times.push_back(static_cast<double>(tcp::now_ns() - begun) / 2000.0);
  }
  other.join();
  std::nth_element(times.begin(), times.begin() + rounds / 2, times.end());
  return times[static_cast<size_t>(rounds / 2)];
}

double by_engine(int rounds, const char* from, const char* to, std::byte* here, std::byte* there) {
  verbs::Engine a(settings(from));
  verbs::Engine b(settings(to));
  a.add_region(1, here, kBytes);
  b.add_region(1, there, kBytes);
  EngineEnd first(&a, &b, here);
  EngineEnd second(&b, &a, there);
  const double took = ping(&first, &second, rounds);
  a.close(kSecond);
  b.close(kSecond);
  return took;
}

double by_hand(int rounds, const char* from, const char* to, std::byte* here, std::byte* there) {
  BareEnd first(from, here);
  BareEnd second(to, there);
  first.connect(second);
  second.connect(first);
  return ping(&first, &second, rounds);
}

}  // namespace

int main(int count, char** arguments) {
  require(count == 5, "usage: _rdma_ping engine|bare ROUNDS DEVICE DEVICE");
  const int rounds = std::atoi(arguments[2]);
  require(rounds > 0, "rounds");
  std::vector<std::byte> here(kBytes);
  std::vector<std::byte> there(kBytes);
  const bool bare = std::strcmp(arguments[1], "bare") == 0;
  const double took =
      bare ? by_hand(rounds, arguments[3], arguments[4], here.data(), there.data())
           : by_engine(rounds, arguments[3], arguments[4], here.data(), there.data());
  std::printf("%.2f\n", took);
  return 0;
}
