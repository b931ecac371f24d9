// SiLU of the gate times the up projection, of rows that hold both.
#include "common/launch.cuh"
#include "dense_cuda/kernels.h"
#include "dense_cuda/pack.cuh"

namespace clover::cuda {
namespace {

constexpr int kWarp = 32;
constexpr int kThreads = 256;

template <typename T>
__device__ __forceinline__ float silu(float x) {
  // float32 keeps its precision; 16-bit types round away what the quick way loses.
  if constexpr (sizeof(T) == 4)
    return x / (1.f + expf(-x));
  else
    return x / (1.f + __expf(-x));
}

// One pack per thread; a block's are of one row.
template <typename T, int V>
__global__ void __launch_bounds__(kThreads) gate_kernel(const __grid_constant__ GateParams params) {
  let_next_start();
  const int64_t row = blockIdx.x;
  const int column = static_cast<int>(blockIdx.y * blockDim.x + threadIdx.x) * V;
  if (column >= params.columns) return;
  wait_for_previous();
  const Pack<T, V> gate = load_pack<T, V>(params.gate_up, row * params.stride + column);
  const Pack<T, V> up =
      load_pack<T, V>(params.gate_up, row * params.stride + params.columns + column);
  Pack<T, V> out;
#pragma unroll
  for (int i = 0; i < V; ++i)
    out.values[i] = narrow<T>(silu<T>(widen(gate.values[i])) * widen(up.values[i]));
  store_pack<T, V>(params.out, row * params.columns + column, out);
}

template <typename T, int V>
cudaError_t launch_gate(const GateParams& params, const Target& target) {
  const int packs = params.columns / V;
  const int threads = packs < kThreads ? (packs + kWarp - 1) / kWarp * kWarp : kThreads;
  const dim3 grid(params.rows, (packs + threads - 1) / threads);
  const Launch how = {grid, threads, target.stream, target.early};
  return launch(gate_kernel<T, V>, how, params);
}

template <typename T>
cudaError_t gate_of(const GateParams& params, const Target& target) {
  constexpr int V = kWidth<T>;
  const auto addresses =
      reinterpret_cast<uintptr_t>(params.gate_up) | reinterpret_cast<uintptr_t>(params.out);
  const bool fits =
      addresses % kAccessBytes == 0 && params.columns % V == 0 && params.stride % V == 0;
  return fits ? launch_gate<T, V>(params, target) : launch_gate<T, 1>(params, target);
}

}  // namespace

cudaError_t gate(const GateParams& params, const Target& target) {
  return for_type(params.dtype,
                  [&](auto of) { return gate_of<typename decltype(of)::Type>(params, target); });
}

}  // namespace clover::cuda
