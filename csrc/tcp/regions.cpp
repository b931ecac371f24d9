#include "tcp/regions.h"

#include <utility>

namespace clover::tcp {

Region::Writing::Writing(Region* region) : region_(region) {
  const std::lock_guard<std::mutex> lock(region->mutex_);
  if (region->open_) {
    ++region->writers_;
  } else {
    region_ = nullptr;
  }
}

Region::Writing::~Writing() {
  if (region_ == nullptr) return;
  const std::lock_guard<std::mutex> lock(region_->mutex_);
  if (--region_->writers_ == 0 && !region_->open_) region_->left_.notify_all();
}

void Region::close() {
  std::unique_lock<std::mutex> lock(mutex_);
  open_ = false;
  // No deadline: a writer is inside a system call that does not block, and returning before it
  // has come out would give the memory away under it.
  left_.wait(lock, [this] { return writers_ == 0; });
}

void Regions::add(uint64_t number, std::byte* base, uint64_t nbytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  regions_[number] = std::make_shared<Region>(base, nbytes);
}

void Regions::remove(uint64_t number) {
  std::shared_ptr<Region> region;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = regions_.find(number);
    if (found == regions_.end()) return;
    region = std::move(found->second);
    regions_.erase(found);
  }
  region->close();
}

std::shared_ptr<Region> Regions::find(uint64_t number) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = regions_.find(number);
  return found == regions_.end() ? nullptr : found->second;
}

}  // namespace clover::tcp
