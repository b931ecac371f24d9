#include "dense_cuda/dense.h"

#include "common/device.h"

namespace clover::cuda {
namespace {

int attribute(cudaDeviceAttr name, int device) {
  int value = 0;
  check(cudaDeviceGetAttribute(&value, name, device), "asking a device what it can do");
  return value;
}

}  // namespace

Dense::Dense(int device, bool clusters) : device_(device) {
  const bool hopper = attribute(cudaDevAttrComputeCapabilityMajor, device) >= 9;
  target_.early = hopper;
  target_.cluster_blocks = hopper && clusters ? kPortableCluster : 1;
  target_.shared_bytes = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  const DeviceGuard guard(device);
  check(prepare_sample(target_), "preparing to sample");
}

void Dense::norm(const NormParams& params, cudaStream_t stream) const {
  const DeviceGuard guard(device_);
  check(cuda::norm(params, target_.on(stream)), "a norm");
}

void Dense::gate(const GateParams& params, cudaStream_t stream) const {
  const DeviceGuard guard(device_);
  check(cuda::gate(params, target_.on(stream)), "multiplying by a gate");
}

void Dense::rotate(const RotateParams& params, cudaStream_t stream) const {
  const DeviceGuard guard(device_);
  check(cuda::rotate(params, target_.on(stream)), "rotating");
}

void Dense::quantise(const QuantiseParams& params, cudaStream_t stream) const {
  const DeviceGuard guard(device_);
  check(cuda::quantise(params, target_.on(stream)), "quantising rows");
}

void Dense::sample(const SampleParams& params, cudaStream_t stream) const {
  const DeviceGuard guard(device_);
  check(cuda::sample(params, target_.on(stream)), "sampling");
}

}  // namespace clover::cuda
