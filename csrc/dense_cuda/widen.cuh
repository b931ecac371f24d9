// Weights of float8 (e4m3) in shared memory as bfloat16, which holds every number of theirs, in
// the registers that a warpgroup multiplies from. Knows nothing of scales.
//
// A lane multiplies inputs i, i + 1, i + 8, i + 9 of each 16, i being 0, 2, 4 or 6: weights lie in
// the order i, i + 8, i + 1, i + 9 of each i, so that a lane reads its four as one.
#pragma once

#include "attention_cuda/products.cuh"

namespace clover::cuda {

// Numbers of the upper bytes of `signs`' halves, whose exponents and fractions `numbers` has where
// bfloat16 has them, subnormal ones too: then only the exponents' biases differ, by 120.
__device__ __forceinline__ uint32_t join_float8(uint32_t numbers, uint32_t signs) {
  uint32_t pair = (numbers & 0x07f007f0) | (signs & 0x80008000);
  asm("mul.rn.bf16x2 %0, %0, %1;" : "+r"(pair) : "r"(0x7b807b80));  // by 2^120
  return pair;
}

// Bytes 0 and 2 of `bytes`, and 1 and 3.
__device__ __forceinline__ void widen_float8(uint32_t bytes, uint32_t& even, uint32_t& odd) {
  even = join_float8(bytes << 4, bytes << 8);
  odd = join_float8(bytes >> 4, bytes);
}

// The slices of 16 inputs of a warpgroup's 64 rows, which begin at `address`, in the order of a
// panel: of a lane, four inputs of rows lane / 4 and lane / 4 + 8 of its warp's 16.
template <int Slices>
__device__ __forceinline__ void read_panel(uint32_t (&bytes)[Slices][2], uint32_t address) {
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane % 16;
#pragma unroll
  for (int slice = 0; slice < Slices; slice += 2) {
    uint32_t a[4];
    load_matrices(a, address + panel_at(row, slice + lane / 16));
    bytes[slice][0] = a[0];
    bytes[slice][1] = a[1];
    bytes[slice + 1][0] = a[2];
    bytes[slice + 1][1] = a[3];
  }
}

template <int Slices>
__device__ __forceinline__ void widen_panel(const uint32_t (&bytes)[Slices][2],
                                            uint32_t (&fragments)[Slices][4]) {
#pragma unroll
  for (int slice = 0; slice < Slices; ++slice) {
    uint32_t (&a)[4] = fragments[slice];
    widen_float8(bytes[slice][0], a[0], a[2]);
    widen_float8(bytes[slice][1], a[1], a[3]);
  }
}

}  // namespace clover::cuda
