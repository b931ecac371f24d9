#include "dense_cuda/gemm.cuh"
#include "dense_cuda/gemm_kernels.h"

namespace clover::cuda {
namespace {

// A stage is 128 inputs deep for every type.
template <typename Weight, int Tokens, bool Gated>
GemmKernel instance() {
  using Kind = GemmKind<Weight, Tokens, 1, Weight::kBytes, Gated>;
  return {&gemm_kernel<Kind>, Tokens, Kind::kRows, Kind::kInputBoxes * kBoxInputs,
          Kind::kStageBytes};
}

template <typename Weight, bool Gated>
GemmKernel kernel_for(int tokens) {
  if (tokens <= 8) return instance<Weight, 8, Gated>();
  if (tokens <= 16) return instance<Weight, 16, Gated>();
  if (tokens <= 32) return instance<Weight, 32, Gated>();
  if (tokens <= 64) return instance<Weight, 64, Gated>();
  if (tokens <= 128) return instance<Weight, 128, Gated>();
  return {};
}

}  // namespace

GemmKernel gemm_kernel_for(int tokens, bool gated, bool float8) {
  if (float8) return gated ? kernel_for<Float8, true>(tokens) : kernel_for<Float8, false>(tokens);
  return gated ? kernel_for<BFloat16, true>(tokens) : kernel_for<BFloat16, false>(tokens);
}

cudaError_t launch_gemm(const GemmKernel& kernel, const GemmParams& params, int blocks,
                        int shared_bytes, cudaStream_t stream) {
  const Launch how = {dim3(blocks), kGemmThreads, stream, true, shared_bytes};
  return launch(kernel.function, how, params);
}

}  // namespace clover::cuda
