#include "verbs/memory_region.h"

#include <sys/resource.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "verbs/status.h"

namespace clover::verbs {
namespace {

constexpr int kAccess = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;

std::string mib(uint64_t nbytes) { return std::to_string(nbytes >> 20) + " MiB"; }

bool pages_on_demand(ibv_context* context) {
  ibv_device_attr_ex attributes{};
  if (ibv_query_device_ex(context, nullptr, &attributes) != 0) return false;
  const uint32_t needed = IBV_ODP_SUPPORT_WRITE | IBV_ODP_SUPPORT_SEND;
  return (attributes.odp_caps.general_caps & IBV_ODP_SUPPORT) != 0 &&
         (attributes.odp_caps.per_transport_caps.rc_odp_caps & needed) == needed;
}

// The limit on locked memory is a soft one of this process; root with CAP_IPC_LOCK has none.
std::string memlock_cure(uint64_t nbytes) {
  rlimit limit{};
  if (getrlimit(RLIMIT_MEMLOCK, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) {
    return "the host has no memory left to lock: configure smaller pools";
  }
  return "this process may lock " + mib(limit.rlim_cur) + " in all and wants " + mib(nbytes) +
         " here: ulimit -l unlimited (docker: --ulimit memlock=-1; systemd: LimitMEMLOCK=infinity)";
}

std::string cure(const Context& context, int error, uint64_t nbytes) {
  ibv_device_attr attributes{};
  const bool known = ibv_query_device(context.get(), &attributes) == 0;
  if (known && nbytes > attributes.max_mr_size) {
    return "the device takes at most " + mib(attributes.max_mr_size) +
           " in one region: configure smaller pools";
  }
  switch (error) {
    case ENOMEM:
    case EPERM:
      return memlock_cure(nbytes);
    case EFAULT:
      return "it is no memory of this process: for a GPU's load nvidia-peermem (modprobe "
             "nvidia-peermem), or a driver that exports dma-bufs";
    case EOPNOTSUPP:
    case EINVAL:
      return "the device or the kernel does not do that: for a GPU's memory load nvidia-peermem "
             "(modprobe nvidia-peermem)";
  }
  return "see the kernel's log (dmesg)";
}

[[noreturn]] void refuse(const Context& context, const char* what, uint64_t nbytes) {
  const int error = errno;
  throw Error(context.device() + " cannot register " + std::to_string(nbytes) + " bytes of " +
              what + ": " + std::strerror(error) + "; " + cure(context, error, nbytes));
}

int access(const Context& context) {
  if (!context.settings().on_demand) return kAccess;
  if (!pages_on_demand(context.get())) {
    throw Error(context.device() +
                " does not page on demand: set network.rdma_on_demand_paging to false, and let the "
                "process lock its memory (ulimit -l unlimited)");
  }
  return kAccess | IBV_ACCESS_ON_DEMAND;
}

}  // namespace

MemoryRegion::MemoryRegion(const Context& context, std::byte* base, uint64_t nbytes)
    : address_(reinterpret_cast<uint64_t>(base)), nbytes_(nbytes) {
  mr_.reset(ibv_reg_mr(context.pd(), base, nbytes, access(context)));
  if (mr_ == nullptr) refuse(context, "memory", nbytes);
}

MemoryRegion::MemoryRegion(const Context& context, int fd, uint64_t offset, std::byte* base,
                           uint64_t nbytes)
    : address_(reinterpret_cast<uint64_t>(base)), nbytes_(nbytes) {
  mr_.reset(ibv_reg_dmabuf_mr(context.pd(), offset, nbytes, address_, fd, kAccess));
  if (mr_ == nullptr) refuse(context, "a dma-buf", nbytes);
}

}  // namespace clover::verbs
