#include "verbs/context.h"

#include <arpa/inet.h>
#include <fcntl.h>

#include <cerrno>
#include <cstring>

#include "verbs/status.h"

namespace clover::verbs {
namespace {

constexpr size_t kMostGids = 256;

struct FreeList {
  void operator()(ibv_device** list) const { ibv_free_device_list(list); }
};

struct DeviceList {
  DeviceList() : list(ibv_get_device_list(&count)) {}
  int count = 0;  // before the list, whose making sets it
  std::unique_ptr<ibv_device*, FreeList> list;
};

std::string reason() { return std::strerror(errno); }

const char* layer(const ibv_port_attr& port) {
  return port.link_layer == IBV_LINK_LAYER_ETHERNET ? "Ethernet" : "InfiniBand";
}

std::string port_line(ibv_context* context, const char* name, uint8_t number) {
  ibv_port_attr port{};
  std::string line = std::string(name) + " port " + std::to_string(number) + ": ";
  if (ibv_query_port(context, number, &port) != 0) return line + "cannot be asked";
  return line + (port.state == IBV_PORT_ACTIVE ? "active" : "not active") + ", " + layer(port);
}

bool has_active_port(ibv_device* device, int number) {
  const Owned<ibv_context, ibv_close_device> context(ibv_open_device(device));
  ibv_port_attr port{};
  return context != nullptr &&
         ibv_query_port(context.get(), static_cast<uint8_t>(number), &port) == 0 &&
         port.state == IBV_PORT_ACTIVE;
}

std::string known_devices() {
  std::string text;
  for (const std::string& line : devices()) text += (text.empty() ? "" : "; ") + line;
  return text.empty() ? "this host has no RDMA device" : "this host has " + text;
}

const char* type_name(uint32_t type) {
  switch (type) {
    case IBV_GID_TYPE_IB:
      return "ib";
    case IBV_GID_TYPE_ROCE_V1:
      return "roce_v1";
    case IBV_GID_TYPE_ROCE_V2:
      return "roce_v2";
  }
  return "unknown";
}

bool is_ipv4(const ibv_gid& gid) {
  static constexpr uint8_t kMapped[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
  return std::memcmp(gid.raw, kMapped, sizeof(kMapped)) == 0;
}

std::string address_of(const ibv_gid& gid) {
  char text[INET6_ADDRSTRLEN] = "";
  if (is_ipv4(gid)) {
    inet_ntop(AF_INET, gid.raw + 12, text, sizeof(text));
  } else {
    inet_ntop(AF_INET6, gid.raw, text, sizeof(text));
  }
  return text;
}

// How well a GID serves where nothing is asked for: routable RoCE with an IPv4 address is best, as
// link-local ones do not leave a network.
int rank(const ibv_gid_entry& entry) {
  const bool local = entry.gid.raw[0] == 0xfe && (entry.gid.raw[1] & 0xc0) == 0x80;
  const int type = entry.gid_type == IBV_GID_TYPE_ROCE_V2 ? 4 : 0;
  return type + (is_ipv4(entry.gid) ? 2 : 0) + (local ? 0 : 1);
}

bool fits(const ibv_gid_entry& entry, const Settings& settings) {
  if (entry.port_num != static_cast<uint32_t>(settings.port)) return false;
  if (settings.gid_index >= 0) return entry.gid_index == static_cast<uint32_t>(settings.gid_index);
  const bool type = settings.gid_type == "auto" || settings.gid_type == type_name(entry.gid_type);
  return type && (settings.gid_address.empty() || settings.gid_address == address_of(entry.gid));
}

ibv_mtu mtu_of(int bytes) {
  switch (bytes) {
    case 256:
      return IBV_MTU_256;
    case 512:
      return IBV_MTU_512;
    case 1024:
      return IBV_MTU_1024;
    case 2048:
      return IBV_MTU_2048;
  }
  return IBV_MTU_4096;
}

void set_nonblocking(int fd) {
  const int flags = fcntl(fd, F_GETFL);
  if (flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) != 0) throw Error("fcntl: " + reason());
}

}  // namespace

std::vector<std::string> devices() {
  std::vector<std::string> lines;
  const DeviceList all;
  for (int i = 0; i < all.count; ++i) {
    ibv_device* const device = all.list.get()[i];
    const char* const name = ibv_get_device_name(device);
    const Owned<ibv_context, ibv_close_device> context(ibv_open_device(device));
    ibv_device_attr attributes{};
    if (context == nullptr || ibv_query_device(context.get(), &attributes) != 0) {
      lines.push_back(std::string(name) + ": cannot be opened (see /dev/infiniband)");
      continue;
    }
    for (uint8_t port = 1; port <= attributes.phys_port_cnt; ++port) {
      lines.push_back(port_line(context.get(), name, port));
    }
  }
  return lines;
}

Context::Context(const Settings& settings) : settings_(settings) {
  // Kernels since 5.12 copy pinned pages at a fork; older ones need the library's care, which has
  // to be asked for before anything is registered.
  if (ibv_is_fork_initialized() == IBV_FORK_DISABLED) ibv_fork_init();
  open();
  read_port();
  find_gid();
  pd_.reset(ibv_alloc_pd(context_.get()));
  if (pd_ == nullptr) throw Error(name_ + " gives no protection domain: " + reason());
  channel_.reset(ibv_create_comp_channel(context_.get()));
  if (channel_ == nullptr) throw Error(name_ + " gives no completion channel: " + reason());
  set_nonblocking(channel_->fd);
  set_nonblocking(context_->async_fd);
}

void Context::open() {
  const DeviceList all;
  ibv_device* chosen = nullptr;
  for (int i = 0; i < all.count && chosen == nullptr; ++i) {
    ibv_device* const device = all.list.get()[i];
    const bool named = settings_.device == ibv_get_device_name(device);
    if (settings_.device.empty() ? has_active_port(device, settings_.port) : named) chosen = device;
  }
  if (chosen == nullptr) {
    const std::string wanted =
        settings_.device.empty()
            ? "no RDMA device has an active port " + std::to_string(settings_.port)
            : "there is no RDMA device " + settings_.device;
    throw Error(wanted + " (network.rdma_device, network.rdma_port); " + known_devices());
  }
  name_ = ibv_get_device_name(chosen);
  context_.reset(ibv_open_device(chosen));
  if (context_ == nullptr) {
    throw Error("cannot open " + name_ + ": " + reason() +
                "; in a container pass /dev/infiniband on (docker: --device /dev/infiniband)");
  }
}

void Context::read_port() {
  ibv_port_attr port{};
  if (ibv_query_port(context_.get(), static_cast<uint8_t>(settings_.port), &port) != 0) {
    throw Error(name_ + " has no port " + std::to_string(settings_.port) +
                " (network.rdma_port); " + known_devices());
  }
  if (port.state != IBV_PORT_ACTIVE) {
    throw Error("port " + std::to_string(settings_.port) + " of " + name_ +
                " is not active: see the cable and the switch, or `ip link set ... up` for RoCE");
  }
  ethernet_ = port.link_layer == IBV_LINK_LAYER_ETHERNET;
  lid_ = port.lid;
  mtu_ = settings_.mtu == 0 ? port.active_mtu : mtu_of(settings_.mtu);
  if (mtu_ > port.active_mtu) {
    throw Error("network.rdma_mtu " + std::to_string(settings_.mtu) + " is more than " + name_ +
                " carries now (" + std::to_string(128 << port.active_mtu) +
                "): raise its interface's MTU, or lower the setting");
  }
  global_ = ethernet_ || settings_.gid_index >= 0 || !settings_.gid_address.empty();
}

void Context::find_gid() {
  if (!global_) return;
  std::vector<ibv_gid_entry> entries(kMostGids);
  const ssize_t count = ibv_query_gid_table(context_.get(), entries.data(), entries.size(), 0);
  const ibv_gid_entry* best = nullptr;
  std::string all;
  for (ssize_t i = 0; i < count; ++i) {
    const ibv_gid_entry& entry = entries[static_cast<size_t>(i)];
    all += (all.empty() ? "" : ", ") + std::to_string(entry.gid_index) + " " +
           type_name(entry.gid_type) + " " + address_of(entry.gid);
    if (fits(entry, settings_) && (best == nullptr || rank(entry) > rank(*best))) best = &entry;
  }
  if (best == nullptr) {
    throw Error("no GID of " + name_ + " fits network.rdma_gid_*; there are: " +
                (all.empty() ? "none: give its interface an address" : all));
  }
  gid_ = best->gid;
  gid_index_ = static_cast<int>(best->gid_index);
}

OwnedCq Context::make_cq(int entries, uint64_t link) const {
  void* const name = reinterpret_cast<void*>(link);
  OwnedCq cq(ibv_create_cq(context_.get(), entries, name, channel_.get(), 0));
  if (cq == nullptr) {
    throw Error(name_ + " gives no completion queue of " + std::to_string(entries) +
                " entries: " + reason() + "; lower network.rdma_queue_depth");
  }
  return cq;
}

}  // namespace clover::verbs
