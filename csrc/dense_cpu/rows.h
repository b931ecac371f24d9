// What graphs have between their products, on rows of bfloat16: no Python, no PyTorch, no threads.
// Everything is computed in float32 and rounded once.
#pragma once

#include <cstdint>

namespace clover::dense {

// y from a, and b where two are named; `scalar` where one number is.
enum class Map : int {
  kCopy = 0,
  kAdd = 1,
  kSubtract = 2,
  kMultiply = 3,
  kAddScalar = 4,
  kScale = 5,
  kSilu = 6,
  kGelu = 7,
  kGeluTanh = 8,
  kRelu = 9,
  kSigmoid = 10,
  kTanh = 11,
  kSquare = 12,
  kCube = 13,
};
constexpr int kMaps = 14;

constexpr bool takes_two(Map map) {
  return map == Map::kAdd || map == Map::kSubtract || map == Map::kMultiply;
}

struct Norm {
  int64_t size;
  float eps;
  bool centred;         // whether the mean is taken off first
  const float* weight;  // [size], or null
  const float* bias;    // [size], or null
};

struct RowKernels {
  void (*map)(Map map, const uint16_t* a, const uint16_t* b, float scalar, int64_t size,
              uint16_t* y);
  // y = x / sqrt(mean(x^2) + eps) * weight + bias.
  void (*norm)(const uint16_t* x, const Norm& norm, uint16_t* y);
  // y = x * cos + (-second half of x, first half) * sin; `size` is even.
  void (*turn)(const uint16_t* x, const uint16_t* cos, const uint16_t* sin, int64_t size,
               uint16_t* y);
};

}  // namespace clover::dense
