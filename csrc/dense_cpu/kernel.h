// What the kernels compute, in plain pointers and sizes: no Python, no PyTorch, no threads.
//
// Products are of weights as they are stored, [outputs, inputs] row by row in bfloat16, with
// bfloat16 rows; sums are float32. A sum is taken in one order, whatever the other rows of the
// call, so a token's results do not depend on its batch.
#pragma once

#include <cstdint>

namespace clover::dense {

constexpr int kBlock = 16;       // outputs computed at a time: the unit in which work is split
constexpr int kMaxTokens = 256;  // of one call; beyond, blocked products of large libraries gain

struct Matrix {
  const uint16_t* weight = nullptr;  // bfloat16 [outputs, inputs], contiguous
  const uint16_t* bias = nullptr;    // bfloat16 [outputs], or null
  int64_t outputs = 0;               // of gate_up: of either half
  int64_t inputs = 0;
};

// Rows of bfloat16, `stride` elements apart.
struct Rows {
  const uint16_t* data;
  int64_t stride;
  int count;
};

// Outputs [first, last) of a product. While they are computed the weights after them are brought
// into the second-level cache; after `last` those at `next`.
struct Part {
  int64_t first;
  int64_t last;
  const uint16_t* next;
};

struct Kernels {
  const char* name;
  // y[t, o] = product + bias + residual[t, o]; residual may be null, or y itself.
  void (*project)(const Matrix& m, const Rows& x, const Part& part, const float* residual, float* y,
                  int64_t y_stride);
  // y[t, o] = silu(gate product) * (up product); `m` holds the gate's outputs, then as many of up.
  void (*gate_up)(const Matrix& m, const Rows& x, const Part& part, uint16_t* y, int64_t y_stride);
  // y = x / sqrt(mean(x^2) + eps) * weight.
  void (*norm)(const float* x, const uint16_t* weight, int64_t size, float eps, uint16_t* y);
  // One head: normalised where `weight` is not null, then turned, y = x * cos + roll(x, d/2) * sin.
  void (*rotate)(const float* x, const uint16_t* weight, float eps, const uint16_t* cos,
                 const uint16_t* sin, int64_t head_dim, uint16_t* y);
  void (*narrow)(const float* x, int64_t size, uint16_t* y);
  void (*widen)(const uint16_t* x, int64_t size, float* y);
};

}  // namespace clover::dense
