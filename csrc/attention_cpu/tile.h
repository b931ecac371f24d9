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

// Asks for the rows of the tile after this one while this one is computed, in even steps: memory
// then never idles, and what it can have under way at a time is never exceeded. Into the second
// level: a whole tile is more than the first one can wait for. Keys and values take turns, as two
// streams are read faster than one.
template <typename T>
struct Ahead {
  const Tile<T>* next;  // or null
  int k_dim;
  int v_dim;

  CLOVER_HEADER_INLINE static void lines(const void* row, int bytes) {
    const char* p = static_cast<const char*>(row);
    for (const char* end = p + bytes; p < end; p += 64) __builtin_prefetch(p, 0, 2);
  }

  CLOVER_HEADER_INLINE void fetch(int i) const {
    if (next == nullptr || i >= next->count) return;
    lines(next->keys[i], k_dim * static_cast<int>(sizeof(T)));
    lines(next->values[i], v_dim * static_cast<int>(sizeof(T)));
    if (kScaled<T> && i % 8 == 0) {
      lines(next->key_scales[i], 4);
      lines(next->value_scales[i], 4);
    }
  }
};

}  // namespace
}  // namespace clover::attention
