// Exposes csrc/shm: scattered copies, and the mailboxes and rings of the shm transport. Memory
// crosses as objects with a buffer, which stay pinned (and mapped) as long as they are used here.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/buffers.h"
#include "bindings/links.h"
#include "bindings/mailboxes.h"
#include "shm/copy.h"
#include "shm/foreign.h"
#include "shm/rally.h"

namespace py = pybind11;

namespace clover {
namespace {

using shm::Status;

// Threads that large copies are shared out over; one set per number of them in a process.
class CopyThreads {
 public:
  explicit CopyThreads(int threads) {
    if (threads < 1) raise("ValueError", "a copy has at least one thread");
    pool_ = ThreadPool::shared(threads);
  }
  ThreadPool* pool() const { return pool_.get(); }

 private:
  std::shared_ptr<ThreadPool> pool_;
};

void copy_ranges(const py::object& dst, const Offsets& dst_offsets, const py::object& src,
                 const Offsets& src_offsets, int64_t length, const Index& index,
                 const CopyThreads* threads) {
  check_index(index);
  const Pinned to(dst, true);
  const Pinned from(src, false);
  const shm::Pieces<std::byte> dst_pieces{to.data(), to.size(), dst_offsets.data(),
                                          dst_offsets.size()};
  const shm::Pieces<const std::byte> src_pieces{from.data(), from.size(), src_offsets.data(),
                                                src_offsets.size()};
  Status status;
  {
    const py::gil_scoped_release unlocked;
    status = shm::copy_ranges(dst_pieces, src_pieces, length, index.data(), index.shape(0),
                              threads == nullptr ? nullptr : threads->pool());
  }
  check(status);
}

shm::CallersPage* page_in(const Pinned& pinned) {
  if (pinned.size() < sizeof(shm::CallersPage)) check(Status::kMalformed);
  return reinterpret_cast<shm::CallersPage*>(pinned.data());
}

void open_page(const py::object& page, const py::object& memory) {
  const Pinned pinned(page, true);
  const Pinned named(memory, true);
  shm::open_page(page_in(pinned), reinterpret_cast<uintptr_t>(named.data()), named.size());
}

bool close_page(const py::object& page, double timeout) {
  const Pinned pinned(page, true);
  const py::gil_scoped_release unlocked;
  return shm::close_page(page_in(pinned), to_ns(timeout));
}

void write_ranges(const py::object& page, int64_t pid, const Offsets& dst_offsets,
                  const py::object& src, const Offsets& src_offsets, int64_t length,
                  const Index& index) {
  check_index(index);
  const Pinned there(page, true);
  const Pinned from(src, false);
  const shm::Pieces<std::byte> dst_pieces{nullptr, 0, dst_offsets.data(), dst_offsets.size()};
  const shm::Pieces<const std::byte> src_pieces{from.data(), from.size(), src_offsets.data(),
                                                src_offsets.size()};
  shm::CallersPage* named = page_in(there);
  Status status;
  {
    const py::gil_scoped_release unlocked;
    status =
        shm::write_ranges(named, pid, dst_pieces, src_pieces, length, index.data(), index.shape(0));
  }
  check(status);
}

// What a put of several holds while the GIL is released.
struct HeldPut {
  HeldPut(const py::object& page, Offsets to_offsets, const py::object& from, Offsets from_offsets,
          int64_t length, Index index, uint64_t notice)
      : page(page, true),
        from(from, false),
        to_offsets(std::move(to_offsets)),
        from_offsets(std::move(from_offsets)),
        index(std::move(index)),
        length(length),
        notice(notice) {
    check_index(this->index);
  }

  shm::ForeignPut put() const {
    return {page_in(page),
            {nullptr, 0, to_offsets.data(), to_offsets.size()},
            {from.data(), from.size(), from_offsets.data(), from_offsets.size()},
            length,
            index.data(),
            index.shape(0),
            notice};
  }

  Pinned page;
  Pinned from;
  Offsets to_offsets;
  Offsets from_offsets;
  Index index;
  int64_t length;
  uint64_t notice;
};

size_t write_and_tell(MailboxWriter& writer, int64_t pid, const py::sequence& puts,
                      double timeout) {
  using Part = std::tuple<py::object, Offsets, py::object, Offsets, int64_t, Index, uint64_t>;
  std::vector<std::unique_ptr<HeldPut>> held;
  std::vector<shm::ForeignPut> plain;
  for (const py::handle each : puts) {
    auto [page, to, from, of, length, index, notice] = each.cast<Part>();
    held.push_back(std::make_unique<HeldPut>(page, to, from, of, length, index, notice));
    plain.push_back(held.back()->put());
  }
  const py::gil_scoped_release unlocked;
  return shm::write_and_tell(writer.sender(), pid, plain, to_ns(timeout));
}

void may_write(const py::object& page, int64_t pid) {
  const Pinned pinned(page, true);
  check(shm::may_write(page_in(pinned), pid));
}

// The least that two processes can do to wake each other, `rounds` times there and back: a bell
// each, and nothing said. `memory` is shared, zeroed, and the first and the second name different
// sides of it. False: the other side did not answer in time.
bool bell_rally(const py::object& memory, bool second, int64_t rounds, double timeout) {
  const Pinned pinned(memory, true);
  const bool aligned = reinterpret_cast<uintptr_t>(pinned.data()) % alignof(shm::Rally) == 0;
  if (pinned.size() < sizeof(shm::Rally) || !aligned) {
    raise("ValueError", "the memory is too small, or not at a multiple of 64");
  }
  const py::gil_scoped_release unlocked;
  return shm::rally(reinterpret_cast<shm::Rally*>(pinned.data()), second, rounds, to_ns(timeout));
}

void format_mailbox(const py::object& memory, int64_t pid, uint64_t start_time) {
  const Pinned pinned(memory, true);
  check(shm::format_mailbox(pinned.data(), pinned.size(), pid, start_time));
}

py::tuple mailbox_owner(const py::object& memory) {
  const Pinned pinned(memory, true);
  const shm::MailboxHeader* header = mailbox_of(pinned);
  return py::make_tuple(header->pid, header->start_time);
}

void format_ring(const py::object& memory, const std::string& sender) {
  const Pinned pinned(memory, true);
  check(shm::format_ring(pinned.data(), pinned.size(), sender));
}

py::str ring_sender(const py::object& memory) {
  const Pinned pinned(memory, true);
  const std::string name = ring_of(pinned)->sender;
  return py::reinterpret_steal<py::str>(
      PyUnicode_DecodeUTF8(name.data(), static_cast<Py_ssize_t>(name.size()), "replace"));
}

}  // namespace

void bind_shm(py::module_& m) {
  py::class_<CopyThreads>(m, "CopyThreads").def(py::init<int>(), py::arg("threads"));
  m.attr("MAILBOX_NOTICE") = shm::kNotice;
  m.attr("LARGE_COPY_BYTES") = shm::kLargeCopy;
  m.def("copy_ranges", &copy_ranges, py::arg("dst"), py::arg("dst_offsets").noconvert(),
        py::arg("src"), py::arg("src_offsets").noconvert(), py::arg("length"),
        py::arg("index").noconvert(), py::arg("threads") = nullptr);
  m.attr("CALLERS_PAGE_BYTES") = sizeof(shm::CallersPage);
  m.def("open_page", &open_page, py::arg("page"), py::arg("memory"));
  m.def("close_page", &close_page, py::arg("page"), py::arg("timeout"));
  m.def("write_ranges", &write_ranges, py::arg("page"), py::arg("pid"),
        py::arg("dst_offsets").noconvert(), py::arg("src"), py::arg("src_offsets").noconvert(),
        py::arg("length"), py::arg("index").noconvert());
  m.def("write_and_tell", &write_and_tell, py::arg("writer"), py::arg("pid"), py::arg("puts"),
        py::arg("timeout"));
  m.def("may_write", &may_write, py::arg("page"), py::arg("pid"));
  m.def("bell_rally", &bell_rally, py::arg("memory"), py::arg("second"), py::arg("rounds"),
        py::arg("timeout"));
  m.def("format_mailbox", &format_mailbox, py::arg("memory"), py::arg("pid"),
        py::arg("start_time"));
  m.def("mailbox_owner", &mailbox_owner, py::arg("memory"));
  m.def("format_ring", &format_ring, py::arg("memory"), py::arg("sender"));
  m.def("ring_sender", &ring_sender, py::arg("memory"));
  py::class_<MailboxWriter>(m, "MailboxWriter")
      .def(py::init<const py::object&, const py::object&>(), py::arg("mailbox"), py::arg("ring"))
      .def("push", &MailboxWriter::push, py::arg("kind"), py::arg("value"), py::arg("payload"),
           py::arg("timeout"))
      .def("wait_consumed", &MailboxWriter::wait_consumed, py::arg("position"), py::arg("timeout"))
      .def("announce", &MailboxWriter::announce)
      .def("close", &MailboxWriter::close)
      .def_property_readonly("position", &MailboxWriter::position)
      .def_property_readonly("peer_closed", &MailboxWriter::peer_closed);
  py::class_<MailboxReader>(m, "MailboxReader")
      .def(py::init<const py::object&>(), py::arg("mailbox"))
      .def("add_ring", &MailboxReader::add_ring, py::arg("ring"))
      .def("remove_ring", &MailboxReader::remove_ring, py::arg("ring"))
      .def("finished", &MailboxReader::finished, py::arg("ring"), py::arg("sender_died"))
      .def("poll", &MailboxReader::poll, py::arg("timeout"))
      .def("take_announcement", &MailboxReader::take_announcement)
      .def("close", &MailboxReader::close)
      .def_property_readonly("malformed", &MailboxReader::malformed);
}

}  // namespace clover
