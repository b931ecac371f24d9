#include "shm/ring.h"

#include <algorithm>
#include <cstring>
#include <new>

namespace clover::shm {
namespace {

constexpr uint32_t kVersion = 1;

std::byte* records_of(RingHeader* header) {
  return reinterpret_cast<std::byte*>(header) + RingHeader::kBytes;
}

uint64_t padded(uint64_t nbytes) {
  constexpr uint64_t kUnit = sizeof(RecordHeader);
  return (nbytes + kUnit - 1) / kUnit * kUnit;
}

}  // namespace

Status format_ring(std::byte* memory, size_t size, const std::string& sender) {
  if (size < RingHeader::kBytes + sizeof(RecordHeader)) return Status::kMalformed;
  if (sender.size() >= RingHeader::kMaxName) return Status::kTooLong;
  auto* header = new (memory) RingHeader{};
  header->version = kVersion;
  header->capacity = (size - RingHeader::kBytes) / sizeof(RecordHeader) * sizeof(RecordHeader);
  std::memcpy(header->sender, sender.data(), sender.size());
  header->magic = RingHeader::kMagic;
  return Status::kOk;
}

RingHeader* ring_in(std::byte* memory, size_t size) {
  if (size < RingHeader::kBytes + sizeof(RecordHeader)) return nullptr;
  auto* header = reinterpret_cast<RingHeader*>(memory);
  const bool good = header->magic == RingHeader::kMagic && header->version == kVersion &&
                    header->capacity > 0 && header->capacity <= size - RingHeader::kBytes &&
                    header->capacity % sizeof(RecordHeader) == 0 &&
                    std::memchr(header->sender, 0, RingHeader::kMaxName) != nullptr;
  return good ? header : nullptr;
}

RingWriter::RingWriter(RingHeader* header)
    : header_(header),
      records_(records_of(header)),
      capacity_(header->capacity),
      tail_(header->tail.load(std::memory_order_relaxed)) {}

Status RingWriter::try_push(const Outgoing& record) {
  const uint64_t needed = sizeof(RecordHeader) + padded(record.nbytes);
  if (record.nbytes > UINT32_MAX || needed > capacity_) return Status::kTooLong;
  // Acquire pairs with the release store of `head` in drain(): the bytes we are about to write
  // over have been read.
  const uint64_t used = tail_ - header_->head.load(std::memory_order_acquire);
  if (used > capacity_) return Status::kMalformed;  // the receiver wrote nonsense
  if (needed > capacity_ - used) return Status::kTimeout;
  const RecordHeader header{record.kind, static_cast<uint32_t>(record.nbytes), record.value};
  write(tail_, &header, sizeof(header));
  write(tail_ + sizeof(header), record.payload, record.nbytes);
  tail_ += needed;
  // Release pairs with the acquire load of `tail` in drain(): the record, and the put's bytes
  // that were copied before it, are visible to whoever sees the new tail.
  header_->tail.store(tail_, std::memory_order_release);
  return Status::kOk;
}

void RingWriter::write(uint64_t position, const void* bytes, size_t nbytes) {
  const uint64_t at = position % capacity_;
  const size_t first = std::min<size_t>(nbytes, capacity_ - at);
  if (first > 0) std::memcpy(records_ + at, bytes, first);
  if (nbytes > first) {
    std::memcpy(records_, static_cast<const std::byte*>(bytes) + first, nbytes - first);
  }
}

// Release pairs with the acquire load in finished(): the last tail is visible with the flag.
void RingWriter::close() { header_->sender_closed.store(1, std::memory_order_release); }

RingReader::RingReader(RingHeader* header)
    : header_(header),
      records_(records_of(header)),
      capacity_(header->capacity),
      head_(header->head.load(std::memory_order_relaxed)) {}

void RingReader::drain(int ring, std::vector<Record>* out) {
  // Acquire pairs with the release store of `tail` in try_push().
  const uint64_t tail = header_->tail.load(std::memory_order_acquire);
  if (tail == head_) return;
  if (tail - head_ > capacity_) {
    ++malformed_;
    head_ = tail;
  }
  while (head_ != tail) {
    if (!next(tail, ring, out)) {
      ++malformed_;
      head_ = tail;
    }
  }
  // Release pairs with the acquire load of `head` in try_push().
  header_->head.store(head_, std::memory_order_release);
  header_->space.ring();
}

bool RingReader::next(uint64_t tail, int ring, std::vector<Record>* out) {
  const uint64_t available = tail - head_;
  if (head_ % sizeof(RecordHeader) != 0 || available < sizeof(RecordHeader)) return false;
  RecordHeader record;
  read(head_, &record, sizeof(record));
  const uint64_t size = sizeof(record) + padded(record.nbytes);
  if (size > available) return false;
  out->push_back({ring, record.kind, record.value, std::string(record.nbytes, '\0')});
  read(head_ + sizeof(record), out->back().payload.data(), record.nbytes);
  head_ += size;
  return true;
}

void RingReader::read(uint64_t position, void* bytes, size_t nbytes) const {
  const uint64_t at = position % capacity_;
  const size_t first = std::min<size_t>(nbytes, capacity_ - at);
  if (first > 0) std::memcpy(bytes, records_ + at, first);
  if (nbytes > first) std::memcpy(static_cast<std::byte*>(bytes) + first, records_, nbytes - first);
}

bool RingReader::finished(bool sender_died) const {
  // Acquire pairs with the release store in close().
  const bool over = sender_died || header_->sender_closed.load(std::memory_order_acquire) != 0;
  return over && header_->tail.load(std::memory_order_acquire) == head_;
}

}  // namespace clover::shm
