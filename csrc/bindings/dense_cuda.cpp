// Python's way to csrc/dense_cuda. Tensors cross as device addresses, with sizes, strides and the
// code of their type, which are checked here; streams as CUDA's handles.
#include <pybind11/pybind11.h>

#ifdef CLOVER_HAVE_CUDA

#include <stdexcept>
#include <string>
#include <tuple>

#include "bindings/addresses.h"
#include "dense_cuda/dense.h"

namespace py = pybind11;

namespace clover {
namespace {

using cuda::Dense;

cudaStream_t stream_of(int64_t stream) { return reinterpret_cast<cudaStream_t>(stream); }

// float8 is for weights and caches only.
cuda::DType dtype_of(int code) {
  if (code < 0 || code > 2) throw std::invalid_argument("rows are float32, bfloat16 or float16");
  return static_cast<cuda::DType>(code);
}

void* rows_at(int64_t address, cuda::DType dtype, const char* name, bool needed = true) {
  if ((needed && address == 0) || address % cuda::dtype_bytes(dtype) != 0)
    throw std::invalid_argument(std::string(name) + " is not at an address of its type");
  return reinterpret_cast<void*>(address);
}

void check_sizes(int rows, int columns) {
  if (rows < 1 || columns < 1) throw std::invalid_argument("sizes must be at least 1");
}

void check_stride(int64_t stride, int64_t least, const char* name) {
  if (stride < least) throw std::invalid_argument(std::string("rows of ") + name + " overlap");
}

cuda::NormParams norm_params(int dtype, int rows, int columns, float eps, int64_t weight,
                             int64_t hidden, int64_t hidden_stride, int64_t out) {
  check_sizes(rows, columns);
  check_stride(hidden_stride, columns, "hidden");
  cuda::NormParams params = {};
  params.dtype = dtype_of(dtype);
  params.rows = rows;
  params.columns = columns;
  params.eps = eps;
  params.weight = rows_at(weight, params.dtype, "weight");
  params.hidden = rows_at(hidden, params.dtype, "hidden");
  params.hidden_stride = hidden_stride;
  params.out = rows_at(out, params.dtype, "out");
  return params;
}

void norm(const Dense& self, int64_t stream, int dtype, int rows, int columns, float eps,
          int64_t weight, int64_t hidden, int64_t hidden_stride, int64_t out) {
  const cuda::NormParams params =
      norm_params(dtype, rows, columns, eps, weight, hidden, hidden_stride, out);
  py::gil_scoped_release release;
  self.norm(params, stream_of(stream));
}

void add_norm(const Dense& self, int64_t stream, int dtype, int rows, int columns, float eps,
              int64_t weight, int64_t hidden, int64_t hidden_stride, int64_t added,
              int64_t added_stride, int64_t hidden_out, int64_t out) {
  cuda::NormParams params =
      norm_params(dtype, rows, columns, eps, weight, hidden, hidden_stride, out);
  check_stride(added_stride, columns, "added");
  params.added = rows_at(added, params.dtype, "added");
  params.added_stride = added_stride;
  params.hidden_out = rows_at(hidden_out, params.dtype, "hidden_out");
  py::gil_scoped_release release;
  self.norm(params, stream_of(stream));
}

void embed_norm(const Dense& self, int64_t stream, int dtype, int rows, int columns, float eps,
                int64_t weight, int64_t table, int64_t vocabulary, int64_t ids, int64_t hidden_out,
                int64_t out) {
  if (vocabulary < 1) throw std::invalid_argument("sizes must be at least 1");
  cuda::NormParams params = norm_params(dtype, rows, columns, eps, weight, table, columns, out);
  params.ids = at_address<int64_t>(ids, "ids");
  params.vocabulary = vocabulary;
  params.hidden_out = rows_at(hidden_out, params.dtype, "hidden_out");
  py::gil_scoped_release release;
  self.norm(params, stream_of(stream));
}

void gate(const Dense& self, int64_t stream, int dtype, int rows, int columns, int64_t gate_up,
          int64_t stride, int64_t out) {
  check_sizes(rows, columns);
  check_stride(stride, int64_t{2} * columns, "gate_up");
  cuda::GateParams params = {};
  params.dtype = dtype_of(dtype);
  params.rows = rows;
  params.columns = columns;
  params.gate_up = rows_at(gate_up, params.dtype, "gate_up");
  params.stride = stride;
  params.out = rows_at(out, params.dtype, "out");
  py::gil_scoped_release release;
  self.gate(params, stream_of(stream));
}

void check_rotation(const cuda::RotateParams& params) {
  const int64_t q = int64_t{params.heads} * params.head_dim;
  const int64_t kv = int64_t{params.kv_heads} * params.head_dim;
  check_sizes(params.tokens, params.heads);
  check_sizes(params.kv_heads, params.head_dim);
  if (params.head_dim % 2 != 0) throw std::invalid_argument("head_dim must be even");
  if (params.table_rows < 1) throw std::invalid_argument("sizes must be at least 1");
  check_stride(params.stride, q + 2 * kv, "qkv");
  check_stride(params.q_stride, q, "q");
  check_stride(params.k_stride, kv, "k");
  check_stride(params.v_stride, kv, "v");
}

using Table = std::tuple<int64_t, int64_t, int64_t>;  // addresses of cos and sin, rows
using Out = std::tuple<int64_t, int64_t>;             // address, stride

void rotate(const Dense& self, int64_t stream, int dtype, int tokens, int heads, int kv_heads,
            int head_dim, float eps, Out qkv, int64_t positions, Table table, int64_t norm, Out q,
            Out k, Out v) {
  cuda::RotateParams params = {};
  params.dtype = dtype_of(dtype);
  params.tokens = tokens;
  params.heads = heads;
  params.kv_heads = kv_heads;
  params.head_dim = head_dim;
  params.eps = eps;
  params.qkv = rows_at(std::get<0>(qkv), params.dtype, "qkv");
  params.stride = std::get<1>(qkv);
  params.positions = at_address<int64_t>(positions, "positions");
  params.cos = rows_at(std::get<0>(table), params.dtype, "cos");
  params.sin = rows_at(std::get<1>(table), params.dtype, "sin");
  params.table_rows = std::get<2>(table);
  params.norm = rows_at(norm, params.dtype, "norm", false);
  params.q = rows_at(std::get<0>(q), params.dtype, "q");
  params.q_stride = std::get<1>(q);
  params.k = rows_at(std::get<0>(k), params.dtype, "k");
  params.k_stride = std::get<1>(k);
  params.v = rows_at(std::get<0>(v), params.dtype, "v");
  params.v_stride = std::get<1>(v);
  check_rotation(params);
  py::gil_scoped_release release;
  self.rotate(params, stream_of(stream));
}

void sample(const Dense& self, int64_t stream, int dtype, int rows, int columns, int64_t logits,
            int64_t stride, int64_t temperature, int64_t top_k, int64_t top_p, int64_t min_p,
            int64_t uniform, int64_t out) {
  check_sizes(rows, columns);
  check_stride(stride, columns, "logits");
  cuda::SampleParams params = {};
  params.dtype = dtype_of(dtype);
  params.rows = rows;
  params.columns = columns;
  params.logits = rows_at(logits, params.dtype, "logits");
  params.stride = stride;
  params.temperature = at_address<double>(temperature, "temperature");
  params.top_k = at_address<int64_t>(top_k, "top_k");
  params.top_p = at_address<double>(top_p, "top_p");
  params.min_p = at_address<double>(min_p, "min_p");
  params.uniform = at_address<double>(uniform, "uniform");
  params.out = at_address<int64_t>(out, "out");
  py::gil_scoped_release release;
  self.sample(params, stream_of(stream));
}

}  // namespace

void bind_dense_cuda(py::module_& m) {
  py::class_<Dense>(m, "CudaDense")
      .def(py::init<int>(), py::kw_only(), py::arg("device"))
      .def("norm", &norm)
      .def("add_norm", &add_norm)
      .def("embed_norm", &embed_norm)
      .def("gate", &gate)
      .def("rotate", &rotate)
      .def("sample", &sample);
}

}  // namespace clover

#else

namespace clover {
void bind_dense_cuda(pybind11::module_&) {}
}  // namespace clover

#endif
