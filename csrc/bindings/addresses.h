// Tensors cross from Python as addresses; what can be checked of an address is checked here.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace clover {

template <typename T>
T* at_address(int64_t address, const char* name, bool needed = true) {
  if ((needed && address == 0) || address % static_cast<int64_t>(alignof(T)) != 0)
    throw std::invalid_argument(std::string(name) + " is not at an address of its type");
  return reinterpret_cast<T*>(address);
}

}  // namespace clover
