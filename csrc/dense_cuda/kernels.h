// What the launcher knows of the kernels: what each is told and its entry point. Pointers are of
// the device, strides count elements between rows; elements of a row are contiguous. Results do not
// depend on how many rows a call has.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/dtype.h"

namespace clover::cuda {

constexpr int kPortableCluster = 8;

// Where and how kernels are launched.
struct Target {
  cudaStream_t stream = nullptr;
  bool early = false;      // programmatic dependent launch
  int cluster_blocks = 1;  // that may share a cluster; 1 where there are none
  int shared_bytes = 0;    // most that a block can have

  Target on(cudaStream_t other) const {
    Target target = *this;
    target.stream = other;
    return target;
  }
};

// Hidden rows and their norm:
//   ids given:   hidden_out = table row ids[i] (zeros where there is none); out = norm(hidden_out)
//   added given: hidden_out = hidden + added, in the rows' type;            out = norm(hidden_out)
//   neither:                                                                out = norm(hidden)
// norm(x) = x / sqrt(mean(x^2) + eps) * weight, in float32 and rounded once.
struct NormParams {
  const void* hidden;  // [rows, columns]; the embedding table with `ids`
  int64_t hidden_stride;
  const void* added;  // [rows, columns]
  int64_t added_stride;
  const int64_t* ids;  // [rows]
  int64_t vocabulary;
  const void* weight;  // [columns]
  void* hidden_out;    // [rows, columns], contiguous
  void* out;           // [rows, columns], contiguous
  int rows;
  int columns;
  float eps;
  DType dtype;
};

cudaError_t norm(const NormParams& params, const Target& target);

// out[t, j] = silu(gate_up[t, j]) * gate_up[t, columns + j], in float32 and rounded once.
struct GateParams {
  const void* gate_up;  // [rows, 2 * columns]
  int64_t stride;
  void* out;  // [rows, columns], contiguous
  int rows;
  int columns;
  DType dtype;
};

cudaError_t gate(const GateParams& params, const Target& target);

// Queries and keys of fused rows, normalised where there is a norm, then rotated:
//   y[j] = x[j] * cos[p, j] + x[(j + d / 2) % d] * sin[p, j], p the token's position,
// in float32 and rounded once. Both halves of cos are alike, and those of sin opposed, as
// models/rope.py makes them. q, k and v may be where they are read; values are copied elsewhere.
struct RotateParams {
  const void* qkv;  // [tokens, (heads + 2 kv_heads) * head_dim]
  int64_t stride;
  const int64_t* positions;  // [tokens]; held to the table
  const void* cos;           // [table_rows, head_dim]
  const void* sin;
  int64_t table_rows;
  const void* norm;  // [heads + kv_heads, head_dim], or null
  float eps;
  void* q;  // [tokens, heads * head_dim]
  int64_t q_stride;
  void* k;  // [tokens, kv_heads * head_dim]
  int64_t k_stride;
  void* v;  // [tokens, kv_heads * head_dim]
  int64_t v_stride;
  int tokens;
  int heads;
  int kv_heads;
  int head_dim;
  DType dtype;
};

cudaError_t rotate(const RotateParams& params, const Target& target);

// out[t, j] = rows_in[t, j] / scales[t] as float8 (e4m3), where scales[t] is the row's largest over
// the type's largest; 1 of a row of zeros. `interleaved`: of every 16 columns, i, i + 8, i + 1, i +
// 9 of i = 0, 2, 4, 6 in turn, as the GEMM kernel reads float8; for 16-bit rows on 16 bytes and
// columns that are a multiple of 16.
struct QuantiseParams {
  const void* rows_in;  // [rows, columns]
  int64_t stride;
  void* out;      // [rows, columns], contiguous
  float* scales;  // [rows]
  int rows;
  int columns;
  DType dtype;  // of rows_in
  bool interleaved;
};

cudaError_t quantise(const QuantiseParams& params, const Target& target);

// A token of each row, as models/sampling.py draws it: the largest, the lowest first, where the
// temperature is not above 0; else by the inverse of the cumulative weights in order of the
// vocabulary, of what top_k, min_p and top_p keep. -1 where the largest is no finite number.
struct SampleParams {
  const void* logits;  // [rows, columns]
  int64_t stride;
  const double* temperature;  // [rows], as all below
  const int64_t* top_k;       // 0, or the number of columns and more: all
  const double* top_p;        // 1 and more: all
  const double* min_p;        // 0: all
  const double* uniform;      // from 0 to below 1
  int64_t* out;
  int rows;
  int columns;
  DType dtype;
};

cudaError_t sample(const SampleParams& params, const Target& target);

// Once per device, before the first.
cudaError_t prepare_sample(const Target& target);

}  // namespace clover::cuda
