#include "dense_cpu/dense.h"

#include <algorithm>
#include <stdexcept>

#include "dense_cpu/dispatch.h"

namespace clover::dense {
namespace {

constexpr int kPartsPerThread = 4;      // enough that threads finish at about one time
constexpr int kTogether = 8;            // fewer tokens than this are normed on one thread
constexpr int64_t kAloneBytes = 32768;  // of weights; less is multiplied on one thread

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

void require(bool good, const std::string& message) {
  if (!good) throw std::invalid_argument(message);
}

}  // namespace

Dense::Dense(int threads, const std::string& isa, const Shape& shape, const uint16_t* embedding,
             const uint16_t* final_norm, const uint16_t* head)
    : shape_(shape),
      kernels_(choose_kernels(isa)),
      embedding_(embedding),
      final_norm_(final_norm),
      head_{head, nullptr, shape.vocab, shape.hidden},
      threads_(ThreadPool::shared(threads)) {
  require(shape.hidden >= 1 && shape.heads >= 1 && shape.kv_heads >= 1 && shape.head_dim >= 2 &&
              shape.ffn >= 1 && shape.vocab >= 1,
          "sizes must be at least 1");
  require(shape.head_dim % 2 == 0, "head_dim must be even");
  normed_.resize(kMaxTokens * shape.hidden);
  gated_.resize(kMaxTokens * shape.ffn);
  qkv_.resize(kMaxTokens * (shape.heads + 2 * shape.kv_heads) * shape.head_dim);
}

void Dense::add_layer(Layer layer) {
  const auto size = [](Matrix& m, int64_t outputs, int64_t inputs) {
    m.outputs = outputs;
    m.inputs = inputs;
  };
  size(layer.qkv, (shape_.heads + 2 * shape_.kv_heads) * shape_.head_dim, shape_.hidden);
  size(layer.out, shape_.hidden, shape_.heads * shape_.head_dim);
  size(layer.gate_up, shape_.ffn, shape_.hidden);
  size(layer.down, shape_.hidden, shape_.ffn);
  layers_.push_back(layer);
}

template <typename Run>
void Dense::each(int count, const Run& run) {
  threads_->run(
      count, [](void* context, int i, int) { (*static_cast<const Run*>(context))(i); },
      const_cast<Run*>(&run));
}

// Splits `m`'s outputs into whole blocks. A thread that has done its share finds the start of its
// share of the `next` matrix on the way.
template <typename Run>
void Dense::each_part(const Matrix& m, const Matrix* next, const Run& run) {
  const int64_t blocks = ceil_div(m.outputs, kBlock);
  const int64_t threads = threads_->threads();
  const bool alone = m.outputs * m.inputs * 2 < kAloneBytes;
  const int64_t parts = alone ? 1 : std::min(blocks, threads * kPartsPerThread);
  each(static_cast<int>(parts), [&](int i) {
    const int64_t first = blocks * i / parts * kBlock;
    const int64_t last = std::min(blocks * (i + 1) / parts * kBlock, m.outputs);
    const uint16_t* ahead = m.weight + (last < m.outputs ? last : 0) * m.inputs;
    for (int64_t p = 0; next && p < threads; ++p)
      if (i + 1 == (p + 1) * parts / threads)
        ahead =
            next->weight + ceil_div(next->outputs, kBlock) * p / threads * kBlock * next->inputs;
    run(Part{first, last, ahead});
  });
}

void Dense::norm(const float* x, const uint16_t* weight, int tokens) {
  const auto one = [&](int t) {
    kernels_->norm(x + t * shape_.hidden, weight, shape_.hidden, shape_.eps,
                   normed_.data() + t * shape_.hidden);
  };
  if (tokens >= kTogether) return each(tokens, one);
  for (int t = 0; t < tokens; ++t) one(t);
}

void Dense::stage(int index, const StageCall& call) {
  require(index >= 0 && index <= layers(), "no such stage");
  require(call.tokens >= 1 && call.tokens <= kMaxTokens, "too many tokens, or none");
  std::lock_guard<std::mutex> turn(mutex_);
  if (index == 0)
    embed(call);
  else
    finish_layer(index - 1, call);
  if (index < layers()) start_layer(index, call);
}

void Dense::embed(const StageCall& call) {
  for (int t = 0; t < call.tokens; ++t)
    require(call.token_ids[t] >= 0 && call.token_ids[t] < shape_.vocab,
            "token " + std::to_string(call.token_ids[t]) + " is outside the vocabulary");
  for (int t = 0; t < call.tokens; ++t)
    kernels_->widen(embedding_ + call.token_ids[t] * shape_.hidden, shape_.hidden,
                    call.hidden_out + t * shape_.hidden);
}

void Dense::finish_layer(int index, const StageCall& call) {
  const Layer& layer = layers_[index];
  const int64_t hidden = shape_.hidden, ffn = shape_.ffn;
  const Rows attended = {call.attended, call.attended_stride, call.tokens};
  each_part(layer.out, &layer.gate_up, [&](const Part& part) {
    kernels_->project(layer.out, attended, part, call.hidden, call.hidden_out, hidden);
  });
  norm(call.hidden_out, layer.post_norm, call.tokens);
  each_part(layer.gate_up, &layer.down, [&](const Part& part) {
    kernels_->gate_up(layer.gate_up, normed(call.tokens), part, gated_.data(), ffn);
  });
  const Matrix* next = index + 1 < layers() ? &layers_[index + 1].qkv : &head_;
  const Rows gated = {gated_.data(), ffn, call.tokens};
  each_part(layer.down, next, [&](const Part& part) {
    kernels_->project(layer.down, gated, part, call.hidden_out, call.hidden_out, hidden);
  });
}

void Dense::start_layer(int index, const StageCall& call) {
  const Layer& layer = layers_[index];
  norm(call.hidden_out, layer.input_norm, call.tokens);
  each_part(layer.qkv, &layer.out, [&](const Part& part) {
    kernels_->project(layer.qkv, normed(call.tokens), part, nullptr, qkv_.data(),
                      layer.qkv.outputs);
  });
  const auto one = [&](int t) { rotate(layer, call, t); };
  if (call.tokens >= kTogether) return each(call.tokens, one);
  for (int t = 0; t < call.tokens; ++t) one(t);
}

void Dense::rotate(const Layer& layer, const StageCall& call, int token) {
  const int64_t dim = shape_.head_dim, heads = shape_.heads, kv_heads = shape_.kv_heads;
  const float* x = qkv_.data() + token * layer.qkv.outputs;
  uint16_t* q = call.q + token * call.q_stride;
  uint16_t* k = call.k + token * call.k_stride;
  for (int64_t h = 0; h < heads + kv_heads; ++h)
    kernels_->rotate(x + h * dim, layer.qk_norm ? layer.qk_norm + h * dim : nullptr, shape_.eps,
                     call.cos + token * dim, call.sin + token * dim, dim,
                     h < heads ? q + h * dim : k + (h - heads) * dim);
  kernels_->narrow(x + (heads + kv_heads) * dim, kv_heads * dim, call.v + token * call.v_stride);
}

void Dense::logits(const float* hidden, int tokens, float* y) {
  require(tokens >= 1 && tokens <= kMaxTokens, "too many tokens, or none");
  std::lock_guard<std::mutex> turn(mutex_);
  norm(hidden, final_norm_, tokens);
  each_part(head_, layers_.empty() ? nullptr : &layers_[0].qkv, [&](const Part& part) {
    kernels_->project(head_, normed(tokens), part, nullptr, y, shape_.vocab);
  });
}

}  // namespace clover::dense
