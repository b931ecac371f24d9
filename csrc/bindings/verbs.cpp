// Exposes csrc/verbs, as a module of its own: it needs libibverbs. Host memory crosses as objects
// with a buffer, pinned while a region uses it; a GPU's as an address. Sockets cross as file
// descriptors, which belong to the engine from then on.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bindings/buffers.h"
#include "bindings/links.h"
#include "verbs/engine.h"

namespace py = pybind11;

namespace clover {
namespace {

using verbs::Status;

const char* text(Status status) {
  switch (status) {
    case Status::kOk:
      return "";
    case Status::kTimeout:
      return "it did not finish within its deadline";
    case Status::kPeerGone:
      return "the peer is gone: its control connection ended";
    case Status::kDropped:
      return "the link was dropped, as another put missed its deadline";
    case Status::kNoRegion:
      return "the peer has no such region, or has closed it";
    case Status::kClosed:
      return "this endpoint is closed";
    case Status::kOutOfRange:
      return "an index row names no slice, or a slice reaches outside its region";
    case Status::kMalformed:
      return "the peer said what makes no sense";
    case Status::kRetries:
      return "the network card got no answer (RETRY_EXC_ERR): the peer is dead, or the way to it "
             "is broken";
    case Status::kCannotSend:
      return "the network card could not send (LOC_QP_OP_ERR): see whether its link is up";
    case Status::kNotReady:
      return "the peer has no room for notices (RNR_RETRY_EXC_ERR)";
    case Status::kRemoteAccess:
      return "the peer's network card refused the write (REM_ACCESS_ERR): its region is closed";
    case Status::kLocalMemory:
      return "local memory is not registered any more (LOC_PROT_ERR)";
    case Status::kQueuePair:
      return "the queue pair has failed";
    case Status::kDevice:
      return "the RDMA device has failed or was removed";
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
    case Status::kRetries:
    case Status::kCannotSend:
    case Status::kNotReady:
    case Status::kRemoteAccess:
    case Status::kLocalMemory:
    case Status::kQueuePair:
    case Status::kDevice:
      return "TransportError";
  }
  return "TransportError";
}

void check(Status status) {
  if (status != Status::kOk) raise(error(status), text(status));
}

// Both sides of a put, resolved once. The caller keeps the source alive.
class VerbsRanges {
 public:
  VerbsRanges(std::pair<uint64_t, uint64_t> source, uint64_t source_region, Offsets local,
              std::pair<uint64_t, uint64_t> region, Offsets remote, int64_t length)
      : source_region_(source_region), local_(std::move(local)), remote_(std::move(remote)) {
    slices_ = {source.first,  source.second,  local_.data(),  local_.size(), region.first,
               region.second, remote_.data(), remote_.size(), length};
  }
  uint64_t source_region() const { return source_region_; }
  const verbs::Slices& slices() const { return slices_; }

 private:
  uint64_t source_region_;
  Offsets local_;
  Offsets remote_;
  verbs::Slices slices_{};
};

class VerbsEngine {
 public:
  explicit VerbsEngine(const verbs::Settings& settings) : engine_(settings) {}

  std::string device() const { return engine_.context().device(); }
  int gid_index() const { return engine_.context().gid_index(); }
  int mtu() const { return 128 << engine_.context().mtu(); }

  void add_region(uint64_t number, const py::object& memory) {
    auto pinned = std::make_unique<Pinned>(memory, true);
    add_device_region(number, reinterpret_cast<uint64_t>(pinned->data()), pinned->size());
    regions_[number] = std::move(pinned);
  }

  void add_device_region(uint64_t number, uint64_t pointer, uint64_t nbytes) {
    const py::gil_scoped_release unlocked;
    engine_.add_region(number, reinterpret_cast<std::byte*>(pointer), nbytes);
  }

  void add_dma_buf(uint64_t number, int fd, uint64_t offset, uint64_t pointer, uint64_t nbytes) {
    const py::gil_scoped_release unlocked;
    engine_.add_dma_buf(number, fd, offset, reinterpret_cast<std::byte*>(pointer), nbytes);
  }

  void remove_region(uint64_t number) {
    {
      const py::gil_scoped_release unlocked;
      engine_.remove_region(number);
    }
    regions_.erase(number);
  }

  uint64_t add_outgoing(int socket, double timeout) {
    tcp::Fd owned(socket);
    const int64_t deadline = after(timeout);
    uint64_t link = 0;
    Status status;
    {
      const py::gil_scoped_release unlocked;
      status = engine_.add_outgoing(std::move(owned), deadline, &link);
    }
    check(status);
    return link;
  }

  void drop_outgoing(uint64_t link) {
    const py::gil_scoped_release unlocked;
    engine_.drop_outgoing(link);
  }

  uint64_t add_incoming(int socket) {
    tcp::Fd owned(socket);
    const py::gil_scoped_release unlocked;
    return engine_.add_incoming(std::move(owned));
  }

  void fence_incoming(uint64_t link) {
    const py::gil_scoped_release unlocked;
    engine_.fence_incoming(link);
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

  void put(uint64_t link, uint64_t number, const VerbsRanges& ranges, const Index& index,
           uint32_t notice, double timeout) {
    check_index(index);
    auto op = std::make_unique<verbs::Op>();
    op->id = number;
    op->notice = notice;
    Status status;
    {
      const py::gil_scoped_release unlocked;
      status = engine_.make_put(ranges.source_region(), ranges.slices(), index.data(),
                                index.shape(0), op.get());
    }
    check(status);
    submit(link, std::move(op), timeout);
  }

  void send(uint64_t link, const py::bytes& message, double timeout) {
    auto op = std::make_unique<verbs::Op>();
    op->is_message = true;
    op->message = message;
    submit(link, std::move(op), timeout);
  }

  py::tuple poll(double timeout) {
    verbs::Arrivals arrivals;
    {
      const py::gil_scoped_release unlocked;
      arrivals = engine_.poll(to_ns(timeout));
    }
    return as_tuple(arrivals, text);
  }

  std::vector<std::string> take_events() { return engine_.take_events(); }

  void close(double timeout) {
    {
      const py::gil_scoped_release unlocked;
      engine_.close(to_ns(timeout));
    }
    regions_.clear();
  }

  uint64_t malformed() const { return engine_.malformed(); }

 private:
  void submit(uint64_t link, std::unique_ptr<verbs::Op> op, double timeout) {
    check(submit_by(engine_, link, std::move(op), after(timeout)));
  }

  std::map<uint64_t, std::unique_ptr<Pinned>> regions_;
  verbs::Engine engine_;  // last: the device writes to what stands above
};

void bind_settings(py::module_& m) {
  using verbs::Settings;
  py::class_<Settings>(m, "Settings")
      .def(py::init<>())
      .def_readwrite("device", &Settings::device)
      .def_readwrite("port", &Settings::port)
      .def_readwrite("gid_index", &Settings::gid_index)
      .def_readwrite("gid_type", &Settings::gid_type)
      .def_readwrite("gid_address", &Settings::gid_address)
      .def_readwrite("mtu", &Settings::mtu)
      .def_readwrite("queue_pairs", &Settings::queue_pairs)
      .def_readwrite("queue_depth", &Settings::queue_depth)
      .def_readwrite("signal_every", &Settings::signal_every)
      .def_readwrite("block_size", &Settings::block_size)
      .def_readwrite("retries", &Settings::retries)
      .def_readwrite("timeout", &Settings::timeout)
      .def_readwrite("service_level", &Settings::service_level)
      .def_readwrite("spin_us", &Settings::spin_us)
      .def_readwrite("on_demand", &Settings::on_demand);
}

void bind_engine(py::module_& m) {
  using Where = std::pair<uint64_t, uint64_t>;
  py::class_<VerbsRanges>(m, "VerbsRanges")
      .def(py::init<Where, uint64_t, Offsets, Where, Offsets, int64_t>(), py::arg("source"),
           py::arg("source_region"), py::arg("local").noconvert(), py::arg("region"),
           py::arg("remote").noconvert(), py::arg("length"));
  py::class_<VerbsEngine>(m, "VerbsEngine")
      .def(py::init<const verbs::Settings&>(), py::arg("settings"))
      .def("add_region", &VerbsEngine::add_region, py::arg("number"), py::arg("memory"))
      .def("add_device_region", &VerbsEngine::add_device_region, py::arg("number"),
           py::arg("pointer"), py::arg("nbytes"))
      .def("add_dma_buf", &VerbsEngine::add_dma_buf, py::arg("number"), py::arg("fd"),
           py::arg("offset"), py::arg("pointer"), py::arg("nbytes"))
      .def("remove_region", &VerbsEngine::remove_region, py::arg("number"))
      .def("add_outgoing", &VerbsEngine::add_outgoing, py::arg("socket"), py::arg("timeout"))
      .def("drop_outgoing", &VerbsEngine::drop_outgoing, py::arg("link"))
      .def("add_incoming", &VerbsEngine::add_incoming, py::arg("socket"))
      .def("fence_incoming", &VerbsEngine::fence_incoming, py::arg("link"))
      .def("problem", &VerbsEngine::problem, py::arg("link"))
      .def("query", &VerbsEngine::query, py::arg("link"), py::arg("region"), py::arg("nbytes"),
           py::arg("timeout"))
      .def("put", &VerbsEngine::put, py::arg("link"), py::arg("number"), py::arg("ranges"),
           py::arg("index").noconvert(), py::arg("notice"), py::arg("timeout"))
      .def("send", &VerbsEngine::send, py::arg("link"), py::arg("message"), py::arg("timeout"))
      .def("poll", &VerbsEngine::poll, py::arg("timeout"))
      .def("take_events", &VerbsEngine::take_events)
      .def("close", &VerbsEngine::close, py::arg("timeout"))
      .def_property_readonly("malformed", &VerbsEngine::malformed)
      .def_property_readonly("device", &VerbsEngine::device)
      .def_property_readonly("gid_index", &VerbsEngine::gid_index)
      .def_property_readonly("mtu", &VerbsEngine::mtu);
}

}  // namespace
}  // namespace clover

PYBIND11_MODULE(_verbs, m) {
  py::register_exception_translator([](std::exception_ptr thrown) {
    try {
      if (thrown) std::rethrow_exception(thrown);
    } catch (const clover::verbs::Error& error) {
      const py::object type = py::module_::import("cloverinfer.core.errors").attr("TransportError");
      PyErr_SetString(type.ptr(), error.what());
    }
  });
  m.def("devices", &clover::verbs::devices, "A line for every port of every RDMA device.");
  clover::bind_settings(m);
  clover::bind_engine(m);
}
