// Single instructions of compute capability 8.0 and newer, and the element types they work on.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>
#include <type_traits>

#include "common/launch.cuh"

namespace clover::cuda {

struct BFloat16 {
  static constexpr int kBytes = 2;
};
struct Float16 {
  static constexpr int kBytes = 2;
};
struct Float8 {  // e4m3; multiplied as float16, which holds all of its values
  static constexpr int kBytes = 1;
};

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// 16 bytes from global to shared memory, or zeros where not `valid` (nothing is read then).
__device__ __forceinline__ void copy_async(uint32_t to, const void* from, bool valid) {
  const int size = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(size));
}

__device__ __forceinline__ void copy_async(uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from));
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;"); }

// Waits until all but the newest `Pending` groups of this thread's copies have landed.
template <int Pending>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

__device__ __forceinline__ void load_matrices(uint32_t (&a)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void load_matrices_transposed(uint32_t (&a)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ uint32_t transpose_matrix(uint32_t a) {
  uint32_t b;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(b) : "r"(a));
  return b;
}

// d[16 x 8] += a[16 x 16] b[16 x 8].
template <typename T>
__device__ __forceinline__ void multiply_add(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// Two numbers in the type that T is multiplied in; the first in the low half.
template <typename T>
__device__ __forceinline__ uint32_t pack(float low, float high) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const uint32_t&>(pair);
  } else {
    const __half2 pair = __floats2half2_rn(low, high);
    return reinterpret_cast<const uint32_t&>(pair);
  }
}

// The two e4m3 numbers in the low half of `bytes` as float16.
__device__ __forceinline__ uint32_t widen_float8(uint32_t bytes) {
#if __CUDA_ARCH__ >= 890
  uint32_t pair;
  asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; cvt.rn.f16x2.e4m3x2 %0, low; }"
      : "=r"(pair)
      : "r"(bytes));
  return pair;
#else
  // Sign, exponent and fraction in their places; the exponents' biases differ by 8.
  const uint32_t spread = (bytes & 0xff) | ((bytes & 0xff00) << 8);
  const uint32_t moved = ((spread & 0x00800080) << 8) | ((spread & 0x007f007f) << 7);
  const __half2 scaled = __hmul2(reinterpret_cast<const __half2&>(moved), __float2half2_rn(256.f));
  return reinterpret_cast<const uint32_t&>(scaled);
#endif
}

// A barrier between some of a block's warps, of `threads` threads.
__device__ __forceinline__ void sync_barrier(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// A barrier in shared memory with phases, each of which ends with `arrivals` arrivals. Phase n has
// parity n % 2; one may ask for a phase once the one before it has ended. Arriving releases what
// this thread knows of, and to see a phase ended acquires it.
__device__ __forceinline__ void init_phases(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals)
               : "memory");
}

__device__ __forceinline__ void arrive_phase(uint32_t barrier) {
  asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(barrier)
               : "memory");
}

__device__ __forceinline__ void arrive_phase(uint64_t* barrier) {
  arrive_phase(shared_address(barrier));
}

__device__ __forceinline__ bool phase_done(uint64_t* barrier, int parity) {
  uint32_t done;
  asm volatile(
      "{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
      : "=r"(done)
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
  return done != 0;
}

__device__ __forceinline__ void wait_phase(uint64_t* barrier, int parity) {
#if __CUDA_ARCH__ >= 900
  uint32_t done;
  do {  // asleep in between, for as long as the hardware lets it
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
  } while (!done);
#else
  while (!phase_done(barrier, parity)) __nanosleep(20);
#endif
}

// Adds one; what this block's threads wrote before its last barrier is visible to whoever sees the
// sum, and what others wrote before theirs is visible from here on.
__device__ __forceinline__ int arrive(int* counter) {
  int before;
  asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], 1;"
               : "=r"(before)
               : "l"(counter)
               : "memory");
  return before;
}

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float tanh_of(float x) {
  // 1 - 2 / (e^2x + 1) is right at both ends: the exponential becomes 0 or infinity.
  return 1.f - 2.f / (exp2_fast(2.885390082f * x) + 1.f);
}

}  // namespace clover::cuda
