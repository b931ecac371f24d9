// CUDA's status as exceptions, and the current device.
#pragma once

#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

namespace clover::cuda {

// What to do about a failure, where it is the build's; else nothing.
inline const char* advice(cudaError_t status) {
  switch (status) {
    case cudaErrorNoKernelImageForDevice:
      return ": this build has no code for this GPU, so build it there with "
             "-DCMAKE_CUDA_ARCHITECTURES=native";
    case cudaErrorUnsupportedPtxVersion:
      return ": the driver is older than the nvcc of this build, which has no machine code for "
             "this GPU, so build it there with -DCMAKE_CUDA_ARCHITECTURES=native";
    default:
      return "";
  }
}

inline void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  throw std::runtime_error(std::string(what) + " failed: " + cudaGetErrorString(status) +
                           advice(status));
}

// Makes a device current for as long as it lives.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    check(cudaGetDevice(&before_), "finding the current device");
    if (before_ != device) check(cudaSetDevice(device), "choosing the device");
    changed_ = before_ != device;
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;
  ~DeviceGuard() {
    if (changed_) cudaSetDevice(before_);
  }

 private:
  int before_ = 0;
  bool changed_ = false;
};

}  // namespace clover::cuda
