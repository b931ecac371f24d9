// The dense half's small kernels on one device, launched on the caller's stream. Nothing is
// allocated or waited for, so every call can be captured in a graph.
#pragma once

#include "dense_cuda/kernels.h"

namespace clover::cuda {

class Dense {
 public:
  // std::runtime_error for what CUDA refuses, here and in every call. `clusters` false: as on
  // devices that have none.
  Dense(int device, bool clusters);

  void norm(const NormParams& params, cudaStream_t stream) const;
  void gate(const GateParams& params, cudaStream_t stream) const;
  void rotate(const RotateParams& params, cudaStream_t stream) const;
  void quantise(const QuantiseParams& params, cudaStream_t stream) const;
  void sample(const SampleParams& params, cudaStream_t stream) const;

 private:
  int device_;
  Target target_;  // without its stream
};

}  // namespace clover::cuda
