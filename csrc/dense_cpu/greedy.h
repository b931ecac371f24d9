// The likeliest token of a row of logits.
#pragma once

#include <cstdint>

namespace clover::dense {

// The place of the largest of `x`, the lowest where several are equal; -1 where it is no finite
// number or one of them is NaN.
int64_t greedy(const float* x, int64_t size);

}  // namespace clover::dense
