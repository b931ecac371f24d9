// The dense half as a layer loop sees it: stages of one step, one after another.
#pragma once

#include "common/tables.h"
#include "dense_cpu/dense.h"

namespace clover::dense {

// What a step keeps between its stages; all that is pointed to outlives it.
struct Step {
  int tokens;
  const int64_t* token_ids;
  const uint16_t* cos;  // [tokens, head_dim], as in StageCall
  const uint16_t* sin;
  float* hidden[2];  // [tokens, hidden] each; stage i writes to i % 2 and reads the other
};

// Of `self`, which outlives the table; its steps are pointers to `Step`.
DenseTable table_of(Dense& self);

}  // namespace clover::dense
