#include "verbs/poller.h"

#include <sys/epoll.h>

#include <utility>

namespace clover::verbs {
namespace {

uint64_t link_of(const ibv_async_event& event) {
  switch (event.event_type) {
    case IBV_EVENT_QP_FATAL:
    case IBV_EVENT_QP_REQ_ERR:
    case IBV_EVENT_QP_ACCESS_ERR:
    case IBV_EVENT_COMM_EST:
    case IBV_EVENT_SQ_DRAINED:
    case IBV_EVENT_PATH_MIG:
    case IBV_EVENT_PATH_MIG_ERR:
    case IBV_EVENT_QP_LAST_WQE_REACHED:
      return reinterpret_cast<uint64_t>(event.element.qp->qp_context);
    case IBV_EVENT_CQ_ERR:
      return reinterpret_cast<uint64_t>(event.element.cq->cq_context);
    default:  // of a port or the device
      return 0;
  }
}

}  // namespace

// Events are acknowledged before anything else is done: whoever destroys a queue waits for that.
class Poller::Completions : public tcp::Loop::Handler {
 public:
  Completions(ibv_comp_channel* channel, const Calls& calls) : channel_(channel), calls_(calls) {}

  void ready(uint32_t) override {
    ibv_cq* queue = nullptr;
    void* link = nullptr;
    while (ibv_get_cq_event(channel_, &queue, &link) == 0) {
      ibv_ack_cq_events(queue, 1);
      calls_.completed(reinterpret_cast<uint64_t>(link));
    }
  }

 private:
  ibv_comp_channel* channel_;
  const Calls& calls_;
};

class Poller::Happenings : public tcp::Loop::Handler {
 public:
  Happenings(ibv_context* context, const Calls& calls) : context_(context), calls_(calls) {}

  void ready(uint32_t) override {
    ibv_async_event event{};
    while (ibv_get_async_event(context_, &event) == 0) {
      const ibv_event_type type = event.event_type;
      const uint64_t link = link_of(event);
      ibv_ack_async_event(&event);
      calls_.happened(type, link);
    }
  }

 private:
  ibv_context* context_;
  const Calls& calls_;
};

Poller::Poller(const Context& context, Calls calls) : calls_(std::move(calls)) {
  loop_.start(calls_.turned);
  ibv_comp_channel* const channel = context.channel();
  loop_.watch(channel->fd, EPOLLIN, std::make_shared<Completions>(channel, calls_));
  ibv_context* const device = context.get();
  loop_.watch(device->async_fd, EPOLLIN, std::make_shared<Happenings>(device, calls_));
}

}  // namespace clover::verbs
