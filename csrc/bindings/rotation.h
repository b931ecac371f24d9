// Fused rows of queries, keys and values, and how they are rotated, as Python names them.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <tuple>

#include "bindings/addresses.h"
#include "dense_cuda/kernels.h"

namespace clover {

using Strided = std::tuple<int64_t, int64_t>;             // address, elements between tokens
using RopeTable = std::tuple<int64_t, int64_t, int64_t>;  // addresses of cos and sin, rows
using HeadSizes = std::tuple<int, int, int>;              // heads, KV heads, size of a head

// float8 is for weights and caches only.
inline cuda::DType row_dtype(int code) {
  if (code < 0 || code > 2) throw std::invalid_argument("rows are float32, bfloat16 or float16");
  return static_cast<cuda::DType>(code);
}

inline void* rows_at(int64_t address, cuda::DType dtype, const char* name, bool needed = true) {
  if ((needed && address == 0) || address % cuda::dtype_bytes(dtype) != 0)
    throw std::invalid_argument(std::string(name) + " is not at an address of its type");
  return reinterpret_cast<void*>(address);
}

inline void check_sizes(int rows, int columns) {
  if (rows < 1 || columns < 1) throw std::invalid_argument("sizes must be at least 1");
}

inline void check_row_stride(int64_t stride, int64_t least, const char* name) {
  if (stride < least) throw std::invalid_argument(std::string("rows of ") + name + " overlap");
}

// All but where keys and values go; queries go to `q`.
inline cuda::RotateParams rotation(int dtype, int tokens, HeadSizes sizes, float eps, Strided qkv,
                                   int64_t positions, RopeTable table, int64_t norm, Strided q) {
  cuda::RotateParams params = {};
  params.dtype = row_dtype(dtype);
  params.tokens = tokens;
  std::tie(params.heads, params.kv_heads, params.head_dim) = sizes;
  params.eps = eps;
  params.qkv = rows_at(std::get<0>(qkv), params.dtype, "qkv");
  params.stride = std::get<1>(qkv);
  params.positions = at_address<int64_t>(positions, "positions");
  params.cos = rows_at(std::get<0>(table), params.dtype, "cos");
  params.sin = rows_at(std::get<1>(table), params.dtype, "sin");
  params.table_rows = std::get<2>(table);
  params.norm = rows_at(norm, params.dtype, "norm", false);
  params.q = rows_at(std::get<0>(q), params.dtype, "q");
  params.q_stride = std::get<1>(q);
  check_sizes(tokens, params.heads);
  check_sizes(params.kv_heads, params.head_dim);
  if (params.head_dim % 2 != 0) throw std::invalid_argument("head_dim must be even");
  if (params.table_rows < 1) throw std::invalid_argument("sizes must be at least 1");
  const int64_t heads = params.heads + int64_t{2} * params.kv_heads;
  check_row_stride(params.stride, heads * params.head_dim, "qkv");
  check_row_stride(params.q_stride, int64_t{params.heads} * params.head_dim, "q");
  return params;
}

}  // namespace clover
