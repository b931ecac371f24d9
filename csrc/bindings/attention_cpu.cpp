#include <pybind11/pybind11.h>

namespace clover {
void bind_attention_cpu(pybind11::module_&) {}
}  // namespace clover
