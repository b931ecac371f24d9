// Python's way to csrc/loop. What a loop works on is handed over as addresses, whose sizes and
// types the caller has checked; the Python lock is released while layers run.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <memory>

#include "bindings/addresses.h"
#include "bindings/buffers.h"
#include "common/gate.h"
#include "loop/layers.h"

namespace py = pybind11;

namespace clover {
namespace {

using loop::Outcome;

using Qkv = std::array<int64_t, 6>;   // address and stride of q, of k, of v
using Rows = std::array<int64_t, 7>;  // starts, tables, table stride, lengths, slots, rows, tokens

QkvRows qkv_rows(const Qkv& qkv) {
  return {at_address<uint16_t>(qkv[0], "q"),
          qkv[1],
          at_address<uint16_t>(qkv[2], "k"),
          qkv[3],
          at_address<uint16_t>(qkv[4], "v"),
          qkv[5],
          1};  // bfloat16
}

AttentionRows attention_rows(const Rows& rows) {
  if (rows[5] < 1 || rows[6] < rows[5]) throw std::invalid_argument("a step has rows and tokens");
  return {at_address<int32_t>(rows[0], "starts"),
          at_address<int32_t>(rows[1], "tables"),
          rows[2],
          at_address<int32_t>(rows[3], "lengths"),
          at_address<int64_t>(rows[4], "slots"),
          rows[5],
          rows[6]};
}

void enter(Gate& gate) {
  if (gate.try_enter()) return;
  const py::gil_scoped_release unlocked;
  gate.enter();
}

std::unique_ptr<loop::OwnHop> own_hop(const AttentionTable& table, const Rows& rows, const Qkv& qkv,
                                      int64_t o, int64_t lse) {
  return std::make_unique<loop::OwnHop>(table, attention_rows(rows), qkv_rows(qkv),
                                        at_address<uint16_t>(o, "o"),
                                        at_address<float>(lse, "lse"));
}

std::unique_ptr<loop::Layers> layers(const DenseTable& dense, int64_t step, const Qkv& qkv,
                                     loop::Hop* hop, Gate* gate) {
  return std::make_unique<loop::Layers>(dense, at_address<uint64_t>(step, "step"), qkv_rows(qkv),
                                        hop, gate);
}

void bind_hops(py::module_& m) {
  py::class_<loop::Hop>(m, "Hop");
  py::class_<loop::OwnHop, loop::Hop>(m, "OwnHop")
      .def(py::init(&own_hop), py::kw_only(), py::arg("table"), py::arg("rows"), py::arg("qkv"),
           py::arg("o"), py::arg("lse"), py::keep_alive<1, 2>())
      .def_property_readonly("seconds", &loop::OwnHop::seconds);
}

}  // namespace

void bind_loop(py::module_& m) {
  py::class_<Gate>(m, "Gate")
      .def(py::init<>())
      .def("enter", &enter)
      .def("leave", &Gate::leave)
      .def_property_readonly("waiting", &Gate::waiting);
  py::enum_<Outcome>(m, "LoopOutcome")
      .value("DONE", Outcome::kDone)
      .value("EVENTS", Outcome::kEvents)
      .value("TIMEOUT", Outcome::kTimeout)
      .value("HAND_OVER", Outcome::kHandOver);
  bind_hops(m);
  py::class_<loop::Layers>(m, "LayerLoop")
      .def(py::init(&layers), py::kw_only(), py::arg("dense"), py::arg("step"), py::arg("qkv"),
           py::arg("hop"), py::arg("gate").none(true), py::keep_alive<1, 2>(),
           py::keep_alive<1, 5>(), py::keep_alive<1, 6>())
      .def(
          "run", [](loop::Layers& self, double timeout) { return self.run(to_ns(timeout)); },
          py::arg("timeout"), py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("layer", &loop::Layers::layer)
      .def_property_readonly("dense_seconds", &loop::Layers::dense_seconds)
      .def_property_readonly("wait_seconds", &loop::Layers::wait_seconds);
}

}  // namespace clover
