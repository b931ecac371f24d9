// Rotation with keys and values in rows: where they are, or elsewhere.
#include "dense_cuda/rotate.cuh"

namespace clover::cuda {
namespace {

struct Rows {
  static constexpr bool kAppends = false;

  template <typename T, int V>
  __device__ __forceinline__ void key(const RotateParams& rows, int token, int head, int at,
                                      const Pack<T, V>& pack) const {
    store_pack<T, V>(rows.k, token * rows.k_stride + int64_t{head} * rows.head_dim + at, pack);
  }
  template <typename T, int V>
  __device__ __forceinline__ void value(const RotateParams& rows, int token, int head, int at,
                                        const Pack<T, V>& pack) const {
    store_pack<T, V>(rows.v, token * rows.v_stride + int64_t{head} * rows.head_dim + at, pack);
  }
};

}  // namespace

cudaError_t rotate(const RotateParams& params, const Target& target) {
  const int64_t values_at = int64_t{params.heads + params.kv_heads} * params.head_dim;
  const void* values = static_cast<const char*>(params.qkv) + values_at * dtype_bytes(params.dtype);
  const bool stay = params.v == values && params.v_stride == params.stride;
  const Rotation<Rows> rotation = rotation_to(params, Rows{}, !stay);
  return for_type(params.dtype, [&](auto of) {
    return rotate_of<typename decltype(of)::Type>(rotation, target);
  });
}

}  // namespace clover::cuda
