#include "dense_cpu/dense.h"

#include <algorithm>
#include <stdexcept>

#include "dense_cpu/dispatch.h"
#include "dense_cpu/parts.h"

namespace clover::dense {
namespace {

constexpr int kTogether = 8;  // fewer tokens than this are normed on one thread

int64_t padded(int64_t inputs) { return round_up(inputs, kGroup); }

void require(bool good, const std::string& message) {
  if (!good) throw std::invalid_argument(message);
}

}  // namespace

Dense::Dense(int threads, const std::string& isa, const Shape& shape, const uint16_t* embedding,
             const uint16_t* final_norm, Matrix head)
    : shape_(shape),
      kernels_(choose_kernels(isa)),
      embedding_(embedding),
      final_norm_(final_norm),
      head_(head),
      threads_(ThreadPool::shared(threads)) {
  require(shape.hidden >= 1 && shape.heads >= 1 && shape.kv_heads >= 1 && shape.head_dim >= 2 &&
              shape.ffn >= 1 && shape.vocab >= 1,
          "sizes must be at least 1");
  require(shape.head_dim % 2 == 0, "head_dim must be even");
  head_.outputs = shape.vocab;
  head_.inputs = shape.hidden;
}

void Dense::reserve(int tokens) {
  require(tokens >= 1, "there are no tokens");
  if (tokens <= tokens_) return;
  tokens_ = tokens;
  normed_.resize(tokens_ * padded(shape_.hidden));
  gated_.resize(tokens_ * padded(shape_.ffn));
  qkv_.resize(tokens_ * (shape_.heads + 2 * shape_.kv_heads) * shape_.head_dim);
  const int64_t widest = std::max({shape_.hidden, shape_.ffn, shape_.heads * shape_.head_dim});
  codes_.resize(tokens_ * padded(widest));
  scales_.resize(codes_.size() / kGroup);
  sums_.resize(codes_.size() / kGroup);
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
  layer.gate_up.folds = 2;
  layers_.push_back(layer);
}

// `data`'s rows as `m` needs them.
Rows Dense::rows(const Matrix& m, const uint16_t* data, int64_t stride, int tokens) {
  if (m.format == Format::kBFloat16)
    return rows_for(*kernels_, *threads_, {data, stride, tokens, 0, nullptr, nullptr}, m.inputs,
                    wide_);
  const int64_t groups = m.groups();
  each_token(tokens, [&](int t) {
    kernels_->encode(data + t * stride, m.inputs, codes_.data() + t * groups * kGroup,
                     scales_.data() + t * groups, sums_.data() + t * groups);
  });
  return {codes_.data(), groups * kGroup, tokens, groups, scales_.data(), sums_.data()};
}

template <typename Run>
void Dense::each_token(int tokens, const Run& run) {
  if (tokens >= kTogether) return each(*threads_, tokens, run);
  for (int t = 0; t < tokens; ++t) run(t);
}

void Dense::norm(const float* x, const uint16_t* weight, int tokens) {
  each_token(tokens, [&](int t) {
    kernels_->norm(x + t * shape_.hidden, weight, shape_.hidden, shape_.eps,
                   normed_.data() + t * padded(shape_.hidden));
  });
}

Rows Dense::normed(const Matrix& m, int tokens) {
  return rows(m, normed_.data(), padded(shape_.hidden), tokens);
}

void Dense::stage(int index, const StageCall& call) {
  require(index >= 0 && index <= layers(), "no such stage");
  std::lock_guard<std::mutex> turn(mutex_);
  reserve(call.tokens);
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

void Dense::project(const Matrix& m, const Matrix* next, const Rows& x, const float* residual,
                    float* y) {
  each_part(*threads_, m, next, x, [&](const Part& part, const Rows& some, int64_t from) {
    const int64_t at = from * m.outputs;
    kernels_->project(m, some, part, residual ? residual + at : nullptr, y + at, m.outputs);
  });
}

void Dense::finish_layer(int index, const StageCall& call) {
  const Layer& layer = layers_[index];
  const int64_t gated = padded(shape_.ffn);
  const Rows attended = rows(layer.out, call.attended, call.attended_stride, call.tokens);
  project(layer.out, &layer.gate_up, attended, call.hidden, call.hidden_out);
  norm(call.hidden_out, layer.post_norm, call.tokens);
  const Rows x = normed(layer.gate_up, call.tokens);
  each_part(*threads_, layer.gate_up, &layer.down, x,
            [&](const Part& part, const Rows& some, int64_t from) {
              kernels_->gate_up(layer.gate_up, some, part, gated_.data() + from * gated, gated);
            });
  const Matrix* next = index + 1 < layers() ? &layers_[index + 1].qkv : &head_;
  project(layer.down, next, rows(layer.down, gated_.data(), gated, call.tokens), call.hidden_out,
          call.hidden_out);
}

void Dense::start_layer(int index, const StageCall& call) {
  const Layer& layer = layers_[index];
  norm(call.hidden_out, layer.input_norm, call.tokens);
  project(layer.qkv, &layer.out, normed(layer.qkv, call.tokens), nullptr, qkv_.data());
  each_token(call.tokens, [&](int t) { rotate(layer, call, t); });
}

void Dense::rotate(const Layer& layer, const StageCall& call, int token) {
  const int64_t dim = shape_.head_dim, heads = shape_.heads, kv_heads = shape_.kv_heads;
  const float* x = qkv_.data() + token * layer.qkv.outputs;
  uint16_t* q = call.q + token * call.q_stride;
  uint16_t* k = call.k + token * call.k_stride;
  const int64_t at = (call.positions ? call.positions[token] : token) * dim;
  for (int64_t h = 0; h < heads + kv_heads; ++h)
    kernels_->rotate(x + h * dim, layer.qk_norm ? layer.qk_norm + h * dim : nullptr, shape_.eps,
                     call.cos + at, call.sin + at, dim,
                     h < heads ? q + h * dim : k + (h - heads) * dim);
  kernels_->narrow(x + (heads + kv_heads) * dim, kv_heads * dim, call.v + token * call.v_stride);
}

void Dense::logits(const float* hidden, int tokens, float* y) {
  std::lock_guard<std::mutex> turn(mutex_);
  reserve(tokens);
  norm(hidden, final_norm_, tokens);
  project(head_, layers_.empty() ? nullptr : &layers_[0].qkv, normed(head_, tokens), nullptr, y);
}

}  // namespace clover::dense
