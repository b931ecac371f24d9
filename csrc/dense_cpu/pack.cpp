#include "dense_cpu/pack.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "common/simd.h"

namespace clover::dense {
namespace {

float widened(uint16_t x) {
  const uint32_t bits = uint32_t{x} << 16;
  float y;
  std::memcpy(&y, &bits, sizeof y);
  return y;
}

// The rows of a panel; those beyond the last output are null.
struct PanelRows {
  const uint16_t* at[kBlock] = {};
  int64_t inputs;

  uint16_t number(int o, int64_t i) const { return at[o] && i < inputs ? at[o][i] : uint16_t{0}; }
};

void pack_bfloat16(const PanelRows& rows, uint8_t* panel) {
  auto* to = reinterpret_cast<uint16_t*>(panel);
  for (int64_t k = 0; k < rows.inputs; k += 2)
    for (int o = 0; o < kBlock; ++o) {
      *to++ = rows.number(o, k);
      *to++ = rows.number(o, k + 1);
    }
}

// The group of one output: its scale, as float16, and kGroup codes.
uint16_t quantize(const float* weights, uint8_t* codes) {
  float most = 0;
  for (int i = 0; i < kGroup; ++i) most = std::max(most, std::fabs(weights[i]));
  const float wanted = most / 127;
  uint32_t bits;
  std::memcpy(&bits, &wanted, sizeof bits);
  const Float16 stored = {to_float16(bits)};
  float scales[kWidth];
  Float16 repeated[kWidth];
  std::fill_n(repeated, kWidth, stored);
  store(scales, load(repeated));
  const float factor = scales[0] > 0 ? 1 / scales[0] : 0.0f;
  for (int i = 0; i < kGroup; ++i) {
    const float magnitude = std::min(std::nearbyint(std::fabs(weights[i]) * factor), 127.0f);
    const uint8_t sign = weights[i] < 0 && magnitude > 0 ? 0x80 : 0;
    codes[i] = static_cast<uint8_t>(sign | static_cast<uint8_t>(magnitude));
  }
  return stored.bits;
}

void pack_int8(const PanelRows& rows, uint8_t* panel) {
  for (int64_t k = 0; k < rows.inputs; k += kGroup, panel += group_bytes(Format::kInt8)) {
    for (int o = 0; o < kBlock; ++o) {
      float weights[kGroup];
      uint8_t codes[kGroup];
      for (int i = 0; i < kGroup; ++i) weights[i] = widened(rows.number(o, k + i));
      const uint16_t scale = quantize(weights, codes);
      std::memcpy(panel + o * sizeof scale, &scale, sizeof scale);
      // [input / 4][o / 4][pair][o % 4][input of the pair]
      uint8_t* to = panel + kBlock * sizeof scale + o / 4 * 16 + o % 4 * 2;
      for (int i = 0; i < kGroup; i += 2)
        std::memcpy(to + i / 4 * 64 + i / 2 % 2 * 8, codes + i, 2);
    }
  }
}

}  // namespace

void pack(ThreadPool& threads, const Plain& from, Format format, uint8_t* to) {
  if (format == Format::kInt4) throw std::invalid_argument("int4 is packed from its codes only");
  const int64_t bytes = panel_bytes(format, from.inputs);
  const auto one = [&](int panel) {
    PanelRows rows;
    rows.inputs = from.inputs;
    const int64_t fold = panel % from.folds, first = panel / from.folds * kBlock;
    for (int64_t o = 0; o < kBlock && first + o < from.outputs; ++o)
      rows.at[o] = from.weight + (fold * from.outputs + first + o) * from.inputs;
    if (format == Format::kInt8) return pack_int8(rows, to + panel * bytes);
    pack_bfloat16(rows, to + panel * bytes);
  };
  threads.run(
      static_cast<int>(round_up(from.outputs, kBlock) / kBlock * from.folds),
      [](void* context, int i, int) { (*static_cast<const decltype(one)*>(context))(i); },
      const_cast<void*>(static_cast<const void*>(&one)));
}

}  // namespace clover::dense
