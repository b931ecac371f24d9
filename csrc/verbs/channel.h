// The control connection of a link: what its two sides say to each other besides queue pairs. It
// lives as long as the link, so its end tells at once that the other process is gone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "tcp/loop.h"
#include "verbs/queue_pair.h"

namespace clover::verbs {

enum class Kind : uint32_t {
  kSetup = 1,    // sender: Setup, its queue pairs
  kReady = 2,    // receiver: Setup, the queue pairs for them
  kRefused = 3,  // receiver: why there are none, as text
  kFind = 4,     // sender: Find
  kFound = 5,    // receiver: Found
  kRevoke = 6,   // receiver: Revoke, a region that is about to be closed
  kRevoked = 7,  // sender: Revoke, nothing more will be written there
};

constexpr uint32_t kVersion = 1;
constexpr uint32_t kMostPairs = 16;

struct Setup {
  uint32_t version;
  uint32_t count;  // of queue pairs
  QpInfo pairs[kMostPairs];
};

struct Find {
  uint64_t number;  // of the question
  uint64_t region;
  uint64_t nbytes;
};

struct Found {
  uint64_t number;
  uint64_t address;
  uint32_t rkey;
  uint32_t there;  // 0: no such region
};

struct Revoke {
  uint64_t region;
};

struct Frame {
  Kind kind;
  std::string payload;

  // False where the payload has another size.
  template <class T>
  bool as(T* record) const {
    if (payload.size() != sizeof(T)) return false;
    payload.copy(reinterpret_cast<char*>(record), sizeof(T));
    return true;
  }
};

class Channel {
 public:
  explicit Channel(tcp::Fd socket) : socket_(std::move(socket)) {}

  int fd();
  // Whole frames that have arrived. False: the connection has ended, or holds no frames.
  bool read(std::vector<Frame>* frames);
  // The next frame, waiting for it until `deadline_ns`.
  Status wait(Frame* frame, int64_t deadline_ns);
  // False where it has ended, or the other side does not read.
  bool write(Kind kind, const void* payload, size_t nbytes);
  template <class T>
  bool write(Kind kind, const T& record) {
    return write(kind, &record, sizeof(record));
  }
  // Ends it and hands the socket over, to be closed where nobody waits on it.
  tcp::Fd end();

 private:
  bool take(Frame* frame, bool* good);

  std::mutex mutex_;  // of writing and ending
  tcp::Fd socket_;
  std::string read_;
};

}  // namespace clover::verbs
