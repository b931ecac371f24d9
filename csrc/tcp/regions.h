// Memory that peers may write to, by number.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>

namespace clover::tcp {

// One region. Writers hold a Writing around every write; close() fences them: once it returns,
// nothing writes to the memory any more.
class Region {
 public:
  Region(std::byte* base, uint64_t nbytes) : base_(base), nbytes_(nbytes) {}

  std::byte* base() const { return base_; }
  uint64_t nbytes() const { return nbytes_; }

  void close();

  class Writing {
   public:
    explicit Writing(Region* region);
    ~Writing();
    Writing(const Writing&) = delete;
    Writing& operator=(const Writing&) = delete;
    explicit operator bool() const { return region_ != nullptr; }

   private:
    Region* region_;  // nullptr: it is closed
  };

 private:
  std::byte* const base_;
  const uint64_t nbytes_;
  std::mutex mutex_;
  std::condition_variable left_;
  int writers_ = 0;
  bool open_ = true;
};

class Regions {
 public:
  void add(uint64_t number, std::byte* base, uint64_t nbytes);
  // Waits for writes that are under way: system calls that never block.
  void remove(uint64_t number);
  // nullptr where there is none.
  std::shared_ptr<Region> find(uint64_t number);

 private:
  std::mutex mutex_;
  std::unordered_map<uint64_t, std::shared_ptr<Region>> regions_;
};

}  // namespace clover::tcp
