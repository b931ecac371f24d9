#include "dense_cpu/table.h"

namespace clover::dense {
namespace {

bool stage(void* self, void* step, int index, const void* attended, const QkvRows& out,
           Failure* failure) {
  auto& dense = *static_cast<Dense*>(self);
  const Step& of = *static_cast<const Step*>(step);
  StageCall call = {};
  call.tokens = of.tokens;
  call.token_ids = of.token_ids;
  call.attended = static_cast<const uint16_t*>(attended);
  call.attended_stride = dense.shape().heads * dense.shape().head_dim;
  call.hidden = of.hidden[(index + 1) % 2];
  call.hidden_out = of.hidden[index % 2];
  call.cos = of.cos;
  call.sin = of.sin;
  call.q = static_cast<uint16_t*>(out.q);
  call.q_stride = out.q_stride;
  call.k = static_cast<uint16_t*>(out.k);
  call.k_stride = out.k_stride;
  call.v = static_cast<uint16_t*>(out.v);
  call.v_stride = out.v_stride;
  return guarded(failure, [&] { dense.stage(index, call); });
}

}  // namespace

DenseTable table_of(Dense& self) { return {&self, self.layers(), &stage}; }

}  // namespace clover::dense
