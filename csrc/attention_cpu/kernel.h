// What the kernels compute, in plain pointers and sizes: no Python, no PyTorch, no threads.
//
// A span is a run of context positions of one query token and one KV head. Its partial result is
// merged with those of the other spans of the same query token by `finish`.
#pragma once

#include <cstdint>

// Always inlined, so that no kernel object brings a copy that only newer processors can run.
#define CLOVER_HEADER_INLINE [[gnu::always_inline]] inline

namespace clover::attention {

enum class DType : int { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

CLOVER_HEADER_INLINE int64_t dtype_bytes(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

// One layer of the pool, and how it is attended over. Sizes count elements unless they say bytes.
struct Layer {
  unsigned char* base;  // first block
  DType dtype;
  int kv_heads;
  int group;  // query heads per KV head
  int k_dim;
  int v_dim;
  int block_size;
  int64_t num_blocks;
  float scale;
  int64_t window;             // 0: none
  float softcap;              // 0: none
  const float* sinks;         // one per query head, or null
  const float* alibi_slopes;  // one per query head, or null

  CLOVER_HEADER_INLINE int64_t block_elements() const {
    return int64_t{kv_heads} * block_size * (k_dim + v_dim);
  }
  CLOVER_HEADER_INLINE int64_t keys_at(int head) const {
    return int64_t{head} * block_size * k_dim;
  }
  CLOVER_HEADER_INLINE int64_t values_at(int head) const {
    return int64_t{kv_heads} * block_size * k_dim + int64_t{head} * block_size * v_dim;
  }
};

struct Span {
  const void* q;         // [group, k_dim] of the layer's type
  const int32_t* table;  // blocks of the row
  int head;              // KV head
  int64_t query_at;      // position of the query token
  int64_t begin;         // context positions [begin, end), never empty
  int64_t end;
};

// Floats of a partial result: per query head of the group v_dim unscaled sums, then per query head
// the largest score, then per query head the sum of exponentials relative to it.
CLOVER_HEADER_INLINE int64_t partial_floats(const Layer& layer) {
  return int64_t{layer.group} * (layer.v_dim + 2);
}

struct Kernels {
  const char* name;
  int width;  // k_dim and v_dim must be multiples of it
  void (*span)(const Layer& layer, const Span& span, float* scratch, float* partial);
  // Merges `count` partial results, which follow one another, in order; writes o [group, v_dim] in
  // the layer's type and lse [group].
  void (*finish)(const Layer& layer, int head, float* partials, int count, void* o, float* lse);
};

constexpr int kTile = 64;  // context positions that are scored at a time

// Floats of working memory that a call of `span` needs.
CLOVER_HEADER_INLINE int64_t scratch_floats(const Layer& layer) {
  return int64_t{layer.group} * (layer.k_dim + kTile + 1);
}

}  // namespace clover::attention
