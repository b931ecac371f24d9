// How far to keep logits: a search over the bits of distances, a few at a time, for where a count
// or a weight is reached. Each lane adds up in places of its own, in order, so there are no atomics
// and the sums are always the same.
#pragma once

#include "dense_cuda/row.cuh"

namespace clover::cuda {

constexpr int kBins = kTeamNumbers;
constexpr int kBinsLog2 = 4;

using LaneSums = double[kTeamWarps][kBins][kWarp];

// An interval of distances in bins of equal width; `first` bins by powers of two instead.
struct Interval {
  static constexpr int kFirstExponent = 121;  // of bin 0 and below: 2^-5

  uint32_t low = 0;
  int shift = 0;
  bool first = true;

  // Not below kBins where the distance lies outside.
  __device__ __forceinline__ uint32_t bin(uint32_t distance) const {
    if (!first) return (distance - low) >> shift;
    return min(max(static_cast<int>(distance >> 23) - kFirstExponent, 0), kBins - 1);
  }

  // Goes into one of its bins; false where that is a single distance, which `low` is then.
  __device__ bool enter(int bin) {
    if (!first) {
      low += static_cast<uint32_t>(bin) << shift;
      if (shift == 0) return false;
      shift = max(shift - kBinsLog2, 0);
      return true;
    }
    first = false;
    low = bin == 0 ? 0 : static_cast<uint32_t>(bin + kFirstExponent) << 23;
    shift = bin == 0 || bin == kBins - 1 ? 26 : 19;
    return true;
  }
};

// What lies in each bin of the interval, of all blocks: weights, or a count of logits.
template <bool kCount, typename T, bool kCluster>
__device__ void add_bins(const Slice<T>& slice, const Draw& draw, const Interval& interval,
                         Team<kCluster>& team, LaneSums& sums, double (&bins)[kBins]) {
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
#pragma unroll
  for (int bin = 0; bin < kBins; ++bin) sums[warp][bin][lane] = 0.0;
  visit_run(slice, [&](float logit, int) {
    const uint32_t distance = draw.distance(logit);
    const uint32_t bin = interval.bin(distance);
    if (bin < kBins) sums[warp][bin][lane] += kCount ? 1.0 : draw.weight(distance);
  });
  __syncthreads();
  constexpr int kShare = kTeamThreads / kBins;  // threads that add up one bin
  const int bin = threadIdx.x / kShare, part = threadIdx.x % kShare;
  double sum = 0.0;
  for (int i = part; i < kTeamWarps * kWarp; i += kShare) sum += sums[i / kWarp][bin][i % kWarp];
#pragma unroll
  for (int mask = kShare / 2; mask > 0; mask /= 2) sum += __shfl_xor_sync(0xffffffff, sum, mask);
  if (part == 0) team.tell(bin, sum);
  team.meet();
  if (threadIdx.x < kBins) {
    sum = 0.0;
    for (int block = 0; block < team.blocks(); ++block) sum += team.told(block, threadIdx.x);
    bins[threadIdx.x] = sum;
  }
  team.end_turn();
  __syncthreads();
}

// The least distance such that what is no farther weighs, or counts, at least `needed`.
template <bool kCount, typename T, bool kCluster>
__device__ uint32_t reach(const Slice<T>& slice, const Draw& draw, double needed,
                          Team<kCluster>& team, LaneSums& sums) {
  __shared__ double bins[kBins];
  Interval interval;
  double before = 0.0;
  bool more = true;
  while (more) {
    add_bins<kCount>(slice, draw, interval, team, sums, bins);
    int chosen = -1;
    double reached = before, base = before;
    for (int bin = 0; bin < kBins; ++bin) {
      if (bins[bin] > 0.0) {  // where rounding keeps from reaching it, the last will do
        chosen = bin;
        base = reached;
      }
      reached += bins[bin];
      if (reached >= needed && chosen == bin) break;
    }
    if (chosen < 0 || (interval.first && reached < needed)) return kFarthest;
    before = base;
    more = interval.enter(chosen);
    __syncthreads();  // before the bins are written again
  }
  return interval.low;
}

}  // namespace clover::cuda
