// Chooses the kernels that this processor can run.
#pragma once

#include <string>
#include <vector>

#include "attention_cpu/kernel.h"

namespace clover::attention {

// Compiled in and supported here, from the baseline ("portable") to the widest.
std::vector<const Kernels*> available_kernels();

// The kernels called `name`, or for "auto" the widest whose width divides `dims`; never wider than
// asked for. std::invalid_argument names those there are.
const Kernels* choose_kernels(const std::string& name, const std::vector<int>& dims);

}  // namespace clover::attention
