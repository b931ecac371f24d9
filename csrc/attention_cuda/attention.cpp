#include "attention_cuda/attention.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include "attention_cuda/tuning.h"
#include "common/device.h"

namespace clover::cuda {
namespace {

template <typename T>
std::unique_ptr<T, DeviceDeleter> allocate(int64_t count) {
  void* memory = nullptr;
  check(cudaMalloc(&memory, count * sizeof(T)), "allocating the attention workspace");
  return std::unique_ptr<T, DeviceDeleter>(static_cast<T*>(memory));
}

std::unique_ptr<float, DeviceDeleter> upload(const std::vector<float>& values) {
  if (values.empty()) return nullptr;
  auto memory = allocate<float>(static_cast<int64_t>(values.size()));
  check(cudaMemcpy(memory.get(), values.data(), values.size() * sizeof(float),
                   cudaMemcpyHostToDevice),
        "copying a layer's parameters");
  return memory;
}

Kernel find_kernel(DType dtype, int dim, int eights) {
  switch (dtype) {
    case DType::kFloat32:
      return {};
    case DType::kBFloat16:
      return bfloat16_kernel(dim, eights);
    case DType::kFloat16:
      return float16_kernel(dim, eights);
    case DType::kFloat8E4M3:
      return float8_kernel(dim, eights);
  }
  return {};
}

bool aligned(const void* pointer, size_t bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
}

PoolView describe(const LayerConfig& config, unsigned char* base, int block_size, int num_blocks) {
  PoolView pool;
  const int64_t tokens = int64_t{config.kv_heads} * block_size, size = dtype_bytes(config.dtype);
  pool.base = base;
  pool.block_bytes = tokens * (config.k_dim + config.v_dim) * size;
  pool.values_at = tokens * config.k_dim * size;
  pool.block_size = block_size;
  pool.num_blocks = num_blocks;
  pool.kv_heads = config.kv_heads;
  pool.k_dim = config.k_dim;
  pool.v_dim = config.v_dim;
  pool.dtype = config.dtype;
  return pool;
}

}  // namespace

void DeviceDeleter::operator()(void* memory) const { cudaFree(memory); }
void HostDeleter::operator()(void* memory) const { cudaFreeHost(memory); }

int device_count() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

Attention::Attention(int device, void* pool, int64_t pool_bytes, int block_size, int num_blocks,
                     bool fixed_splits)
    : device_(device),
      pool_(static_cast<unsigned char*>(pool)),
      pool_bytes_(pool_bytes),
      block_size_(block_size),
      num_blocks_(num_blocks),
      fixed_splits_(fixed_splits) {
  if (block_size < 1 || num_blocks < 1)
    throw std::invalid_argument("block_size and num_blocks must be at least 1");
  const DeviceGuard guard(device_);
  check(cudaDeviceGetAttribute(&processors_, cudaDevAttrMultiProcessorCount, device_),
        "counting multiprocessors");
  int major = 0;
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device_),
        "asking for the compute capability");
  early_launch_ = major >= 9;
  void* bad = nullptr;
  check(cudaHostAlloc(&bad, sizeof(int), cudaHostAllocMapped | cudaHostAllocPortable),
        "allocating host memory");
  bad_.reset(static_cast<int*>(bad));
  *bad_ = 0;
}

void Attention::add_layer(const LayerConfig& config) {
  const DeviceGuard guard(device_);
  Layer layer;
  layer.config = config;
  layer.pool = describe(config, pool_ + used_bytes_, block_size_, num_blocks_);
  const int64_t bytes = layer.pool.block_bytes * num_blocks_;
  if (used_bytes_ + bytes > pool_bytes_)
    throw std::invalid_argument("the pool does not hold another layer of " + std::to_string(bytes) +
                                " bytes");
  layer.sinks = upload(config.sinks);
  layer.slopes = upload(config.alibi_slopes);
  int cols = 0;
  for (int eights : {1, 2}) {
    const Kernel kernel = find_kernel(config.dtype, config.k_dim, eights);
    if (kernel.function == nullptr) continue;
    cols = std::max(cols, kernel.cols);
    check(cudaFuncSetAttribute(kernel.function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               kernel.shared_bytes),
          "preparing an attention kernel");
  }
  const int64_t slots = int64_t{processors_} * kSlotsPerBlock;
  reserve(slots, slots * cols * config.v_dim, nullptr);
  used_bytes_ += bytes;
  layers_.push_back(std::move(layer));
}

void Attention::reserve(int64_t slots, int64_t floats, cudaStream_t stream) {
  if (slots <= slots_ && floats <= floats_) return;
  cudaStreamCaptureStatus capturing = cudaStreamCaptureStatusNone;
  if (stream != nullptr) check(cudaStreamIsCapturing(stream, &capturing), "asking for a capture");
  if (capturing != cudaStreamCaptureStatusNone)
    throw std::invalid_argument(
        "the attention workspace is too small for this call: make one of its size before the "
        "capture");
  slots_ = std::max(slots, slots_);
  floats_ = std::max(floats, floats_);
  check(cudaDeviceSynchronize(), "waiting for the device");
  constexpr int64_t kMostCols = 32;
  partials_ = allocate<float>(floats_);
  maxima_sums_ = allocate<float>(slots_ * kMostCols * 2);
  counters_ = allocate<int>(slots_);
  check(cudaMemset(counters_.get(), 0, slots_ * sizeof(int)), "clearing counters");
  check(cudaDeviceSynchronize(), "waiting for the device");
}

// Every unit of every item may need a slot.
void Attention::reserve_fixed(const Layer& layer, const AttendCall& call, int cols,
                              cudaStream_t stream) {
  const int64_t longest = call.table_stride * block_size_;
  const int64_t units = (longest + kFixedTokens - 1) / kFixedTokens;
  if (units <= 1) return;
  const int64_t tiles = int64_t{call.tokens} * layer.config.group / cols + call.rows;
  const int64_t slots = units * tiles * layer.config.kv_heads;
  reserve(slots, slots * cols * layer.config.v_dim, stream);
}

Kernel Attention::kernel_for(const Layer& layer, const AttendCall& call) const {
  const LayerConfig& config = layer.config;
  const bool fits = config.k_dim == config.v_dim && block_size_ % kSlab == 0 &&
                    aligned(call.q, 8) && call.q_stride % 4 == 0 && aligned(call.o, 8);
  if (!fits) return {};
  // With fixed splits the instance may depend on the layer alone.
  const int tokens = fixed_splits_ ? 1 : (call.tokens + call.rows - 1) / call.rows;
  return find_kernel(config.dtype, config.k_dim, (tokens * config.group + 7) / 8);
}

int Attention::columns(int layer, const AttendCall& call) const {
  return kernel_for(layers_.at(layer), call).cols;
}

void Attention::append(int layer, const AppendParams& call, cudaStream_t stream) {
  const DeviceGuard guard(device_);
  const Layer& of = layers_.at(layer);
  AppendParams params = call;
  params.pool = of.pool;
  params.k_scale = of.config.k_scale;
  params.v_scale = of.config.v_scale;
  params.bad = bad_.get();
  check(cuda::append(params, stream), "appending");
}

void Attention::append_rotated(int layer, const RotateParams& rows, const int64_t* slots,
                               cudaStream_t stream) {
  const DeviceGuard guard(device_);
  const Layer& of = layers_.at(layer);
  AppendParams to = {};
  to.pool = of.pool;
  to.slots = slots;
  to.k_scale = of.config.k_scale;
  to.v_scale = of.config.v_scale;
  to.bad = bad_.get();
  Target target;
  target.stream = stream;
  target.early = early_launch_;
  check(cuda::append_rotated(rows, to, target), "rotating and appending");
}

void Attention::attend(int layer, const AttendCall& call, cudaStream_t stream) {
  const DeviceGuard guard(device_);
  const Layer& of = layers_.at(layer);
  const Kernel kernel = kernel_for(of, call);
  if (fixed_splits_ && kernel.function != nullptr) reserve_fixed(of, call, kernel.cols, stream);
  AttendParams params;
  params.pool = of.pool;
  params.score = {of.config.scale * of.config.k_scale, of.config.softcap, of.config.v_scale,
                  of.sinks.get(), of.slopes.get()};
  params.work = {partials_.get(), maxima_sums_.get(), counters_.get(), bad_.get()};
  params.split = {of.config.group,
                  std::max(1, kernel.cols),
                  of.config.kv_heads,
                  of.config.window,
                  fixed_splits_ ? kFixedTokens / kernel.tile : 0,
                  kernel.tile};
  params.q = call.q;
  params.q_stride = call.q_stride;
  params.q_dtype = call.q_dtype;
  params.starts = call.starts;
  params.tables = call.tables;
  params.table_stride = call.table_stride;
  params.lengths = call.lengths;
  params.rows = call.rows;
  params.tokens = call.tokens;
  params.o = call.o;
  params.lse = call.lse;
  params.min_units = fixed_splits_ ? 1 : kMinTokens / kernel.tile;
  if (kernel.function == nullptr) {
    check(attend_plain(params, stream), "attending");
    return;
  }
  void* arguments[] = {&params};
  check(cudaLaunchKernel(kernel.function, dim3(processors_), dim3(kernel.threads), arguments,
                         kernel.shared_bytes, stream),
        "attending");
}

void Attention::gather(int layer, const GatherParams& call, cudaStream_t stream) {
  const DeviceGuard guard(device_);
  const Layer& of = layers_.at(layer);
  GatherParams params = call;
  params.pool = of.pool;
  params.k_scale = params.v_scale = 1.f;
  params.bad = bad_.get();
  check(cuda::gather(params, stream), "gathering");
}

void Attention::copy_blocks(const CopyParams& call, cudaStream_t stream) {
  const DeviceGuard guard(device_);
  check(cuda::copy_blocks(call, stream), "copying blocks");
}

int Attention::take_bad() {
  const int bad = *static_cast<volatile int*>(bad_.get());
  if (bad != 0) *bad_ = 0;
  return bad;
}

}  // namespace clover::cuda
