// Many operators of a graph in one call: products with packed weights, and what stands between
// them, on rows of bfloat16. It knows neither models nor what its values are for.
//
// Every value of a chain lies in a buffer, of which each token has a row. The first buffers are the
// caller's to read, the next ones the caller's to be written, the others the chain's own.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "common/thread_pool.h"
#include "dense_cpu/kernel.h"
#include "dense_cpu/product.h"
#include "dense_cpu/rows.h"

namespace clover::dense {

// Of every token's row `heads` times `size` numbers, `stride` from one head to the next.
struct Operand {
  int64_t buffer;
  int64_t offset;
  int64_t heads;
  int64_t stride;
  int64_t size;
};

enum class Act : int { kProduct = 0, kNorm = 1, kTurn = 2, kMap = 3 };

struct Instruction {
  Act act;
  // What is written, then what is read. Of a product: rows, perhaps what is added; of one that
  // turns: x, cos, sin.
  std::vector<Operand> operands;
  // Places among the weights, or -1: of a product its panels and bias; of a norm weight and bias.
  int64_t weight = -1;
  int64_t bias = -1;
  int64_t outputs = 0;  // of a product, as inputs and folds
  int64_t inputs = 0;
  int folds = 1;
  Map map = Map::kCopy;
  bool centred = false;
  float scalar = 0;  // epsilon of a norm
};

struct Layout {
  int inputs;
  int outputs;
  int weights;
  std::vector<int64_t> widths;  // numbers of a token's row, of every buffer
};

struct Place {
  uint16_t* data;
  int64_t stride;  // numbers from a token's row to the next
};

class Chain {
 public:
  // std::invalid_argument where the code reaches outside of its buffers and weights.
  Chain(int threads, const std::string& isa, const Layout& layout, std::vector<Instruction> code);

  const Layout& layout() const { return layout_; }

  // `weights`: addresses of panels (bfloat16), biases of products (bfloat16), weights and biases of
  // norms (float32). `places`: those of the caller's buffers, inputs first. Callers take turns.
  void run(const int64_t* weights, int64_t tokens, const std::vector<Place>& places);

 private:
  void check(const Instruction& one) const;
  void check(const Operand& operand) const;
  void run_some(const int64_t* weights, int tokens);
  void multiply(size_t index, const int64_t* weights, int tokens);
  void each_row(const Instruction& one, const int64_t* weights, int64_t token);
  Matrix matrix(const Instruction& one, const int64_t* weights) const;
  uint16_t* at(const Operand& operand, int64_t token) const {
    const Place& place = places_[operand.buffer];
    return place.data + token * place.stride + operand.offset;
  }

  const Kernels* kernels_;
  std::shared_ptr<ThreadPool> threads_;
  Layout layout_;
  std::vector<Instruction> code_;
  std::mutex mutex_;  // of what follows
  std::vector<std::vector<uint16_t>> scratch_;
  std::vector<float> sums_;
  std::vector<float> wide_;
  std::vector<Place> places_;
};

}  // namespace clover::dense
