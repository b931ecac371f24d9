// Brings matrices into panels, as kernel.h describes them; once, as weights are loaded.
#pragma once

#include <cstdint>

#include "common/thread_pool.h"
#include "dense_cpu/kernel.h"

namespace clover::dense {

// Of a matrix [folds * outputs, inputs], contiguous.
struct Size {
  int64_t outputs;  // of a fold
  int64_t inputs;
  int folds;
};

// A matrix that is quantised already.
struct Codes {
  const uint8_t* codes;    // [outputs, inputs]: of int8 with a sign, of int4 from 0 to 15
  const uint16_t* scales;  // float16 [outputs, inputs / kGroup]
  const uint16_t* minima;  // the same, of int4
};

// Both write folds * panel_bytes(format, inputs) bytes for each kBlock outputs.

// From bfloat16 numbers. For int8 a group's scale is its largest weight / 127, rounded to float16,
// and a code the multiple of it that is nearest. int4 is not made so: std::invalid_argument.
void pack(ThreadPool& threads, const uint16_t* weight, const Size& size, Format format,
          uint8_t* to);

// `size.inputs` is a multiple of kGroup; bfloat16 has no codes: std::invalid_argument.
void pack_codes(ThreadPool& threads, const Codes& from, const Size& size, Format format,
                uint8_t* to);

}  // namespace clover::dense
