#include "attention_cpu/attention.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "attention_cpu/dispatch.h"

namespace clover::attention {
namespace {

constexpr int64_t kMinSpan = 256;       // positions; below this merging costs more than it gives
constexpr int64_t kSpansPerThread = 8;  // enough that the last spans finish at about one time
constexpr int64_t kAloneBytes = 128 << 10;  // less KV than this is read before a thread wakes up

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

void require(bool good, const std::string& message) {
  if (!good) throw std::invalid_argument(message);
}

}  // namespace

struct Attention::Plan {
  Attention* self;
  const Entry* entry;
  const AttendCall* call;
  int64_t scratch;  // floats per thread: kernel scratch, then one partial result
};

Attention::Attention(int threads, const std::string& isa, void* pool, int64_t pool_bytes,
                     int block_size, int64_t num_blocks)
    : isa_(isa),
      pool_(static_cast<unsigned char*>(pool)),
      pool_bytes_(pool_bytes),
      block_size_(block_size),
      num_blocks_(num_blocks),
      threads_(ThreadPool::shared(threads)) {
  require(block_size >= 1, "block_size must be at least 1");
  require(num_blocks >= 1, "num_blocks must be at least 1");
}

void Attention::add_layer(LayerConfig config) {
  require(config.kv_heads >= 1 && config.group >= 1, "heads must be at least 1");
  require(config.k_dim >= 4 && config.v_dim >= 4, "head sizes must be at least 4");
  const size_t heads = static_cast<size_t>(config.kv_heads) * config.group;
  require(config.sinks.empty() || config.sinks.size() == heads, "one sink per query head");
  require(config.alibi_slopes.empty() || config.alibi_slopes.size() == heads,
          "one alibi slope per query head");
  auto entry = std::make_unique<Entry>();
  entry->config = std::move(config);
  const LayerConfig& c = entry->config;
  entry->kernels = choose_kernels(isa_, {c.k_dim, c.v_dim});
  entry->layer = {pool_ + used_bytes_,
                  c.dtype,
                  c.kv_heads,
                  c.group,
                  c.k_dim,
                  c.v_dim,
                  block_size_,
                  num_blocks_,
                  c.scale,
                  c.window,
                  c.softcap,
                  c.sinks.empty() ? nullptr : c.sinks.data(),
                  c.alibi_slopes.empty() ? nullptr : c.alibi_slopes.data()};
  const int64_t bytes = entry->layer.block_elements() * dtype_bytes(c.dtype) * num_blocks_;
  require(bytes <= pool_bytes_ - used_bytes_, "the layers do not fit into the pool");
  used_bytes_ += bytes;
  layers_.push_back(std::move(entry));
}

void Attention::append(int index, const AppendCall& call) {
  const Layer& layer = layers_.at(index)->layer;
  const int64_t size = dtype_bytes(layer.dtype);
  const int64_t slots = layer.num_blocks * layer.block_size;
  for (int64_t t = 0; t < call.tokens; ++t)
    require(call.slots[t] >= 0 && call.slots[t] < slots,
            "slot " + std::to_string(call.slots[t]) + " is outside the pool");
  for (int64_t t = 0; t < call.tokens; ++t) {
    const int64_t offset = call.slots[t] % layer.block_size;
    unsigned char* block =
        layer.base + call.slots[t] / layer.block_size * layer.block_elements() * size;
    const auto* k = static_cast<const unsigned char*>(call.k) + t * call.k_stride * size;
    const auto* v = static_cast<const unsigned char*>(call.v) + t * call.v_stride * size;
    const int64_t k_bytes = layer.k_dim * size, v_bytes = layer.v_dim * size;
    for (int head = 0; head < layer.kv_heads; ++head) {
      std::memcpy(block + layer.keys_at(head) * size + offset * k_bytes, k + head * k_bytes,
                  k_bytes);
      std::memcpy(block + layer.values_at(head) * size + offset * v_bytes, v + head * v_bytes,
                  v_bytes);
    }
  }
}

int64_t Attention::visible_from(const Layer& layer, int64_t query_at) const {
  return layer.window > 0 ? std::max<int64_t>(0, query_at - layer.window + 1) : 0;
}

void Attention::check(const Layer& layer, const AttendCall& call) const {
  require(call.starts[0] == 0 && call.starts[call.rows] == call.tokens,
          "query_starts must go from 0 to the number of query tokens");
  for (int64_t row = 0; row < call.rows; ++row) {
    const int64_t queries = int64_t{call.starts[row + 1]} - call.starts[row];
    const int64_t length = call.lengths[row];
    const std::string name = "row " + std::to_string(row);
    require(queries >= 1, name + " has no query token");
    require(length >= queries, name + " has more query tokens than its length");
    require(ceil_div(length, layer.block_size) <= call.table_stride,
            name + " is longer than its block table");
    const int32_t* table = call.tables + row * call.table_stride;
    const int64_t first = visible_from(layer, length - queries) / layer.block_size;
    for (int64_t b = first; b < ceil_div(length, layer.block_size); ++b)
      require(table[b] >= 0 && table[b] < layer.num_blocks,
              name + " names block " + std::to_string(table[b]) + ", outside the pool");
  }
}

// One item per query token and KV head, in that order; returns the positions of all together.
int64_t Attention::list_items(const Layer& layer, const AttendCall& call) {
  whole_.clear();
  items_.clear();
  int64_t total = 0;
  const int64_t head_bytes = int64_t{layer.group} * layer.k_dim * dtype_bytes(layer.dtype);
  for (int64_t row = 0; row < call.rows; ++row) {
    const int64_t first = call.starts[row], last = call.starts[row + 1];
    if (last - first > kMaxQueries) continue;
    for (int64_t token = first; token < last; ++token) {
      const int64_t query_at = call.lengths[row] - (last - token);
      const int64_t begin = visible_from(layer, query_at);
      const auto* q = static_cast<const unsigned char*>(call.q) +
                      token * call.q_stride * dtype_bytes(layer.dtype);
      for (int head = 0; head < layer.kv_heads; ++head) {
        whole_.push_back({q + head * head_bytes, call.tables + row * call.table_stride, head,
                          query_at, begin, query_at + 1});
        items_.push_back({token, 0, 0});
        total += query_at + 1 - begin;
      }
    }
  }
  return total;
}

void Attention::split_items(const Layer& layer, int64_t total) {
  spans_.clear();
  item_of_.clear();
  const int64_t share = ceil_div(total, threads_->threads() * kSpansPerThread);
  const int64_t most = threads_->threads() == 1 ? total : std::max(kMinSpan, share);
  size_t partials = 0;
  for (size_t i = 0; i < items_.size(); ++i) {
    const Span& whole = whole_[i];
    const int64_t length = whole.end - whole.begin;
    const int64_t count = ceil_div(length, most);
    items_[i].first = static_cast<int>(spans_.size());
    items_[i].count = static_cast<int>(count);
    for (int64_t s = 0; s < count; ++s) {
      spans_.push_back(whole);
      spans_.back().begin = whole.begin + length * s / count;
      spans_.back().end = whole.begin + length * (s + 1) / count;
      item_of_.push_back(static_cast<int>(i));
    }
    if (count > 1) partials = spans_.size() * partial_floats(layer);
  }
  if (partials_.size() < partials) partials_.resize(partials);
}

void Attention::attend(int index, const AttendCall& call) {
  const Entry& entry = *layers_.at(index);
  if (call.rows == 0) return;
  check(entry.layer, call);
  std::lock_guard<std::mutex> turn(mutex_);
  const int64_t total = list_items(entry.layer, call);
  if (items_.empty()) return;
  split_items(entry.layer, total);
  run(entry, call, total);
}

void Attention::run(const Entry& entry, const AttendCall& call, int64_t total) {
  const Layer& layer = entry.layer;
  const int64_t scratch = scratch_floats(layer) + partial_floats(layer) + 16;  // a line apart
  const size_t floats = static_cast<size_t>(scratch) * threads_->threads();
  if (scratch_.size() < floats) scratch_.resize(floats);
  Plan plan = {this, &entry, &call, scratch};
  const int count = static_cast<int>(spans_.size());
  if (total * (layer.k_dim + layer.v_dim) * dtype_bytes(layer.dtype) < kAloneBytes) {
    for (int i = 0; i < count; ++i) run_span(plan, i, 0);
  } else {
    threads_->run(
        count,
        [](void* context, int i, int thread) {
          const Plan& plan = *static_cast<Plan*>(context);
          plan.self->run_span(plan, i, thread);
        },
        &plan);
  }
  for (const Item& item : items_)
    if (item.count > 1)
      finish_item(plan, item, partials_.data() + item.first * partial_floats(layer));
}

void Attention::run_span(const Plan& plan, int index, int thread) {
  const Layer& layer = plan.entry->layer;
  const Item& item = items_[item_of_[index]];
  float* scratch = scratch_.data() + thread * plan.scratch;
  float* partial = item.count > 1 ? partials_.data() + index * partial_floats(layer)
                                  : scratch + scratch_floats(layer);
  plan.entry->kernels->span(layer, spans_[index], scratch, partial);
  if (item.count == 1) finish_item(plan, item, partial);
}

void Attention::finish_item(const Plan& plan, const Item& item, float* partials) {
  const Layer& layer = plan.entry->layer;
  const int head = spans_[item.first].head;
  const int64_t at = (item.token * layer.kv_heads + head) * layer.group;
  auto* o = static_cast<unsigned char*>(plan.call->o);
  plan.entry->kernels->finish(layer, head, partials, item.count,
                              o + at * layer.v_dim * dtype_bytes(layer.dtype), plan.call->lse + at);
}

}  // namespace clover::attention
