// One product with packed weights in bfloat16, on the threads of a pool: for whoever has a graph of
// its own between its products. Sums are float32, in the order of the stages' products.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "common/thread_pool.h"
#include "dense_cpu/kernel.h"

namespace clover::dense {

class Products {
 public:
  // `isa`: a name of available_kernels(), or "auto".
  Products(int threads, const std::string& isa);

  // y [tokens, outputs] = x times the matrix, plus its bias, plus `residual` [tokens, outputs],
  // which may be null; rounded once. With two folds silu(first) * second, with no residual. Rows
  // of x are `stride` elements apart and of an even number of inputs, the others contiguous.
  void multiply(const Matrix& m, const uint16_t* x, int64_t stride, int tokens,
                const uint16_t* residual, uint16_t* y);

 private:
  const Kernels* kernels_;
  std::shared_ptr<ThreadPool> threads_;
  std::mutex mutex_;  // of `sums_`; callers on several threads take turns
  std::vector<float> sums_;
};

}  // namespace clover::dense
