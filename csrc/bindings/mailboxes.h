// The two ends of a mailbox as Python has them: memory stays pinned for as long as they live.
#pragma once

#include <pybind11/pybind11.h>

#include <map>
#include <memory>
#include <vector>

#include "bindings/buffers.h"
#include "shm/mailbox.h"
#include "shm/ring.h"

namespace clover {

inline void check(shm::Status status) {
  switch (status) {
    case shm::Status::kOk:
      return;
    case shm::Status::kTimeout:
      raise("DeadlineError", "the peer's mailbox stayed full");
    case shm::Status::kClosed:
      raise("TransportError", "the peer has closed its endpoint");
    case shm::Status::kTooLong:
      raise("ValueError", "a record is longer than its ring, or a name than its field");
    case shm::Status::kOutOfRange:
      raise("ValueError", "an index row names no slice, or a slice reaches outside its region");
    case shm::Status::kDenied:
      raise("TransportError",
            "the kernel does not let this process write into the peer's memory: allow ptrace "
            "between them (CAP_SYS_PTRACE, or kernel.yama.ptrace_scope = 0), or use tcp");
    case shm::Status::kMalformed:
      raise("TransportError", "shared memory does not hold what it should");
  }
}

template <typename Header>
Header* checked(Header* header) {
  if (header == nullptr) check(shm::Status::kMalformed);
  return header;
}

inline shm::MailboxHeader* mailbox_of(const Pinned& memory) {
  return checked(shm::mailbox_in(memory.data(), memory.size()));
}

inline shm::RingHeader* ring_of(const Pinned& memory) {
  return checked(shm::ring_in(memory.data(), memory.size()));
}

// The sending end of one ring into one peer's mailbox.
class MailboxWriter {
 public:
  MailboxWriter(const pybind11::object& mailbox, const pybind11::object& ring)
      : mailbox_(mailbox, true), ring_(ring, true), sender_(mailbox_of(mailbox_), ring_of(ring_)) {}

  bool push(uint32_t kind, uint64_t value, const pybind11::bytes& payload, double timeout) {
    char* data = nullptr;
    Py_ssize_t nbytes = 0;
    if (PyBytes_AsStringAndSize(payload.ptr(), &data, &nbytes) != 0)
      throw pybind11::error_already_set();
    const shm::Outgoing record{kind, value, data, static_cast<size_t>(nbytes)};
    shm::Status status;
    {
      const pybind11::gil_scoped_release unlocked;
      status = sender_.push(record, to_ns(timeout));
    }
    return pushed(status);
  }

  bool wait_consumed(uint64_t position, double timeout) {
    shm::Status status;
    {
      const pybind11::gil_scoped_release unlocked;
      status = sender_.wait_consumed(position, to_ns(timeout));
    }
    return pushed(status);
  }

  uint64_t position() const { return sender_.position(); }
  bool peer_closed() const { return sender_.peer_closed(); }
  void announce() { sender_.announce(); }
  void close() { sender_.close(); }
  shm::Sender* sender() { return &sender_; }

 private:
  static bool pushed(shm::Status status) {
    if (status == shm::Status::kTimeout) return false;
    check(status);
    return true;
  }

  Pinned mailbox_;
  Pinned ring_;
  shm::Sender sender_;  // last: it points into what stands above
};

// The owner's end of a mailbox, with the rings that lead into it.
class MailboxReader {
 public:
  explicit MailboxReader(const pybind11::object& mailbox)
      : memory_(mailbox, true), mailbox_(mailbox_of(memory_)) {}

  int add_ring(const pybind11::object& ring) {
    auto memory = std::make_unique<Pinned>(ring, true);
    const int id = mailbox_.add_ring(ring_of(*memory));
    rings_.emplace(id, std::move(memory));
    return id;
  }

  void remove_ring(int ring) {
    if (rings_.count(ring) == 0) raise("ValueError", "no such ring");
    mailbox_.remove_ring(ring);
    rings_.erase(ring);
  }

  bool finished(int ring, bool sender_died) const {
    if (rings_.count(ring) == 0) raise("ValueError", "no such ring");
    return mailbox_.finished(ring, sender_died);
  }

  pybind11::list poll(double timeout) {
    std::vector<shm::Record> records;
    {
      const pybind11::gil_scoped_release unlocked;
      records = mailbox_.poll(to_ns(timeout));
    }
    pybind11::list result;
    for (const shm::Record& record : records) {
      result.append(pybind11::make_tuple(record.ring, record.kind, record.value,
                                         pybind11::bytes(record.payload)));
    }
    return result;
  }

  bool take_announcement() { return mailbox_.take_announcement(); }
  uint64_t malformed() const { return mailbox_.malformed(); }
  void close() { mailbox_.close(); }
  shm::Mailbox* mailbox() { return &mailbox_; }

 private:
  Pinned memory_;
  std::map<int, std::unique_ptr<Pinned>> rings_;
  shm::Mailbox mailbox_;  // last: it points into what stands above
};

}  // namespace clover
