// Chooses the kernels that this processor can run.
#pragma once

#include <string>
#include <vector>

#include "dense_cpu/kernel.h"

namespace clover::dense {

// Compiled in and supported here, from the baseline ("portable") to the best.
std::vector<const Kernels*> available_kernels();

// The kernels called `name`, or for "auto" the best. std::invalid_argument names those there are.
const Kernels* choose_kernels(const std::string& name);

}  // namespace clover::dense
