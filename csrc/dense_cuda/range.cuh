// Which steps of which tiles a block of the GEMM kernel takes, and in which order.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace clover::cuda {

// Steps along k of one tile.
struct Segment {
  int tile, step, count;
};

// A block's units: the line of all units is cut into one range for each block. The parts of tiles
// at its ends come first and whole tiles last, so that what has to be merged with other blocks'
// sums is not what the launch ends with.
struct Range {
  int64_t units;
  int blocks, steps, begin, end;

  __device__ Range(int tiles, int steps)
      : units(int64_t{tiles} * steps),
        blocks(gridDim.x),
        steps(steps),
        begin(static_cast<int>(units * blockIdx.x / blocks)),
        end(static_cast<int>(units * (blockIdx.x + 1) / blocks)) {}

  // The block whose range holds a unit.
  __device__ int holding(int unit) const {
    return static_cast<int>(((unit + int64_t{1}) * blocks - 1) / units);
  }
  __device__ int first_whole() const { return (begin + steps - 1) / steps; }
  __device__ int segments() const { return 2 + max(0, end / steps - first_whole()); }

  // Segments 0 and 1 may be empty.
  __device__ Segment segment(int i) const {
    const int first = first_whole(), last = end / steps;
    if (i == 0) return {first - 1, begin + steps - first * steps, min(end, first * steps) - begin};
    if (i == 1) return {last, 0, last < first ? 0 : end - last * steps};
    return {first + i - 2, 0, steps};
  }
};

// A place in a block's range.
class Cursor {
 public:
  __device__ explicit Cursor(const Range& range) : range_(range), segment_(range.segment(0)) {
    skip_empty();
  }

  __device__ int tile() const { return segment_.tile; }
  __device__ int step() const { return segment_.step; }
  __device__ void advance() {
    ++segment_.step;
    --segment_.count;
    skip_empty();
  }

 private:
  __device__ void skip_empty() {
    while (segment_.count == 0 && ++index_ < range_.segments()) segment_ = range_.segment(index_);
  }

  const Range& range_;
  Segment segment_;
  int index_ = 0;
};

}  // namespace clover::cuda
