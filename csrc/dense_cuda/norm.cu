// The norm of rows, with what comes before it: an embedding's row, or the residual's addition. One
// thread block per row, which stays in registers.
#include "common/launch.cuh"
#include "dense_cuda/kernels.h"
#include "dense_cuda/pack.cuh"

namespace clover::cuda {
namespace {

constexpr int kWarp = 32;
constexpr int kFewThreads = 512;
constexpr int kMostThreads = 1024;

enum class Source { kHidden, kAdded, kEmbedding };

// In the same order whatever the other blocks do.
__device__ __forceinline__ float block_sum(float value) {
  __shared__ float sums[kMostThreads / kWarp];
#pragma unroll
  for (int mask = kWarp / 2; mask > 0; mask /= 2) value += __shfl_xor_sync(0xffffffff, value, mask);
  if (threadIdx.x % kWarp == 0) sums[threadIdx.x / kWarp] = value;
  __syncthreads();
  const int lane = threadIdx.x % kWarp;
  value = lane < static_cast<int>(blockDim.x) / kWarp ? sums[lane] : 0.f;
#pragma unroll
  for (int mask = kWarp / 2; mask > 0; mask /= 2) value += __shfl_xor_sync(0xffffffff, value, mask);
  return value;
}

// A row's elements from `column` on, as the norm takes them; written out where they are new.
template <typename T, int V, Source kSource>
__device__ __forceinline__ Pack<T, V> take(const NormParams& params, int64_t source, int64_t row,
                                           int column) {
  if constexpr (kSource == Source::kHidden)
    return load_pack<T, V>(params.hidden, source * params.hidden_stride + column);
  Pack<T, V> pack;
  if constexpr (kSource == Source::kEmbedding) {
    if (source >= 0 && source < params.vocabulary) {
      pack = load_pack<T, V>(params.hidden, source * params.hidden_stride + column);
    } else {
#pragma unroll
      for (int i = 0; i < V; ++i) pack.values[i] = narrow<T>(0.f);
    }
  } else {
    pack = load_pack<T, V>(params.hidden, source * params.hidden_stride + column);
    const Pack<T, V> added = load_pack<T, V>(params.added, row * params.added_stride + column);
#pragma unroll
    for (int i = 0; i < V; ++i)
      pack.values[i] = narrow<T>(widen(pack.values[i]) + widen(added.values[i]));
  }
  store_pack<T, V>(params.hidden_out, row * params.columns + column, pack);
  return pack;
}

template <typename T, int V>
__device__ __forceinline__ Pack<T, V> scaled(const Pack<T, V>& x, const Pack<T, V>& weight,
                                             float factor) {
  Pack<T, V> y;
#pragma unroll
  for (int i = 0; i < V; ++i)
    y.values[i] = narrow<T>(widen(x.values[i]) * factor * widen(weight.values[i]));
  return y;
}

// `N` packs per thread.
template <typename T, int V, int N, Source kSource>
__global__ void __launch_bounds__(kFewThreads)
    norm_kernel(const __grid_constant__ NormParams params) {
  Pack<T, V> weight[N], x[N];
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const int column = (n * blockDim.x + threadIdx.x) * V;
    if (column < params.columns) weight[n] = load_pack<T, V>(params.weight, column);
  }
  let_next_start();
  wait_for_previous();
  const int64_t row = blockIdx.x;
  const int64_t source = kSource == Source::kEmbedding ? params.ids[row] : row;
  float sum = 0.f;
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const int column = (n * blockDim.x + threadIdx.x) * V;
    if (column >= params.columns) continue;
    x[n] = take<T, V, kSource>(params, source, row, column);
    sum += squares(x[n]);
  }
  const float factor = rsqrtf(block_sum(sum) / static_cast<float>(params.columns) + params.eps);
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const int column = (n * blockDim.x + threadIdx.x) * V;
    if (column < params.columns)
      store_pack<T, V>(params.out, row * params.columns + column, scaled(x[n], weight[n], factor));
  }
}

// Any width and alignment; a thread reads again what it has read or written.
template <typename T, Source kSource>
__global__ void __launch_bounds__(kMostThreads)
    plain_norm_kernel(const __grid_constant__ NormParams params) {
  let_next_start();
  wait_for_previous();
  const int64_t row = blockIdx.x;
  const int64_t source = kSource == Source::kEmbedding ? params.ids[row] : row;
  float sum = 0.f;
  for (int column = threadIdx.x; column < params.columns; column += blockDim.x)
    sum += squares(take<T, 1, kSource>(params, source, row, column));
  const float factor = rsqrtf(block_sum(sum) / static_cast<float>(params.columns) + params.eps);
  for (int column = threadIdx.x; column < params.columns; column += blockDim.x) {
    const int64_t at = row * params.columns + column;
    const Pack<T, 1> x = kSource == Source::kHidden
                             ? load_pack<T, 1>(params.hidden, row * params.hidden_stride + column)
                             : load_pack<T, 1>(params.hidden_out, at);
    store_pack<T, 1>(params.out, at, scaled(x, load_pack<T, 1>(params.weight, column), factor));
  }
}

bool in_packs(const NormParams& params, int width) {
  const auto addresses =
      reinterpret_cast<uintptr_t>(params.hidden) | reinterpret_cast<uintptr_t>(params.added) |
      reinterpret_cast<uintptr_t>(params.weight) | reinterpret_cast<uintptr_t>(params.hidden_out) |
      reinterpret_cast<uintptr_t>(params.out);
  return addresses % kAccessBytes == 0 && params.columns % width == 0 &&
         params.hidden_stride % width == 0 && params.added_stride % width == 0;
}

template <typename T, Source kSource>
cudaError_t launch_norm(const NormParams& params, const Target& target) {
  constexpr int V = kWidth<T>;
  const int packs = params.columns / V;
  Launch how = {dim3(params.rows), kMostThreads, target.stream, target.early};
  if (!in_packs(params, V) || packs > 8 * kFewThreads)
    return launch(plain_norm_kernel<T, kSource>, how, params);
  const int each = packs <= kFewThreads       ? 1
                   : packs <= 2 * kFewThreads ? 2
                   : packs <= 4 * kFewThreads ? 4
                                              : 8;
  const int threads = (packs + each - 1) / each;
  how.threads = (threads + kWarp - 1) / kWarp * kWarp;
  switch (each) {
    case 1:
      return launch(norm_kernel<T, V, 1, kSource>, how, params);
    case 2:
      return launch(norm_kernel<T, V, 2, kSource>, how, params);
    case 4:
      return launch(norm_kernel<T, V, 4, kSource>, how, params);
    default:
      return launch(norm_kernel<T, V, 8, kSource>, how, params);
  }
}

template <typename T>
cudaError_t norm_of(const NormParams& params, const Target& target) {
  if (params.ids != nullptr) return launch_norm<T, Source::kEmbedding>(params, target);
  if (params.added != nullptr) return launch_norm<T, Source::kAdded>(params, target);
  return launch_norm<T, Source::kHidden>(params, target);
}

}  // namespace

cudaError_t norm(const NormParams& params, const Target& target) {
  return for_type(params.dtype,
                  [&](auto of) { return norm_of<typename decltype(of)::Type>(params, target); });
}

}  // namespace clover::cuda
