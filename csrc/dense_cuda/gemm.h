// Products with weights for few tokens on one device, launched on the caller's stream: y = x w^T.
// Nothing is allocated or waited for, so a call can be captured in a graph.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace clover::cuda {

struct GemmShape {
  int n;  // a multiple of 8; of 16 where gated
  int k;  // a multiple of 8; of 16 where w is float8
  // w is gate and then up, each [n / 2, k]: y = silu(x gate^T) * (x up^T), rounded once.
  bool gated;
};

// All bfloat16 but w where it has scales, rows contiguous, strides in elements. w and x lie on 16
// bytes, and so do their rows.
struct GemmCall {
  const void* w;        // [n, k]
  const float* scales;  // [n], of the rows of w, which is float8 (e4m3) then, its inputs in the
                        // order of interleaved QuantiseParams; or null
  const void* x;        // [tokens, k]
  int64_t x_stride;
  void* y;  // [tokens, n], or [tokens, n / 2] where gated
  int64_t y_stride;
  const void* bias;      // [n], or null
  const void* residual;  // [tokens, columns of y], or null: added to the rounded product
  int64_t residual_stride;
  GemmShape shape;
  int tokens;  // 1 to kGemmTokens
};

constexpr int kGemmTokens = 128;

class Gemm {
 public:
  // std::runtime_error for what CUDA refuses, here and in every call.
  explicit Gemm(int device);

  // Whether the device can run the kernels: compute capability 9.0.
  static bool serves(int device);

  // Memory that calls need, zero before the first; those of one workspace must follow each other.
  int64_t workspace_bytes() const;

  // A token's result depends on the shape of w alone, not on what else is computed.
  void run(const GemmCall& call, void* workspace, cudaStream_t stream) const;

 private:
  int device_;
  int processors_ = 0;
};

}  // namespace clover::cuda
