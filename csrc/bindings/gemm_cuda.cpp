// Python's way to the GEMM kernels of csrc/dense_cuda. Tensors cross as device addresses, with
// sizes and strides, which are checked here and by the launcher; streams as CUDA's handles.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#ifdef CLOVER_HAVE_CUDA

#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>

#include "dense_cuda/gemm.h"

namespace py = pybind11;

namespace clover {
namespace {

using cuda::Gemm;
using Rows = std::tuple<int64_t, int64_t>;  // address, elements from row to row

void* aligned(int64_t address, int64_t bytes, const char* name, bool needed = true) {
  if ((needed && address == 0) || address % bytes != 0)
    throw std::invalid_argument(std::string(name) + " is not at an address aligned to " +
                                std::to_string(bytes) + " bytes");
  return reinterpret_cast<void*>(address);
}

// Two elements are written and read at a time.
void* rows_at(const Rows& rows, int columns, int tokens, const char* name) {
  const auto [address, stride] = rows;
  if (stride % 2 != 0 || (tokens > 1 && stride < columns))
    throw std::invalid_argument(std::string("rows of ") + name + " overlap or are not aligned");
  return aligned(address, 4, name);
}

// Address, n, k, gate and up, address of scales.
using Weights = std::tuple<int64_t, int, int, bool, int64_t>;

cuda::GemmShape shape_of(const Weights& weights) {
  return {std::get<1>(weights), std::get<2>(weights), std::get<3>(weights)};
}

void multiply(const Gemm& self, int64_t stream, int64_t workspace, int tokens, const Weights& w,
              int64_t bias, const Rows& x, const Rows& y, const std::optional<Rows>& residual) {
  cuda::GemmCall call = {};
  call.w = aligned(std::get<0>(w), 16, "w");
  call.shape = shape_of(w);
  call.scales = static_cast<const float*>(aligned(std::get<4>(w), 4, "scales", false));
  call.tokens = tokens;
  call.bias = aligned(bias, 2, "bias", false);
  call.x = aligned(std::get<0>(x), 16, "x");
  call.x_stride = std::get<1>(x);
  const int columns = call.shape.gated ? call.shape.n / 2 : call.shape.n;
  call.y = rows_at(y, columns, tokens, "y");
  call.y_stride = std::get<1>(y);
  if (residual) {
    call.residual = rows_at(*residual, columns, tokens, "residual");
    call.residual_stride = std::get<1>(*residual);
  }
  void* memory = aligned(workspace, 256, "workspace");
  py::gil_scoped_release release;
  self.run(call, memory, reinterpret_cast<cudaStream_t>(stream));
}

}  // namespace

void bind_gemm_cuda(py::module_& m) {
  m.attr("GEMM_TOKENS") = cuda::kGemmTokens;
  m.def("cuda_gemm_serves", &Gemm::serves, py::arg("device"));
  py::class_<Gemm>(m, "CudaGemm")
      .def(py::init<int>(), py::kw_only(), py::arg("device"))
      .def_property_readonly("workspace_bytes", &Gemm::workspace_bytes)
      .def("multiply", &multiply, py::arg("stream"), py::arg("workspace"), py::arg("tokens"),
           py::arg("w"), py::arg("bias"), py::arg("x"), py::arg("y"), py::arg("residual"));
}

}  // namespace clover

#else

namespace clover {
void bind_gemm_cuda(pybind11::module_& m) { (void)m; }
}  // namespace clover

#endif
