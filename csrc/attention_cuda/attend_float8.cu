#include "attention_cuda/instances.cuh"

namespace clover::cuda {

Kernel float8_kernel(int dim, int eights) { return instance_of<Float8>(dim, eights); }

}  // namespace clover::cuda
