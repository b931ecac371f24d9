// Brings matrices into panels, as kernel.h describes them; once, as weights are loaded.
#pragma once

#include <cstdint>

#include "common/thread_pool.h"
#include "dense_cpu/kernel.h"

namespace clover::dense {

struct Plain {
  const uint16_t* weight;  // bfloat16 [folds * outputs, inputs], contiguous
  int64_t outputs;         // of a fold
  int64_t inputs;
  int folds;
};

// Writes folds * panel_bytes(format, inputs) bytes for each kBlock outputs. For int8 a group's
// scale is its largest weight / 127, rounded to float16, and a code the multiple of it that is
// nearest. int4 is not made from plain numbers: std::invalid_argument.
void pack(ThreadPool& threads, const Plain& from, Format format, uint8_t* to);

}  // namespace clover::dense
