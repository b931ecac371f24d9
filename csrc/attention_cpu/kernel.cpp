// The attention kernels: one source, compiled once per instruction set (CLOVER_ISA names it).
//
// A tile of context positions is scored for all rows of a span (query tokens times query heads of
// the KV head), then its values are added up for all of them, so that keys and values are read from
// memory once. The softmax is online: the largest score so far, and sums relative to it.
//
// Nothing from the standard library with external linkage may be used here: the linker would keep
// one copy of it, perhaps the one that only newer processors can run.
#include "attention_cpu/kernel.h"

#include "attention_cpu/amx.h"
#include "attention_cpu/dot.h"
#include "attention_cpu/ends.h"
#include "attention_cpu/words.h"

#ifndef CLOVER_ISA
#error "compile with -DCLOVER_ISA=<name of the instruction set>"
#endif

namespace clover::attention::CLOVER_ISA {
namespace {

// Scores of kWidth positions from `at` for R rows: scores[r * kTile + lane].
template <typename K, int R>
void score(int k_dim, const typename K::Number* q, const Tile<typename K::Stored>& tile,
           Ahead<typename K::Stored>& ahead, int at, float* scores) {
  Vec quads[R][kWidth / 4];
  for (int quad = 0; quad < kWidth / 4; ++quad) {
    const int i = at + 4 * quad;
    const typename K::Stored* const* k = tile.keys + i;
    Vec sums[R][4] = {};
    for (int d = 0; d < k_dim; d += K::kStep) {
      ahead.some();
      typename K::Chunk x[R];
      for (int r = 0; r < R; ++r) x[r] = K::take_query(q + r * k_dim + d);
      for (int j = 0; j < 4; ++j) {  // one key at a time, for few registers
        const auto key = K::take(k[j] + d);
        for (int r = 0; r < R; ++r) sums[r][j] = K::add(sums[r][j], x[r], key);
      }
    }
    ahead.some();
    for (int r = 0; r < R; ++r)
      quads[r][quad] = fold_four(K::added(sums[r][0]), K::added(sums[r][1]), K::added(sums[r][2]),
                                 K::added(sums[r][3]));
  }
  for (int r = 0; r < R; ++r) store(scores + r * kTile, fold_quads(quads[r]));
}

// What one row sees of a tile.
struct Sight {
  int first;  // lanes [first, end)
  int end;
  float distance;  // from the query to lane 0
  float slope;     // of ALiBi
  float scale;     // of the raw scores
};

CLOVER_INLINE Sight sight_of(const Layer& layer, const Span& span, int row, int64_t at, int count,
                             float step) {
  const int token = row / layer.group;
  const int64_t query_at = span.query_at + token - at;  // as a lane
  const int64_t first = layer.window > 0 ? query_at - layer.window + 1 : 0;
  const int64_t end = query_at + 1 < count ? query_at + 1 : count;
  const int head = span.head * layer.group + row % layer.group;
  return {static_cast<int>(first > 0 ? (first < count ? first : count) : 0),
          static_cast<int>(end > 0 ? end : 0), static_cast<float>(-query_at),
          layer.alibi_slopes ? layer.alibi_slopes[head] : 0.0f, layer.scale * step};
}

template <typename T>
struct Softener {
  const Layer& layer;
  const Tile<T>& tile;
  float key_scales[kTile];
  float value_scales[kTile];

  Softener(const Layer& of, const Tile<T>& at) : layer(of), tile(at) {
    for (int i = 0; kScaled<T> && i < kTile; ++i) {
      const int from = i < tile.count ? i : tile.count - 1;
      key_scales[i] = *tile.key_scales[from];
      value_scales[i] = *tile.value_scales[from];
    }
  }

  CLOVER_HEADER_INLINE Vec final_score(const Sight& sight, Vec s, Ints lane, int i) const {
    s *= sight.scale;
    if (kScaled<T>) s *= load(key_scales + i);
    if (layer.softcap > 0) s = layer.softcap * tanh_of(s / layer.softcap);
    if (sight.slope != 0) s += sight.slope * (__builtin_convertvector(lane, Vec) + sight.distance);
    return ((lane >= sight.first) & (lane < sight.end)) != 0 ? s : splat(-kInfinity);
  }

  // Turns a row's scores into weights relative to its largest score so far; updates its `best` and
  // `total`, and says by what its earlier sums shrink.
  CLOVER_HEADER_INLINE float soften(const Sight& sight, Ahead<T>& ahead, float* scores, float* best,
                                    float* total) const {
    Ints lanes;
    for (int i = 0; i < kWidth; ++i) lanes[i] = i;
    Vec top = splat(-kInfinity);
    for (int i = 0; i < tile.count; i += kWidth) {
      ahead.some();
      const Vec s = final_score(sight, load(scores + i), lanes + i, i);
      store(scores + i, s);
      top = bigger(top, s);
    }
    const float tile_best = largest(top);
    const float next = tile_best > *best ? tile_best : *best;
    if (next == -kInfinity) {  // nothing visible so far: weights of zero, not of NaN
      for (int i = 0; i < tile.count; i += kWidth) store(scores + i, Vec{});
      return 1.0f;
    }
    Vec sums = {};
    for (int i = 0; i < tile.count; i += kWidth) {
      ahead.some();
      Vec weight = exponential(load(scores + i) - next);
      sums += weight;
      if (kScaled<T>) weight *= load(value_scales + i);
      store(scores + i, weight);
    }
    const float decay = next == *best ? 1.0f : __builtin_expf(*best - next);
    *best = next;
    *total = *total * decay + sum(sums);
    return decay;
  }
};

// Calls f.template run<R>(first row) for all rows, as many at a time as registers hold.
template <typename F>
CLOVER_INLINE void over_rows(int rows, const F& f) {
  int r = 0;
  for (; r + kMaxHeads <= rows; r += kMaxHeads) f.template run<kMaxHeads>(r);
  if (kMaxHeads > 3 && rows - r == 3)
    f.template run<3>(r);
  else if (kMaxHeads > 2 && rows - r == 2)
    f.template run<2>(r);
  else if (rows - r == 1)
    f.template run<1>(r);
}

// Whether queries and weights are integers, with a step's size for each row.
template <typename K>
constexpr bool kSteps =
    !kTiled<K> && sizeof(typename K::Number) == sizeof(int16_t) && sizeof(typename K::Stored) == 1;

// Vectors of sums that registers hold for each of so many rows; a power of two.
constexpr int sums_of(int rows) {
  const int most = (kMaxHeads > 2 ? 16 : 8) / (rows == 3 ? 4 : rows);
  return most < 8 ? most : 8;
}

// Working memory of a span, all of it per row.
template <typename K>
struct Work {
  typename K::Number* q;
  float* q_steps;  // sizes of the steps of queries and weights, where they are integers
  float* w_steps;
  float* scores;
  typename K::Number* weights;
  float* decay;
  float* acc;
  float* best;
  float* total;
};

template <typename K>
struct ScoreRows {
  const Layer& layer;
  const Tile<typename K::Stored>& tile;
  Ahead<typename K::Stored>& ahead;
  const typename K::Number* q;
  float* scores;

  template <int R>
  [[gnu::always_inline]] void run(int r) const {
    for (int i = 0; i < tile.count; i += kWidth)
      score<K, R>(layer.k_dim, q + r * layer.k_dim, tile, ahead, i, scores + r * kTile + i);
  }
};

template <typename K>
struct AddRows {
  const Layer& layer;
  const Tile<typename K::Stored>& tile;
  Ahead<typename K::Stored>& ahead;
  const Work<K>& work;

  template <int R, int E>
  [[gnu::always_inline]] void add(int r, int e) const {
    const Sums<K> of = {tile,
                        ahead,
                        layer.v_dim,
                        work.weights + r * kTile,
                        work.w_steps + r,
                        work.decay + r,
                        work.acc + r * layer.v_dim};
    add_up<R, E>(of, e);
  }

  template <int R>
  [[gnu::always_inline]] void run(int r) const {
    constexpr int kMost = sums_of(R) * kWidth / K::kStep;
    int e = 0;
    for (; e + kMost * K::kStep <= layer.v_dim; e += kMost * K::kStep) add<R, kMost>(r, e);
    for (; e + 2 * K::kStep <= layer.v_dim; e += 2 * K::kStep) add<R, 2>(r, e);
    for (; e < layer.v_dim; e += K::kStep) add<R, 1>(r, e);
  }
};

// Of the span's head number `head`.
template <typename K>
CLOVER_INLINE Work<K> work_in(const Layer& layer, const Span& span, int head, float* scratch,
                              float* partial) {
  const int rows = span.queries * layer.group;
  const int64_t queries = in_lines(int64_t{rows} * layer.k_dim);
  float* q = scratch + head * queries;
  float* scores = scratch + span.heads * queries;
  float* weights = scores + rows * kTile;
  float* best = partial + rows * layer.v_dim;
  const bool same = sizeof(typename K::Number) == sizeof(float);  // weights replace the scores
  float* steps = q + rows * layer.k_dim / 2;  // integers leave half of the queries' room
  return {reinterpret_cast<typename K::Number*>(q),
          steps,
          steps + rows,
          scores,
          reinterpret_cast<typename K::Number*>(same ? scores : weights),
          weights + rows * kTile,
          partial,
          best,
          best + rows};
}

template <typename K>
void take_queries(const Layer& layer, const Span& span, const Work<K>& work) {
  const int64_t token = int64_t{layer.group} * layer.k_dim;
  for (int t = 0; t < span.queries; ++t) {
    const unsigned char* q = span.q + t * span.q_stride;
    if constexpr (kTiled<K>)
      take_columns(q, layer, t * layer.group, span.queries * layer.group, work.q);
    else if constexpr (!kSteps<K>)
      widen(span.q_dtype, q, token, work.q + t * token);
#if defined(CLOVER_HAVE_WORDS)
    else
      of_type(span.q_dtype, [&](auto* type) {
        const auto* numbers = static_cast<decltype(type)>(static_cast<const void*>(q));
        for (int r = t * layer.group, h = 0; h < layer.group; ++h)
          work.q_steps[r + h] = to_words(numbers + int64_t{h} * layer.k_dim, layer.k_dim,
                                         work.q + int64_t{r + h} * layer.k_dim);
      });
#endif
  }
}

template <typename K>
void begin(const Layer& layer, const Span& span, int rows, const Work<K>& work) {
  take_queries(layer, span, work);
  if constexpr (K::kRun == 1) take_turns<K::kRun>(work.q, rows * layer.k_dim);
  for (int64_t i = 0; i < int64_t{rows} * layer.v_dim; i += kWidth) store(work.acc + i, Vec{});
  for (int r = 0; r < rows; ++r) {
    work.best[r] = -kInfinity;
    work.total[r] = 0;
  }
}

// The weights of row `r` as what its sums are made with.
template <typename K>
CLOVER_INLINE void take_weights(const float* scores, int count, int r, const Work<K>& work) {
  if constexpr (kSteps<K>) {
#if defined(CLOVER_HAVE_WORDS)
    const int whole = (count + kWidth - 1) / kWidth * kWidth;
    work.w_steps[r] = to_words(scores, whole, work.weights + r * kTile);
#endif
  } else if constexpr (kTiled<K>) {
    take_pairs(scores, count, work.weights + r * kTile);
  } else if constexpr (sizeof(typename K::Number) < sizeof(float)) {
    for (int i = 0; i < count; i += kWidth) store(work.weights + r * kTile + i, load(scores + i));
  }
}

// Of the inner loops over a tile of `count` positions.
template <typename K>
int rounds(const Layer& layer, int rows, int count) {
  const int softened = rows * 2 * ((count + kWidth - 1) / kWidth);
  if constexpr (kTiled<K>) return softened + Registers<K>::rounds(layer, rows, count);
  const int chunks = (rows + kMaxHeads - 1) / kMaxHeads;
  const int most = sums_of(rows < kMaxHeads ? rows : kMaxHeads) * kWidth;  // as AddRows takes them
  const int pair = 2 * K::kStep;
  const int left = layer.v_dim % most;
  const int parts = layer.v_dim / most + left / pair + (left % pair + K::kStep - 1) / K::kStep;
  const int scored = (count + kWidth - 1) / kWidth * (kWidth / 4);
  const int added = (count + K::kPositions - 1) / K::kPositions;
  return chunks * (scored * ((layer.k_dim + K::kStep - 1) / K::kStep + 1) + added * parts) +
         softened;
}

template <typename K>
CLOVER_INLINE void compute(const Layer& layer, const Span& span, int64_t at,
                           const Tile<typename K::Stored>& tile, Ahead<typename K::Stored>& ahead,
                           [[maybe_unused]] Registers<K>& registers, const Work<K>& work) {
  const int rows = span.queries * layer.group;
  if constexpr (kTiled<K>)
    score_tiled(layer.k_dim, rows, work.q, tile, ahead, registers, work.scores);
  else
    over_rows(rows, ScoreRows<K>{layer, tile, ahead, work.q, work.scores});
  const Softener<typename K::Stored> softener(layer, tile);
  for (int r = 0; r < rows; ++r) {
    float* scores = work.scores + r * kTile;
    const Sight sight = sight_of(layer, span, r, at, tile.count, kSteps<K> ? work.q_steps[r] : 1);
    work.decay[r] = softener.soften(sight, ahead, scores, work.best + r, work.total + r);
    take_weights(scores, tile.count, r, work);
  }
  if constexpr (kTiled<K>)
    add_tiled(layer.v_dim, rows, tile, ahead, registers, work.weights, work.decay, work.acc);
  else
    over_rows(rows, AddRows<K>{layer, tile, ahead, work});
}

// A span's head number `head` alone.
CLOVER_INLINE Span head_of(const Layer& layer, const Span& span, int head) {
  Span one = span;
  one.q += int64_t{head} * layer.group * layer.k_dim * dtype_bytes(span.q_dtype);
  one.head += head;
  return one;
}

template <typename K>
void span_of(const Layer& layer, const Span& span, const Span* next, float* scratch, float* partial,
             int64_t stride) {
  using T = typename K::Stored;
  const int rows = span.queries * layer.group;
  Registers<K> registers;
  Tile<T> tiles[2];
  locate(layer, span, span.begin, tiles[0]);
  for (int head = 0; head < span.heads; ++head)
    begin(layer, head_of(layer, span, head), rows,
          work_in<K>(layer, span, head, scratch, partial + head * stride));
  int current = 0;
  for (int64_t at = span.begin; at < span.end; at += kTile) {
    for (int head = 0; head < span.heads; ++head, current ^= 1) {
      Tile<T>& other = tiles[current ^ 1];
      const bool last_head = head + 1 == span.heads;
      const bool last = last_head && at + kTile >= span.end;
      if (!last)
        locate(layer, head_of(layer, span, last_head ? 0 : head + 1), last_head ? at + kTile : at,
               other);
      else if (next)
        locate(layer, *next, next->begin, other);
      Ahead<T> ahead(last && !next ? nullptr : &other, layer,
                     rounds<K>(layer, rows, tiles[current].count));
      compute<K>(layer, head_of(layer, span, head), at, tiles[current], ahead, registers,
                 work_in<K>(layer, span, head, scratch, partial + head * stride));
    }
  }
  if constexpr (K::kRun > 0)
    for (int head = 0; head < span.heads; ++head)
      settle<K::kRun>(partial + head * stride, rows * layer.v_dim);
}

void span(const Layer& layer, const Span& span, const Span* next, float* scratch, float* partial,
          int64_t stride) {
#if defined(__AMX_BF16__)
  if (tiled<BFloat16>(layer, span))
    return span_of<Tiled<BFloat16>>(layer, span, next, scratch, partial, stride);
  if (tiled<Int8>(layer, span))
    return span_of<Tiled<Int8>>(layer, span, next, scratch, partial, stride);
#endif
  switch (layer.dtype) {
    case DType::kFloat32:
      return span_of<Widened<float>>(layer, span, next, scratch, partial, stride);
    case DType::kBFloat16:
#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)  // these multiply floats as fast as pairs
      if (span.q_dtype == DType::kBFloat16 && layer.k_dim % 32 == 0 && layer.v_dim % 32 == 0)
        return span_of<Paired>(layer, span, next, scratch, partial, stride);
#endif
      if (layer.k_dim % Halved::kStep == 0 && layer.v_dim % Halved::kStep == 0)
        return span_of<Halved>(layer, span, next, scratch, partial, stride);
      return span_of<Widened<BFloat16>>(layer, span, next, scratch, partial, stride);
    case DType::kFloat16:
      return span_of<Widened<Float16>>(layer, span, next, scratch, partial, stride);
    case DType::kInt8:
#if defined(CLOVER_HAVE_WORDS)
      // 15 bits are more than 16-bit queries have, but not as many as float32's.
      if (span.q_dtype != DType::kFloat32 && layer.k_dim % Words::kStep == 0 &&
          layer.v_dim % Words::kStep == 0 && layer.k_dim <= kMostWordsDim)
        return span_of<Words>(layer, span, next, scratch, partial, stride);
#endif
      return span_of<Widened<Int8>>(layer, span, next, scratch, partial, stride);
  }
}

}  // namespace

#define CLOVER_TEXT_OF(x) #x
#define CLOVER_TEXT(x) CLOVER_TEXT_OF(x)
extern const Kernels kernels;
const Kernels kernels = {CLOVER_TEXT(CLOVER_ISA), kWidth, span, finish, put};

}  // namespace clover::attention::CLOVER_ISA
