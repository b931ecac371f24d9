// The matrix products of compute capability 9.0: a warpgroup's, with operands in shared memory.
//
// Operands there lie in panels of rows of 128 bytes, 16-byte chunks swizzled within eight rows.
#pragma once

#include "attention_cuda/primitives.cuh"

namespace clover::cuda {

// Chunk `chunk` of 16 bytes of row `row` in a panel of 64 elements' width.
__device__ __forceinline__ uint32_t panel_at(int row, int chunk) {
  return row * 128 + ((chunk ^ (row & 7)) << 4);
}

// `leading`: bytes from 64 columns to the next 64 where rows are what is summed over; eight rows
// are always 1,024 bytes.
__device__ __forceinline__ uint64_t describe_panels(uint32_t address, uint32_t leading) {
  return uint64_t{(address & 0x3ffff) >> 4} | uint64_t{leading >> 4} << 16 |
         uint64_t{1024 >> 4} << 32 | uint64_t{1} << 62;
}

__device__ __forceinline__ void begin_products() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void commit_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until all but the newest `Pending` groups of products are done.
template <int Pending>
__device__ __forceinline__ void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}

// Keeps the compiler from moving uses of what products write across this point.
template <int N>
__device__ __forceinline__ void hold(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

template <int N>
__device__ __forceinline__ void hold(uint32_t (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+r"(d[i])::"memory");
}

// clang-format off
#define CLOVER_FLOATS_8(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), \
    "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define CLOVER_FLOATS_32(d) CLOVER_FLOATS_8(d, 0), CLOVER_FLOATS_8(d, 8), \
    CLOVER_FLOATS_8(d, 16), CLOVER_FLOATS_8(d, 24)
#define CLOVER_FLOATS_40(d) CLOVER_FLOATS_32(d), CLOVER_FLOATS_8(d, 32)
#define CLOVER_FLOATS_48(d) CLOVER_FLOATS_40(d), CLOVER_FLOATS_8(d, 40)
#define CLOVER_FLOATS_64(d) CLOVER_FLOATS_48(d), CLOVER_FLOATS_8(d, 48), CLOVER_FLOATS_8(d, 56)

#define CLOVER_REGISTERS_64 \
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, " \
      "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "

#define CLOVER_REGISTERS_80 \
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, " \
      "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, " \
      "%36, %37, %38, %39}, "

#define CLOVER_REGISTERS_96 \
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, " \
      "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, " \
      "%36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47}, "

#define CLOVER_REGISTERS_128 \
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, " \
      "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, " \
      "%36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, " \
      "%53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "

#define CLOVER_SCORES_64(type) \
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %34, 0; " \
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " " CLOVER_REGISTERS_64 \
      "%32, %33, p, 1, 1, 0, 0; }" \
      : CLOVER_FLOATS_32(d) : "l"(a), "l"(b), "r"(static_cast<int>(add)))
#define CLOVER_VALUES_64(type) \
  asm volatile("{ .reg .pred p; setp.ne.b32 p, 1, 0; " \
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " " CLOVER_REGISTERS_64 \
      "{%32, %33, %34, %35}, %36, p, 1, 1, 1; }" \
      : CLOVER_FLOATS_32(d) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
#define CLOVER_VALUES_80(type) \
  asm volatile("{ .reg .pred p; setp.ne.b32 p, 1, 0; " \
      "wgmma.mma_async.sync.aligned.m64n80k16.f32." type "." type " " CLOVER_REGISTERS_80 \
      "{%40, %41, %42, %43}, %44, p, 1, 1, 1; }" \
      : CLOVER_FLOATS_40(d) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
#define CLOVER_VALUES_96(type) \
  asm volatile("{ .reg .pred p; setp.ne.b32 p, 1, 0; " \
      "wgmma.mma_async.sync.aligned.m64n96k16.f32." type "." type " " CLOVER_REGISTERS_96 \
      "{%48, %49, %50, %51}, %52, p, 1, 1, 1; }" \
      : CLOVER_FLOATS_48(d) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
#define CLOVER_SCORES_128(type) \
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %66, 0; " \
      "wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type " " CLOVER_REGISTERS_128 \
      "%64, %65, p, 1, 1, 0, 0; }" \
      : CLOVER_FLOATS_64(d) : "l"(a), "l"(b), "r"(static_cast<int>(add)))
#define CLOVER_VALUES_128(type) \
  asm volatile("{ .reg .pred p; setp.ne.b32 p, 1, 0; " \
      "wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type " " CLOVER_REGISTERS_128 \
      "{%64, %65, %66, %67}, %68, p, 1, 1, 1; }" \
      : CLOVER_FLOATS_64(d) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
// clang-format on

#define CLOVER_BY_TYPE(product)              \
  if constexpr (std::is_same_v<T, BFloat16>) \
    product("bf16");                         \
  else                                       \
    product("f16")

// d[64 x N] = or += a[64 x 16] b[N x 16]^T, both of shared memory with their rows along what is
// summed over.
template <typename T, int N>
__device__ __forceinline__ void multiply_rows(float (&d)[N / 2], uint64_t a, uint64_t b, bool add) {
  static_assert(N == 64 || N == 128);
  if constexpr (N == 64) {
    CLOVER_BY_TYPE(CLOVER_SCORES_64);
  } else {
    CLOVER_BY_TYPE(CLOVER_SCORES_128);
  }
}

// d[64 x N] += a[64 x 16] b[16 x N], a of registers.
template <typename T, int N>
__device__ __forceinline__ void multiply_columns(float (&d)[N / 2], const uint32_t (&a)[4],
                                                 uint64_t b) {
  static_assert(N == 64 || N == 80 || N == 96 || N == 128);
  if constexpr (N == 64) {
    CLOVER_BY_TYPE(CLOVER_VALUES_64);
  } else if constexpr (N == 80) {
    CLOVER_BY_TYPE(CLOVER_VALUES_80);
  } else if constexpr (N == 96) {
    CLOVER_BY_TYPE(CLOVER_VALUES_96);
  } else {
    CLOVER_BY_TYPE(CLOVER_VALUES_128);
  }
}

}  // namespace clover::cuda
