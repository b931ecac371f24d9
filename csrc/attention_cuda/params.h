// What the kernels are told: plain pointers and sizes. Pointers are of the device.
#pragma once

#include <cstdint>

#include "attention_cuda/plan.h"
#include "common/dtype.h"

namespace clover::cuda {

// One layer of a pool in the canonical layout: a block is keys [kv_heads, block_size, k_dim] and
// then values [kv_heads, block_size, v_dim].
struct PoolView {
  unsigned char* base;
  int64_t block_bytes;
  int64_t values_at;  // bytes into a block
  int block_size;
  int num_blocks;
  int kv_heads;
  int k_dim;
  int v_dim;
  DType dtype;
};

// How scores are made. The scale of stored keys is in `scale`.
struct ScoreParams {
  float scale;
  float softcap;        // 0: none
  float v_scale;        // multiplies what is stored
  const float* sinks;   // one per query head, or null
  const float* slopes;  // one per query head, or null
};

// Partial results and counters of one launch at a time. Counters are zero between launches: who
// uses one last sets it back.
struct Workspace {
  float* partials;     // [slots][cols][v_dim]
  float* maxima_sums;  // [slots][cols][2]
  int* arrivals;       // [slots]
  int* bad;            // set to kBadBlock or kBadSlot where an index is outside the pool
};

constexpr int kBadBlock = 1;
constexpr int kBadSlot = 2;

struct AttendParams {
  PoolView pool;
  ScoreParams score;
  Workspace work;
  Split split;
  const void* q;     // [tokens, kv_heads * group, k_dim], heads contiguous within a token
  int64_t q_stride;  // elements
  DType q_dtype;     // of o too
  const int32_t* starts;
  const int32_t* tables;
  int64_t table_stride;
  const int32_t* lengths;
  int rows;
  int tokens;
  void* o;        // [tokens, heads, v_dim], contiguous
  float* lse;     // [tokens, heads], contiguous
  int min_units;  // of a range
  int narrow;     // the prompt kernel leaves out rows of no more tokens
  int slots;      // of the workspace
  int stages;     // tiles in flight of a computing warp
  bool early;     // lengths, starts and tables may be read before the kernel before has ended
};

}  // namespace clover::cuda
