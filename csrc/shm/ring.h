// A ring of records in shared memory, from one sending endpoint to one receiving endpoint.
//
// Knows bytes only: what a record's kind and value mean is the caller's. Who may write which word
// is said at the word; neither side ever trusts what the other side wrote.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "shm/bell.h"
#include "shm/status.h"

namespace clover::shm {

struct RingHeader {
  static constexpr uint32_t kMagic = 0x52564c43;  // "CLVR"
  static constexpr size_t kBytes = 4096;          // records begin after them
  static constexpr size_t kMaxName = 256;
  static constexpr size_t kFlags = 2048;  // from here to kBytes: flags that a sender's devices set

  uint32_t magic;
  uint32_t version;
  uint64_t capacity;      // bytes of records; a multiple of RecordHeader's size
  char sender[kMaxName];  // the sender's address, zero-terminated
  std::atomic<uint32_t> sender_closed;
  alignas(64) std::atomic<uint64_t> tail;  // bytes ever written; stored by the sender only
  alignas(64) std::atomic<uint64_t> head;  // bytes ever read; stored by the receiver only
  alignas(64) Bell space;                  // the sender sleeps here, the receiver rings
};
static_assert(sizeof(RingHeader) <= RingHeader::kFlags);

// Followed by `nbytes` of payload, padded to a multiple of this header's size. A header never
// wraps around the ring's end; a payload may.
struct RecordHeader {
  uint32_t kind;
  uint32_t nbytes;
  uint64_t value;
};
static_assert(sizeof(RecordHeader) == 16);

// A record to be sent; the payload is the caller's.
struct Outgoing {
  uint32_t kind;
  uint64_t value;
  const void* payload;
  size_t nbytes;
};

// A record that has arrived.
struct Record {
  int ring;  // which of the reader's rings it came from
  uint32_t kind;
  uint64_t value;
  std::string payload;
};

// Makes fresh (zeroed) memory a ring. kMalformed: too small; kTooLong: the sender's name.
Status format_ring(std::byte* memory, size_t size, const std::string& sender);

// The sending end. Not thread-safe: the caller has one lock per ring.
class RingWriter {
 public:
  explicit RingWriter(RingHeader* header);

  // Publishes the record, or kTimeout: there is no room for it now.
  Status try_push(const Outgoing& record);
  // Bytes pushed so far; a record is read once `consumed()` has reached the position after it.
  uint64_t position() const { return tail_; }
  uint64_t consumed() const { return header_->head.load(std::memory_order_acquire); }
  Bell& space() { return header_->space; }
  void close();

 private:
  void write(uint64_t position, const void* bytes, size_t nbytes);

  RingHeader* header_;
  std::byte* records_;
  uint64_t capacity_;
  uint64_t tail_ = 0;  // our own copy: the shared one is for the reader
};

// The receiving end; one thread.
class RingReader {
 public:
  explicit RingReader(RingHeader* header);

  // Appends what had been published when it was called. What cannot be a record is dropped, with
  // all that follows it in the ring so far, and counted.
  void drain(int ring, std::vector<Record>* out);
  // Whether everything is read and nothing will come: the sender has closed it, or is known dead.
  bool finished(bool sender_died) const;
  uint64_t malformed() const { return malformed_; }
  Bell& space() { return header_->space; }

 private:
  bool next(uint64_t tail, int ring, std::vector<Record>* out);
  void read(uint64_t position, void* bytes, size_t nbytes) const;

  RingHeader* header_;
  const std::byte* records_;
  uint64_t capacity_;
  uint64_t head_ = 0;  // our own copy: the shared one is for the writer
  uint64_t malformed_ = 0;
};

// The ring in this memory, or nullptr where there is none.
RingHeader* ring_in(std::byte* memory, size_t size);

}  // namespace clover::shm
