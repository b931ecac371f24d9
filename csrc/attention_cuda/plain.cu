// The plain kernel: any type, head size and block size, one query token and head per thread block.
// Right before it is fast: arithmetic in float32 on ordinary cores, keys read once per query head.
#include "attention_cuda/elements.cuh"
#include "attention_cuda/kernels.h"

namespace clover::cuda {
namespace {

constexpr int kThreads = 128;

struct Query {
  int row;
  int position;
  int first;  // position that it sees first
};

__device__ Query find_query(const AttendParams& params, int token) {
  int low = 0, high = params.rows;  // the row whose tokens hold `token`
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (params.starts[middle] <= token)
      low = middle;
    else
      high = middle;
  }
  Query query;
  query.row = low;
  query.position = params.lengths[low] - (params.starts[low + 1] - token);
  const int window = params.split.window;
  query.first = window > 0 ? most(0, query.position - window + 1) : 0;
  return query;
}

__device__ float block_reduce(float value, bool maximum, float* scratch) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) {
    const float other = __shfl_xor_sync(0xffffffff, value, mask);
    value = maximum ? fmaxf(value, other) : value + other;
  }
  __syncthreads();
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = value;
  __syncthreads();
  value = scratch[0];
  for (int w = 1; w < kThreads / 32; ++w)
    value = maximum ? fmaxf(value, scratch[w]) : value + scratch[w];
  return value;
}

// The score of one position, natural units.
__device__ float score_of(const AttendParams& params, const float* query, int head, int block,
                          int position, int query_at) {
  const PoolView& pool = params.pool;
  const int64_t at = key_at(pool, block, head / params.split.group, position % pool.block_size);
  float dot = 0.f;
  for (int d = 0; d < pool.k_dim; ++d)
    dot += query[d] * load_element(pool.base, at + d, pool.dtype);
  dot *= params.score.scale;
  if (params.score.softcap != 0.f) dot = params.score.softcap * tanhf(dot / params.score.softcap);
  if (params.score.slopes != nullptr)
    dot += params.score.slopes[head] * static_cast<float>(position - query_at);
  return dot;
}

// Shared memory: the query, the output so far, weights and blocks of the keys at hand.
__global__ void __launch_bounds__(kThreads)
    plain_kernel(const __grid_constant__ AttendParams params) {
  extern __shared__ float memory[];
  __shared__ float weights[kThreads], scratch[kThreads / 32];
  __shared__ int blocks[kThreads];
  const PoolView& pool = params.pool;
  float* query = memory;
  float* out = memory + pool.k_dim;
  const int token = blockIdx.x, head = blockIdx.y, heads = gridDim.y;
  const Query of = find_query(params, token);
  if (of.position < 0) return;
  const int64_t q_at = token * params.q_stride + int64_t{head} * pool.k_dim;
  for (int d = threadIdx.x; d < pool.k_dim; d += kThreads)
    query[d] = load_element(params.q, q_at + d, params.q_dtype);
  for (int e = threadIdx.x; e < pool.v_dim; e += kThreads) out[e] = 0.f;
  __syncthreads();
  const int32_t* table = params.tables + of.row * params.table_stride;
  float top = -INFINITY, sum = 0.f;
  for (int first = of.first; first <= of.position; first += kThreads) {
    const int position = first + static_cast<int>(threadIdx.x);
    float score = -INFINITY;
    blocks[threadIdx.x] = -1;
    if (position <= of.position) {
      const int block = block_of(pool, table, position, params.work.bad);
      blocks[threadIdx.x] = block;
      if (block >= 0) score = score_of(params, query, head, block, position, of.position);
    }
    const float highest = fmaxf(top, block_reduce(score, true, scratch));
    const float base = highest == -INFINITY ? 0.f : highest;
    const float factor = expf(top - base), weight = expf(score - base);
    weights[threadIdx.x] = weight;
    sum = sum * factor + block_reduce(weight, false, scratch);
    top = highest;
    const int keys = least(kThreads, of.position + 1 - first);
    for (int e = threadIdx.x; e < pool.v_dim; e += kThreads) {
      float value = out[e] * factor;
      for (int i = 0; i < keys; ++i) {
        if (blocks[i] < 0) continue;
        const int64_t at =
            value_at(pool, blocks[i], head / params.split.group, (first + i) % pool.block_size);
        value += weights[i] * load_element(pool.base, at + e, pool.dtype);
      }
      out[e] = value;
    }
    __syncthreads();
  }
  float scale = params.score.v_scale;
  if (params.score.sinks != nullptr) {
    const float base = fmaxf(top, params.score.sinks[head]);
    scale *= expf(top - base);
    sum = sum * expf(top - base) + expf(params.score.sinks[head] - base);
    top = base;
  }
  const int64_t at = int64_t{token} * heads + head;
  for (int e = threadIdx.x; e < pool.v_dim; e += kThreads)
    store_element(params.o, at * pool.v_dim + e, params.q_dtype,
                  sum > 0 ? out[e] * scale / sum : 0);
  if (threadIdx.x == 0) params.lse[at] = top + logf(sum);
}

}  // namespace

cudaError_t attend_plain(const AttendParams& params, cudaStream_t stream) {
  const dim3 grid(params.tokens, params.split.kv_heads * params.split.group);
  const size_t shared = (params.pool.k_dim + params.pool.v_dim) * sizeof(float);
  plain_kernel<<<grid, kThreads, shared, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace clover::cuda
