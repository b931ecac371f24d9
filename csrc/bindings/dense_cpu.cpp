// Python's way to csrc/dense_cpu. Tensors cross as addresses, whose sizes and types the caller has
// checked; the Python lock is released while a stage runs.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "dense_cpu/blocks.h"
#include "dense_cpu/dense.h"
#include "dense_cpu/dispatch.h"
#include "dense_cpu/greedy.h"
#include "dense_cpu/pack.h"
#include "dense_cpu/product.h"
#include "dense_cpu/table.h"

namespace py = pybind11;

namespace clover {
namespace {

using dense::Dense;

template <typename T>
T* at(int64_t address, const char* name, bool needed = true) {
  if ((needed && address == 0) || address % static_cast<int64_t>(alignof(T)) != 0)
    throw std::invalid_argument(std::string(name) + " is not at an address of its type");
  return reinterpret_cast<T*>(address);
}

// Format, address of the packed weights, address of the bias or 0.
using Packed = std::tuple<int, int64_t, int64_t>;

dense::Matrix matrix(const Packed& packed, const char* name) {
  const auto [format, weight, bias] = packed;
  if (format < 0 || format > static_cast<int>(dense::Format::kInt4))
    throw std::invalid_argument(std::string(name) + " is of an unknown format");
  if (weight % 64 != 0)
    throw std::invalid_argument(std::string(name) + " is not at a multiple of 64 bytes");
  dense::Matrix made;
  made.format = static_cast<dense::Format>(format);
  made.weight = at<uint8_t>(weight, name);
  made.bias = at<uint16_t>(bias, name, false);
  return made;
}

int64_t packed_bytes(int format, int64_t outputs, int64_t inputs) {
  if (format < 0 || format > static_cast<int>(dense::Format::kInt4) || outputs < 1 || inputs < 1)
    throw std::invalid_argument("no such format or size");
  const int64_t panels = dense::round_up(outputs, dense::kBlock) / dense::kBlock;
  return panels * dense::panel_bytes(static_cast<dense::Format>(format), inputs);
}

using MatrixSize = std::tuple<int64_t, int64_t, int>;  // outputs of a fold, inputs, folds

dense::Size checked_size(int threads, int format, const MatrixSize& size) {
  const auto [outputs, inputs, folds] = size;
  if (threads < 1 || folds < 1) throw std::invalid_argument("threads and folds are at least 1");
  packed_bytes(format, outputs, inputs);  // refuses what cannot be
  return {outputs, inputs, folds};
}

void pack(int threads, int format, int64_t weight, const MatrixSize& size, int64_t to) {
  const dense::Size checked = checked_size(threads, format, size);
  const uint16_t* from = at<uint16_t>(weight, "weight");
  uint8_t* panels = at<uint8_t>(to, "to");
  py::gil_scoped_release release;
  dense::pack(*ThreadPool::shared(threads), from, checked, static_cast<dense::Format>(format),
              panels);
}

// Addresses of codes, scales, minima (0 for int8).
using CodeAddresses = std::tuple<int64_t, int64_t, int64_t>;

void pack_codes(int threads, int format, const CodeAddresses& codes, const MatrixSize& size,
                int64_t to) {
  const dense::Size checked = checked_size(threads, format, size);
  const bool minima = format == static_cast<int>(dense::Format::kInt4);
  const dense::Codes from = {at<uint8_t>(std::get<0>(codes), "codes"),
                             at<uint16_t>(std::get<1>(codes), "scales"),
                             at<uint16_t>(std::get<2>(codes), "minima", minima)};
  uint8_t* panels = at<uint8_t>(to, "to");
  py::gil_scoped_release release;
  dense::pack_codes(*ThreadPool::shared(threads), from, checked, static_cast<dense::Format>(format),
                    panels);
}

void read_blocks(int threads, int kind, int64_t blocks, int64_t count, const CodeAddresses& to) {
  if (kind < 0 || kind > static_cast<int>(dense::Blocks::kQ8_0) || threads < 1 || count < 1)
    throw std::invalid_argument("no such kind or count of blocks");
  const auto checked = static_cast<dense::Blocks>(kind);
  const uint8_t* from = at<uint8_t>(blocks, "blocks");
  uint8_t* codes = at<uint8_t>(std::get<0>(to), "codes");
  uint16_t* scales = at<uint16_t>(std::get<1>(to), "scales");
  uint16_t* minima = at<uint16_t>(std::get<2>(to), "minima", checked != dense::Blocks::kQ8_0);
  py::gil_scoped_release release;
  dense::read_blocks(*ThreadPool::shared(threads), checked, from, count, codes, scales, minima);
}

std::unique_ptr<Dense> make(int threads, const std::string& isa, int64_t hidden, int64_t heads,
                            int64_t kv_heads, int64_t head_dim, int64_t ffn, int64_t vocab,
                            float eps, int64_t embedding, int64_t final_norm, const Packed& head) {
  if (threads < 1) throw std::invalid_argument("threads must be at least 1");
  const dense::Shape shape = {hidden, heads, kv_heads, head_dim, ffn, vocab, eps};
  return std::make_unique<Dense>(threads, isa, shape, at<uint16_t>(embedding, "embedding"),
                                 at<uint16_t>(final_norm, "final_norm"), matrix(head, "head"));
}

void add_layer(Dense& self, int64_t input_norm, const Packed& qkv, int64_t qk_norm,
               const Packed& out, int64_t post_norm, const Packed& gate_up, const Packed& down) {
  self.add_layer({at<uint16_t>(input_norm, "input_norm"), matrix(qkv, "qkv"),
                  at<uint16_t>(qk_norm, "qk_norm", false), matrix(out, "out"),
                  at<uint16_t>(post_norm, "post_norm"), matrix(gate_up, "gate_up"),
                  matrix(down, "down")});
}

void check_stride(int64_t stride, int64_t least, int tokens, const char* name) {
  if (tokens > 1 && stride < least)
    throw std::invalid_argument(std::string("tokens of ") + name + " overlap");
}

// Which addresses a stage needs follows from its number.
dense::StageCall checked(const Dense& self, int index, dense::StageCall call) {
  const bool first = index == 0, last = index == self.layers();
  const dense::Shape& shape = self.shape();
  const auto need = [](const void* pointer, const char* name) {
    if (!pointer) throw std::invalid_argument(std::string(name) + " is missing");
  };
  if (first) need(call.token_ids, "token_ids");
  if (!first) need(call.attended, "attended");
  if (!first) need(call.hidden, "hidden");
  if (!first)
    check_stride(call.attended_stride, shape.heads * shape.head_dim, call.tokens, "attended");
  if (last) return call;
  need(call.cos, "cos");
  need(call.sin, "sin");
  need(call.q, "q");
  need(call.k, "k");
  need(call.v, "v");
  check_stride(call.q_stride, shape.heads * shape.head_dim, call.tokens, "q");
  check_stride(call.k_stride, shape.kv_heads * shape.head_dim, call.tokens, "k");
  check_stride(call.v_stride, shape.kv_heads * shape.head_dim, call.tokens, "v");
  return call;
}

void stage(Dense& self, int index, int tokens, int64_t token_ids, int64_t attended,
           int64_t attended_stride, int64_t hidden, int64_t hidden_out, int64_t cos, int64_t sin,
           int64_t q, int64_t q_stride, int64_t k, int64_t k_stride, int64_t v, int64_t v_stride) {
  const dense::StageCall call =
      checked(self, index,
              {tokens, at<int64_t>(token_ids, "token_ids", false),
               at<uint16_t>(attended, "attended", false), attended_stride,
               at<float>(hidden, "hidden", false), at<float>(hidden_out, "hidden_out"), nullptr,
               at<uint16_t>(cos, "cos", false), at<uint16_t>(sin, "sin", false),
               at<uint16_t>(q, "q", false), q_stride, at<uint16_t>(k, "k", false), k_stride,
               at<uint16_t>(v, "v", false), v_stride});
  py::gil_scoped_release release;
  self.stage(index, call);
}

void logits(Dense& self, int64_t hidden, int tokens, int64_t y) {
  const float* from = at<float>(hidden, "hidden");
  float* to = at<float>(y, "y");
  py::gil_scoped_release release;
  self.logits(from, tokens, to);
}

// Outputs of a fold, inputs, folds; tokens, and elements from one to the next.
void multiply(dense::Products& self, const Packed& packed, const MatrixSize& size, int64_t x,
              const std::tuple<int, int64_t>& rows, int64_t residual, int64_t y) {
  dense::Matrix m = matrix(packed, "weight");
  std::tie(m.outputs, m.inputs, m.folds) = size;
  if (m.outputs < 1 || m.inputs < 1 || m.folds < 1)
    throw std::invalid_argument("sizes must be at least 1");
  const auto [tokens, stride] = rows;
  check_stride(stride, m.inputs, tokens, "x");
  const dense::SomeRows from = {at<uint16_t>(x, "x"), stride};
  const dense::SomeRows added = {at<uint16_t>(residual, "residual", false), m.outputs};
  const dense::SomeRows to = {at<uint16_t>(y, "y"), m.outputs};
  py::gil_scoped_release release;
  self.multiply(m, tokens, from, added, to);
}

std::vector<int64_t> greedy(int64_t logits, int64_t rows, int64_t columns) {
  if (rows < 1 || columns < 1) throw std::invalid_argument("there are no logits");
  const float* from = at<float>(logits, "logits");
  std::vector<int64_t> tokens(rows);
  py::gil_scoped_release release;
  for (int64_t row = 0; row < rows; ++row)
    tokens[row] = dense::greedy(from + row * columns, columns);
  return tokens;
}

std::vector<std::string> isas() {
  std::vector<std::string> names;
  for (const dense::Kernels* kernels : dense::available_kernels())
    names.emplace_back(kernels->name);
  return names;
}

using Rope = std::tuple<int64_t, int64_t, int64_t>;  // addresses of cos and sin, rows of each

std::unique_ptr<dense::Step> step(const Dense& self, int tokens, int64_t token_ids,
                                  int64_t positions, const Rope& rope, int64_t hidden) {
  if (tokens < 1) throw std::invalid_argument("there are no tokens");
  const auto [cos, sin, rope_rows] = rope;
  auto* first = at<float>(hidden, "hidden");
  const int64_t half = tokens * self.shape().hidden;
  return std::make_unique<dense::Step>(dense::Step{tokens,
                                                   at<int64_t>(token_ids, "token_ids"),
                                                   at<int64_t>(positions, "positions"),
                                                   at<uint16_t>(cos, "cos"),
                                                   at<uint16_t>(sin, "sin"),
                                                   rope_rows,
                                                   {first, first + half}});
}

void finish(Dense& self, const dense::Step& step, int64_t attended, int64_t y) {
  const auto* from = at<uint16_t>(attended, "attended");
  float* to = at<float>(y, "y");
  py::gil_scoped_release release;
  dense::finish(self, step, from, to);
}

}  // namespace

void bind_dense_cpu(py::module_& m) {
  m.def("dense_packed_bytes", &packed_bytes, py::arg("format"), py::arg("outputs"),
        py::arg("inputs"));
  m.def("dense_isas", &isas);
  m.def("greedy_tokens", &greedy);
  m.def("dense_pack", &pack, py::kw_only(), py::arg("threads"), py::arg("format"),
        py::arg("weight"), py::arg("size"), py::arg("to"));
  m.def("dense_read_blocks", &read_blocks, py::kw_only(), py::arg("threads"), py::arg("kind"),
        py::arg("blocks"), py::arg("count"), py::arg("to"));
  m.def("dense_pack_codes", &pack_codes, py::kw_only(), py::arg("threads"), py::arg("format"),
        py::arg("codes"), py::arg("size"), py::arg("to"));
  py::class_<dense::Products>(m, "CpuProducts")
      .def(py::init<int, const std::string&>(), py::kw_only(), py::arg("threads"), py::arg("isa"))
      .def("multiply", &multiply);
  py::class_<dense::Step>(m, "DenseStep").def_property_readonly("address", [](dense::Step& self) {
    return reinterpret_cast<int64_t>(&self);
  });
  py::class_<Dense>(m, "CpuDense")
      .def(py::init(&make), py::kw_only(), py::arg("threads"), py::arg("isa"), py::arg("hidden"),
           py::arg("heads"), py::arg("kv_heads"), py::arg("head_dim"), py::arg("ffn"),
           py::arg("vocab"), py::arg("eps"), py::arg("embedding"), py::arg("final_norm"),
           py::arg("head"))
      .def("add_layer", &add_layer, py::kw_only(), py::arg("input_norm"), py::arg("qkv"),
           py::arg("qk_norm"), py::arg("out"), py::arg("post_norm"), py::arg("gate_up"),
           py::arg("down"))
      .def("isa", &Dense::isa)
      .def("stage", &stage)
      .def("logits", &logits)
      .def("table", &dense::table_of, py::keep_alive<0, 1>())
      .def("step", &step, py::kw_only(), py::arg("tokens"), py::arg("token_ids"),
           py::arg("positions"), py::arg("rope"), py::arg("hidden"))
      .def("finish", &finish);
}

}  // namespace clover
