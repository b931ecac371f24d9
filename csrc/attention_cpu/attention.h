// Paged attention on the CPU: a pool described layer by layer, appends, and the launcher that
// splits a call into spans and runs them on its threads.
//
// How a call is split depends on its lengths and the number of threads alone, and partial results
// merge in order of position: the same call gives the same bits.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "attention_cpu/kernel.h"
#include "common/thread_pool.h"

namespace clover::attention {

// Query tokens times query heads of a KV head that are computed in one pass over the KV.
constexpr int kMaxRows = 64;
// Bytes of sums that the KV heads of a span may have: they take turns with these in the cache.
constexpr int64_t kMaxSums = 32 << 10;

struct LayerConfig {
  DType dtype;
  int kv_heads;
  int group;
  int k_dim;
  int v_dim;
  float scale;
  int64_t window;  // 0: none
  float softcap;   // 0: none
  std::vector<float> sinks;
  std::vector<float> alibi_slopes;
};

// Strides count elements. Heads and elements are contiguous within a token.
struct AppendCall {
  const void* k;
  int64_t k_stride;
  const void* v;
  int64_t v_stride;
  const int64_t* slots;
  int64_t tokens;
  DType dtype;  // of k and v: float32, bfloat16 or float16, whatever the layer stores
};

struct AttendCall {
  const void* q;
  int64_t q_stride;
  const int32_t* starts;
  const int32_t* tables;
  int64_t table_stride;
  const int32_t* lengths;
  int64_t rows;
  int64_t tokens;
  void* o;                   // [tokens, heads, v_dim], contiguous
  float* lse;                // [tokens, heads], contiguous
  DType dtype;               // of q and o: float32, bfloat16 or float16, whatever the layer stores
  int64_t most_queries = 0;  // rows of more query tokens are left to the caller; 0: none are
};

class Attention {
 public:
  // `pool` must outlive this; a size or pointer that cannot be is std::invalid_argument.
  Attention(int threads, const std::string& isa, void* pool, int64_t pool_bytes, int block_size,
            int64_t num_blocks);

  // Adds the next layer, which lies after those before it in the pool.
  void add_layer(LayerConfig config);

  int layers() const { return static_cast<int>(layers_.size()); }
  const Layer& layer(int i) const { return layers_.at(i)->layer; }
  const char* isa(int i) const { return layers_.at(i)->kernels->name; }

  // std::invalid_argument before anything is written where a slot is outside the pool.
  void append(int layer, const AppendCall& call);

  // Fills o and lse of every row that is not left to the caller; std::invalid_argument where
  // starts, lengths or blocks cannot be. Callers on several threads take turns.
  void attend(int layer, const AttendCall& call);

 private:
  struct Entry {
    Layer layer;
    LayerConfig config;  // owns what `layer` points to
    const Kernels* kernels;
  };
  // Some query tokens of a row and one KV head or several: `count` spans from `first` on, whose
  // partial results, if they are several, lie at `partials`: for each head those of the spans.
  struct Item {
    Span whole;
    int64_t token;  // the first one's number within the call
    int first;
    int count;
    int64_t partials;
  };
  struct Plan;

  static int64_t work_of(const Item& item);
  int64_t visible_from(const Layer& layer, int64_t query_at) const;
  void check(const Layer& layer, const AttendCall& call) const;
  int64_t list_items(const Layer& layer, const AttendCall& call);
  int heads_together(const Layer& layer, const AttendCall& call) const;
  void list_row(const Layer& layer, const AttendCall& call, int64_t row, int queries, int heads);
  void split_items(const Layer& layer, int64_t total);
  void run(const Entry& entry, const AttendCall& call, int64_t total);
  void run_span(const Plan& plan, int index, int thread);
  void finish_item(const Plan& plan, const Item& item, float* partials);

  // Memory that grows and begins at a cache line.
  class Floats {
   public:
    float* at_least(int64_t floats);

   private:
    std::vector<float> memory_;
  };

  std::string isa_;
  unsigned char* pool_;
  int64_t pool_bytes_;
  int block_size_;
  int64_t num_blocks_;
  int64_t used_bytes_ = 0;
  std::shared_ptr<ThreadPool> threads_;
  std::vector<std::unique_ptr<Entry>> layers_;
  std::mutex mutex_;  // of what follows
  // Kept between calls so that they do not allocate once they have grown.
  std::vector<Span> spans_;
  std::vector<int> item_of_;  // by span
  std::vector<Item> items_;
  Floats partials_;
  Floats scratch_;
};

}  // namespace clover::attention
