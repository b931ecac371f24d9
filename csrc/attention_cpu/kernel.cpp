// The attention kernels: one source, compiled once per instruction set (CLOVER_ISA names it).
//
// A tile of context positions is scored for all query heads of the KV head, then its values are
// added up for all of them, so that keys and values are read from memory once. The softmax is
// online: the largest score so far, and sums relative to it.
//
// Nothing from the standard library with external linkage may be used here: the linker would keep
// one copy of it, perhaps the one that only newer processors can run.
#include "attention_cpu/kernel.h"

#include "common/simd.h"

#ifndef CLOVER_ISA
#error "compile with -DCLOVER_ISA=<name of the instruction set>"
#endif

namespace clover::attention::CLOVER_ISA {
namespace {

constexpr float kInfinity = __builtin_inff();

// Where the keys and values of up to kTile positions lie. What is past `count` repeats the last
// position, so that whole vectors of positions can be scored without reading what is not the row's.
template <typename T>
struct Tile {
  int count;
  const T* keys[kTile];
  const T* values[kTile];
};

template <typename T>
void locate(const Layer& layer, const Span& span, int64_t at, Tile<T>& tile) {
  const T* base = reinterpret_cast<const T*>(layer.base);
  const int64_t keys_at = layer.keys_at(span.head), values_at = layer.values_at(span.head);
  const int count = span.end - at < kTile ? static_cast<int>(span.end - at) : kTile;
  tile.count = count;
  for (int i = 0; i < count;) {
    const int64_t index = (at + i) / layer.block_size;
    const int offset = static_cast<int>((at + i) % layer.block_size);
    const T* block = base + span.table[index] * layer.block_elements();
    const T* key = block + keys_at + int64_t{offset} * layer.k_dim;
    const T* value = block + values_at + int64_t{offset} * layer.v_dim;
    for (int o = offset; o < layer.block_size && i < count; ++o, ++i) {
      tile.keys[i] = key;
      tile.values[i] = value;
      key += layer.k_dim;
      value += layer.v_dim;
    }
  }
  for (int i = count; i < kTile; ++i) {
    tile.keys[i] = tile.keys[count - 1];
    tile.values[i] = tile.values[count - 1];
  }
}

// Into the second-level cache: a whole tile is more than the first level can wait for at a time.
template <typename T>
CLOVER_INLINE void prefetch(const T* row, int elements) {
  const char* p = reinterpret_cast<const char*>(row);
  const char* end = reinterpret_cast<const char*>(row + elements);
  for (; p < end; p += 64) __builtin_prefetch(p, 0, 2);
}

// Scores of kWidth positions from `at` for H query heads: scores[h * kTile + lane].
template <typename T, int H>
void score(const Layer& layer, const float* q, const Tile<T>& tile, const Tile<T>* next, int at,
           float* scores) {
  const int k_dim = layer.k_dim;
  Vec quads[H][kWidth / 4];
  for (int quad = 0; quad < kWidth / 4; ++quad) {
    const T* const* k = tile.keys + at + 4 * quad;
    for (int i = at + 4 * quad; next && i < at + 4 * quad + 4; ++i) {
      prefetch(next->keys[i], k_dim);
      prefetch(next->values[i], layer.v_dim);
    }
    Vec sums[H][4] = {};
    for (int d = 0; d < k_dim; d += kWidth) {
      const Vec k0 = load(k[0] + d), k1 = load(k[1] + d), k2 = load(k[2] + d), k3 = load(k[3] + d);
      for (int h = 0; h < H; ++h) {
        const Vec x = load(q + h * k_dim + d);
        sums[h][0] += x * k0;
        sums[h][1] += x * k1;
        sums[h][2] += x * k2;
        sums[h][3] += x * k3;
      }
    }
    for (int h = 0; h < H; ++h)
      quads[h][quad] = fold_four(sums[h][0], sums[h][1], sums[h][2], sums[h][3]);
  }
  for (int h = 0; h < H; ++h) store(scores + h * kTile, fold_quads(quads[h]));
}

// acc[h] = acc[h] * decay[h] + sum of weights[h][i] * values[i], for H heads and E vectors.
template <typename T, int H, int E>
void accumulate(const Tile<T>& tile, int e, int v_dim, const float* weights, const float* decay,
                float* acc) {
  Vec sums[H][E];
  for (int h = 0; h < H; ++h)
    for (int j = 0; j < E; ++j) sums[h][j] = load(acc + h * v_dim + e + j * kWidth) * decay[h];
  for (int i = 0; i < tile.count; ++i) {
    const T* value = tile.values[i] + e;
    Vec v[E];
    for (int j = 0; j < E; ++j) v[j] = load(value + j * kWidth);
    for (int h = 0; h < H; ++h) {
      const float weight = weights[h * kTile + i];
      for (int j = 0; j < E; ++j) sums[h][j] += weight * v[j];
    }
  }
  for (int h = 0; h < H; ++h)
    for (int j = 0; j < E; ++j) store(acc + h * v_dim + e + j * kWidth, sums[h][j]);
}

// Turns one head's scores of a tile into weights relative to the largest score so far; updates the
// head's `best` and `total`, and says by what the earlier sums shrink.
float soften(const Layer& layer, int q_head, int count, float distance, float* scores, float* best,
             float* total) {
  Ints lane;
  for (int i = 0; i < kWidth; ++i) lane[i] = i;
  const float slope = layer.alibi_slopes ? layer.alibi_slopes[q_head] : 0.0f;
  Vec top = splat(-kInfinity);
  for (int i = 0; i < count; i += kWidth) {
    Vec s = load(scores + i);
    if (layer.softcap > 0) s = layer.softcap * tanh_of(s / layer.softcap);
    if (slope != 0) s += slope * (__builtin_convertvector(lane + i, Vec) + distance);
    s = lane + i < count ? s : splat(-kInfinity);
    store(scores + i, s);
    top = bigger(top, s);
  }
  const float tile_best = largest(top);
  const float next = tile_best > *best ? tile_best : *best;
  if (next == -kInfinity) {  // nothing visible so far: weights of zero, not of NaN
    for (int i = 0; i < count; ++i) scores[i] = 0;
    return 1.0f;
  }
  Vec sums = {};
  for (int i = 0; i < count; i += kWidth) {
    const Vec weight = exponential(load(scores + i) - next);
    store(scores + i, weight);
    sums += weight;
  }
  const float decay = next == *best ? 1.0f : __builtin_expf(*best - next);
  *best = next;
  *total = *total * decay + sum(sums);
  return decay;
}

template <typename T, int H>
void add_tile(const Layer& layer, const Tile<T>& tile, const float* weights, const float* decay,
              float* acc) {
  const int v_dim = layer.v_dim;
  int e = 0;
  for (; e + 4 * kWidth <= v_dim; e += 4 * kWidth)
    accumulate<T, H, 4>(tile, e, v_dim, weights, decay, acc);
  for (; e < v_dim; e += kWidth) accumulate<T, H, 1>(tile, e, v_dim, weights, decay, acc);
}

// Calls f.template operator()<H>(first head) for the heads of a group, as many as registers hold.
template <typename F>
CLOVER_INLINE void over_heads(int group, const F& f) {
  int h = 0;
  for (; h + kMaxHeads <= group; h += kMaxHeads) f.template run<kMaxHeads>(h);
  if (kMaxHeads > 3 && group - h == 3)
    f.template run<3>(h);
  else if (kMaxHeads > 2 && group - h == 2)
    f.template run<2>(h);
  else if (group - h == 1)
    f.template run<1>(h);
}

template <typename T>
struct ScoreHeads {
  const Layer& layer;
  const Tile<T>& tile;
  const Tile<T>& next;  // fetched while the tile is scored
  const float* q;
  float* scores;
  template <int H>
  [[gnu::always_inline]] void run(int h) const {
    const Tile<T>* ahead = h == 0 ? &next : nullptr;
    for (int i = 0; i < tile.count; i += kWidth)
      score<T, H>(layer, q + h * layer.k_dim, tile, ahead, i, scores + h * kTile + i);
  }
};

template <typename T>
struct AddHeads {
  const Layer& layer;
  const Tile<T>& tile;
  const float* weights;
  const float* decay;
  float* acc;
  template <int H>
  [[gnu::always_inline]] void run(int h) const {
    add_tile<T, H>(layer, tile, weights + h * kTile, decay + h, acc + h * layer.v_dim);
  }
};

template <typename T>
void span_of(const Layer& layer, const Span& span, float* scratch, float* partial) {
  const int group = layer.group;
  float* q = scratch;
  float* scores = q + group * layer.k_dim;
  float* decay = scores + group * kTile;
  float* acc = partial;
  float* best = acc + group * layer.v_dim;
  float* total = best + group;
  for (int i = 0; i < group * layer.k_dim; i += kWidth)
    store(q + i, load(static_cast<const T*>(span.q) + i) * layer.scale);
  for (int i = 0; i < group * layer.v_dim; ++i) acc[i] = 0;
  for (int h = 0; h < group; ++h) {
    best[h] = -kInfinity;
    total[h] = 0;
  }
  Tile<T> tiles[2];
  locate(layer, span, span.begin, tiles[0]);
  int current = 0;
  for (int64_t at = span.begin; at < span.end; at += kTile, current ^= 1) {
    const Tile<T>& tile = tiles[current];
    const bool last = at + kTile >= span.end;
    if (!last) locate(layer, span, at + kTile, tiles[current ^ 1]);
    over_heads(group, ScoreHeads<T>{layer, tile, tiles[last ? current : current ^ 1], q, scores});
    for (int h = 0; h < group; ++h)
      decay[h] =
          soften(layer, span.head * group + h, tile.count, static_cast<float>(at - span.query_at),
                 scores + h * kTile, best + h, total + h);
    over_heads(group, AddHeads<T>{layer, tile, scores, decay, acc});
  }
}

void span(const Layer& layer, const Span& span, float* scratch, float* partial) {
  switch (layer.dtype) {
    case DType::kFloat32:
      return span_of<float>(layer, span, scratch, partial);
    case DType::kBFloat16:
      return span_of<BFloat16>(layer, span, scratch, partial);
    case DType::kFloat16:
      return span_of<Float16>(layer, span, scratch, partial);
  }
}

// Merges the partial results of one query head into the first, and scales it.
void merge(const Layer& layer, int h, float sink, float* partials, int count, float* lse) {
  const int64_t stride = partial_floats(layer);
  float* first = partials + h * layer.v_dim;
  const float* best = partials + layer.group * layer.v_dim + h;
  const float* total = best + layer.group;
  float top = sink;
  for (int i = 0; i < count; ++i) top = best[i * stride] > top ? best[i * stride] : top;
  float sums = sink == -kInfinity ? 0.0f : __builtin_expf(sink - top);
  for (int i = 0; i < count; ++i) {
    const float* acc = first + i * stride;
    const float share = __builtin_expf(best[i * stride] - top);
    sums += share * total[i * stride];
    for (int e = 0; e < layer.v_dim; e += kWidth) {
      const Vec before = i == 0 ? Vec{} : load(first + e);
      store(first + e, before + load(acc + e) * share);
    }
  }
  for (int e = 0; e < layer.v_dim; e += kWidth) store(first + e, load(first + e) / sums);
  *lse = top + __builtin_logf(sums);
}

template <typename T>
void write(const float* from, int count, void* to) {
  for (int i = 0; i < count; i += kWidth) store(static_cast<T*>(to) + i, load(from + i));
}

void finish(const Layer& layer, int head, float* partials, int count, void* o, float* lse) {
  for (int h = 0; h < layer.group; ++h) {
    const float sink = layer.sinks ? layer.sinks[head * layer.group + h] : -kInfinity;
    merge(layer, h, sink, partials, count, lse + h);
  }
  const int elements = layer.group * layer.v_dim;
  switch (layer.dtype) {
    case DType::kFloat32:
      return write<float>(partials, elements, o);
    case DType::kBFloat16:
      return write<BFloat16>(partials, elements, o);
    case DType::kFloat16:
      return write<Float16>(partials, elements, o);
  }
}

}  // namespace

#define CLOVER_TEXT_OF(x) #x
#define CLOVER_TEXT(x) CLOVER_TEXT_OF(x)
extern const Kernels kernels;
const Kernels kernels = {CLOVER_TEXT(CLOVER_ISA), kWidth, span, finish};

}  // namespace clover::attention::CLOVER_ISA
