// Rotation on the way into the pool: queries stay in their rows, rotated; keys and values of the
// same rows go to their slots. One launch for what rotating and appending would take two.
#include <cuda_fp8.h>

#include <type_traits>

#include "attention_cuda/elements.cuh"
#include "attention_cuda/kernels.h"
#include "dense_cuda/rotate.cuh"

namespace clover::cuda {
namespace {

// `S` is what the pool stores: float8, or the rows' own type.
template <typename S>
struct Pool {
  static constexpr bool kAppends = true;

  PoolView view;
  const int64_t* slots;
  int* bad;
  float k_factor;  // what is stored is this times the real number
  float v_factor;

  // Where a token's slot is: its block, -1 for none, and the offset in that.
  __device__ __forceinline__ int64_t find(int token, int& offset) const {
    const int64_t slot = slots[token];
    if (slot < 0 || slot >= int64_t{view.block_size} * view.num_blocks) {
      if (slot != kNoSlot) *bad = kBadSlot;
      return -1;
    }
    const unsigned block = static_cast<unsigned>(slot) / view.block_size;
    offset = static_cast<int>(static_cast<unsigned>(slot) - block * view.block_size);
    return block;
  }

  template <typename T, int V>
  __device__ __forceinline__ void store(int64_t at, const Pack<T, V>& pack, float factor) const {
    if constexpr (std::is_same_v<S, T>) {
      store_pack<T, V>(view.base, at, pack);
    } else {
      Pack<__nv_fp8_storage_t, V> stored;
#pragma unroll
      for (int i = 0; i < V; ++i)
        stored.values[i] =
            __nv_cvt_float_to_fp8(widen(pack.values[i]) * factor, __NV_SATFINITE, __NV_E4M3);
      store_pack<__nv_fp8_storage_t, V>(view.base, at, stored);
    }
  }

  template <typename T, int V>
  __device__ __forceinline__ void key(const RotateParams&, int token, int head, int at,
                                      const Pack<T, V>& pack) const {
    int offset = 0;
    const int64_t block = find(token, offset);
    if (block >= 0) store<T, V>(key_at(view, block, head, offset) + at, pack, k_factor);
  }

  template <typename T, int V>
  __device__ __forceinline__ void value(const RotateParams&, int token, int head, int at,
                                        const Pack<T, V>& pack) const {
    int offset = 0;
    const int64_t block = find(token, offset);
    if (block >= 0) store<T, V>(value_at(view, block, head, offset) + at, pack, v_factor);
  }
};

template <typename T>
cudaError_t append_of(RotateParams rows, const AppendParams& to, const Target& target) {
  if (int64_t{to.pool.block_size} * to.pool.num_blocks > UINT32_MAX) return cudaErrorInvalidValue;
  rows.k = rows.v = to.pool.base;  // whose alignment counts
  rows.k_stride = rows.v_stride = 0;
  const float k_factor = 1.f / to.k_scale, v_factor = 1.f / to.v_scale;
  if (to.pool.dtype == DType::kFloat8E4M3) {
    const Pool<__nv_fp8_storage_t> pool = {to.pool, to.slots, to.bad, k_factor, v_factor};
    return rotate_of<T>(rotation_to(rows, pool, true), target);
  }
  const Pool<T> pool = {to.pool, to.slots, to.bad, k_factor, v_factor};
  return rotate_of<T>(rotation_to(rows, pool, true), target);
}

}  // namespace

cudaError_t append_rotated(const RotateParams& rows, const AppendParams& to, const Target& target) {
  return for_type(rows.dtype, [&](auto of) {
    return append_of<typename decltype(of)::Type>(rows, to, target);
  });
}

}  // namespace clover::cuda
