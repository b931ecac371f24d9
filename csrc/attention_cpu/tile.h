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
// are spread evenly over all of the tile's loops, softmax included, of which each round is a call
// of `some`. Into the second level, as a whole tile is more than the first one can wait for; rows
// of keys and of values take turns, as two streams are read faster than one. All of it must stay in
// registers: no arrays that are indexed, and whoever calls `some` is inlined.
template <typename T>
class Ahead {
 public:
  // `next` may be null; `calls` of `some` will follow.
  Ahead(const Tile<T>* next, const Layer& layer, int calls)
      : next_(next),
        key_bytes_(layer.k_dim * static_cast<int>(sizeof(T))),
        value_bytes_(layer.v_dim * static_cast<int>(sizeof(T))) {
    if (!next || calls == 0) return;
    const int pairs = next->count * ((key_bytes_ + kPair - 1) / kPair) +
                      next->count * ((value_bytes_ + kPair - 1) / kPair);
    rate_ = (pairs * kCost + calls - 1) / calls;
  }

  CLOVER_HEADER_INLINE void some() {
    for (credit_ += rate_; credit_ >= kCost; credit_ -= kCost) {
      if (at_ >= end_) open();
      __builtin_prefetch(at_, 0, 2);
      __builtin_prefetch(at_ + kPair / 2, 0, 2);
      at_ += kPair;
    }
  }

 private:
  static constexpr int kPair = 128;  // bytes of two lines, which are asked for together
  static constexpr int kCost = 256;  // credit that they cost

  // The next row; at the end the last lines again, which costs nothing.
  CLOVER_HEADER_INLINE void open() {
    const int i = row_ / 2;
    const bool value = row_ % 2;
    if (i >= next_->count) {
      at_ = end_ - kPair;
      return;
    }
    at_ = reinterpret_cast<const char*>(value ? next_->values[i] : next_->keys[i]);
    end_ = at_ + (value ? value_bytes_ : key_bytes_);
    if (kScaled<T> && i % 8 == 0)
      __builtin_prefetch(value ? next_->value_scales[i] : next_->key_scales[i], 0, 2);
    ++row_;
  }

  const Tile<T>* next_;
  const int key_bytes_;
  const int value_bytes_;
  int rate_ = 0;
  int credit_ = 0;
  int row_ = 0;
  const char* at_ = nullptr;
  const char* end_ = nullptr;
};

}  // namespace
}  // namespace clover::attention
