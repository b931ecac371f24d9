// One token of each row of logits. A row is cut into slices for the blocks of a cluster, and a
// slice into runs for their warps; where a row is cut depends on its length alone, and everything
// is added up in one order, so that a row's token does not depend on which rows it comes with.
#include "common/launch.cuh"
#include "dense_cuda/kernels.h"
#include "dense_cuda/reach.cuh"

namespace clover::cuda {
namespace {

constexpr int kStaticSampleBytes = 4096;  // room for what is not dynamic
constexpr int kNoIndex = 0x7fffffff;
constexpr int64_t kNoToken = -1;

struct SampleLaunch {
  SampleParams rows;
  int slice;    // elements of each block, a multiple of packs times warps
  bool staged;  // whether a slice is copied to shared memory
  bool packed;  // whether rows can be read in packs
};

struct Largest {
  float value;
  int index;  // of the row's elements, the lowest that has it
  bool nan;

  __device__ __forceinline__ void take(const Largest& other) {
    nan = nan || other.nan;
    if (other.value > value || (other.value == value && other.index < index)) {
      value = other.value;
      index = other.index;
    }
  }
};

template <typename T, bool kCluster>
__device__ Largest find_largest(const Slice<T>& slice, Team<kCluster>& team) {
  __shared__ Largest of_warps[kTeamWarps];
  Largest largest = {-INFINITY, kNoIndex, false};
  visit_run(slice, [&](float logit, int at) {
    largest.nan = largest.nan || isnan(logit);
    if (logit > largest.value) {
      largest.value = logit;
      largest.index = slice.first + at;
    }
  });
#pragma unroll
  for (int mask = kWarp / 2; mask > 0; mask /= 2)
    largest.take({__shfl_xor_sync(0xffffffff, largest.value, mask),
                  __shfl_xor_sync(0xffffffff, largest.index, mask),
                  __shfl_xor_sync(0xffffffff, static_cast<int>(largest.nan), mask) != 0});
  if (threadIdx.x % kWarp == 0) of_warps[threadIdx.x / kWarp] = largest;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int warp = 1; warp < kTeamWarps; ++warp) largest.take(of_warps[warp]);
    team.tell(0, largest.value);
    team.tell(1, largest.index);
    team.tell(2, largest.nan);
  }
  team.meet();
  largest = {-INFINITY, kNoIndex, false};
  for (int block = 0; block < team.blocks(); ++block)
    largest.take({static_cast<float>(team.told(block, 0)), static_cast<int>(team.told(block, 1)),
                  team.told(block, 2) != 0.0});
  team.end_turn();
  return largest;
}

// What each warp's run adds up to, of all blocks, and all of it.
struct Runs {
  double sums[kPortableCluster * kTeamWarps];
  double total;
};

template <typename T, bool kCluster>
__device__ void add_runs(const Slice<T>& slice, const Draw& draw, Team<kCluster>& team,
                         Runs& runs) {
  double sum = 0.0;
  visit_run(slice, [&](float logit, int) { sum += draw.weight(draw.distance(logit)); });
#pragma unroll
  for (int mask = kWarp / 2; mask > 0; mask /= 2) sum += __shfl_xor_sync(0xffffffff, sum, mask);
  if (threadIdx.x % kWarp == 0) team.tell(threadIdx.x / kWarp, sum);
  team.meet();
  const int count = team.blocks() * kTeamWarps;
  if (static_cast<int>(threadIdx.x) < count)
    runs.sums[threadIdx.x] = team.told(threadIdx.x / kTeamWarps, threadIdx.x % kTeamWarps);
  team.end_turn();
  __syncthreads();
  if (threadIdx.x == 0) {
    double total = 0.0;
    for (int run = 0; run < count; ++run) total += runs.sums[run];
    runs.total = total;
  }
  __syncthreads();
}

// The first element whose cumulative weight exceeds `target`, else the last that has any weight:
// of this warp's run, before which `before` lies.
template <typename T>
__device__ int find_in_run(const Slice<T>& slice, const Draw& draw, double before, double target) {
  constexpr int V = kWidth<T>;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int begin = warp * slice.run, end = min(begin + slice.run, slice.count);
  int last = -1;
  for (int segment = begin; segment < end; segment += kWarp * V) {
    const int from = segment + lane * V, to = min(from + V, end);
    double sum = 0.0;
    int mine = -1;
    for (int at = from; at < to; ++at) {
      const double weight = draw.weight(draw.distance(widen(slice.data[at])));
      if (weight > 0.0) mine = at;
      sum += weight;
    }
    double through = sum;  // of this lane and those below
#pragma unroll
    for (int step = 1; step < kWarp; step *= 2) {
      const double below = __shfl_up_sync(0xffffffff, through, step);
      if (lane >= step) through += below;
    }
    const unsigned passed = __ballot_sync(0xffffffff, before + through > target && mine >= 0);
    if (passed != 0) {
      const int lane_of = __ffs(passed) - 1;
      if (lane == lane_of) {
        double reached = before + (through - sum);
        for (int at = from; at < to; ++at) {
          const double weight = draw.weight(draw.distance(widen(slice.data[at])));
          reached += weight;
          if (weight > 0.0 && reached > target) {
            mine = at;
            break;
          }
        }
      }
      return __shfl_sync(0xffffffff, mine, lane_of);
    }
    last = max(last, __reduce_max_sync(0xffffffff, mine));
    before += __shfl_sync(0xffffffff, through, kWarp - 1);
  }
  return last;
}

// The warp whose run holds the target writes the token.
template <typename T, bool kCluster>
__device__ void choose(const Slice<T>& slice, const Draw& draw, double uniform,
                       const Team<kCluster>& team, const Runs& runs, int64_t* out) {
  const double target = uniform * runs.total;
  const int mine = team.block() * kTeamWarps + threadIdx.x / kWarp;
  double before = 0.0, through = 0.0;
  int chosen = -1;
  for (int run = 0; run < team.blocks() * kTeamWarps; ++run) {
    if (!(runs.sums[run] > 0.0)) continue;
    chosen = run;  // rounding must not pass the last
    before = through;
    through += runs.sums[run];
    if (through > target) break;
  }
  if (chosen != mine) return;
  const int at = find_in_run(slice, draw, before, target);
  if (threadIdx.x % kWarp == 0) *out = slice.first + at;
}

template <typename T, bool kCluster>
__device__ void sample_row(const SampleParams& rows, int64_t row, const Slice<T>& slice,
                           Team<kCluster>& team, LaneSums& sums) {
  __shared__ Runs runs;
  const Largest largest = find_largest(slice, team);
  const double temperature = rows.temperature[row];
  if (largest.nan || isinf(largest.value) || !(temperature > 0.0)) {
    const bool known = !largest.nan && !isinf(largest.value);
    if (team.block() == 0 && threadIdx.x == 0) rows.out[row] = known ? largest.index : kNoToken;
    return;
  }
  // 1 / 1e-310 is infinite, which the largest, of distance 0, does not meet.
  Draw draw = {largest.value, 1.0 / temperature, 0.0, kFarthest};
  const int64_t top_k = rows.top_k[row];
  if (top_k > 0 && top_k < rows.columns)
    draw.farthest = reach<true>(slice, draw, static_cast<double>(top_k), team, sums);
  draw.min_p = rows.min_p[row];
  add_runs(slice, draw, team, runs);
  const double top_p = rows.top_p[row];
  if (top_p < 1.0) {
    draw.farthest = min(draw.farthest, reach<false>(slice, draw, runs.total * top_p, team, sums));
    add_runs(slice, draw, team, runs);
  }
  choose(slice, draw, rows.uniform[row], team, runs, rows.out + row);
}

template <typename T, bool kCluster>
__global__ void __launch_bounds__(kTeamThreads)
    sample_kernel(const __grid_constant__ SampleLaunch params) {
  extern __shared__ __align__(16) unsigned char memory[];
  __shared__ typename Team<kCluster>::Mail mail;
  LaneSums& sums = *reinterpret_cast<LaneSums*>(memory);
  Team<kCluster> team(&mail);
  const int64_t row = blockIdx.x / team.blocks();
  Slice<T> slice;
  slice.first = team.block() * params.slice;
  slice.count = min(max(params.rows.columns - slice.first, 0), params.slice);
  slice.run = params.slice / kTeamWarps;
  slice.data = static_cast<const T*>(params.rows.logits) + row * params.rows.stride + slice.first;
  slice.packed = params.staged || params.packed;
  let_next_start();
  wait_for_previous();
  if (params.staged) {
    T* staged = reinterpret_cast<T*>(memory + sizeof(LaneSums));
    copy_slice(slice.data, staged, slice.count, params.packed);
    __syncthreads();
    slice.data = staged;
  }
  sample_row(params.rows, row, slice, team, sums);
  team.meet();  // nobody leaves while its numbers may be read
}

template <typename T>
cudaError_t sample_of(const SampleParams& rows, const Target& target) {
  constexpr int V = kWidth<T>;
  const int blocks = target.cluster_blocks, step = V * kTeamWarps;
  SampleLaunch params = {rows, 0, false, false};
  params.slice = (rows.columns + blocks * step - 1) / (blocks * step) * step;
  params.packed =
      reinterpret_cast<uintptr_t>(rows.logits) % kAccessBytes == 0 && rows.stride % V == 0;
  const int64_t staged = sizeof(LaneSums) + int64_t{params.slice} * sizeof(T);
  params.staged = staged <= target.shared_bytes - kStaticSampleBytes;
  Launch how = {dim3(static_cast<unsigned>(rows.rows) * blocks), kTeamThreads, target.stream,
                target.early};
  how.shared_bytes = static_cast<int>(params.staged ? staged : sizeof(LaneSums));
  how.cluster_blocks = blocks;
  return blocks > 1 ? launch(sample_kernel<T, true>, how, params)
                    : launch(sample_kernel<T, false>, how, params);
}

template <typename T>
cudaError_t prepare_sample_of(const Target& target) {
  const auto set = [&](const void* kernel) {
    return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                target.shared_bytes - kStaticSampleBytes);
  };
  if (target.cluster_blocks > 1) return set(reinterpret_cast<const void*>(&sample_kernel<T, true>));
  return set(reinterpret_cast<const void*>(&sample_kernel<T, false>));
}

}  // namespace

cudaError_t prepare_sample(const Target& target) {
  for (const auto prepare :
       {&prepare_sample_of<float>, &prepare_sample_of<__nv_bfloat16>, &prepare_sample_of<__half>}) {
    const cudaError_t status = prepare(target);
    if (status != cudaSuccess) return status;
  }
  return cudaSuccess;
}

cudaError_t sample(const SampleParams& params, const Target& target) {
  return for_type(params.dtype,
                  [&](auto of) { return sample_of<typename decltype(of)::Type>(params, target); });
}

}  // namespace clover::cuda
