// The ends of a computation: keys and values on their way into a block, partial results on their
// way out. Included by kernels alone.
#pragma once

#include <cstddef>
#include <type_traits>

#include "attention_cpu/kernel.h"
#include "common/simd.h"

namespace clover::attention {
namespace {

constexpr float kInfinity = __builtin_inff();

// Calls f with a null pointer to the type that `dtype` names.
template <typename F>
CLOVER_INLINE void of_type(DType dtype, const F& f) {
  switch (dtype) {
    case DType::kFloat32:
      return f(static_cast<const float*>(nullptr));
    case DType::kBFloat16:
      return f(static_cast<const BFloat16*>(nullptr));
    case DType::kFloat16:
      return f(static_cast<const Float16*>(nullptr));
    case DType::kInt8:  // never a type of calls
      return;
  }
}

// `count` numbers of `dtype` as numbers of type To.
template <typename To>
void widen(DType dtype, const void* from, int64_t count, To* to) {
  of_type(dtype, [&](auto* type) {
    const auto* numbers = static_cast<decltype(type)>(from);
    for (int64_t i = 0; i < count; i += kWidth) store(to + i, load(numbers + i));
  });
}

// Rounded to the nearest of 255 steps that are symmetric about zero; returns a step's size.
template <typename From>
CLOVER_INLINE float quantise(const From* from, int count, Int8* to) {
  Vec top = {};
  for (int i = 0; i < count; i += kWidth) {
    const Vec x = load(from + i);
    top = bigger(bigger(x, -x), top);
  }
  const float most = largest(top);
  const float steps = most > 0 ? 127.0f / most : 0.0f;
  const float magic = 0x1.8p23f;  // adding it rounds to an integer, which lands in the low bits
  for (int i = 0; i < count; i += kWidth) {
    const Ints rounded = (Ints)(load(from + i) * steps + magic) - 0x4b400000;
    for (int j = 0; j < kWidth; ++j) to[i + j].value = static_cast<int8_t>(rounded[j]);
  }
  return most / 127.0f;
}

// Calls f with each token's numbers of this KV head and its block and offset.
template <typename F>
CLOVER_INLINE void over_tokens(const Layer& layer, const Put& put, const F& f) {
  const auto* from = static_cast<const unsigned char*>(put.from);
  for (int64_t t = 0; t < put.tokens; ++t, from += put.stride)
    f(from, layer.base + put.slots[t] / layer.block_size * layer.block_bytes(),
      put.slots[t] % layer.block_size);
}

template <typename To>
void put_numbers(const Layer& layer, const Put& put) {
  const int dim = put.keys ? layer.k_dim : layer.v_dim;
  const int64_t at = put.keys ? layer.keys_at(put.head) : layer.values_at(put.head);
  const int64_t scale_at =
      put.keys ? layer.key_scales_at(put.head) : layer.value_scales_at(put.head);
  of_type(put.dtype, [&](auto* type) {
    over_tokens(layer, put, [&](const void* from, unsigned char* block, int64_t offset) {
      const auto* numbers = static_cast<decltype(type)>(from);
      To* to = reinterpret_cast<To*>(block + at) + offset * dim;
      if constexpr (sizeof(To) == 1) {
        reinterpret_cast<float*>(block + scale_at)[offset] = quantise(numbers, dim, to);
      } else {
        for (int i = 0; i < dim; i += kWidth) store(to + i, load(numbers + i));
      }
    });
  });
}

// The same bits where the types are the same, NaN and subnormal numbers included.
void copy_numbers(const Layer& layer, const Put& put) {
  const int64_t bytes = (put.keys ? layer.k_dim : layer.v_dim) * dtype_bytes(layer.dtype);
  const int64_t at = put.keys ? layer.keys_at(put.head) : layer.values_at(put.head);
  over_tokens(layer, put, [&](const void* from, unsigned char* block, int64_t offset) {
    __builtin_memcpy(block + at + offset * bytes, from, static_cast<size_t>(bytes));
  });
}

void put(const Layer& layer, const Put& put) {
  if (put.dtype == layer.dtype) return copy_numbers(layer, put);
  switch (layer.dtype) {
    case DType::kFloat32:
      return put_numbers<float>(layer, put);
    case DType::kBFloat16:
      return put_numbers<BFloat16>(layer, put);
    case DType::kFloat16:
      return put_numbers<Float16>(layer, put);
    case DType::kInt8:
      return put_numbers<Int8>(layer, put);
  }
}

// Merges the partial results of row r into the first, and scales it; returns the row's lse.
CLOVER_INLINE float merge(const Layer& layer, const Span& span, int r, float* partials, int count) {
  const int64_t stride = partial_floats(layer, span.queries);
  const int rows = span.queries * layer.group;
  const int head = span.head * layer.group + r % layer.group;
  const float sink = layer.sinks ? layer.sinks[head] : -kInfinity;
  float* first = partials + r * layer.v_dim;
  const float* best = partials + rows * layer.v_dim + r;
  const float* total = best + rows;
  float top = sink;
  for (int i = 0; i < count; ++i) top = best[i * stride] > top ? best[i * stride] : top;
  float sums = sink == -kInfinity ? 0.0f : __builtin_expf(sink - top);
  for (int i = 0; i < count; ++i) {
    const float* acc = first + i * stride;
    const float share = __builtin_expf(best[i * stride] - top);
    sums += share * total[i * stride];
    for (int e = 0; e < layer.v_dim; e += kWidth) {
      const Vec before = i == 0 ? Vec{} : load(first + e);
      store(first + e, before + load(acc + e) * share);
    }
  }
  for (int e = 0; e < layer.v_dim; e += kWidth) store(first + e, load(first + e) / sums);
  return top + __builtin_logf(sums);
}

void finish(const Layer& layer, const Span& span, float* partials, int count,
            const Result& result) {
  const int64_t token = int64_t{layer.group} * layer.v_dim;
  for (int t = 0; t < span.queries; ++t) {
    for (int h = 0; h < layer.group; ++h)
      result.lse[t * result.lse_stride + h] =
          merge(layer, span, t * layer.group + h, partials, count);
    of_type(span.q_dtype, [&](auto* type) {
      using To = std::remove_const_t<std::remove_pointer_t<decltype(type)>>;
      To* o = reinterpret_cast<To*>(result.o + t * result.o_stride);
      for (int64_t i = 0; i < token; i += kWidth) store(o + i, load(partials + t * token + i));
    });
  }
}

}  // namespace
}  // namespace clover::attention
