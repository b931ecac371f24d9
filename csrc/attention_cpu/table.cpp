#include "attention_cpu/table.h"

namespace clover::attention {
namespace {

bool answer(void* self, int layer, const QkvRows& in, const AttentionRows& rows, void* o,
            float* lse, Failure* failure) {
  auto& attention = *static_cast<Attention*>(self);
  const auto dtype = static_cast<DType>(in.dtype);
  return guarded(failure, [&] {
    attention.append(layer, {in.k, in.k_stride, in.v, in.v_stride, rows.slots, rows.tokens, dtype});
    attention.attend(layer, {in.q, in.q_stride, rows.starts, rows.tables, rows.table_stride,
                             rows.lengths, rows.rows, rows.tokens, o, lse, dtype});
  });
}

}  // namespace

AttentionTable table_of(Attention& self) { return {&self, self.layers(), &answer}; }

}  // namespace clover::attention
