// Blocks of GGUF files as codes, scales and minima: what pack.h brings into panels.
#pragma once

#include <cstdint>

#include "common/thread_pool.h"

namespace clover::dense {

// Of 32 numbers each: a float16 scale, of kQ4_1 a float16 minimum, then the codes; of four bits the
// first half of them in the low halves of 16 bytes.
enum class Blocks : int { kQ4_0 = 0, kQ4_1 = 1, kQ8_0 = 2 };

constexpr int64_t block_bytes(Blocks kind) {
  return kind == Blocks::kQ8_0 ? 34 : kind == Blocks::kQ4_1 ? 20 : 18;
}

// A byte for each of the `count` blocks' codes, a float16 for each block's scale and minimum (not
// of kQ8_0, whose codes have a sign).
void read_blocks(ThreadPool& threads, Blocks kind, const uint8_t* blocks, int64_t count,
                 uint8_t* codes, uint16_t* scales, uint16_t* minima);

}  // namespace clover::dense
