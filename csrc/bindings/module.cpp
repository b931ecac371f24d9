// The package's one native module; each room of csrc binds itself in a file of its own.
#include <pybind11/pybind11.h>

namespace clover {
void bind_attention_cpu(pybind11::module_& m);
void bind_attention_cuda(pybind11::module_& m);
void bind_chain(pybind11::module_& m);
void bind_checksum(pybind11::module_& m);
void bind_dense_cpu(pybind11::module_& m);
void bind_dense_cuda(pybind11::module_& m);
void bind_gemm_cuda(pybind11::module_& m);
void bind_loop(pybind11::module_& m);
void bind_shm(pybind11::module_& m);
void bind_tables(pybind11::module_& m);
void bind_tcp(pybind11::module_& m);
}  // namespace clover

PYBIND11_MODULE(_native, m) {
  clover::bind_tables(m);
  clover::bind_attention_cpu(m);
  clover::bind_attention_cuda(m);
  clover::bind_chain(m);
  clover::bind_checksum(m);
  clover::bind_dense_cpu(m);
  clover::bind_dense_cuda(m);
  clover::bind_gemm_cuda(m);
  clover::bind_loop(m);
  clover::bind_shm(m);
  clover::bind_tcp(m);
}
