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
  for (int i = 0; i < count;) {
    const int left = layer.block_size - static_cast<int>((at + i) % layer.block_size);
    const int end = i + left < count ? i + left : count;
    locate_run(layer, span, at, i, end, tile);
    i = end;
  }
  for (int i = count; i < kTile; ++i) {
    tile.keys[i] = tile.keys[count - 1];
    tile.values[i] = tile.values[count - 1];
  }
}

// Asks for the lines of the tile after this one while this one is computed. What memory can have
// under way at a time is little, about 30 lines a core, so it idles whenever nobody asks: the lines
// are spread evenly over all of the tile's inner loops, of which each round is a call of `some`.
// Into the second level, as a whole tile is more than the first one can wait for; rows of keys and
// of values take turns, as two streams are read faster than one.
template <typename T>
class Ahead {
 public:
  // `next` may be null; `calls` of `some` will follow.
  Ahead(const Tile<T>* next, const Layer& layer, int calls)
      : next_(next),
        bytes_{layer.k_dim * static_cast<int>(sizeof(T)),
               layer.v_dim * static_cast<int>(sizeof(T))},
        rows_(next ? 2 * next->count : 0) {
    const int lines = (bytes_[0] + 63) / 64 + (bytes_[1] + 63) / 64;
    rate_ = calls > 0 ? (rows_ / 2 * lines * kLine + calls - 1) / calls : 0;
  }

  CLOVER_HEADER_INLINE void some() {
    for (credit_ += rate_; credit_ >= kLine; credit_ -= kLine) {
      if (at_ >= end_) open();
      __builtin_prefetch(at_, 0, 2);
      at_ += 64;
    }
  }

 private:
  static constexpr int kLine = 256;  // credit that a line costs

  // The next row; at the end the last line again, which costs nothing.
  CLOVER_HEADER_INLINE void open() {
    if (row_ == rows_) {
      at_ = end_ - 64;
      return;
    }
    const int i = row_ / 2, side = row_ % 2;
    at_ = reinterpret_cast<const char*>(side ? next_->values[i] : next_->keys[i]);
    end_ = at_ + bytes_[side];
    if (kScaled<T> && i % 8 == 0)
      __builtin_prefetch(side ? next_->value_scales[i] : next_->key_scales[i], 0, 2);
    ++row_;
  }

  const Tile<T>* next_;
  const int bytes_[2];
  const int rows_;
  int rate_;
  int credit_ = 0;
  int row_ = 0;
  const char* at_ = nullptr;
  const char* end_ = nullptr;
};

}  // namespace
}  // namespace clover::attention
