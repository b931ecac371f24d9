#include "attention_cpu/attention.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "attention_cpu/dispatch.h"

namespace clover::attention {
namespace {

constexpr int64_t kMinSpan = 256;       // positions; below this merging costs more than it gives
constexpr int64_t kSpanStep = 16;       // positions; spans begin with a run of a block's keys
constexpr int64_t kSpansPerThread = 8;  // enough that the last spans finish at about one time
constexpr int64_t kLongRun = 32 << 10;  // bytes of a block below which heads gain nothing together
constexpr int64_t kAloneBytes = 128 << 10;  // less KV than this is done before a thread wakes up
// Less is done alone where threads are asleep: awake, they keep cores from whoever has the next
// turn.
constexpr int64_t kWakingBytes = 512 << 10;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

void require(bool good, const std::string& message) {
  if (!good) throw std::invalid_argument(message);
}

struct Putting {
  const Layer* layer;
  const Kernels* kernels;
  const AppendCall* call;
};

// Keys of a head, then values. All tokens of a head are one task: where two share a slot the later
// one stays, whatever the threads do.
void put_head(const Putting& all, int task) {
  const AppendCall& call = *all.call;
  const bool keys = task < all.layer->kv_heads;
  const int head = task % all.layer->kv_heads;
  const int64_t size = dtype_bytes(call.dtype);
  const int64_t dim = keys ? all.layer->k_dim : all.layer->v_dim;
  const auto* from = static_cast<const unsigned char*>(keys ? call.k : call.v) + head * dim * size;
  all.kernels->put(*all.layer, {call.dtype, from, (keys ? call.k_stride : call.v_stride) * size,
                                call.slots, call.tokens, keys, head});
}

}  // namespace

// Query tokens times KV heads that each position of an item costs.
int64_t Attention::work_of(const Item& item) {
  return int64_t{item.whole.queries} * item.whole.heads;
}

struct Attention::Plan {
  Attention* self;
  const Entry* entry;
  const AttendCall* call;
  float* partials;  // of items of several spans
  float* scratch;
  int64_t work;          // floats that the kernel works in, per thread
  int64_t scratch_each;  // floats per thread: these, then one partial result
};

float* Attention::Floats::at_least(int64_t floats) {
  constexpr int64_t kLine = 16;
  if (static_cast<int64_t>(memory_.size()) < floats + kLine) memory_.resize(floats + kLine);
  const auto address = reinterpret_cast<uintptr_t>(memory_.data());
  return reinterpret_cast<float*>((address + 63) / 64 * 64);
}

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
  const int64_t bytes = entry->layer.block_bytes() * num_blocks_;
  require(bytes <= pool_bytes_ - used_bytes_, "the layers do not fit into the pool");
  used_bytes_ += bytes;
  layers_.push_back(std::move(entry));
}

void Attention::append(int index, const AppendCall& call) {
  const Layer& layer = layers_.at(index)->layer;
  const Kernels& kernels = *layers_.at(index)->kernels;
  require(call.dtype != DType::kInt8, "tokens are floats, whatever is stored");
  const int64_t slots = layer.num_blocks * layer.block_size;
  for (int64_t t = 0; t < call.tokens; ++t)
    require(call.slots[t] >= 0 && call.slots[t] < slots,
            "slot " + std::to_string(call.slots[t]) + " is outside the pool");
  Putting all = {&layer, &kernels, &call};
  const int tasks = 2 * layer.kv_heads;
  if (call.tokens * layer.block_bytes() / layer.block_size < kAloneBytes) {
    for (int i = 0; i < tasks; ++i) put_head(all, i);
  } else {
    threads_->run(
        tasks, [](void* all, int i, int) { put_head(*static_cast<const Putting*>(all), i); }, &all);
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

// Items in the order of query tokens, then of KV heads; returns what they cost, in positions times
// query tokens and KV heads.
int64_t Attention::list_items(const Layer& layer, const AttendCall& call) {
  items_.clear();
  const int most = std::max(1, kMaxRows / layer.group);
  const int heads = heads_together(layer, call);
  for (int64_t row = 0; row < call.rows; ++row) {
    const int64_t queries = call.starts[row + 1] - call.starts[row];
    if (call.most_queries == 0 || queries <= call.most_queries)
      list_row(layer, call, row, most, queries == 1 ? heads : 1);
  }
  int64_t total = 0;
  for (const Item& item : items_) total += (item.whole.end - item.whole.begin) * work_of(item);
  return total;
}

// KV heads that share a span, whose keys in a block are then one run of memory: as many as leave
// enough spans for the threads.
int Attention::heads_together(const Layer& layer, const AttendCall& call) const {
  if (layer.values_at(0) < kLongRun) return 1;
  int64_t parts = 0;
  for (int64_t row = 0; row < call.rows; ++row) {
    const int64_t length = call.lengths[row];
    parts += ceil_div(length - visible_from(layer, length - 1), kMinSpan);
  }
  const int64_t wanted = threads_->threads() == 1 ? 1 : threads_->threads() * kSpansPerThread;
  int heads = layer.kv_heads;
  while (heads > 1 && (int64_t{heads} * layer.group * layer.v_dim * 4 > kMaxSums ||
                       parts * ceil_div(layer.kv_heads, heads) < wanted))
    heads = (heads + 1) / 2;
  return heads;
}

// Items of a row, each of up to `most` query tokens and `heads` KV heads.
void Attention::list_row(const Layer& layer, const AttendCall& call, int64_t row, int most,
                         int heads) {
  const int64_t last = call.starts[row + 1], size = dtype_bytes(call.dtype);
  for (int64_t token = call.starts[row]; token < last; token += most) {
    const int queries = static_cast<int>(std::min<int64_t>(most, last - token));
    const int64_t query_at = call.lengths[row] - (last - token);
    const auto* q = static_cast<const unsigned char*>(call.q) + token * call.q_stride * size;
    for (int head = 0; head < layer.kv_heads; head += heads) {
      const Span whole = {q + int64_t{head} * layer.group * layer.k_dim * size,
                          call.q_stride * size,
                          call.dtype,
                          queries,
                          call.tables + row * call.table_stride,
                          head,
                          std::min(heads, layer.kv_heads - head),
                          query_at,
                          visible_from(layer, query_at),
                          query_at + queries};
      items_.push_back({whole, token, 0, 0, 0});
    }
  }
}

void Attention::split_items(const Layer& layer, int64_t total) {
  spans_.clear();
  item_of_.clear();
  const int64_t share = ceil_div(total, threads_->threads() * kSpansPerThread);
  int64_t partials = 0;
  for (size_t i = 0; i < items_.size(); ++i) {
    Item& item = items_[i];
    const int64_t length = item.whole.end - item.whole.begin;
    const int64_t most = std::max(kMinSpan, share / work_of(item));
    const int64_t count = threads_->threads() == 1 ? 1 : ceil_div(length, most);
    item.first = static_cast<int>(spans_.size());
    item.count = static_cast<int>(count);
    item.partials = partials;
    for (int64_t s = 0; s < count; ++s) {
      if (s > 0)
        spans_.back().end = (item.whole.begin + length * s / count) / kSpanStep * kSpanStep;
      const int64_t begin = s > 0 ? spans_.back().end : item.whole.begin;
      spans_.push_back(item.whole);
      spans_.back().begin = begin;
      item_of_.push_back(static_cast<int>(i));
    }
    if (count > 1) partials += count * item.whole.heads * partial_floats(layer, item.whole.queries);
  }
  partials_.at_least(partials);
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
  int64_t work = 0, partial = 0;
  for (const Item& item : items_) {
    const auto [queries, heads] = std::pair(item.whole.queries, item.whole.heads);
    work = std::max(work, scratch_floats(layer, queries, heads));
    partial = std::max(partial, heads * partial_floats(layer, queries));
  }
  const int64_t each = work + partial;
  float* scratch = scratch_.at_least(each * threads_->threads());
  Plan plan = {this, &entry, &call, partials_.at_least(0), scratch, work, each};
  const int count = static_cast<int>(spans_.size());
  const int64_t bytes = total * (layer.k_dim + layer.v_dim) * dtype_bytes(layer.dtype);
  if (bytes < kAloneBytes) {
    for (int i = 0; i < count; ++i) run_span(plan, i, 0);
  } else {
    threads_->run(
        count,
        [](void* context, int i, int thread) {
          const Plan& plan = *static_cast<Plan*>(context);
          plan.self->run_span(plan, i, thread);
        },
        &plan, bytes < kWakingBytes ? ThreadPool::Asleep::kLeftAsleep : ThreadPool::Asleep::kWoken);
  }
  for (const Item& item : items_)
    if (item.count > 1) finish_item(plan, item, plan.partials + item.partials);
}

void Attention::run_span(const Plan& plan, int index, int thread) {
  const Layer& layer = plan.entry->layer;
  const Item& item = items_[item_of_[index]];
  const Span& span = spans_[index];
  float* scratch = plan.scratch + thread * plan.scratch_each;
  float* partial = scratch + plan.work;
  const int64_t floats = partial_floats(layer, span.queries);
  if (item.count > 1) partial = plan.partials + item.partials + (index - item.first) * floats;
  const Span* next = index + 1 < static_cast<int>(spans_.size()) ? &span + 1 : nullptr;
  plan.entry->kernels->span(layer, span, next, scratch, partial, item.count * floats);
  if (item.count == 1) finish_item(plan, item, partial);
}

void Attention::finish_item(const Plan& plan, const Item& item, float* partials) {
  const Layer& layer = plan.entry->layer;
  const int64_t heads = int64_t{layer.kv_heads} * layer.group;
  const int64_t size = dtype_bytes(plan.call->dtype);
  Span one = item.whole;
  for (int head = 0; head < item.whole.heads; ++head, ++one.head) {
    const int64_t at = item.token * heads + int64_t{one.head} * layer.group;
    const Result result = {static_cast<unsigned char*>(plan.call->o) + at * layer.v_dim * size,
                           heads * layer.v_dim * size, plan.call->lse + at, heads};
    plan.entry->kernels->finish(layer, one, partials, item.count, result);
    partials += item.count * partial_floats(layer, item.whole.queries);
  }
}

}  // namespace clover::attention
