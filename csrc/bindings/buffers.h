// What bindings share: contiguous buffers held for as long as native code uses them, and errors.
#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>

namespace clover {

// `error` is ValueError or the name of a class of cloverinfer.core.errors.
[[noreturn]] inline void raise(const char* error, const char* message) {
  namespace py = pybind11;
  const py::object type = error == std::string("ValueError")
                              ? py::module_::import("builtins").attr(error)
                              : py::module_::import("cloverinfer.core.errors").attr(error);
  PyErr_SetString(type.ptr(), message);
  throw py::error_already_set();
}

// A contiguous buffer, held for the life of this object. Needs the GIL to begin and to end.
class Pinned {
 public:
  Pinned(const pybind11::object& object, bool writable) {
    const int flags = writable ? PyBUF_WRITABLE : PyBUF_SIMPLE;
    if (PyObject_GetBuffer(object.ptr(), &view_, flags) != 0) throw pybind11::error_already_set();
  }
  ~Pinned() { PyBuffer_Release(&view_); }
  Pinned(const Pinned&) = delete;
  Pinned& operator=(const Pinned&) = delete;

  std::byte* data() const { return static_cast<std::byte*>(view_.buf); }
  size_t size() const { return static_cast<size_t>(view_.len); }

 private:
  Py_buffer view_;
};

inline int64_t to_ns(double seconds) {
  constexpr double kLongest = 1e9;  // seconds; keeps infinity and the like in range
  return static_cast<int64_t>(std::clamp(seconds, 0.0, kLongest) * 1e9);
}

}  // namespace clover
