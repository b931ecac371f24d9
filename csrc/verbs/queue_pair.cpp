#include "verbs/queue_pair.h"

#include <arpa/inet.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <random>
#include <string>

namespace clover::verbs {
namespace {

constexpr uint8_t kRnrTimer = 6;    // 0.08 ms between tries where the peer has no room
constexpr uint8_t kRnrForever = 7;  // puts have deadlines of their own
constexpr uint8_t kHops = 64;

uint32_t random_psn() {
  std::random_device device;
  return device() & 0xffffff;
}

void check(int result, const Context& context, const char* what) {
  if (result == 0) return;
  throw Error(context.device() + " does not bring a queue pair to " + what + ": " +
              std::strerror(result));
}

}  // namespace

Status to_status(ibv_wc_status status) {
  switch (status) {
    case IBV_WC_SUCCESS:
      return Status::kOk;
    case IBV_WC_RETRY_EXC_ERR:
    case IBV_WC_RESP_TIMEOUT_ERR:
      return Status::kRetries;
    case IBV_WC_LOC_QP_OP_ERR:
      return Status::kCannotSend;
    case IBV_WC_RNR_RETRY_EXC_ERR:
      return Status::kNotReady;
    case IBV_WC_REM_ACCESS_ERR:
    case IBV_WC_REM_INV_REQ_ERR:
    case IBV_WC_REM_OP_ERR:
      return Status::kRemoteAccess;
    case IBV_WC_LOC_PROT_ERR:
    case IBV_WC_LOC_LEN_ERR:
    case IBV_WC_LOC_ACCESS_ERR:
    case IBV_WC_MW_BIND_ERR:
      return Status::kLocalMemory;
    default:  // the library's enum, which grows
      return Status::kQueuePair;
  }
}

QueuePair::QueuePair(const Context& context, ibv_cq* cq, int index, int recv_depth, uint64_t link)
    : context_(context), index_(index), depth_(context.settings().queue_depth), psn_(random_psn()) {
  ibv_qp_init_attr attributes{};
  attributes.qp_context = reinterpret_cast<void*>(link);
  attributes.send_cq = cq;
  attributes.recv_cq = cq;
  attributes.qp_type = IBV_QPT_RC;
  attributes.cap.max_send_wr = static_cast<uint32_t>(depth_);
  attributes.cap.max_recv_wr = static_cast<uint32_t>(std::max(recv_depth, 1));
  attributes.cap.max_send_sge = 1;
  attributes.cap.max_recv_sge = 1;
  qp_.reset(ibv_create_qp(context.pd(), &attributes));
  if (qp_ == nullptr) {
    throw Error(context.device() + " gives no queue pair of depth " + std::to_string(depth_) +
                ": " + std::strerror(errno) +
                "; lower network.rdma_queue_depth or network.rdma_queue_pairs, or raise the limit "
                "on locked memory (ulimit -l)");
  }
  to_init();
}

QpInfo QueuePair::info() const {
  QpInfo info{};
  info.number = qp_->qp_num;
  info.psn = psn_;
  info.lid = context_.lid();
  info.mtu = static_cast<uint16_t>(context_.mtu());
  if (context_.global()) std::memcpy(info.gid, context_.gid().raw, sizeof(info.gid));
  return info;
}

void QueuePair::connect(const QpInfo& remote) {
  to_rtr(remote);
  to_rts();
}

void QueuePair::to_init() {
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_INIT;
  attributes.port_num = static_cast<uint8_t>(context_.settings().port);
  attributes.qp_access_flags = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
  const int mask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
  check(ibv_modify_qp(qp_.get(), &attributes, mask), context_, "INIT");
}

void QueuePair::to_rtr(const QpInfo& remote) {
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_RTR;
  attributes.path_mtu = std::min(context_.mtu(), static_cast<ibv_mtu>(remote.mtu));
  attributes.dest_qp_num = remote.number;
  attributes.rq_psn = remote.psn;
  attributes.max_dest_rd_atomic = 1;
  attributes.min_rnr_timer = kRnrTimer;
  attributes.ah_attr.port_num = static_cast<uint8_t>(context_.settings().port);
  attributes.ah_attr.sl = static_cast<uint8_t>(context_.settings().service_level);
  attributes.ah_attr.dlid = remote.lid;
  if (context_.global()) {
    attributes.ah_attr.is_global = 1;
    std::memcpy(attributes.ah_attr.grh.dgid.raw, remote.gid, sizeof(remote.gid));
    attributes.ah_attr.grh.sgid_index = static_cast<uint8_t>(context_.gid_index());
    attributes.ah_attr.grh.hop_limit = kHops;
  }
  const int mask = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                   IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
  check(ibv_modify_qp(qp_.get(), &attributes, mask), context_,
        "RTR (is there a way to the peer's GID?)");
}

void QueuePair::to_rts() {
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_RTS;
  attributes.timeout = static_cast<uint8_t>(context_.settings().timeout);
  attributes.retry_cnt = static_cast<uint8_t>(context_.settings().retries);
  attributes.rnr_retry = kRnrForever;
  attributes.sq_psn = psn_;
  attributes.max_rd_atomic = 1;
  const int mask = IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                   IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC;
  check(ibv_modify_qp(qp_.get(), &attributes, mask), context_, "RTS");
}

bool QueuePair::post_receive(ibv_recv_wr* first) {
  ibv_recv_wr* bad = nullptr;
  return ibv_post_recv(qp_.get(), first, &bad) == 0;
}

bool QueuePair::post_raw(ibv_send_wr* first) {
  ibv_send_wr* bad = nullptr;
  return ibv_post_send(qp_.get(), first, &bad) == 0;
}

ibv_send_wr* Batch::next(const Local& local, bool signal) {
  if (count_ == kMost) flush();
  const int room = qp_->room();
  QueuePair& qp = *qp_;
  ++qp.posted_;
  ibv_sge& piece = pieces_[count_];
  piece.addr = local.address;
  piece.length = local.length;
  piece.lkey = local.lkey;
  ibv_send_wr& request = requests_[count_];
  request = {};
  request.wr_id = static_cast<uint64_t>(qp.index_) << QueuePair::kIndexShift | qp.posted_;
  request.sg_list = &piece;
  request.num_sge = local.length == 0 ? 0 : 1;
  // Also where the queue becomes full, or nothing would ever tell that it has room again.
  if (signal || room == 1 || ++qp.unsignalled_ >= qp.context_.settings().signal_every) {
    request.send_flags = IBV_SEND_SIGNALED;
    qp.unsignalled_ = 0;
  }
  if (count_ > 0) requests_[count_ - 1].next = &request;
  ++count_;
  return &request;
}

void Batch::write(const Local& local, const Remote& remote, const uint32_t* notice, bool signal) {
  ibv_send_wr* const request = next(local, signal);
  request->opcode = notice == nullptr ? IBV_WR_RDMA_WRITE : IBV_WR_RDMA_WRITE_WITH_IMM;
  if (notice != nullptr) request->imm_data = htonl(*notice);
  request->wr.rdma.remote_addr = remote.address;
  request->wr.rdma.rkey = remote.rkey;
}

void Batch::send(const Local& local, bool last, bool signal) {
  next(local, signal)->opcode = last ? IBV_WR_SEND_WITH_IMM : IBV_WR_SEND;
}

bool Batch::flush() {
  if (count_ > 0 && !qp_->post_raw(requests_.data())) good_ = false;
  count_ = 0;
  return good_;
}

}  // namespace clover::verbs
