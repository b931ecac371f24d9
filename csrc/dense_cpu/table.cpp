#include "dense_cpu/table.h"

#include <stdexcept>

namespace clover::dense {
namespace {

StageCall call_of(const Dense& dense, const Step& step, int index, const uint16_t* attended) {
  StageCall call = {};
  call.tokens = step.tokens;
  call.token_ids = step.token_ids;
  call.attended = attended;
  call.attended_stride = dense.shape().heads * dense.shape().head_dim;
  call.hidden = step.hidden[(index + 1) % 2];
  call.hidden_out = step.hidden[index % 2];
  call.positions = step.positions;
  call.cos = step.cos;
  call.sin = step.sin;
  return call;
}

void check_positions(const Step& step) {
  for (int t = 0; t < step.tokens; ++t)
    if (step.positions[t] < 0 || step.positions[t] >= step.rope_rows)
      throw std::invalid_argument("a position is past those that were prepared for");
}

bool stage(void* self, void* step, int index, const void* attended, const QkvRows& out,
           Failure* failure) {
  auto& dense = *static_cast<Dense*>(self);
  const Step& of = *static_cast<const Step*>(step);
  StageCall call = call_of(dense, of, index, static_cast<const uint16_t*>(attended));
  call.q = static_cast<uint16_t*>(out.q);
  call.q_stride = out.q_stride;
  call.k = static_cast<uint16_t*>(out.k);
  call.k_stride = out.k_stride;
  call.v = static_cast<uint16_t*>(out.v);
  call.v_stride = out.v_stride;
  return guarded(failure, [&] {
    if (index == 0) check_positions(of);
    dense.stage(index, call);
  });
}

}  // namespace

void finish(Dense& self, const Step& step, const uint16_t* attended, float* y) {
  const int last = self.layers();
  self.stage(last, call_of(self, step, last, attended));
  self.logits(step.hidden[last % 2], step.tokens, y);
}

DenseTable table_of(Dense& self) { return {&self, self.layers(), &stage}; }

}  // namespace clover::dense
