// The kernels of rows.h: one source, compiled once per instruction set (CLOVER_ISA).
//
// Nothing from the standard library with external linkage may be used here: the linker would keep
// one copy of it, perhaps the one that only newer processors can run.
#include "dense_cpu/rows.h"

#include "common/simd.h"

#ifndef CLOVER_ISA
#error "compile with -DCLOVER_ISA=<name of the instruction set>"
#endif

namespace clover::dense::CLOVER_ISA {
namespace {

CLOVER_INLINE Vec load_rest(const uint16_t* p, int64_t count) {
  if (count == kWidth) return load(reinterpret_cast<const BFloat16*>(p));
  BFloat16 filled[kWidth] = {};
  __builtin_memcpy(filled, p, count * sizeof *p);
  return load(filled);
}

CLOVER_INLINE void store_rest(uint16_t* p, Vec v, int64_t count) {
  if (count == kWidth) return store(reinterpret_cast<BFloat16*>(p), v);
  BFloat16 made[kWidth];
  store(made, v);
  __builtin_memcpy(p, made, count * sizeof *p);
}

CLOVER_INLINE const BFloat16* numbers(const uint16_t* p) {
  return reinterpret_cast<const BFloat16*>(p);
}

// y[i] = f(a[i], b[i])
template <typename F>
CLOVER_INLINE void each(const uint16_t* a, const uint16_t* b, int64_t size, uint16_t* y,
                        const F& f) {
  int64_t i = 0;
  for (; i + kWidth <= size; i += kWidth)
    store(reinterpret_cast<BFloat16*>(y + i), f(load(numbers(a + i)), load(numbers(b + i))));
  if (i < size)
    store_rest(y + i, f(load_rest(a + i, size - i), load_rest(b + i, size - i)), size - i);
}

CLOVER_INLINE Vec sigmoid(Vec x) { return 1.0f / (1.0f + exponential(-bigger(x, splat(-80.0f)))); }

// Abramowitz and Stegun, 7.1.26: absolute error 1.5e-7.
CLOVER_INLINE Vec erf_of(Vec x) {
  const Vec size = bigger(x, -x);
  const Vec t = 1.0f / (1.0f + 0.3275911f * size);
  Vec p = 1.061405429f * t - 1.453152027f;
  p = p * t + 1.421413741f;
  p = p * t - 0.284496736f;
  p = p * t + 0.254829592f;
  const Vec y = 1.0f - p * t * exponential(-size * size);
  return x < 0.0f ? -y : y;
}

CLOVER_INLINE Vec gelu(Vec x) { return 0.5f * x * (1.0f + erf_of(0.707106781f * x)); }

CLOVER_INLINE Vec gelu_tanh(Vec x) {
  return 0.5f * x * (1.0f + tanh_of(0.797884561f * (x + 0.044715f * x * x * x)));
}

void map(Map map, const uint16_t* a, const uint16_t* b, float scalar, int64_t size, uint16_t* y) {
  switch (map) {
    case Map::kCopy:
      __builtin_memcpy(y, a, size * sizeof *y);
      return;
    case Map::kAdd:
      return each(a, b, size, y, [](Vec u, Vec v) { return u + v; });
    case Map::kSubtract:
      return each(a, b, size, y, [](Vec u, Vec v) { return u - v; });
    case Map::kMultiply:
      return each(a, b, size, y, [](Vec u, Vec v) { return u * v; });
    case Map::kAddScalar:
      return each(a, a, size, y, [scalar](Vec u, Vec) { return u + scalar; });
    case Map::kScale:
      return each(a, a, size, y, [scalar](Vec u, Vec) { return u * scalar; });
    case Map::kSilu:
      return each(a, a, size, y, [](Vec u, Vec) { return u * sigmoid(u); });
    case Map::kGelu:
      return each(a, a, size, y, [](Vec u, Vec) { return gelu(u); });
    case Map::kGeluTanh:
      return each(a, a, size, y, [](Vec u, Vec) { return gelu_tanh(u); });
    case Map::kRelu:
      return each(a, a, size, y, [](Vec u, Vec) { return u < 0.0f ? Vec{} : u; });
    case Map::kSigmoid:
      return each(a, a, size, y, [](Vec u, Vec) { return sigmoid(u); });
    case Map::kTanh:
      return each(a, a, size, y, [](Vec u, Vec) { return tanh_of(u); });
    case Map::kSquare:
      return each(a, a, size, y, [](Vec u, Vec) { return u * u; });
    case Map::kCube:
      return each(a, a, size, y, [](Vec u, Vec) { return u * u * u; });
  }
}

// The sum of f(x[i]).
template <typename F>
CLOVER_INLINE float total(const uint16_t* x, int64_t size, const F& f) {
  Vec sums = {};
  int64_t i = 0;
  for (; i + kWidth <= size; i += kWidth) sums += f(load(numbers(x + i)));
  float found = sum(sums);
  const Vec rest = f(load_rest(x + i, size - i));
  for (int64_t k = 0; k < size - i; ++k) found += rest[k];
  return found;
}

CLOVER_INLINE Vec load_floats(const float* p, int64_t count, float otherwise) {
  if (p && count >= kWidth) return load(p);
  Vec v = splat(otherwise);
  for (int64_t k = 0; p && k < count; ++k) v[k] = p[k];
  return v;
}

void norm(const uint16_t* x, const Norm& norm, uint16_t* y) {
  const float size = static_cast<float>(norm.size);
  float mean = 0;
  if (norm.centred) mean = total(x, norm.size, [](Vec v) { return v; }) / size;
  const float squares =
      total(x, norm.size, [mean](Vec v) { return (v - mean) * (v - mean); }) / size;
  const float factor = 1.0f / __builtin_sqrtf(squares + norm.eps);
  for (int64_t i = 0; i < norm.size; i += kWidth) {
    const int64_t count = norm.size - i < kWidth ? norm.size - i : kWidth;
    const Vec v = load_rest(x + i, count);
    const Vec weight = load_floats(norm.weight ? norm.weight + i : nullptr, count, 1.0f);
    const Vec bias = load_floats(norm.bias ? norm.bias + i : nullptr, count, 0.0f);
    store_rest(y + i, (v - mean) * factor * weight + bias, count);
  }
}

void turn(const uint16_t* x, const uint16_t* cos, const uint16_t* sin, int64_t size, uint16_t* y) {
  const int64_t half = size / 2;
  for (int64_t i = 0; i < half; i += kWidth) {
    const int64_t count = half - i < kWidth ? half - i : kWidth, j = half + i;
    const Vec low = load_rest(x + i, count), high = load_rest(x + j, count);
    store_rest(y + i, low * load_rest(cos + i, count) - high * load_rest(sin + i, count), count);
    store_rest(y + j, high * load_rest(cos + j, count) + low * load_rest(sin + j, count), count);
  }
}

}  // namespace

extern const RowKernels row_kernels;
const RowKernels row_kernels = {map, norm, turn};

}  // namespace clover::dense::CLOVER_ISA
