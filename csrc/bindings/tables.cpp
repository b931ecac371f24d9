// The tables of C functions that rooms offer to the layer loop, as handles that Python passes on.
#include "common/tables.h"

#include <pybind11/pybind11.h>

namespace py = pybind11;

namespace clover {

void bind_tables(py::module_& m) {
  py::class_<DenseTable>(m, "DenseTable").def_readonly("layers", &DenseTable::layers);
  py::class_<AttentionTable>(m, "AttentionTable").def_readonly("layers", &AttentionTable::layers);
}

}  // namespace clover
