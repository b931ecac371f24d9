// The dense half of the Llama family: what lies between two attentions is one call, on the threads
// of a pool. Packed weights stay where the caller has them. Few tokens are bound by reading weights
// and split over outputs; many are bound by arithmetic and split over outputs and tokens.
//
// A stage is the end of one layer (output projection, FFN, each added to the hidden rows) and the
// start of the next (norm, queries, keys, values, rotation). How a product is split depends on its
// size and the number of threads alone, and every sum is taken in one order: the same call gives
// the same bits, and a token's results do not depend on the others of its call.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "common/thread_pool.h"
#include "dense_cpu/kernel.h"

namespace clover::dense {

struct Shape {
  int64_t hidden;
  int64_t heads;
  int64_t kv_heads;
  int64_t head_dim;  // even
  int64_t ffn;
  int64_t vocab;
  float eps;
};

struct Layer {
  const uint16_t* input_norm;
  Matrix qkv;
  const uint16_t* qk_norm;  // [heads + kv_heads, head_dim], or null
  Matrix out;
  const uint16_t* post_norm;
  Matrix gate_up;
  Matrix down;
};

// Strides count elements from token to token; heads and their elements are contiguous.
struct StageCall {
  int tokens;
  const int64_t* token_ids;  // stage 0 only
  const uint16_t* attended;  // later stages: [tokens, heads, head_dim]
  int64_t attended_stride;
  const float* hidden;       // later stages: [tokens, hidden], contiguous
  float* hidden_out;         // not `hidden`
  const int64_t* positions;  // rows of cos and sin, by token; null: one after another
  const uint16_t* cos;       // [rows, head_dim], contiguous; of sin the first half is negated
  const uint16_t* sin;
  uint16_t* q;  // not written by the last stage
  int64_t q_stride;
  uint16_t* k;
  int64_t k_stride;
  uint16_t* v;
  int64_t v_stride;
};

class Dense {
 public:
  // All that is pointed to must outlive this; sizes that cannot be are std::invalid_argument.
  Dense(int threads, const std::string& isa, const Shape& shape, const uint16_t* embedding,
        const uint16_t* final_norm, Matrix head);

  // The next layer; sizes of matrices are set here.
  void add_layer(Layer layer);

  const Shape& shape() const { return shape_; }
  int layers() const { return static_cast<int>(layers_.size()); }
  const char* isa() const { return kernels_->name; }

  // Buffers grow with the largest call. Callers on several threads take turns.
  void stage(int index, const StageCall& call);

  // y [tokens, vocab] from the hidden rows of the last stage.
  void logits(const float* hidden, int tokens, float* y);

 private:
  template <typename Run>
  void each_token(int tokens, const Run& run);

  void reserve(int tokens);
  Rows rows(const Matrix& m, const uint16_t* data, int64_t stride, int tokens);
  Rows normed(const Matrix& m, int tokens);
  void project(const Matrix& m, const Matrix* next, const Rows& x, const float* residual, float* y);
  void embed(const StageCall& call);
  void finish_layer(int index, const StageCall& call);
  void start_layer(int index, const StageCall& call);
  void rotate(const Layer& layer, const StageCall& call, int token);
  void norm(const float* x, const uint16_t* weight, int tokens);

  Shape shape_;
  const Kernels* kernels_;
  const uint16_t* embedding_;
  const uint16_t* final_norm_;
  Matrix head_;
  std::vector<Layer> layers_;
  std::shared_ptr<ThreadPool> threads_;
  std::mutex mutex_;  // of the buffers below
  // Rows are filled up with zeros to whole groups.
  int64_t tokens_ = 0;
  std::vector<uint16_t> normed_;
  std::vector<uint16_t> gated_;
  std::vector<float> qkv_;
  // Rows as codes, where weights are quantised.
  std::vector<uint16_t> codes_;
  std::vector<float> scales_;
  std::vector<float> sums_;
  std::vector<float> wide_;  // rows in float32, where bfloat16 weights need it
};

}  // namespace clover::dense
