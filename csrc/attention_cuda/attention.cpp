#include "attention_cuda/attention.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <limits>
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

int attribute(cudaDeviceAttr which, int device) {
  int value = 0;
  check(cudaDeviceGetAttribute(&value, which, device), "asking what the device has");
  return value;
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

Versions versions() {
  Versions versions = {};
  check(cudaDriverGetVersion(&versions.driver), "asking for the driver's version");
  check(cudaRuntimeGetVersion(&versions.runtime), "asking for the runtime's version");
  return versions;
}

Attention::Attention(int device, void* pool, int64_t pool_bytes, int block_size, int num_blocks,
                     bool fixed_splits, int shared_limit)
    : device_(device),
      pool_(static_cast<unsigned char*>(pool)),
      pool_bytes_(pool_bytes),
      block_size_(block_size),
      num_blocks_(num_blocks),
      fixed_splits_(fixed_splits) {
  if (block_size < 1 || num_blocks < 1)
    throw std::invalid_argument("block_size and num_blocks must be at least 1");
  const DeviceGuard guard(device_);
  processors_ = attribute(cudaDevAttrMultiProcessorCount, device_);
  const int major = attribute(cudaDevAttrComputeCapabilityMajor, device_);
  hopper_ = major == 9;
  early_launch_ = major >= 9;
  shared_limit_ = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device_);
  if (shared_limit > 0) shared_limit_ = std::min(shared_limit_, shared_limit);
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
  std::vector<Kernel> kernels = {find_kernel(config.dtype, config.k_dim, 1),
                                 find_kernel(config.dtype, config.k_dim, 2)};
  if (hopper_) kernels.push_back(prompt_kernel_of(config.dtype, config.k_dim));
  int cols = 0;
  for (const Kernel& kernel : kernels) {
    if (!fits(kernel)) continue;
    cols = std::max(cols, kernel.cols);
    prepare(kernel);
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
  constexpr int64_t kMostCols = 128;
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

bool Attention::fits(const Kernel& kernel) const {
  return kernel.function != nullptr && kernel.stages(shared_limit_) > 0;
}

void Attention::prepare(const Kernel& kernel) const {
  check(cudaFuncSetAttribute(kernel.function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             kernel.bytes(shared_limit_)),
        "preparing an attention kernel");
}

// For rows of `tokens` tokens on average; what does not fit into shared memory leaves the call to
// what reads keys more often.
Kernel Attention::kernel_for(const Layer& layer, const AttendCall& call, int tokens) const {
  const LayerConfig& config = layer.config;
  const bool serves = config.k_dim == config.v_dim && block_size_ % kSlab == 0 &&
                      aligned(call.q, 8) && call.q_stride % 4 == 0 && aligned(call.o, 8);
  if (!serves) return {};
  for (int eights = (tokens * config.group + 7) / 8; eights >= 1;
       eights = std::min(eights - 1, 1)) {
    const Kernel kernel = find_kernel(config.dtype, config.k_dim, eights);
    if (fits(kernel)) return kernel;
  }
  return {};
}

// The kernel for the call's rows of many tokens; none where there can be no such rows, or it does
// not serve the layer.
Kernel Attention::prompt_for(const Layer& layer, const AttendCall& call) const {
  const LayerConfig& config = layer.config;
  const int most_tokens = call.tokens - call.rows + 1;
  const bool serves = hopper_ && !fixed_splits_ && config.k_dim == config.v_dim &&
                      config.softcap == 0.f && config.alibi_slopes.empty() &&
                      block_size_ % kSlab == 0 && aligned(call.q, 16) && call.q_stride % 8 == 0 &&
                      aligned(call.o, 8) && most_tokens * config.group > kNarrowCols;
  if (!serves) return {};
  const Kernel kernel = prompt_kernel_of(config.dtype, config.k_dim);
  return fits(kernel) ? kernel : Kernel();
}

// What rows are taken to have, of tokens, in choosing the kernel for few of them. With fixed splits
// the instance may depend on the layer alone. Beside the prompt kernel it is for rows of one token,
// unless all rows seem to have the same few.
int Attention::tokens_of_rows(const Layer& layer, const AttendCall& call, bool prompts) const {
  const int mean = (call.tokens + call.rows - 1) / call.rows;
  if (fixed_splits_) return 1;
  if (!prompts) return mean;
  const bool alike = call.tokens % call.rows == 0 && mean * layer.config.group <= kNarrowCols;
  return alike ? mean : 1;
}

int Attention::columns(int layer, const AttendCall& call) const {
  const Layer& of = layers_.at(layer);
  const Kernel prompt = prompt_for(of, call);
  if (prompt.function != nullptr) return prompt.cols;
  return kernel_for(of, call, tokens_of_rows(of, call, false)).cols;
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
  appended_ = true;
  appended_on_ = stream;
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
  appended_ = true;
  appended_on_ = stream;
}

AttendParams Attention::describe_call(const Layer& of, const AttendCall& call) const {
  AttendParams params = {};
  params.pool = of.pool;
  params.score = {of.config.scale * of.config.k_scale, of.config.softcap, of.config.v_scale,
                  of.sinks.get(), of.slopes.get()};
  params.work = {partials_.get(), maxima_sums_.get(), counters_.get(), bad_.get()};
  params.split = {of.config.group,
                  1,
                  of.config.kv_heads,
                  of.config.window,
                  0,
                  1,
                  std::numeric_limits<int>::max()};
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
  return params;
}

void Attention::launch(const Kernel& kernel, AttendParams params, cudaStream_t stream) const {
  params.split.cols = kernel.cols;
  params.split.tile = kernel.tile;
  params.split.fixed_tiles = fixed_splits_ ? kFixedTokens / kernel.tile : 0;
  params.min_units = fixed_splits_ ? 1 : kMinTokens / kernel.tile;
  params.stages = kernel.stages(shared_limit_);
  params.slots = processors_ * kSlotsPerBlock;
  void* arguments[] = {&params};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(processors_);
  config.blockDim = dim3(kernel.threads);
  config.dynamicSmemBytes = kernel.bytes(shared_limit_);
  config.stream = stream;
  cudaLaunchAttribute early = {};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &early;
  config.numAttrs = early_launch_ ? 1 : 0;
  check(cudaLaunchKernelExC(&config, kernel.function, arguments), "attending");
}

void Attention::attend(int layer, const AttendCall& call, cudaStream_t stream) {
  const DeviceGuard guard(device_);
  const Layer& of = layers_.at(layer);
  const Kernel prompt = prompt_for(of, call);
  const bool shared = prompt.function != nullptr;
  const Kernel kernel = kernel_for(of, call, tokens_of_rows(of, call, shared));
  if (fixed_splits_ && kernel.function != nullptr) reserve_fixed(of, call, kernel.cols, stream);
  AttendParams params = describe_call(of, call);
  params.early = early_launch_ && (settled_ || (appended_ && appended_on_ == stream));
  appended_ = false;
  if (shared) {
    const int narrow = std::max(1, kernel.cols / of.config.group);
    params.narrow = kernel.function == nullptr ? 0 : narrow;
    launch(prompt, params, stream);
    // With one row it is known to be the prompt kernel's.
    if (kernel.function == nullptr || (call.rows == 1 && call.tokens > narrow)) return;
    params.split.most_count = narrow;
  }
  if (kernel.function == nullptr)
    check(attend_plain(params, stream), "attending");
  else
    launch(kernel, params, stream);
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
