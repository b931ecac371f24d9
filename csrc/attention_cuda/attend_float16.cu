#include "attention_cuda/instances.cuh"

namespace clover::cuda {

Kernel float16_kernel(int dim, int eights) { return instance_of<Float16>(dim, eights); }

}  // namespace clover::cuda
