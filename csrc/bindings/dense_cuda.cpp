// Python's way to csrc/dense_cuda. Tensors cross as device addresses, with sizes, strides and the
// code of their type, which are checked here; streams as CUDA's handles.
#include <pybind11/pybind11.h>

#ifdef CLOVER_HAVE_CUDA

#include <stdexcept>

#include "bindings/addresses.h"
#include "bindings/rotation.h"
#include "dense_cuda/dense.h"

namespace py = pybind11;

namespace clover {
namespace {

using cuda::Dense;

cudaStream_t stream_of(int64_t stream) { return reinterpret_cast<cudaStream_t>(stream); }

cuda::NormParams norm_params(int dtype, int rows, int columns, float eps, int64_t weight,
                             int64_t hidden, int64_t hidden_stride, int64_t out) {
  check_sizes(rows, columns);
  check_row_stride(hidden_stride, columns, "hidden");
  cuda::NormParams params = {};
  params.dtype = row_dtype(dtype);
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
  check_row_stride(added_stride, columns, "added");
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
  check_row_stride(stride, int64_t{2} * columns, "gate_up");
  cuda::GateParams params = {};
  params.dtype = row_dtype(dtype);
  params.rows = rows;
  params.columns = columns;
  params.gate_up = rows_at(gate_up, params.dtype, "gate_up");
  params.stride = stride;
  params.out = rows_at(out, params.dtype, "out");
  py::gil_scoped_release release;
  self.gate(params, stream_of(stream));
}

void rotate(const Dense& self, int64_t stream, int dtype, int tokens, HeadSizes sizes, float eps,
            Strided qkv, int64_t positions, RopeTable table, int64_t norm, Strided q, Strided k,
            Strided v) {
  cuda::RotateParams params = rotation(dtype, tokens, sizes, eps, qkv, positions, table, norm, q);
  params.k = rows_at(std::get<0>(k), params.dtype, "k");
  params.k_stride = std::get<1>(k);
  params.v = rows_at(std::get<0>(v), params.dtype, "v");
  params.v_stride = std::get<1>(v);
  check_row_stride(params.k_stride, int64_t{params.kv_heads} * params.head_dim, "k");
  check_row_stride(params.v_stride, int64_t{params.kv_heads} * params.head_dim, "v");
  py::gil_scoped_release release;
  self.rotate(params, stream_of(stream));
}

void quantise(const Dense& self, int64_t stream, int dtype, int rows, int columns, int64_t rows_in,
              int64_t stride, int64_t out, int64_t scales, bool interleaved) {
  check_sizes(rows, columns);
  check_row_stride(stride, columns, "rows_in");
  cuda::QuantiseParams params = {};
  params.dtype = row_dtype(dtype);
  params.rows = rows;
  params.columns = columns;
  params.rows_in = rows_at(rows_in, params.dtype, "rows_in");
  params.stride = stride;
  params.out = rows_at(out, cuda::DType::kFloat8E4M3, "out");
  params.scales = at_address<float>(scales, "scales");
  params.interleaved = interleaved;
  py::gil_scoped_release release;
  self.quantise(params, stream_of(stream));
}

void sample(const Dense& self, int64_t stream, int dtype, int rows, int columns, int64_t logits,
            int64_t stride, int64_t temperature, int64_t top_k, int64_t top_p, int64_t min_p,
            int64_t uniform, int64_t out) {
  check_sizes(rows, columns);
  check_row_stride(stride, columns, "logits");
  cuda::SampleParams params = {};
  params.dtype = row_dtype(dtype);
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
      .def(py::init<int, bool>(), py::kw_only(), py::arg("device"), py::arg("clusters") = true)
      .def("norm", &norm)
      .def("add_norm", &add_norm)
      .def("embed_norm", &embed_norm)
      .def("gate", &gate)
      .def("rotate", &rotate)
      .def("quantise", &quantise)
      .def("sample", &sample);
}

}  // namespace clover

#else

namespace clover {
void bind_dense_cuda(pybind11::module_&) {}
}  // namespace clover

#endif
