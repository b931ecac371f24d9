#include "dense_cpu/product.h"

#include <stdexcept>

#include "dense_cpu/dispatch.h"
#include "dense_cpu/parts.h"

namespace clover::dense {

Products::Products(int threads, const std::string& isa)
    : kernels_(choose_kernels(isa)), threads_(ThreadPool::shared(threads)) {}

void Products::multiply(const Matrix& m, const uint16_t* x, int64_t stride, int tokens,
                        const uint16_t* residual, uint16_t* y) {
  if (m.format != Format::kBFloat16 || m.inputs % 2 != 0 || tokens < 1 || m.folds > 2 ||
      (m.folds == 2 && residual))
    throw std::invalid_argument("no such product");
  const Rows rows = {x, stride, tokens, 0, nullptr, nullptr};
  std::lock_guard<std::mutex> turn(mutex_);
  if (m.folds == 2) {
    each_part(*threads_, m, nullptr, rows, [&](const Part& part, const Rows& some, int64_t from) {
      kernels_->gate_up(m, some, part, y + from * m.outputs, m.outputs);
    });
    return;
  }
  if (static_cast<int64_t>(sums_.size()) < tokens * m.outputs) sums_.resize(tokens * m.outputs);
  each_part(*threads_, m, nullptr, rows, [&](const Part& part, const Rows& some, int64_t from) {
    const int64_t size = part.last - part.first;
    float* sums = sums_.data() + from * m.outputs;
    for (int64_t t = 0; residual && t < some.count; ++t)
      kernels_->widen(residual + (from + t) * m.outputs + part.first, size,
                      sums + t * m.outputs + part.first);
    kernels_->project(m, some, part, residual ? sums : nullptr, sums, m.outputs);
    for (int64_t t = 0; t < some.count; ++t)
      kernels_->narrow(sums + t * m.outputs + part.first, size,
                       y + (from + t) * m.outputs + part.first);
  });
}

}  // namespace clover::dense
