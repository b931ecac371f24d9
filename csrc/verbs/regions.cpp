#include "verbs/regions.h"

#include <utility>

namespace clover::verbs {

void Regions::add(uint64_t number, std::shared_ptr<MemoryRegion> memory) {
  const std::lock_guard<std::mutex> lock(mutex_);
  regions_.emplace(number, std::move(memory));
}

std::shared_ptr<MemoryRegion> Regions::remove(uint64_t number) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = regions_.find(number);
  if (found == regions_.end()) return nullptr;
  const std::shared_ptr<MemoryRegion> removed = std::move(found->second);
  regions_.erase(found);
  return removed;
}

std::shared_ptr<MemoryRegion> Regions::find(uint64_t number) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = regions_.find(number);
  return found == regions_.end() ? nullptr : found->second;
}

}  // namespace clover::verbs
