#include "dense_cuda/gemm.cuh"
#include "dense_cuda/gemm_kernels.h"

namespace clover::cuda {
namespace {

template <int Tokens, bool Gated>
GemmKernel instance() {
  using Kind = GemmKind<Tokens, 1, 2, Gated>;
  return {&gemm_kernel<Kind>, Tokens, Kind::kRows, Kind::kBoxes * kBoxInputs, Kind::kStageBytes};
}

template <bool Gated>
GemmKernel kernel_for(int tokens) {
  if (tokens <= 8) return instance<8, Gated>();
  if (tokens <= 16) return instance<16, Gated>();
  if (tokens <= 32) return instance<32, Gated>();
  if (tokens <= 64) return instance<64, Gated>();
  if (tokens <= 128) return instance<128, Gated>();
  return {};
}

}  // namespace

GemmKernel gemm_kernel_for(int tokens, bool gated) {
  return gated ? kernel_for<true>(tokens) : kernel_for<false>(tokens);
}

cudaError_t launch_gemm(const GemmKernel& kernel, const GemmParams& params, int blocks,
                        int shared_bytes, cudaStream_t stream) {
  const Launch how = {dim3(blocks), kGemmThreads, stream, true, shared_bytes};
  return launch(kernel.function, how, params);
}

}  // namespace clover::cuda
