// What the kernels compute, in plain pointers and sizes: no Python, no PyTorch, no threads.
//
// A span is a run of context positions, seen by some query tokens of one request through one KV
// head, or through several that follow one another in a block: these take turns tile by tile, so
// that memory is read in long runs. A head's partial result is merged with those of the other spans
// of these tokens by `finish`. A row is one query token and one query head: rows of a head go by
// token, then by query head.
#pragma once

#include <cstdint>

// Always inlined, so that no kernel object brings a copy that only newer processors can run.
#define CLOVER_HEADER_INLINE [[gnu::always_inline]] inline

namespace clover::attention {

// What a pool stores; queries, keys, values and results of calls are of the first three.
enum class DType : int { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2, kInt8 = 3 };

CLOVER_HEADER_INLINE int64_t dtype_bytes(DType dtype) {
  return dtype == DType::kFloat32 ? 4 : dtype == DType::kInt8 ? 1 : 2;
}

// One layer of the pool, and how it is attended over. A block is keys [kv_heads, block_size,
// k_dim], values [kv_heads, block_size, v_dim] and, of int8, float32 scales of the keys [kv_heads,
// block_size] and of the values: a stored number times its scale is the real one.
struct Layer {
  unsigned char* base;  // first block
  DType dtype;          // of what is stored
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

  // Bytes, from the start of a block, of what belongs to a KV head.
  CLOVER_HEADER_INLINE int64_t keys_at(int head) const {
    return int64_t{head} * block_size * k_dim * dtype_bytes(dtype);
  }
  CLOVER_HEADER_INLINE int64_t values_at(int head) const {
    return keys_at(kv_heads) + int64_t{head} * block_size * v_dim * dtype_bytes(dtype);
  }
  CLOVER_HEADER_INLINE int64_t key_scales_at(int head) const {
    return values_at(kv_heads) + int64_t{head} * block_size * 4;
  }
  CLOVER_HEADER_INLINE int64_t value_scales_at(int head) const {
    return key_scales_at(kv_heads) + int64_t{head} * block_size * 4;
  }
  CLOVER_HEADER_INLINE int64_t block_bytes() const {
    return dtype == DType::kInt8 ? value_scales_at(kv_heads) : values_at(kv_heads);
  }
};

// Floats, rounded up to whole cache lines.
CLOVER_HEADER_INLINE int64_t in_lines(int64_t floats) { return (floats + 15) / 16 * 16; }

struct Span {
  const unsigned char* q;  // of the first query token, [group, k_dim]
  int64_t q_stride;        // bytes from one query token to the next
  DType q_dtype;
  int queries;           // query tokens at positions that follow one another
  const int32_t* table;  // blocks of the request
  int head;              // first KV head
  int heads;             // KV heads; one where there are several query tokens
  int64_t query_at;      // position of the first query token
  int64_t begin;         // context positions [begin, end), never empty
  int64_t end;
};

struct Result {
  unsigned char* o;  // of the first query token, [group, v_dim] of the queries' type
  int64_t o_stride;  // bytes from one query token to the next
  float* lse;        // of the first query token, [group]
  int64_t lse_stride;
};

// Keys or values of some tokens and one KV head, on their way into the pool.
struct Put {
  DType dtype;
  const void* from;  // of the first token, [dim]
  int64_t stride;    // bytes from one token to the next
  const int64_t* slots;
  int64_t tokens;
  bool keys;
  int head;
};

// Floats of a KV head's partial result: per row v_dim unscaled sums, then per row the largest
// score, then per row the sum of exponentials relative to it.
CLOVER_HEADER_INLINE int64_t partial_floats(const Layer& layer, int queries) {
  return in_lines(int64_t{queries} * layer.group * (layer.v_dim + 2));
}

struct Kernels {
  const char* name;
  int width;  // k_dim and v_dim must be multiples of it
  // `next` is what this thread most likely computes after this span, or null: it is fetched early.
  // Partial results of its heads lie `partial_stride` floats apart.
  void (*span)(const Layer& layer, const Span& span, const Span* next, float* scratch,
               float* partial, int64_t partial_stride);
  // Merges `count` partial results of one head, which follow one another, in order.
  void (*finish)(const Layer& layer, const Span& span, float* partials, int count,
                 const Result& result);
  // Stores tokens in their places of blocks, in order.
  void (*put)(const Layer& layer, const Put& put);
};

constexpr int kTile = 64;  // context positions that are scored at a time

// Floats of working memory that a call of `span` needs: queries of each head, and what heads take
// turns with.
CLOVER_HEADER_INLINE int64_t scratch_floats(const Layer& layer, int queries, int heads) {
  const int64_t rows = int64_t{queries} * layer.group;
  return heads * in_lines(rows * layer.k_dim) + in_lines(rows * (2 * kTile + 1));
}

}  // namespace clover::attention
