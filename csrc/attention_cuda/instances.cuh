// Which instances of the tensor-core kernel there are, and their shapes.
#pragma once

#include "attention_cuda/attend.cuh"
#include "attention_cuda/kernels.h"

namespace clover::cuda {

template <typename T, int D, int NT>
Kernel instance() {
  using C = Config<T, D, NT, NT == 1 && D <= 128 ? 7 : 4>;  // twelve or eight warps in all
  return {reinterpret_cast<const void*>(&attend_kernel<C>),
          C::kCols,
          C::kTile,
          C::kThreads,
          static_cast<int>(sizeof(Shared<C>)),
          C::W * C::kStageBytes};
}

// Few instances, since each costs every build: eight columns, or as many as registers hold.
template <typename T, int D>
Kernel instance_of(int eights) {
  return eights <= 1 ? instance<T, D, 1>() : instance<T, D, (D > 128 ? 2 : 4)>();
}

template <typename T>
Kernel instance_of(int dim, int eights) {
  switch (dim) {
    case 64:
      return instance_of<T, 64>(eights);
    case 80:
      return instance_of<T, 80>(eights);
    case 96:
      return instance_of<T, 96>(eights);
    case 128:
      return instance_of<T, 128>(eights);
    case 256:
      return instance_of<T, 256>(eights);
    default:
      return {};
  }
}

}  // namespace clover::cuda
