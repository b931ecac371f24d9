#include "dense_cuda/gemm.h"

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "common/device.h"
#include "dense_cuda/gemm_kernels.h"

namespace clover::cuda {
namespace {

constexpr int kBoxBytes = 128;     // along k: what shared memory is swizzled by
constexpr int kAlignment = 1024;   // of a stage in shared memory
constexpr int kBarrierBytes = 16;  // of a stage
constexpr int kCounterBytes = 4096;
constexpr int kMostSums = 128 * kGemmTokens;  // of a tile
// What a block takes: all but what small kernels between two calls need beside it.
constexpr int kSharedBytes = 225 * 1024;
using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                            const cuuint64_t*, const cuuint32_t*, const cuuint32_t*,
                            CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                            CUtensorMapFloatOOBfill);

// The driver's function, found by name: the module loads where there is no driver.
Encode find_encode() {
  constexpr const char* kName = "cuTensorMapEncodeTiled";
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result;
#if CUDART_VERSION >= 12050
  check(cudaGetDriverEntryPointByVersion(kName, &function, 12000, cudaEnableDefault, &result),
        "looking for cuTensorMapEncodeTiled");
#else
  check(cudaGetDriverEntryPoint(kName, &function, cudaEnableDefault, &result),
        "looking for cuTensorMapEncodeTiled");
#endif
  if (result != cudaDriverEntryPointSuccess || function == nullptr)
    throw std::runtime_error("the driver has no cuTensorMapEncodeTiled: it is older than CUDA 12");
  return reinterpret_cast<Encode>(function);
}

constexpr int kBFloat16Bytes = 2, kFloat8Bytes = 1;

// A matrix in memory.
struct Matrix {
  const void* data;
  int rows;
  int k;
  int64_t stride;  // elements
  int bytes;       // of an element
};

template <int Rank>
CUtensorMap encode(const Matrix& matrix, const cuuint64_t (&sizes)[Rank],
                   const cuuint64_t (&strides)[Rank - 1], const cuuint32_t (&box)[Rank]) {
  static const Encode function = find_encode();
  cuuint32_t steps[Rank];
  std::fill(steps, steps + Rank, 1);
  CUtensorMap map;
  const CUtensorMapDataType type = matrix.bytes == kFloat8Bytes ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                                                                : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const CUresult result =
      function(&map, type, Rank, const_cast<void*>(matrix.data), sizes, strides, box, steps,
               CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
               CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS)
    throw std::invalid_argument("a matrix cannot be described to the copy engine (error " +
                                std::to_string(result) + ")");
  return map;
}

// Rows of a matrix, `box` of them at a time.
CUtensorMap map_rows(const Matrix& matrix, int box) {
  return encode<2>(
      matrix, {static_cast<cuuint64_t>(matrix.k), static_cast<cuuint64_t>(matrix.rows)},
      {static_cast<cuuint64_t>(matrix.stride * matrix.bytes)},
      {static_cast<cuuint32_t>(kBoxBytes / matrix.bytes), static_cast<cuuint32_t>(box)});
}

// Rows of gate and up in turns of eight, so that a thread of the kernel has the sums of both.
CUtensorMap map_gated(const Matrix& matrix, int box) {
  const auto row_bytes = static_cast<cuuint64_t>(matrix.stride * matrix.bytes);
  return encode<4>(
      matrix, {static_cast<cuuint64_t>(matrix.k), 8, 2, static_cast<cuuint64_t>(matrix.rows / 16)},
      {row_bytes, row_bytes * (matrix.rows / 2), row_bytes * 8},
      {static_cast<cuuint32_t>(kBoxBytes / matrix.bytes), 8, 2, static_cast<cuuint32_t>(box / 16)});
}

int divide_up(int a, int b) { return (a + b - 1) / b; }

CUtensorMap map_weights(const GemmCall& call, int box) {
  const GemmShape& shape = call.shape;
  const int bytes = call.scales != nullptr ? kFloat8Bytes : kBFloat16Bytes;
  const Matrix w = {call.w, shape.n, shape.k, shape.k, bytes};
  return shape.gated ? map_gated(w, box) : map_rows(w, box);
}

GemmParams describe(const GemmCall& call, const GemmKernel& kernel, void* workspace) {
  const GemmShape& shape = call.shape;
  GemmParams params = {};
  params.w = map_weights(call, kernel.rows);
  params.x = map_rows({call.x, call.tokens, shape.k, call.x_stride, kBFloat16Bytes}, kernel.tokens);
  params.y = static_cast<__nv_bfloat16*>(call.y);
  params.y_stride = call.y_stride;
  params.scales = call.scales;
  params.bias = static_cast<const __nv_bfloat16*>(call.bias);
  params.residual = static_cast<const __nv_bfloat16*>(call.residual);
  params.residual_stride = call.residual_stride;
  params.counters = static_cast<int*>(workspace);
  params.partials =
      reinterpret_cast<float4*>(static_cast<unsigned char*>(workspace) + kCounterBytes);
  params.tokens = call.tokens;
  params.outputs = shape.gated ? shape.n / 2 : shape.n;
  params.tiles = divide_up(shape.n, kernel.rows);
  params.steps = divide_up(shape.k, kernel.depth);
  params.stages = (kSharedBytes - kAlignment) / (kernel.stage_bytes + kBarrierBytes);
  return params;
}

// One to a multiprocessor, or as many to each tile as leave few idle: then a tile has the fewest
// parts. No more than there are units.
int count_blocks(int tiles, int steps, int processors) {
  const int even = processors / tiles * tiles;
  if (even > processors - processors / 16) processors = even;
  return static_cast<int>(std::min<int64_t>(processors, int64_t{tiles} * steps));
}

bool served(const GemmShape& shape, bool float8) {
  const int rows = shape.gated ? 16 : 8, inputs = float8 ? 16 : 8;
  return shape.n >= rows && shape.n % rows == 0 && shape.k >= inputs && shape.k % inputs == 0;
}

void check_call(const GemmCall& call) {
  const bool fits = served(call.shape, call.scales != nullptr) && call.x_stride % 8 == 0 &&
                    call.tokens >= 1 && call.tokens <= kGemmTokens;
  if (!fits) throw std::invalid_argument("the product is not of a shape that the kernel takes");
}

}  // namespace

bool Gemm::serves(int device) {
  int major = 0;
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device),
        "asking a device what it can do");
  return major == 9;
}

Gemm::Gemm(int device) : device_(device) {
  const DeviceGuard guard(device_);
  check(cudaDeviceGetAttribute(&processors_, cudaDevAttrMultiProcessorCount, device_),
        "counting multiprocessors");
  if (processors_ * static_cast<int>(sizeof(int)) > kCounterBytes)
    throw std::runtime_error("the device has more multiprocessors than the kernel counts");
  for (int tokens = 8; tokens <= kGemmTokens; tokens *= 2) {
    for (bool gated : {false, true}) {
      for (bool float8 : {false, true}) {
        const GemmKernel kernel = gemm_kernel_for(tokens, gated, float8);
        check(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel.function),
                                   cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes),
              "preparing a GEMM kernel");
      }
    }
  }
}

int64_t Gemm::workspace_bytes() const {
  // A block has sums of two tiles at most that are not its own alone.
  return kCounterBytes + int64_t{2} * processors_ * kMostSums * int64_t{sizeof(float)};
}

void Gemm::run(const GemmCall& call, void* workspace, cudaStream_t stream) const {
  check_call(call);
  const DeviceGuard guard(device_);
  const GemmKernel kernel = gemm_kernel_for(call.tokens, call.shape.gated, call.scales != nullptr);
  const GemmParams params = describe(call, kernel, workspace);
  const int blocks = count_blocks(params.tiles, params.steps, processors_);
  const int shared_bytes = kAlignment + params.stages * (kernel.stage_bytes + kBarrierBytes);
  check(launch_gemm(kernel, params, blocks, shared_bytes, stream), "a product");
}

}  // namespace clover::cuda
