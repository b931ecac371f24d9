// Where the keys and values of the context positions lie that are computed at a time, and their way
// into the cache ahead of that. Included by kernels alone, once per instruction set.
#pragma once

#include "attention_cpu/kernel.h"
#include "common/simd.h"

namespace clover::attention {
namespace {

template <typename T>
constexpr bool kScaled = false;
template <>
constexpr bool kScaled<Int8> = true;

// What is past `count` repeats the last position, so that whole vectors of positions can be scored
// without reading what is not the request's.
template <typename T>
struct Tile {
  int count;
  int runs;         // of rows that follow one another in memory
  int ends[kTile];  // of runs
  const T* keys[kTile];
  const T* values[kTile];
  const float* key_scales[kTile];  // these and the values' only where numbers are scaled
  const float* value_scales[kTile];
};

template <typename T>
CLOVER_INLINE void locate_run(const Layer& layer, const Span& span, int64_t at, int i, int end,
                              Tile<T>& tile) {
  const int offset = static_cast<int>((at + i) % layer.block_size);
  const unsigned char* block =
      layer.base + span.table[(at + i) / layer.block_size] * layer.block_bytes();
  const T* key =
      reinterpret_cast<const T*>(block + layer.keys_at(span.head)) + int64_t{offset} * layer.k_dim;
  const T* value = reinterpret_cast<const T*>(block + layer.values_at(span.head)) +
                   int64_t{offset} * layer.v_dim;
  const auto* key_scale =
      reinterpret_cast<const float*>(block + layer.key_scales_at(span.head)) + offset;
  const auto* value_scale =
      reinterpret_cast<const float*>(block + layer.value_scales_at(span.head)) + offset;
  for (; i < end; ++i) {
    tile.keys[i] = key;
    tile.values[i] = value;
    key += layer.k_dim;
    value += layer.v_dim;
    if (kScaled<T>) {
      tile.key_scales[i] = key_scale++;
      tile.value_scales[i] = value_scale++;
    }
  }
}

template <typename T>
void locate(const Layer& layer, const Span& span, int64_t at, Tile<T>& tile) {
  const int count = span.end - at < kTile ? static_cast<int>(span.end - at) : kTile;
  tile.count = count;
  tile.runs = 0;
  for (int i = 0; i < count;) {
    const int left = layer.block_size - static_cast<int>((at + i) % layer.block_size);
    const int end = i + left < count ? i + left : count;
    locate_run(layer, span, at, i, end, tile);
    tile.ends[tile.runs++] = end;
    i = end;
  }
  for (int i = count; i < kTile; ++i) {
    tile.keys[i] = tile.keys[count - 1];
    tile.values[i] = tile.values[count - 1];
  }
}

// Asks for the lines of the tile after this one while this one is computed. What memory can have
// under way at a time is little, about 30 lines a core, so it idles whenever nobody asks: the lines
// are spread evenly over all of the tile's loops, softmax included, a few for every few rounds.
// Into the second level, as a whole tile is more than the first one can wait for; keys and values
// take turns, as two streams are read faster than one. Each call asks for as many lines, perhaps
// one of them again: processors guess wrong where loops end now sooner, now later. A call moves on
// by one run at most, so of blocks shorter than its share, of a token or two, some are left out.
template <typename T>
class Ahead {
 public:
  // `next` may be null; `calls` of `some` will follow.
  Ahead(const Tile<T>* next, const Layer& layer, int calls)
      : next_(next),
        key_bytes_(layer.k_dim * static_cast<int>(sizeof(T))),
        value_bytes_(layer.v_dim * static_cast<int>(sizeof(T))) {
    if (!next || calls == 0) return;
    step_ = (next->count * kRow + calls - 1) / calls;
    key_lines_ = lines_of(step_ * key_bytes_ / kRow);
    value_lines_ = lines_of(step_ * value_bytes_ / kRow);
    open();
  }

  CLOVER_HEADER_INLINE void some() {
    if (at_ + step_ > end_) open();
    ask(keys_ + at_ * key_bytes_ / kRow, key_lines_);
    ask(values_ + at_ * value_bytes_ / kRow, value_lines_);
    at_ += step_;
  }

 private:
  static constexpr uint64_t kRow = 1 << 12;  // parts of a row that places are counted in
  static constexpr int64_t kLine = 64;

  static int lines_of(uint64_t bytes) { return static_cast<int>(bytes / kLine + 1); }

  CLOVER_HEADER_INLINE static void ask(const char* at, int lines) {
    for (int i = 0; i < lines; ++i) __builtin_prefetch(at + i * kLine, 0, 2);
  }

  // What is left of a run, and the next one; after the last one nothing more is asked for.
  void open() {
    if (at_ < end_) {
      ask(keys_ + at_ * key_bytes_ / kRow, lines_of((end_ - at_) * key_bytes_ / kRow));
      ask(values_ + at_ * value_bytes_ / kRow, lines_of((end_ - at_) * value_bytes_ / kRow));
    }
    at_ = 0;
    if (run_ == next_->runs) {
      step_ = key_lines_ = value_lines_ = 0;
      return;
    }
    const int row = run_ == 0 ? 0 : next_->ends[run_ - 1];
    const int rows = next_->ends[run_++] - row;
    keys_ = reinterpret_cast<const char*>(next_->keys[row]);
    values_ = reinterpret_cast<const char*>(next_->values[row]);
    end_ = rows * kRow;
    if (kScaled<T>) {
      ask(reinterpret_cast<const char*>(next_->key_scales[row]), lines_of(rows * 4));
      ask(reinterpret_cast<const char*>(next_->value_scales[row]), lines_of(rows * 4));
    }
  }

  const Tile<T>* next_;
  const uint64_t key_bytes_;
  const uint64_t value_bytes_;
  const char* keys_ = nullptr;  // of the run
  const char* values_ = nullptr;
  uint64_t at_ = 0;  // within the run
  uint64_t end_ = 0;
  uint64_t step_ = 0;
  int key_lines_ = 0;  // of a step
  int value_lines_ = 0;
  int run_ = 0;
};

// Rounds of a loop for which `some` is called once: about as many bytes however wide vectors are.
constexpr int kBatch = 64 / kWidth;

// Calls f(0), f(step), ... below `count`, asking ahead meanwhile.
template <typename T, typename F>
CLOVER_INLINE void in_batches(Ahead<T>& ahead, int count, int step, const F& f) {
  for (int i = 0; i < count;) {
    ahead.some();
    const int end = i + kBatch * step < count ? i + kBatch * step : count;
    for (; i < end; i += step) f(i);
  }
}

CLOVER_INLINE int batches_of(int count, int step) {
  return (count + kBatch * step - 1) / (kBatch * step);
}

}  // namespace
}  // namespace clover::attention
