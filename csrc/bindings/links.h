// What bindings of engines of links share: waits for room, what polls return, index arrays.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <memory>

#include "bindings/buffers.h"
#include "shm/inbox.h"
#include "tcp/loop.h"

namespace clover {

using Offsets = pybind11::array_t<int64_t, pybind11::array::c_style>;
using Index = pybind11::array_t<int32_t, pybind11::array::c_style>;

inline int64_t after(double timeout) { return tcp::now_ns() + to_ns(timeout); }

inline void check_index(const Index& index) {
  if (index.ndim() != 2 || index.shape(1) != 2) raise("ValueError", "index must be [n, 2]");
}

// Gives an op to the engine, waiting for room up to its deadline: kOk or why not. In slices, so
// that Ctrl-C ends the wait.
template <class Engine, class Op>
auto submit_by(Engine& engine, uint64_t link, std::unique_ptr<Op> op, int64_t deadline_ns) {
  constexpr int64_t kSliceNs = 100'000'000;
  op->deadline_ns = deadline_ns;
  while (true) {
    const int64_t now = tcp::now_ns();
    const auto status = [&] {
      const pybind11::gil_scoped_release unlocked;
      return engine.submit(link, &op, std::min(deadline_ns, now + kSliceNs));
    }();
    if (status != decltype(status)::kTimeout || now >= deadline_ns) return status;
    if (PyErr_CheckSignals() != 0) throw pybind11::error_already_set();
  }
}

inline pybind11::object content(const shm::Event& event) {
  switch (event.kind) {
    case shm::Event::Kind::kNotice:
      return pybind11::int_(event.notice);
    case shm::Event::Kind::kMessage:
      return pybind11::bytes(event.message);
    case shm::Event::Kind::kGone:
      return pybind11::none();
  }
  return pybind11::none();
}

// (events, finished): (link, content) and (op, whether it was late, problem) each. `text` of a
// status is the problem.
template <class Status, class Text>
pybind11::tuple as_tuple(const shm::Arrivals<Status>& arrivals, Text text) {
  namespace py = pybind11;
  py::list events(arrivals.events.size());
  for (size_t i = 0; i < arrivals.events.size(); ++i) {
    events[i] = py::make_tuple(arrivals.events[i].link, content(arrivals.events[i]));
  }
  py::list finished(arrivals.finished.size());
  for (size_t i = 0; i < arrivals.finished.size(); ++i) {
    const shm::Finished<Status>& one = arrivals.finished[i];
    finished[i] = py::make_tuple(one.op, one.status == Status::kTimeout, text(one.status));
  }
  return py::make_tuple(events, finished);
}

}  // namespace clover
