// Memory that peers may write to, by number.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "verbs/memory_region.h"

namespace clover::verbs {

class Regions {
 public:
  void add(uint64_t number, std::shared_ptr<MemoryRegion> memory);
  // Peers find it no more; nullptr where there is none.
  std::shared_ptr<MemoryRegion> remove(uint64_t number);
  std::shared_ptr<MemoryRegion> find(uint64_t number);

 private:
  std::mutex mutex_;
  std::unordered_map<uint64_t, std::shared_ptr<MemoryRegion>> regions_;
};

}  // namespace clover::verbs
