// Kernels that start while the one before them on the stream still runs (programmatic dependent
// launch, compute capability 9.0 and newer). Such a kernel reads what no kernel writes, weights,
// then calls wait_for_previous() before anything else in global memory. All kernels that are
// launched so must: then each one's end means that all before it have ended.
#pragma once

#include <cuda_runtime.h>

namespace clover::cuda {

// Until every kernel before this one has ended and its writes are visible.
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The next kernel may start as soon as every block of this one has come here.
__device__ __forceinline__ void let_next_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

struct Launch {
  dim3 grid;
  int threads;
  cudaStream_t stream;
  bool early;              // may start before the previous kernel ends
  int shared_bytes = 0;    // dynamic
  int cluster_blocks = 1;  // blocks that share one cluster, along x
};

template <typename Params>
cudaError_t launch(void (*kernel)(Params), const Launch& how, const Params& params) {
  cudaLaunchAttribute attributes[2];
  cudaLaunchConfig_t config = {};
  config.gridDim = how.grid;
  config.blockDim = dim3(how.threads);
  config.dynamicSmemBytes = how.shared_bytes;
  config.stream = how.stream;
  config.attrs = attributes;
  if (how.early) {
    cudaLaunchAttribute& early = attributes[config.numAttrs++];
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
  }
  if (how.cluster_blocks > 1) {
    cudaLaunchAttribute& cluster = attributes[config.numAttrs++];
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {static_cast<unsigned>(how.cluster_blocks), 1, 1};
  }
  return cudaLaunchKernelEx(&config, kernel, params);
}

}  // namespace clover::cuda
