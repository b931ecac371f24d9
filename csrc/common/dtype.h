// Types of numbers in device memory, by the codes that Python gives them.
#pragma once

#include "common/host_device.h"

namespace clover::cuda {

enum class DType : int { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2, kFloat8E4M3 = 3 };

CLOVER_HD constexpr int dtype_bytes(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return 4;
    case DType::kBFloat16:
    case DType::kFloat16:
      return 2;
    case DType::kFloat8E4M3:
      return 1;
  }
  return 0;
}

}  // namespace clover::cuda
