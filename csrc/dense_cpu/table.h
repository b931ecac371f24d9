// The dense half as a layer loop sees it: stages of one step, one after another.
#pragma once

#include "common/tables.h"
#include "dense_cpu/dense.h"

namespace clover::dense {

// What a step keeps between its stages; all that is pointed to outlives it.
struct Step {
  int tokens;
  const int64_t* token_ids;
  const int64_t* positions;
  const uint16_t* cos;  // [rope_rows, head_dim] by position, as in StageCall
  const uint16_t* sin;
  int64_t rope_rows;
  float* hidden[2];  // [tokens, hidden] each; stage i writes to i % 2 and reads the other
};

// The last stage and y [tokens, vocab], from the last layer's `attended`, as the table's stages
// have it.
void finish(Dense& self, const Step& step, const uint16_t* attended, float* y);

// Of `self`, which outlives the table; its steps are pointers to `Step`.
DenseTable table_of(Dense& self);

}  // namespace clover::dense
