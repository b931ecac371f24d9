// Python's way to csrc/attention_cpu. Tensors cross as addresses, with sizes, strides and the code
// of their type, which are checked here; the Python lock is released while data is read.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>
#include <string>

#include "attention_cpu/attention.h"
#include "attention_cpu/dispatch.h"
#include "attention_cpu/table.h"

namespace py = pybind11;

namespace clover {
namespace {

using attention::Attention;

template <typename T>
T* at(int64_t address, int64_t alignment, const char* name) {
  if (address == 0 || address % alignment != 0)
    throw std::invalid_argument(std::string(name) + " is not at an address aligned to " +
                                std::to_string(alignment) + " bytes");
  return reinterpret_cast<T*>(address);
}

attention::DType dtype_of(int code) {
  if (code < 0 || code > 3) throw std::invalid_argument("unknown type code");
  return static_cast<attention::DType>(code);
}

const attention::Layer& checked_layer(const Attention& self, int layer) {
  if (layer < 0 || layer >= self.layers()) throw std::invalid_argument("no such layer");
  return self.layer(layer);
}

void check_stride(int64_t stride, int64_t least, int64_t tokens, const char* name) {
  if (tokens > 1 && stride < least)
    throw std::invalid_argument(std::string("tokens of ") + name + " overlap");
}

void append(Attention& self, int layer, int dtype, int64_t k, int64_t k_stride, int64_t v,
            int64_t v_stride, int64_t slots, int64_t tokens) {
  const attention::Layer& of = checked_layer(self, layer);
  if (tokens < 0) throw std::invalid_argument("tokens must not be negative");
  if (tokens == 0) return;
  const int64_t size = attention::dtype_bytes(dtype_of(dtype));
  check_stride(k_stride, int64_t{of.kv_heads} * of.k_dim, tokens, "k");
  check_stride(v_stride, int64_t{of.kv_heads} * of.v_dim, tokens, "v");
  const attention::AppendCall call = {
      at<void>(k, size, "k"),         k_stride, at<void>(v, size, "v"), v_stride,
      at<int64_t>(slots, 8, "slots"), tokens,   dtype_of(dtype)};
  py::gil_scoped_release release;
  self.append(layer, call);
}

void attend(Attention& self, int layer, int dtype, int64_t q, int64_t q_stride, int64_t starts,
            int64_t tables, int64_t table_stride, int64_t lengths, int64_t rows, int64_t tokens,
            int64_t o, int64_t lse, int64_t most_queries) {
  const attention::Layer& of = checked_layer(self, layer);
  if (rows < 0 || tokens < 0) throw std::invalid_argument("sizes must not be negative");
  if (rows == 0 || tokens == 0) {
    if (rows != tokens) throw std::invalid_argument("rows without query tokens, or the reverse");
    return;
  }
  const int64_t size = attention::dtype_bytes(dtype_of(dtype));
  check_stride(q_stride, int64_t{of.kv_heads} * of.group * of.k_dim, tokens, "q");
  const attention::AttendCall call = {at<void>(q, size, "q"),
                                      q_stride,
                                      at<int32_t>(starts, 4, "query_starts"),
                                      at<int32_t>(tables, 4, "block_tables"),
                                      table_stride,
                                      at<int32_t>(lengths, 4, "lengths"),
                                      rows,
                                      tokens,
                                      at<void>(o, size, "o"),
                                      at<float>(lse, 4, "lse"),
                                      dtype_of(dtype),
                                      most_queries};
  py::gil_scoped_release release;
  self.attend(layer, call);
}

std::unique_ptr<Attention> make(int threads, const std::string& isa, int64_t pool,
                                int64_t pool_bytes, int block_size, int64_t num_blocks) {
  if (threads < 1) throw std::invalid_argument("threads must be at least 1");
  return std::make_unique<Attention>(threads, isa, at<void>(pool, 64, "pool"), pool_bytes,
                                     block_size, num_blocks);
}

void add_layer(Attention& self, int dtype, int kv_heads, int group, int k_dim, int v_dim,
               float scale, int64_t window, float softcap, std::vector<float> sinks,
               std::vector<float> alibi_slopes) {
  self.add_layer({dtype_of(dtype), kv_heads, group, k_dim, v_dim, scale, window, softcap,
                  std::move(sinks), std::move(alibi_slopes)});
}

std::vector<std::string> isas() {
  std::vector<std::string> names;
  for (const attention::Kernels* kernels : attention::available_kernels())
    names.emplace_back(kernels->name);
  return names;
}

}  // namespace

void bind_attention_cpu(py::module_& m) {
  m.def("attention_isas", &isas);
  py::class_<Attention>(m, "CpuAttentionPool")
      .def(py::init(&make), py::arg("threads"), py::arg("isa"), py::arg("pool"),
           py::arg("pool_bytes"), py::arg("block_size"), py::arg("num_blocks"))
      .def("add_layer", &add_layer, py::kw_only(), py::arg("dtype"), py::arg("kv_heads"),
           py::arg("group"), py::arg("k_dim"), py::arg("v_dim"), py::arg("scale"),
           py::arg("window"), py::arg("softcap"), py::arg("sinks"), py::arg("alibi_slopes"))
      .def("isa", &Attention::isa)
      .def("append", &append)
      .def("attend", &attend)
      .def("table", &attention::table_of, py::keep_alive<0, 1>());
}

}  // namespace clover
