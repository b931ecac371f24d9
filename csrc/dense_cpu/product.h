// Products with packed weights in bfloat16, on the threads of a pool: for whoever has a graph of
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

// What products are made with; `sums` and `wide` grow as they need them.
struct Workplace {
  const Kernels* kernels;
  ThreadPool* threads;
  std::vector<float>* sums;
  std::vector<float>* wide;  // rows in float32
};

struct Multiplied {
  Matrix matrix;
  const Matrix* next;  // what is multiplied with after it, or null
};

// Rows, `stride` numbers from one to the next.
struct SomeRows {
  uint16_t* data;
  int64_t stride;
};

// y = x times the matrix, plus its bias, plus `residual` where it has data; rounded once. With two
// folds silu(first) * second, with no residual. x has an even number of inputs.
void multiply_rows(const Workplace& with, const Multiplied& product, int tokens, const SomeRows& x,
                   const SomeRows& residual, const SomeRows& y);

class Products {
 public:
  // `isa`: a name of available_kernels(), or "auto".
  Products(int threads, const std::string& isa);

  // `multiply_rows`, one at a time: callers on several threads take turns.
  void multiply(const Matrix& m, int tokens, const SomeRows& x, const SomeRows& residual,
                const SomeRows& y);

 private:
  const Kernels* kernels_;
  std::shared_ptr<ThreadPool> threads_;
  std::mutex mutex_;  // of the buffers below
  std::vector<float> sums_;
  std::vector<float> wide_;
};

}  // namespace clover::dense
