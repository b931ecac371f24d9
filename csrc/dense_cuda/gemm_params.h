// What a launch of the GEMM kernels is given.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>

#include <cstdint>

namespace clover::cuda {

struct GemmParams {
  CUtensorMap w;
  CUtensorMap x;
  __nv_bfloat16* y;
  int64_t y_stride;           // elements
  const __nv_bfloat16* bias;  // of n, or null
  const __nv_bfloat16* residual;
  int64_t residual_stride;
  float4* partials;
  int* counters;  // one to a block, zero between launches
  int tokens;
  int outputs;  // of y: n, or n / 2 where gated
  int tiles;
  int steps;            // along k, to a tile
  int stages;           // of the ring
  const float* scales;  // of n, where w is float8
};

}  // namespace clover::cuda
