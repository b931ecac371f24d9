// The GEMM kernel's instances, and what the launcher knows of each.
#pragma once

#include <cuda_runtime_api.h>

#include "dense_cuda/gemm_params.h"

namespace clover::cuda {

struct GemmKernel {
  void (*function)(GemmParams) = nullptr;
  int tokens = 0;  // columns of the product
  int rows = 0;    // of w in a tile
  int depth = 0;   // inputs to a stage
  int stage_bytes = 0;
};

// The narrowest that holds `tokens`; its `tokens` are 0 where none does. `float8`: w's type.
GemmKernel gemm_kernel_for(int tokens, bool gated, bool float8);

cudaError_t launch_gemm(const GemmKernel& kernel, const GemmParams& params, int blocks,
                        int shared_bytes, cudaStream_t stream);

}  // namespace clover::cuda
