#include "attention_cuda/kernels.h"
#include "attention_cuda/prompt.cuh"

namespace clover::cuda {
namespace {

template <typename T, int D>
Kernel instance() {
  using C = PromptConfig<T, D>;
  return {reinterpret_cast<const void*>(&prompt_kernel<C>),
          kPromptCols,
          C::kKeys,
          C::kThreads,
          static_cast<int>(sizeof(PromptShared<C>)),
          0};
}

template <typename T>
Kernel instance_of(int dim) {
  switch (dim) {
    case 64:
      return instance<T, 64>();
    case 80:
      return instance<T, 80>();
    case 96:
      return instance<T, 96>();
    case 128:
      return instance<T, 128>();
    case 256:
      return instance<T, 256>();
    default:
      return {};
  }
}

}  // namespace

Kernel prompt_kernel_of(DType dtype, int dim) {
  if (dtype == DType::kBFloat16) return instance_of<BFloat16>(dim);
  if (dtype == DType::kFloat16) return instance_of<Float16>(dim);
  return {};
}

}  // namespace clover::cuda
