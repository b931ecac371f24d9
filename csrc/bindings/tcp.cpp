// Exposes csrc/tcp. Memory crosses as objects with a buffer, pinned while a region or ranges use
// it. Sockets cross as file descriptors, which belong to the engine from then on.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/buffers.h"
#include "bindings/links.h"
#include "tcp/engine.h"

namespace py = pybind11;

namespace clover {
namespace {

using tcp::Status;

const char* text(Status status) {
  switch (status) {
    case Status::kOk:
      return "";
    case Status::kTimeout:
      return "it did not finish within its deadline";
    case Status::kPeerGone:
      return "the peer is gone: its connection ended";
    case Status::kDropped:
      return "the connection was dropped, as another put missed its deadline";
    case Status::kNoRegion:
      return "the peer has no such region, or has closed it";
    case Status::kClosed:
      return "this endpoint is closed";
    case Status::kOutOfRange:
      return "an index row names no slice, or a slice reaches outside its region";
    case Status::kMalformed:
      return "the peer answered what makes no sense";
  }
  return "";
}

const char* error(Status status) {
  switch (status) {
    case Status::kTimeout:
      return "DeadlineError";
    case Status::kOutOfRange:
      return "ValueError";
    case Status::kOk:
    case Status::kPeerGone:
    case Status::kDropped:
    case Status::kNoRegion:
    case Status::kClosed:
    case Status::kMalformed:
      return "TransportError";
  }
  return "TransportError";
}

void check(Status status) {
  if (status != Status::kOk) raise(error(status), text(status));
}

// Both sides of a put, resolved once.
class TcpRanges {
 public:
  TcpRanges(const py::object& source, Offsets local, uint64_t region, uint64_t region_bytes,
            Offsets remote, int64_t length)
      : source_(source, false), local_(std::move(local)), remote_(std::move(remote)) {
    slices_ = {source_.data(), source_.size(), local_.data(),  local_.size(), region,
               region_bytes,   remote_.data(), remote_.size(), length};
  }
  const tcp::Slices& slices() const { return slices_; }

 private:
  Pinned source_;
  Offsets local_;
  Offsets remote_;
  tcp::Slices slices_{};
};

class TcpEngine {
 public:
  explicit TcpEngine(int loops) : engine_(loops) {}

  void add_region(uint64_t number, const py::object& memory) {
    auto pinned = std::make_unique<Pinned>(memory, true);
    engine_.add_region(number, pinned->data(), pinned->size());
    regions_[number] = std::move(pinned);
  }

  void remove_region(uint64_t number) {
    {
      const py::gil_scoped_release unlocked;
      engine_.remove_region(number);
    }
    regions_.erase(number);
  }

  uint64_t add_outgoing(const std::vector<int>& sockets) {
    std::vector<tcp::Fd> owned;
    for (const int socket : sockets) owned.emplace_back(socket);
    const py::gil_scoped_release unlocked;
    return engine_.add_outgoing(std::move(owned));
  }

  void drop_outgoing(uint64_t link) {
    const py::gil_scoped_release unlocked;
    engine_.drop_outgoing(link);
  }

  uint64_t add_incoming(const py::bytes& key, bool first, int socket) {
    const std::string name = key;
    tcp::Fd owned(socket);
    const py::gil_scoped_release unlocked;
    return engine_.add_incoming(name, first, std::move(owned));
  }

  bool fence_incoming(uint64_t link, double timeout) {
    const int64_t until = after(timeout);
    const py::gil_scoped_release unlocked;
    return engine_.fence_incoming(link, until);
  }

  std::string problem(uint64_t link) {
    const py::gil_scoped_release unlocked;
    return text(engine_.state(link));
  }

  void query(uint64_t link, uint64_t region, uint64_t nbytes, double timeout) {
    const int64_t deadline = after(timeout);
    Status status;
    {
      const py::gil_scoped_release unlocked;
      status = engine_.query(link, region, nbytes, deadline);
    }
    check(status);
  }

  void put(uint64_t link, uint64_t number, const TcpRanges& ranges, const Index& index,
           uint32_t notice, double timeout) {
    check_index(index);
    auto op = op_of(number, notice);
    Status status;
    {
      const py::gil_scoped_release unlocked;
      status = tcp::Engine::make_put(ranges.slices(), index.data(), index.shape(0), op.get());
    }
    check(status);
    submit(link, std::move(op), timeout);
  }

  size_t put_many(uint64_t link,
                  const std::vector<std::tuple<uint64_t, TcpRanges*, Index, uint32_t>>& puts,
                  double timeout) {
    for (const auto& each : puts) check_index(std::get<2>(each));
    const int64_t deadline = after(timeout);
    const py::gil_scoped_release unlocked;
    size_t begun = 0;
    for (const auto& [number, ranges, index, notice] : puts) {
      auto op = op_of(number, notice);
      op->deadline_ns = deadline;
      if (tcp::Engine::make_put(ranges->slices(), index.data(), index.shape(0), op.get()) !=
              Status::kOk ||
          engine_.submit(link, &op, tcp::now_ns()) != Status::kOk) {
        break;  // waiting for room, and saying why not, is for put()
      }
      ++begun;
    }
    return begun;
  }

  void send(uint64_t link, const py::bytes& message, double timeout) {
    auto op = std::make_unique<tcp::Op>();
    op->kind = tcp::Kind::kMessage;
    op->message = message;
    op->total = op->message.size();
    submit(link, std::move(op), timeout);
  }

  py::tuple poll(double timeout) {
    tcp::Arrivals arrivals;
    {
      const py::gil_scoped_release unlocked;
      arrivals = engine_.poll(to_ns(timeout));
    }
    return as_tuple(arrivals, text);
  }

  void close(double timeout) {
    {
      const py::gil_scoped_release unlocked;
      engine_.close(to_ns(timeout));
    }
    regions_.clear();
  }

  uint64_t malformed() const { return engine_.malformed(); }

 private:
  static std::unique_ptr<tcp::Op> op_of(uint64_t number, uint32_t notice) {
    auto op = std::make_unique<tcp::Op>();
    op->id = number;
    op->notice = notice;
    return op;
  }

  void submit(uint64_t link, std::unique_ptr<tcp::Op> op, double timeout) {
    check(submit_by(engine_, link, std::move(op), after(timeout)));
  }

  std::map<uint64_t, std::unique_ptr<Pinned>> regions_;
  tcp::Engine engine_;  // last: its threads write to what stands above
};

}  // namespace

void bind_tcp(py::module_& m) {
  py::class_<TcpRanges>(m, "TcpRanges")
      .def(py::init<const py::object&, Offsets, uint64_t, uint64_t, Offsets, int64_t>(),
           py::arg("source"), py::arg("local").noconvert(), py::arg("region"),
           py::arg("region_bytes"), py::arg("remote").noconvert(), py::arg("length"));
  py::class_<TcpEngine>(m, "TcpEngine")
      .def(py::init<int>(), py::arg("loops"))
      .def("add_region", &TcpEngine::add_region, py::arg("number"), py::arg("memory"))
      .def("remove_region", &TcpEngine::remove_region, py::arg("number"))
      .def("add_outgoing", &TcpEngine::add_outgoing, py::arg("sockets"))
      .def("drop_outgoing", &TcpEngine::drop_outgoing, py::arg("link"))
      .def("add_incoming", &TcpEngine::add_incoming, py::arg("key"), py::arg("first"),
           py::arg("socket"))
      .def("fence_incoming", &TcpEngine::fence_incoming, py::arg("link"), py::arg("timeout"))
      .def("problem", &TcpEngine::problem, py::arg("link"))
      .def("query", &TcpEngine::query, py::arg("link"), py::arg("region"), py::arg("nbytes"),
           py::arg("timeout"))
      .def("put", &TcpEngine::put, py::arg("link"), py::arg("number"), py::arg("ranges"),
           py::arg("index").noconvert(), py::arg("notice"), py::arg("timeout"))
      .def("put_many", &TcpEngine::put_many, py::arg("link"), py::arg("puts"), py::arg("timeout"))
      .def("send", &TcpEngine::send, py::arg("link"), py::arg("message"), py::arg("timeout"))
      .def("poll", &TcpEngine::poll, py::arg("timeout"))
      .def("close", &TcpEngine::close, py::arg("timeout"))
      .def_property_readonly("malformed", &TcpEngine::malformed);
}

}  // namespace clover
