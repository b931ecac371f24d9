// The attention backend as a layer loop sees it.
#pragma once

#include "attention_cpu/attention.h"
#include "common/tables.h"

namespace clover::attention {

// Of `self`, which outlives the table. Rows have at most kMaxQueries query tokens.
AttentionTable table_of(Attention& self);

}  // namespace clover::attention
