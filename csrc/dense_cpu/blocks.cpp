#include "dense_cpu/blocks.h"

#include <algorithm>
#include <cstring>

#include "common/simd.h"
#include "dense_cpu/kernel.h"

namespace clover::dense {
namespace {

constexpr int64_t kTogether = 4096;  // blocks of a task

// Q4_0's codes stand for -8 to 7.
uint16_t times_minus_8(uint16_t scale) {
  Float16 repeated[kWidth];
  std::fill_n(repeated, kWidth, Float16{scale});
  const float value = load(repeated)[0] * -8;
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return to_float16(bits);
}

void read_nibbles(const uint8_t* from, uint8_t* codes) {
  for (int i = 0; i < kGroup / 2; ++i) {
    codes[i] = from[i] & 0x0f;
    codes[kGroup / 2 + i] = from[i] >> 4;
  }
}

void read_block(Blocks kind, const uint8_t* block, uint8_t* codes, uint16_t* scale,
                uint16_t* minimum) {
  std::memcpy(scale, block, sizeof *scale);
  switch (kind) {
    case Blocks::kQ4_0:
      *minimum = times_minus_8(*scale);
      return read_nibbles(block + 2, codes);
    case Blocks::kQ4_1:
      std::memcpy(minimum, block + 2, sizeof *minimum);
      return read_nibbles(block + 4, codes);
    case Blocks::kQ8_0:
      std::memcpy(codes, block + 2, kGroup);
  }
}

}  // namespace

void read_blocks(ThreadPool& threads, Blocks kind, const uint8_t* blocks, int64_t count,
                 uint8_t* codes, uint16_t* scales, uint16_t* minima) {
  const auto run = [&](int task) {
    const int64_t end = std::min(count, (task + 1) * kTogether);
    for (int64_t i = task * kTogether; i < end; ++i)
      read_block(kind, blocks + i * block_bytes(kind), codes + i * kGroup, scales + i,
                 minima ? minima + i : nullptr);
  };
  threads.run(
      static_cast<int>((count + kTogether - 1) / kTogether),
      [](void* context, int i, int) { (*static_cast<const decltype(run)*>(context))(i); },
      const_cast<void*>(static_cast<const void*>(&run)));
}

}  // namespace clover::dense
