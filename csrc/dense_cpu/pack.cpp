#include "dense_cpu/pack.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "common/simd.h"

namespace clover::dense {
namespace {

constexpr int kPairBytes = 2 * kBlock;  // of codes of a pair of inputs

float widened(uint16_t x) {
  const uint32_t bits = uint32_t{x} << 16;
  float y;
  std::memcpy(&y, &bits, sizeof y);
  return y;
}

float widened_half(uint16_t x) {
  Float16 repeated[kWidth];
  std::fill_n(repeated, kWidth, Float16{x});
  return load(repeated)[0];
}

// Runs `one(panel, rows)`: the numbers of the matrix's rows in a panel, of which those beyond the
// last output are -1.
template <typename One>
void each_panel(ThreadPool& threads, const Size& size, const One& one) {
  const auto run = [&](int panel) {
    int64_t rows[kBlock];
    const int64_t fold = panel % size.folds, first = panel / size.folds * kBlock;
    for (int64_t o = 0; o < kBlock; ++o)
      rows[o] = first + o < size.outputs ? fold * size.outputs + first + o : -1;
    one(panel, rows);
  };
  threads.run(
      static_cast<int>(round_up(size.outputs, kBlock) / kBlock * size.folds),
      [](void* context, int i, int) { (*static_cast<const decltype(run)*>(context))(i); },
      const_cast<void*>(static_cast<const void*>(&run)));
}

void pack_bfloat16(const uint16_t* const* rows, int64_t inputs, uint8_t* panel) {
  const int64_t pairs = round_up(inputs, 2) / 2;
  for (int o = 0; o < kBlock; ++o) {
    uint8_t* to = panel + o * 4;
    for (int64_t k = 0; k < pairs; ++k) {
      uint16_t pair[2] = {};
      if (rows[o]) std::memcpy(pair, rows[o] + 2 * k, (2 * k + 1 < inputs ? 2 : 1) * sizeof *pair);
      std::memcpy(to + k * kBlock * 4, pair, sizeof pair);
    }
  }
}

// The group of one output: its scale, as float16, and kGroup codes with a sign.
uint16_t quantize(const uint16_t* weights, uint8_t* codes) {
  float numbers[kGroup], most = 0;
  for (int i = 0; i < kGroup; ++i) {
    numbers[i] = widened(weights[i]);
    most = std::max(most, std::fabs(numbers[i]));
  }
  const float wanted = most / 127;
  uint32_t bits;
  std::memcpy(&bits, &wanted, sizeof bits);
  const uint16_t stored = to_float16(bits);
  const float scale = widened_half(stored), factor = scale > 0 ? 1 / scale : 0.0f;
  const float magic = 0x1.8p23f;  // adding it rounds to the nearest integer, ties to even
  for (int i = 0; i < kGroup; ++i) {
    const float code = (numbers[i] * factor + magic) - magic;
    codes[i] = static_cast<uint8_t>(static_cast<int>(std::clamp(code, -127.0f, 127.0f)));
  }
  return stored;
}

// The codes of a group of one output, `to` being those of the panel's group from the output on.
void place_int8(const uint8_t* codes, uint8_t* to) {
  for (int i = 0; i < kGroup; i += 2) std::memcpy(to + i / 2 * kPairBytes, codes + i, 2);
}

void place_int4(const uint8_t* codes, uint8_t* to) {
  for (int i = 0; i < kGroup; i += 4)
    for (int j = 0; j < 2; ++j)
      to[i / 4 * kPairBytes + j] = static_cast<uint8_t>(codes[i + j] | codes[i + 2 + j] << 4);
}

void pack_int8(const uint16_t* const* rows, int64_t inputs, uint8_t* panel) {
  for (int64_t k = 0; k < inputs; k += kGroup, panel += group_bytes(Format::kInt8)) {
    for (int o = 0; o < kBlock; ++o) {
      uint16_t weights[kGroup] = {};
      uint8_t codes[kGroup];
      const auto count = static_cast<size_t>(std::min<int64_t>(kGroup, inputs - k));
      if (rows[o]) std::memcpy(weights, rows[o] + k, count * sizeof *weights);
      const uint16_t scale = quantize(weights, codes);
      std::memcpy(panel + o * sizeof scale, &scale, sizeof scale);
      place_int8(codes, panel + kBlock * sizeof scale + o * 2);
    }
  }
}

// One output of a panel.
void pack_row(const Codes& from, int64_t row, int64_t groups, Format format, uint8_t* to) {
  const uint8_t* codes = from.codes + row * groups * kGroup;
  for (int64_t g = 0; g < groups; ++g, codes += kGroup, to += group_bytes(format)) {
    std::memcpy(to, from.scales + row * groups + g, sizeof *from.scales);
    if (format == Format::kInt8) {
      place_int8(codes, to + kBlock * 2);
    } else {
      std::memcpy(to + kBlock * 2, from.minima + row * groups + g, sizeof *from.minima);
      place_int4(codes, to + kBlock * 4);
    }
  }
}

}  // namespace

void pack(ThreadPool& threads, const uint16_t* weight, const Size& size, Format format,
          uint8_t* to) {
  if (format == Format::kInt4) throw std::invalid_argument("int4 is packed from its codes only");
  const int64_t bytes = panel_bytes(format, size.inputs);
  each_panel(threads, size, [&](int panel, const int64_t* numbers) {
    const uint16_t* rows[kBlock];
    for (int o = 0; o < kBlock; ++o)
      rows[o] = numbers[o] < 0 ? nullptr : weight + numbers[o] * size.inputs;
    if (format == Format::kInt8) return pack_int8(rows, size.inputs, to + panel * bytes);
    pack_bfloat16(rows, size.inputs, to + panel * bytes);
  });
}

void pack_codes(ThreadPool& threads, const Codes& from, const Size& size, Format format,
                uint8_t* to) {
  if (format == Format::kBFloat16) throw std::invalid_argument("bfloat16 has no codes");
  if (size.inputs % kGroup != 0) throw std::invalid_argument("codes come in whole groups");
  const int64_t bytes = panel_bytes(format, size.inputs);
  each_panel(threads, size, [&](int panel, const int64_t* numbers) {
    std::memset(to + panel * bytes, 0, bytes);
    for (int o = 0; o < kBlock && numbers[o] >= 0; ++o) {
      // Scales, minima and codes of an output lie two bytes after those of the one before.
      pack_row(from, numbers[o], size.inputs / kGroup, format, to + panel * bytes + o * 2);
    }
  });
}

}  // namespace clover::dense
