#include "dense_cpu/product.h"

#include <stdexcept>

#include "dense_cpu/dispatch.h"
#include "dense_cpu/parts.h"

namespace clover::dense {

void multiply_rows(const Workplace& with, const Multiplied& product, int tokens, const SomeRows& x,
                   const SomeRows& residual, const SomeRows& y) {
  const Kernels& kernels = *with.kernels;
  const Matrix& m = product.matrix;
  const Rows rows = rows_for(kernels, *with.threads,
                             {x.data, x.stride, tokens, 0, nullptr, nullptr}, m.inputs, *with.wide);
  if (m.folds == 2) {
    each_part(*with.threads, m, product.next, rows,
              [&](const Part& part, const Rows& some, int64_t from) {
                kernels.gate_up(m, some, part, y.data + from * y.stride, y.stride);
              });
    return;
  }
  std::vector<float>& all = *with.sums;
  if (static_cast<int64_t>(all.size()) < tokens * m.outputs) all.resize(tokens * m.outputs);
  const auto run = [&](const Part& part, const Rows& some, int64_t from) {
    const int64_t size = part.last - part.first;
    float* sums = all.data() + from * m.outputs;
    for (int64_t t = 0; residual.data && t < some.count; ++t)
      kernels.widen(residual.data + (from + t) * residual.stride + part.first, size,
                    sums + t * m.outputs + part.first);
    kernels.project(m, some, part, residual.data ? sums : nullptr, sums, m.outputs);
    for (int64_t t = 0; t < some.count; ++t)
      kernels.narrow(sums + t * m.outputs + part.first, size,
                     y.data + (from + t) * y.stride + part.first);
  };
  each_part(*with.threads, m, product.next, rows, run);
}

Products::Products(int threads, const std::string& isa)
    : kernels_(choose_kernels(isa)), threads_(ThreadPool::shared(threads)) {}

void Products::multiply(const Matrix& m, int tokens, const SomeRows& x, const SomeRows& residual,
                        const SomeRows& y) {
  if (m.format != Format::kBFloat16 || m.inputs % 2 != 0 || tokens < 1 || m.folds > 2 ||
      (m.folds == 2 && residual.data))
    throw std::invalid_argument("no such product");
  std::lock_guard<std::mutex> turn(mutex_);
  multiply_rows({kernels_, threads_.get(), &sums_, &wide_}, {m, nullptr}, tokens, x, residual, y);
}

}  // namespace clover::dense
