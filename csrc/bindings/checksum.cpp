// Exposes csrc/checksum: CRC-32C of a buffer and of slices of one, with the Python lock released.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include "checksum/crc32c.h"

namespace py = pybind11;

namespace clover {
namespace {

using Offsets = py::array_t<int64_t, py::array::c_style>;

struct Bytes {
  const std::byte* data;
  int64_t size;
};

Bytes bytes_of(const py::buffer_info& info) {
  if (info.ndim != 1 || info.itemsize != 1 || (info.size > 1 && info.strides[0] != 1)) {
    throw py::value_error("a checksum is of a contiguous buffer of bytes");
  }
  return {static_cast<const std::byte*>(info.ptr), info.size};
}

uint32_t crc32c(const py::buffer& buffer, bool hardware) {
  const py::buffer_info info = buffer.request();
  const Bytes bytes = bytes_of(info);
  const py::gil_scoped_release unlocked;
  const size_t size = static_cast<size_t>(bytes.size);
  return hardware ? checksum::crc32c(bytes.data, size)
                  : checksum::crc32c_portable(bytes.data, size);
}

uint32_t crc32c_slices(const py::buffer& buffer, const Offsets& offsets, int64_t length) {
  const py::buffer_info info = buffer.request();
  const Bytes bytes = bytes_of(info);
  const int64_t* first = offsets.data();
  const auto count = static_cast<size_t>(offsets.size());
  for (size_t i = 0; i < count; ++i) {
    if (length < 0 || first[i] < 0 || length > bytes.size || first[i] > bytes.size - length) {
      throw py::value_error("a slice reaches outside the memory");
    }
  }
  const py::gil_scoped_release unlocked;
  return checksum::crc32c_slices(bytes.data, first, count, static_cast<size_t>(length));
}

}  // namespace

void bind_checksum(py::module_& m) {
  m.def("crc32c", &crc32c, py::arg("data"), py::arg("hardware") = true);
  m.def("crc32c_slices", &crc32c_slices, py::arg("data"), py::arg("offsets"), py::arg("length"));
  m.def("has_hardware_crc32c", &checksum::has_hardware_crc32c);
}

}  // namespace clover
