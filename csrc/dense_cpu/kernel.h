// What the kernels compute, in plain pointers and sizes: no Python, no PyTorch, no threads.
//
// Products are of packed weights with bfloat16 rows; sums are float32. Every output has a lane of
// its own, in which the inputs are added one pair after another, whatever the other rows of the
// call and however it is split: a token's results do not depend on its batch.
//
// Packed weights are panels of kBlock outputs (the last one filled up with zeros), one after the
// other. Of a panel, by format:
//   bfloat16  pairs of inputs, of each the kBlock outputs' two numbers: [inputs / 2][16][2]
//   int8      groups of kGroup inputs: 16 scales (float16), then 512 codes in the same order, bytes
//             with a sign: w = scale * code
//   int4      groups of kGroup inputs: 16 scales and 16 minima (float16), then 256 bytes of codes
//             from 0 to 15: w = scale * code + minimum. The low halves of 32 bytes are the codes of
//             a pair of inputs, the high halves those of the next pair.
// Inputs are filled up with zeros to whole pairs or groups.
//
// Over quantised weights rows are codes too: 16 bits each and a scale for each kGroup inputs. Over
// bfloat16 weights many rows are float32 where the processor multiplies only that (`wide_from`).
#pragma once

#include <cstdint>

#include "dense_cpu/rows.h"

namespace clover::dense {

constexpr int kBlock = 16;  // outputs of a panel: the unit in which work is split
constexpr int kGroup = 32;  // inputs that share a scale

enum class Format : int { kBFloat16 = 0, kInt8 = 1, kInt4 = 2 };

constexpr int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

constexpr int64_t group_bytes(Format format) {
  return format == Format::kInt8 ? kBlock * 2 + kGroup * kBlock : kBlock * 4 + kGroup * kBlock / 2;
}

constexpr int64_t panel_bytes(Format format, int64_t inputs) {
  return format == Format::kBFloat16 ? round_up(inputs, 2) * kBlock * 2
                                     : (inputs + kGroup - 1) / kGroup * group_bytes(format);
}

struct Matrix {
  Format format = Format::kBFloat16;
  const uint8_t* weight = nullptr;  // packed; 64-byte aligned
  const uint16_t* bias = nullptr;   // bfloat16 [outputs], or null
  int64_t outputs = 0;              // of gate_up: of either half
  int64_t inputs = 0;
  int folds = 1;  // panels for each block of outputs: of gate_up one of the gate, then one of up

  int64_t panel() const { return panel_bytes(format, inputs); }
  int64_t block() const { return folds * panel(); }
  int64_t groups() const { return (inputs + kGroup - 1) / kGroup; }
};

// Rows of bfloat16, `stride` elements apart, with zeros up to a whole pair of inputs; over
// quantised weights what `encode` makes of them: codes, scales and sums of each group of inputs.
struct Rows {
  const uint16_t* data;
  int64_t stride;
  int64_t count;
  int64_t groups;       // of a row; 0: bfloat16
  const float* scales;  // [count, groups]
  const float* sums;
  const float* wide = nullptr;  // the same numbers in float32, `stride` apart: `data` is not read

  // Inlined always, so that no object lends its code to those for other processors.
  [[gnu::always_inline]] Rows from(int64_t row) const {
    return {data ? data + row * stride : nullptr,
            stride,
            count - row,
            groups,
            scales + row * groups,
            sums + row * groups,
            wide ? wide + row * stride : nullptr};
  }
  [[gnu::always_inline]] Rows at_input(int64_t k) const {
    const int64_t group = groups ? k / kGroup : 0;
    return {data ? data + k : nullptr, stride, count, groups, scales + group, sums + group,
            wide ? wide + k : nullptr};
  }
};

// Outputs [first, last) of a product, whole panels but for the last one. While they are computed
// the weights after them are brought into the second-level cache; after `last` those at `next`.
// Nothing is fetched ahead where `next` is null.
struct Part {
  int64_t first;
  int64_t last;
  const uint8_t* next;
};

struct Kernels {
  const char* name;
  // Over bfloat16 weights so many rows or more are multiplied in float32, and must be `wide`; 0:
  // any number as they are.
  int wide_from;
  // y[t, o] = product + bias + residual[t, o]; residual may be null, or y itself.
  void (*project)(const Matrix& m, const Rows& x, const Part& part, const float* residual, float* y,
                  int64_t y_stride);
  // y[t, o] = silu(gate product) * (up product); `m` has two folds.
  void (*gate_up)(const Matrix& m, const Rows& x, const Part& part, uint16_t* y, int64_t y_stride);
  // A row of bfloat16 numbers as codes, of 16 bits with a sign, and each group's scale and sum:
  // x = scale * code, to 2^-15 of the largest of its group at worst. Filled up to whole groups.
  void (*encode)(const uint16_t* x, int64_t size, uint16_t* codes, float* scales, float* sums);
  // y = x / sqrt(mean(x^2) + eps) * weight.
  void (*norm)(const float* x, const uint16_t* weight, int64_t size, float eps, uint16_t* y);
  // One head: normalised where `weight` is not null, then turned, y = x * cos + roll(x, d/2) * sin.
  void (*rotate)(const float* x, const uint16_t* weight, float eps, const uint16_t* cos,
                 const uint16_t* sin, int64_t head_dim, uint16_t* y);
  void (*narrow)(const float* x, int64_t size, uint16_t* y);
  void (*widen)(const uint16_t* x, int64_t size, float* y);
  const RowKernels* rows;
};

}  // namespace clover::dense
