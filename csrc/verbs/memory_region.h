// Memory that a device may read and write.
#pragma once

#include <cstddef>
#include <cstdint>

#include "verbs/context.h"

namespace clover::verbs {

// Registered for its whole life. Error says why it cannot be, and what to do about it.
class MemoryRegion {
 public:
  // Host memory, or where nvidia-peermem is loaded a GPU's.
  MemoryRegion(const Context& context, std::byte* base, uint64_t nbytes);
  // A GPU's memory through its dma-buf: `nbytes` from `offset` in `fd`, at `base` for peers.
  MemoryRegion(const Context& context, int fd, uint64_t offset, std::byte* base, uint64_t nbytes);

  uint64_t address() const { return address_; }
  uint64_t nbytes() const { return nbytes_; }
  uint32_t lkey() const { return mr_->lkey; }
  uint32_t rkey() const { return mr_->rkey; }

 private:
  uint64_t address_;
  uint64_t nbytes_;
  OwnedMr mr_;
};

}  // namespace clover::verbs
