#include "dense_cpu/chain.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "dense_cpu/dispatch.h"
#include "dense_cpu/parts.h"

namespace clover::dense {
namespace {

constexpr int kTogether = 8;            // fewer tokens than this are gone through on one thread
constexpr int64_t kTokensAtOnce = 512;  // bounds the scratch

void require(bool good, const char* message) {
  if (!good) throw std::invalid_argument(message);
}

size_t operands_of(const Instruction& one) {
  switch (one.act) {
    case Act::kProduct:
      return one.operands.size() == 3 ? 3 : 2;
    case Act::kNorm:
      return 2;
    case Act::kTurn:
      return 4;
    case Act::kMap:
      return takes_two(one.map) ? 3 : 2;
  }
  throw std::invalid_argument("no such act");
}

}  // namespace

Chain::Chain(int threads, const std::string& isa, const Layout& layout,
             std::vector<Instruction> code)
    : kernels_(choose_kernels(isa)),
      threads_(ThreadPool::shared(threads)),
      layout_(layout),
      code_(std::move(code)) {
  const int64_t own = static_cast<int64_t>(layout.widths.size()) - layout.inputs - layout.outputs;
  require(layout.inputs >= 0 && layout.outputs >= 0 && own >= 0, "buffers are missing");
  for (const int64_t width : layout.widths) require(width >= 1, "rows must have numbers");
  for (const Instruction& one : code_) check(one);
  scratch_.resize(own);
  places_.resize(layout.widths.size());
}

void Chain::check(const Operand& operand) const {
  require(operand.buffer >= 0 && operand.buffer < static_cast<int64_t>(layout_.widths.size()),
          "no such buffer");
  require(operand.offset >= 0 && operand.heads >= 1 && operand.stride >= 0 && operand.size >= 1,
          "sizes must be at least 1");
  require(operand.offset + (operand.heads - 1) * operand.stride + operand.size <=
              layout_.widths[operand.buffer],
          "an operand is outside of its row");
}

void Chain::check(const Instruction& one) const {
  require(one.operands.size() == operands_of(one), "another number of operands is needed");
  for (const Operand& operand : one.operands) check(operand);
  const Operand& y = one.operands[0];
  require(y.buffer >= layout_.inputs, "inputs are not written to");
  require(one.weight >= -1 && one.weight < layout_.weights && one.bias >= -1 &&
              one.bias < layout_.weights,
          "no such weight");
  if (one.act == Act::kProduct) {
    require(one.weight >= 0 && (one.folds == 1 || one.folds == 2), "no such product");
    require(one.folds == 1 || one.operands.size() == 2, "a gated product adds nothing");
    require(one.inputs % 2 == 0, "a product's inputs must be even");
    for (size_t i = 0; i < one.operands.size(); ++i) {
      require(one.operands[i].heads == 1, "a product's rows must be contiguous");
      require(one.operands[i].size == (i == 1 ? one.inputs : one.outputs),
              "another size is needed");
    }
    return;
  }
  for (const Operand& operand : one.operands)
    require(operand.heads == y.heads && operand.size == y.size, "operands must be of one shape");
  require(one.act != Act::kTurn || y.size % 2 == 0, "what is turned must have two halves");
}

void Chain::run(const int64_t* weights, int64_t tokens, const std::vector<Place>& places) {
  require(tokens >= 1, "there are no tokens");
  require(static_cast<int>(places.size()) == layout_.inputs + layout_.outputs,
          "a place for each input and output is needed");
  std::lock_guard<std::mutex> turn(mutex_);
  const int64_t most = std::min(tokens, kTokensAtOnce);
  for (size_t i = 0; i < scratch_.size(); ++i) {
    const int64_t width = layout_.widths[places.size() + i];
    if (static_cast<int64_t>(scratch_[i].size()) < most * width) scratch_[i].resize(most * width);
    places_[places.size() + i] = {scratch_[i].data(), width};
  }
  for (int64_t from = 0; from < tokens; from += most) {
    for (size_t i = 0; i < places.size(); ++i)
      places_[i] = {places[i].data + from * places[i].stride, places[i].stride};
    run_some(weights, static_cast<int>(std::min(most, tokens - from)));
  }
}

// What lies between two products is gone through token by token.
void Chain::run_some(const int64_t* weights, int tokens) {
  size_t next = 0;
  while (next < code_.size()) {
    if (code_[next].act == Act::kProduct) {
      multiply(next++, weights, tokens);
      continue;
    }
    size_t end = next;
    while (end < code_.size() && code_[end].act != Act::kProduct) ++end;
    const auto run = [&](int token) {
      for (size_t i = next; i < end; ++i) each_row(code_[i], weights, token);
    };
    if (tokens >= kTogether) {
      each(*threads_, tokens, run);
    } else {
      for (int token = 0; token < tokens; ++token) run(token);
    }
    next = end;
  }
}

Matrix Chain::matrix(const Instruction& one, const int64_t* weights) const {
  Matrix m;
  m.weight = reinterpret_cast<const uint8_t*>(weights[one.weight]);
  m.bias = one.bias < 0 ? nullptr : reinterpret_cast<const uint16_t*>(weights[one.bias]);
  m.outputs = one.outputs;
  m.inputs = one.inputs;
  m.folds = one.folds;
  return m;
}

void Chain::multiply(size_t index, const int64_t* weights, int tokens) {
  const Instruction& one = code_[index];
  Matrix following;
  const Matrix* next = nullptr;
  for (size_t i = index + 1; i < code_.size() && !next; ++i)
    if (code_[i].act == Act::kProduct) {
      following = matrix(code_[i], weights);
      next = &following;
    }
  const auto rows = [&](size_t i) {
    if (one.operands.size() <= i) return SomeRows{nullptr, 0};
    return SomeRows{at(one.operands[i], 0), places_[one.operands[i].buffer].stride};
  };
  multiply_rows({kernels_, threads_.get(), &sums_, &wide_}, {matrix(one, weights), next}, tokens,
                rows(1), rows(2), rows(0));
}

void Chain::each_row(const Instruction& one, const int64_t* weights, int64_t token) {
  const auto floats = [&](int64_t index) {
    return index < 0 ? nullptr : reinterpret_cast<const float*>(weights[index]);
  };
  const RowKernels& rows = *kernels_->rows;
  const Operand& y = one.operands[0];
  const Norm norm = {y.size, one.scalar, one.centred, floats(one.weight), floats(one.bias)};
  const auto read = [&](size_t i, int64_t head) {
    return at(one.operands[i], token) + head * one.operands[i].stride;
  };
  const size_t second = one.operands.size() > 2 ? 2 : 1;
  for (int64_t head = 0; head < y.heads; ++head) {
    switch (one.act) {
      case Act::kNorm:
        rows.norm(read(1, head), norm, read(0, head));
        break;
      case Act::kTurn:
        rows.turn(read(1, head), read(2, head), read(3, head), y.size, read(0, head));
        break;
      case Act::kMap:
        rows.map(one.map, read(1, head), read(second, head), one.scalar, y.size, read(0, head));
        break;
      case Act::kProduct:
        break;
    }
  }
}

}  // namespace clover::dense
