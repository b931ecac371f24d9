// Python's way to csrc/loop. What a loop works on is handed over as addresses, whose sizes and
// types the caller has checked; the Python lock is released while layers run.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <memory>
#include <tuple>
#include <vector>

#include "bindings/addresses.h"
#include "bindings/buffers.h"
#include "bindings/mailboxes.h"
#include "common/gate.h"
#include "loop/layers.h"
#include "loop/near_hop.h"
#include "loop/shm_hop.h"

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

// Answerer, source, notice of the first layer, first row, rows.
using NearPart = std::tuple<loop::Answerer*, int, uint32_t, int64_t, int64_t>;
// Writer, rings of the answers, first row, rows, addresses of the rows there and back.
using ShmPart = std::tuple<MailboxWriter*, std::vector<int>, int64_t, int64_t, int64_t, int64_t>;

std::unique_ptr<loop::NearHop> near_hop(const std::vector<NearPart>& parts, const Qkv& qkv,
                                        int64_t element_bytes, int64_t o, int64_t row_bytes) {
  std::vector<loop::NearSegment> segments;
  for (const auto& [answerer, source, notice, first, count] : parts)
    segments.push_back({answerer, {source, notice}, first, count});
  return std::make_unique<loop::NearHop>(std::move(segments), qkv_rows(qkv), element_bytes,
                                         at_address<uint16_t>(o, "o"), row_bytes);
}

std::unique_ptr<loop::ShmHop> shm_hop(MailboxReader& reader, const std::vector<ShmPart>& parts,
                                      std::pair<int64_t, int64_t> row_bytes, int64_t rows,
                                      int64_t o, uint32_t notice) {
  std::vector<loop::ShmSegment> segments;
  for (const auto& [writer, rings, first, count, there, back] : parts)
    segments.push_back({writer->sender(), rings, first, count,
                        reinterpret_cast<std::byte*>(at_address<uint16_t>(there, "there")),
                        reinterpret_cast<std::byte*>(at_address<uint16_t>(back, "back"))});
  return std::make_unique<loop::ShmHop>(
      reader.mailbox(), std::move(segments), loop::RowBytes{row_bytes.first, row_bytes.second},
      reinterpret_cast<std::byte*>(at_address<uint16_t>(rows, "rows")),
      reinterpret_cast<std::byte*>(at_address<uint16_t>(o, "o")), notice);
}

std::vector<double> near_seconds(const loop::NearHop& hop) {
  std::vector<double> seconds;
  for (const loop::NearSegment& segment : hop.segments()) seconds.push_back(segment.seconds);
  return seconds;
}

std::vector<int> segments_where(const loop::ShmHop& hop, bool loop::ShmSegment::* flag) {
  std::vector<int> found;
  for (size_t i = 0; i < hop.segments().size(); ++i)
    if (hop.segments()[i].*flag) found.push_back(static_cast<int>(i));
  return found;
}

void begin(loop::Answerer& self, int source, uint32_t notice, const Rows& rows, const Qkv& in,
           int64_t out, int64_t told) {
  const loop::AnswerStep step = {attention_rows(rows), qkv_rows(in),
                                 at_address<uint16_t>(out, "out"),
                                 at_address<loop::Told>(told, "told", false)};
  const py::gil_scoped_release unlocked;
  self.begin({source, notice}, step);
}

py::tuple end(loop::Answerer& self, int source, uint32_t notice) {
  loop::AnswerTotals totals;
  {
    const py::gil_scoped_release unlocked;
    totals = self.end({source, notice});
  }
  return py::make_tuple(totals.layers, totals.seconds);
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
  py::class_<loop::NearHop, loop::Hop>(m, "NearHop")
      .def(py::init(&near_hop), py::kw_only(), py::arg("parts"), py::arg("qkv"),
           py::arg("element_bytes"), py::arg("o"), py::arg("row_bytes"), py::keep_alive<1, 2>())
      .def_property_readonly("seconds", &near_seconds);
  py::class_<loop::ShmHop, loop::Hop>(m, "ShmHop")
      .def(py::init(&shm_hop), py::kw_only(), py::arg("reader"), py::arg("parts"),
           py::arg("row_bytes"), py::arg("rows"), py::arg("o"), py::arg("notice"),
           py::keep_alive<1, 2>(), py::keep_alive<1, 3>())
      .def_property_readonly(
          "waiting",
          [](const loop::ShmHop& hop) { return segments_where(hop, &loop::ShmSegment::waiting); })
      .def_property_readonly("lost", [](const loop::ShmHop& hop) {
        return segments_where(hop, &loop::ShmSegment::lost);
      });
}

void bind_answers(py::module_& m) {
  py::class_<loop::Answerer>(m, "Answerer")
      .def(py::init([](const AttentionTable& table, int heads, Gate* gate) {
             return std::make_unique<loop::Answerer>(table, heads, gate);
           }),
           py::kw_only(), py::arg("table"), py::arg("heads"), py::arg("gate").none(true),
           py::keep_alive<1, 2>(), py::keep_alive<1, 4>())
      .def("begin", &begin, py::kw_only(), py::arg("source"), py::arg("notice"), py::arg("rows"),
           py::arg("into"), py::arg("out"), py::arg("told"))
      .def("end", &end, py::kw_only(), py::arg("source"), py::arg("notice"))
      .def("close", &loop::Answerer::close, py::call_guard<py::gil_scoped_release>());
  py::class_<loop::ShmServer>(m, "ShmServer")
      .def(py::init([](MailboxReader& reader, loop::Answerer* answerer, int layer_bits) {
             return std::make_unique<loop::ShmServer>(reader.mailbox(), answerer, layer_bits);
           }),
           py::kw_only(), py::arg("reader"), py::arg("answerer"), py::arg("layer_bits"),
           py::keep_alive<1, 2>(), py::keep_alive<1, 3>())
      .def(
          "know",
          [](loop::ShmServer& self, int source, const std::vector<int>& rings,
             MailboxWriter& writer) { self.know(source, rings, writer.sender()); },
          py::arg("source"), py::arg("rings"), py::arg("writer"), py::keep_alive<1, 4>())
      .def(
          "answer",
          [](loop::ShmServer& self, int source, uint32_t notice) {
            return self.answer(source, notice);
          },
          py::arg("source"), py::arg("notice"), py::call_guard<py::gil_scoped_release>())
      .def(
          "serve", [](loop::ShmServer& self, double timeout) { return self.serve(to_ns(timeout)); },
          py::arg("timeout"), py::call_guard<py::gil_scoped_release>());
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
  bind_answers(m);
  py::class_<loop::Layers>(m, "LayerLoop")
      .def(py::init(&layers), py::kw_only(), py::arg("dense"), py::arg("step"), py::arg("qkv"),
           py::arg("hop"), py::arg("gate").none(true), py::keep_alive<1, 2>(),
           py::keep_alive<1, 5>(), py::keep_alive<1, 6>())
      .def(
          "run", [](loop::Layers& self, double timeout) { return self.run(to_ns(timeout)); },
          py::arg("timeout"), py::call_guard<py::gil_scoped_release>())
      .def("restart", &loop::Layers::restart, py::arg("notice"))
      .def_property_readonly("layer", &loop::Layers::layer)
      .def_property_readonly("dense_seconds", &loop::Layers::dense_seconds)
      .def_property_readonly("hop_seconds", &loop::Layers::hop_seconds);
}

}  // namespace clover
