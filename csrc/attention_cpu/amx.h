// Products by AMX's tile registers, of 16 rows of 64 bytes each: bfloat16 keys are rows as they lie
// in a block, queries columns of pairs of numbers; softmax weights are rows, values columns of
// pairs of positions. Sums are float32. Included by kernels alone.
#pragma once

#include "attention_cpu/dot.h"

namespace clover::attention {
namespace {

// Whether products of K are made by tile registers, and their shapes while they are.
template <typename K>
constexpr bool kTiled = false;
template <typename K>
struct Registers {};

#if defined(__AMX_BF16__)

constexpr int kSide = 16;           // rows of a tile register, and floats of a row
constexpr int kPairs = 2 * kSide;   // bfloat16 numbers of a row
constexpr int kTiledSize = 256;     // of heads, at most
constexpr int kLeastTiled = kSide;  // rows; fewer leave registers empty

// int8 numbers are bfloat16 ones, without rounding.
template <typename T>
struct Tiled {
  using Stored = T;
  using Number = BFloat16;
  static constexpr int kRun = 4;
};

template <typename T>
constexpr bool kTiled<Tiled<T>> = true;

// Whether a span over numbers of type T is multiplied so.
template <typename T>
CLOVER_INLINE bool tiled(const Layer& layer, const Span& span) {
  const DType stored = sizeof(T) == sizeof(BFloat16) ? DType::kBFloat16 : DType::kInt8;
  return layer.dtype == stored && span.q_dtype == DType::kBFloat16 &&
         span.queries * layer.group >= kLeastTiled && layer.k_dim % kPairs == 0 &&
         layer.v_dim % kPairs == 0 && layer.k_dim <= kTiledSize && layer.v_dim <= kTiledSize;
}

// The compiler does not know what tile registers are loaded from and stored to.
CLOVER_INLINE void fence() { __asm__ volatile("" ::: "memory"); }

// What the thread's registers were shaped for before, by another library perhaps, is put back.
template <typename T>
struct Registers<Tiled<T>> {
  alignas(64) unsigned char before[64];
  int rows = 0;

  Registers() {
    _tile_storeconfig(before);
    fence();
  }
  Registers(const Registers&) = delete;
  ~Registers() {
    if (before[0])
      _tile_loadconfig(before);
    else
      _tile_release();
  }

  // For `wanted` query rows, up to 16: 0 and 1 hold scores (a key a row, a query a column), 2
  // queries, 3 and 4 keys or values, 5 and 6 sums (a query a row), 7 weights.
  void shape(int wanted) {
    if (rows == wanted) return;
    rows = wanted;
    struct alignas(64) {
      uint8_t palette = 1;
      uint8_t rest[15] = {};
      uint16_t bytes[16] = {};  // of a row
      uint8_t rows[16] = {};
    } shapes;
    for (int i = 0; i < 8; ++i) {
      const bool by_query = i >= 5;
      shapes.rows[i] = static_cast<uint8_t>(by_query ? wanted : kSide);
      shapes.bytes[i] = static_cast<uint16_t>(i < 3 ? 4 * wanted : 64);
    }
    fence();
    _tile_loadconfig(&shapes);
  }

  // Of the loops over a tile of `count` positions, but for its softmax.
  static int rounds(const Layer& layer, int rows, int count) {
    const int chunks = (rows + kSide - 1) / kSide, halves = (count + kPairs - 1) / kPairs;
    return halves * (chunks * layer.k_dim / kPairs + kSide);
  }
};

// Zeros where `there` is not.
CLOVER_INLINE __m512i load_pairs(const BFloat16* p, bool there = true) {
  return _mm512_maskz_loadu_epi16(there ? ~0u : 0, p);
}
CLOVER_INLINE __m512i load_pairs(const Int8* p, bool there = true) {
  if (!there) return _mm512_setzero_si512();
  return (__m512i)_mm512_cvtne2ps_pbh((__m512)load(p + kWidth), (__m512)load(p));
}

// A token's queries, rows from `first` on of `rows`, as columns of their chunks.
CLOVER_INLINE void take_columns(const unsigned char* q, const Layer& layer, int first, int rows,
                                BFloat16* chunks) {
  constexpr int kPair = 2 * sizeof(BFloat16);
  for (int r = first; r < first + layer.group; ++r) {
    const int chunk = r / kSide * kSide;
    const int columns = rows - chunk < kSide ? rows - chunk : kSide;
    BFloat16* to = chunks + chunk * layer.k_dim + 2 * (r - chunk);
    for (int p = 0; p < layer.k_dim / 2; ++p, q += kPair, to += 2 * columns)
      __builtin_memcpy(to, q, kPair);
  }
}

// 16 keys as rows: each `stride` bytes after the one before, the next numbers `step` bytes on.
struct KeyRows {
  const char* at;
  int64_t stride;
  int64_t step;
};

// Those of a tile from `at` on; where they are no run of a block, or not bfloat16, in `room`.
template <typename T>
CLOVER_INLINE KeyRows key_rows(const Tile<T>& tile, int k_dim, int at, BFloat16* room) {
  constexpr int64_t kRow = kPairs * sizeof(BFloat16);
  const T* const* keys = tile.keys + at;
  bool run = sizeof(T) == sizeof(BFloat16);
  for (int i = 1; i < kSide; ++i) run = run && keys[i] == keys[i - 1] + k_dim;
  if (run) return {reinterpret_cast<const char*>(keys[0]), k_dim * int64_t{sizeof(T)}, kRow};
  for (int i = 0; i < kSide; ++i)
    for (int d = 0; d < k_dim; d += kPairs)
      _mm512_store_si512(room + d * kSide + i * kPairs, load_pairs(keys[i] + d));
  return {reinterpret_cast<const char*>(room), kRow, kSide * kRow};
}

// to[row * kTile + key] = from[key * 16 + row] of 16 keys.
CLOVER_INLINE void turn(const float* from, int rows, float* to) {
#define CLOVER_BLOCKS(a, b, ...) \
  (Vec) _mm512_maskz_shuffle_f32x4(0xffff, (__m512)(a), (__m512)(b), __VA_ARGS__)
  Vec a[16], b[16];
  for (int i = 0; i < 16; ++i) a[i] = load(from + i * kSide);
  for (int i = 0; i < 16; i += 2) {
    b[i] = CLOVER_SHUFFLE(a[i], a[i + 1], CLOVER_LOW);
    b[i + 1] = CLOVER_SHUFFLE(a[i], a[i + 1], CLOVER_HIGH);
  }
  for (int i = 0; i < 16; i += 4)  // four floats of a[i + j] are row 4 * n + j of four keys
    for (int j = 0; j < 4; ++j)
      a[i + j] = j % 2 ? CLOVER_SHUFFLE(b[i + j / 2], b[i + j / 2 + 2], CLOVER_ODD)
                       : CLOVER_SHUFFLE(b[i + j / 2], b[i + j / 2 + 2], CLOVER_EVEN);
  for (int j = 0; j < 4; ++j) {
    const Vec first = CLOVER_BLOCKS(a[j], a[4 + j], 0x44),
              third = CLOVER_BLOCKS(a[j], a[4 + j], 0xee);
    const Vec second = CLOVER_BLOCKS(a[8 + j], a[12 + j], 0x44),
              fourth = CLOVER_BLOCKS(a[8 + j], a[12 + j], 0xee);
    b[j] = CLOVER_BLOCKS(first, second, 0x88);
    b[4 + j] = CLOVER_BLOCKS(first, second, 0xdd);
    b[8 + j] = CLOVER_BLOCKS(third, fourth, 0x88);
    b[12 + j] = CLOVER_BLOCKS(third, fourth, 0xdd);
  }
  for (int r = 0; r < rows; ++r) store(to + r * kTile, b[r]);
#undef CLOVER_BLOCKS
}

// Scores of a tile for all rows: scores[row * kTile + position].
template <typename T>
CLOVER_INLINE void score_tiled(int k_dim, int rows, const BFloat16* q, const Tile<T>& tile,
                               Ahead<T>& ahead, Registers<Tiled<T>>& registers, float* scores) {
  alignas(64) BFloat16 room[2][kSide * kTiledSize];
  alignas(64) float turned[kTile / kSide][kSide * kSide];
  for (int r = 0; r < rows; r += kSide) {
    const int count = rows - r < kSide ? rows - r : kSide;
    registers.shape(count);
    for (int i = 0; i < tile.count; i += 2 * kSide) {
      const KeyRows first = key_rows(tile, k_dim, i, room[0]);
      const KeyRows second = key_rows(tile, k_dim, i + kSide, room[1]);
      fence();
      _tile_zero(0);
      _tile_zero(1);
      for (int s = 0; s < k_dim / kPairs; ++s) {
        ahead.some();
        _tile_loadd(2, q + r * k_dim + s * kPairs * count, count * 2 * sizeof(BFloat16));
        _tile_loadd(3, first.at + s * first.step, first.stride);
        _tile_loadd(4, second.at + s * second.step, second.stride);
        _tile_dpbf16ps(0, 3, 2);
        _tile_dpbf16ps(1, 4, 2);
      }
      _tile_stored(0, turned[i / kSide], kSide * sizeof(float));
      _tile_stored(1, turned[i / kSide + 1], kSide * sizeof(float));
    }
    for (int i = 0; i < tile.count; i += kSide)
      turn(turned[i / kSide], count, scores + r * kTile + i);
  }
}

// Weights of `count` positions as bfloat16, and zeros up to whole rows of registers.
CLOVER_INLINE void take_pairs(const float* scores, int count, BFloat16* weights) {
  for (int i = 0; i < count; i += kPairs) {
    const Vec second = i + kWidth < count ? load(scores + i + kWidth) : Vec{};
    _mm512_storeu_si512(weights + i,
                        (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)load(scores + i)));
  }
}

// Values of a tile as columns of pairs of positions: `kPairs` numbers are two registers, in the
// order of `Paired`, of `kPairs` positions each.
using PairedValues = BFloat16[kTiledSize / kPairs][kTile / kPairs][2][kSide * kPairs];

// Positions that are not there are zeros, rather than what weights of zero might be multiplied
// with.
template <typename T>
CLOVER_INLINE void pair_values(int v_dim, const Tile<T>& tile, Ahead<T>& ahead,
                               PairedValues& pairs) {
  for (int i = 0; i < (tile.count + kPairs - 1) / kPairs * kPairs; i += 2) {
    ahead.some();
    const int row = i % kPairs / 2 * kPairs;
    for (int e = 0; e < v_dim; e += kPairs) {
      const __m512i a = load_pairs(tile.values[i] + e, i < tile.count);
      const __m512i b = load_pairs(tile.values[i + 1] + e, i + 1 < tile.count);
      BFloat16(&to)[2][kSide * kPairs] = pairs[e / kPairs][i / kPairs];
      _mm512_store_si512(to[0] + row, _mm512_maskz_unpacklo_epi16(~0u, a, b));
      _mm512_store_si512(to[1] + row, _mm512_maskz_unpackhi_epi16(~0u, a, b));
    }
  }
}

// acc[row] = acc[row] * decay[row] + sum of weights[row * kTile + i] * values[i], for all rows.
template <typename T>
CLOVER_INLINE void add_tiled(int v_dim, int rows, const Tile<T>& tile, Ahead<T>& ahead,
                             Registers<Tiled<T>>& registers, const BFloat16* weights,
                             const float* decay, float* acc) {
  alignas(64) PairedValues pairs;
  pair_values(v_dim, tile, ahead, pairs);
  for (int r = 0; r < rows; ++r)
    for (int e = 0; decay[r] != 1 && e < v_dim; e += kWidth)
      store(acc + r * v_dim + e, load(acc + r * v_dim + e) * decay[r]);
  for (int r = 0; r < rows; r += kSide) {
    registers.shape(rows - r < kSide ? rows - r : kSide);
    fence();
    for (int e = 0; e < v_dim; e += kPairs) {
      float* sums = acc + r * v_dim + e;
      _tile_loadd(5, sums, v_dim * sizeof(float));
      _tile_loadd(6, sums + kSide, v_dim * sizeof(float));
      for (int i = 0; i < tile.count; i += kPairs) {
        const auto& of = pairs[e / kPairs][i / kPairs];
        _tile_loadd(7, weights + r * kTile + i, kTile * sizeof(BFloat16));
        _tile_loadd(3, of[0], kPairs * sizeof(BFloat16));
        _tile_loadd(4, of[1], kPairs * sizeof(BFloat16));
        _tile_dpbf16ps(5, 7, 3);
        _tile_dpbf16ps(6, 7, 4);
      }
      _tile_stored(5, sums, v_dim * sizeof(float));
      _tile_stored(6, sums + kSide, v_dim * sizeof(float));
    }
  }
}

#endif

}  // namespace
}  // namespace clover::attention
