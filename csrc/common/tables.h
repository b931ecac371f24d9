// What a dense half and an attention backend offer to a layer loop that runs without Python: a
// table of C functions each, with the meaning of their Python contracts.
//
// Pointers are to memory whose sizes and types the tables' owners and the caller have agreed on
// before the loop starts. Functions throw nothing: false means a failure, told in `failure`.
#pragma once

#include <cstdint>
#include <cstdio>
#include <exception>

namespace clover {

struct Failure {
  char what[256] = "";
};

// Queries, keys and values of a step's tokens. Strides count elements from token to token; heads
// and their elements are contiguous within a token.
struct QkvRows {
  void* q;
  int64_t q_stride;
  void* k;
  int64_t k_stride;
  void* v;
  int64_t v_stride;
  int dtype;  // 0 float32, 1 bfloat16, 2 float16; what a pool stores may be another
};

struct DenseTable {
  void* self;
  int layers;
  // Stage `index` of `step`, which is the dense half's own record of tokens and carry. `attended`
  // [tokens, heads, v_dim] is contiguous, and null at stage 0; stage `layers` is not for here.
  bool (*stage)(void* self, void* step, int index, const void* attended, const QkvRows& out,
                Failure* failure);
};

// The rows of a step on an attention backend; see Attention backend's `append` and `attend`.
struct AttentionRows {
  const int32_t* starts;  // [rows + 1]
  const int32_t* tables;  // [rows, table_stride]
  int64_t table_stride;
  const int32_t* lengths;  // [rows]
  const int64_t* slots;    // [tokens]
  int64_t rows;
  int64_t tokens;
};

struct AttentionTable {
  void* self;
  int layers;
  // Appends the tokens' keys and values, then attends: o [tokens, heads, v_dim] and lse
  // [tokens, heads], both contiguous. Callers on several threads take turns.
  bool (*answer)(void* self, int layer, const QkvRows& in, const AttentionRows& rows, void* o,
                 float* lse, Failure* failure);
};

// Runs `call`, which may throw, as a function of a table.
template <typename Call>
bool guarded(Failure* failure, const Call& call) noexcept {
  try {
    call();
    return true;
  } catch (const std::exception& error) {
    std::snprintf(failure->what, sizeof(failure->what), "%s", error.what());
    return false;
  }
}

}  // namespace clover
