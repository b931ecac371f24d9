// An open RDMA device: its protection domain, completion channel, port and GID.
#pragma once

#include <infiniband/verbs.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace clover::verbs {

// What NetworkConfig's rdma_* fields say; the meaning of each stands there.
struct Settings {
  std::string device;       // empty: the first that has an active port
  int port = 1;             // of the device
  int gid_index = -1;       // -1: found by the two that follow
  std::string gid_type;     // auto, ib, roce_v1, roce_v2
  std::string gid_address;  // empty: any
  int mtu = 0;              // bytes; 0: the port's
  int queue_pairs = 1;      // of a link
  int queue_depth = 128;    // outstanding work requests of a queue pair
  int signal_every = 16;
  int64_t block_size = 1 << 20;  // bytes of the largest write
  int retries = 6;
  int timeout = 14;
  int service_level = 0;
  int spin_us = 0;
  bool on_demand = false;  // register without locking memory
};

// A verbs object that ends with its owner.
template <class T, int (*destroy)(T*)>
struct Destroy {
  void operator()(T* object) const { destroy(object); }
};
template <class T, int (*destroy)(T*)>
using Owned = std::unique_ptr<T, Destroy<T, destroy>>;
using OwnedCq = Owned<ibv_cq, ibv_destroy_cq>;
using OwnedQp = Owned<ibv_qp, ibv_destroy_qp>;
using OwnedMr = Owned<ibv_mr, ibv_dereg_mr>;

// A line for every port of every device: "rx0 port 1: active, Ethernet".
std::vector<std::string> devices();

class Context {
 public:
  // Error, with the devices that there are, where none fits.
  explicit Context(const Settings& settings);

  const Settings& settings() const { return settings_; }
  const std::string& device() const { return name_; }
  ibv_context* get() const { return context_.get(); }
  ibv_pd* pd() const { return pd_.get(); }
  ibv_comp_channel* channel() const { return channel_.get(); }
  const ibv_gid& gid() const { return gid_; }
  int gid_index() const { return gid_index_; }
  uint16_t lid() const { return lid_; }
  ibv_mtu mtu() const { return mtu_; }
  bool global() const { return global_; }  // paths carry GIDs

  // One completion queue whose events name `link`.
  OwnedCq make_cq(int entries, uint64_t link) const;

 private:
  void open();
  void read_port();
  void find_gid();

  Settings settings_;
  std::string name_;
  Owned<ibv_context, ibv_close_device> context_;
  Owned<ibv_pd, ibv_dealloc_pd> pd_;
  Owned<ibv_comp_channel, ibv_destroy_comp_channel> channel_;
  ibv_gid gid_{};
  int gid_index_ = 0;
  uint16_t lid_ = 0;
  ibv_mtu mtu_ = IBV_MTU_1024;
  bool global_ = true;
  bool ethernet_ = true;
};

}  // namespace clover::verbs
