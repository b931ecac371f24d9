#include "attention_cuda/instances.cuh"

namespace clover::cuda {

Kernel bfloat16_kernel(int dim, int eights) { return instance_of<BFloat16>(dim, eights); }

}  // namespace clover::cuda
