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

// Whether queries and weights are integers, with a step's size for each row.
template <typename K>
constexpr bool kSteps =
    !kTiled<K> && sizeof(typename K::Number) == sizeof(int16_t) && sizeof(typename K::Stored) == 1;

// Of 16 registers sums of values have 12, or 8 where what was loaded and a mask for it are held
// besides.
#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr bool kFew = true;
#else
constexpr bool kFew = false;
#endif
template <typename K>
constexpr bool kTight = kFew && K::kParts == 2;

// Whether R rows meet kKeys keys at a time: sums with four would leave the registers.
template <typename K, int R>
constexpr bool kTurned = kFew && (R == 4 || (R == 3 && kTight<K>));
template <typename K>  // products of integers take a register before they are added
constexpr int kKeys = kSteps<K> ? 2 : 3;

// Rows whose values are added up at a time, and for so many rows chunks of them.
template <typename K>
constexpr int kAddedRows = kTight<K> ? 2 : kMaxHeads;
template <typename K>
constexpr int chunks_of(int rows) {
  const int sums = (kTight<K> ? 8 : kSumVectors) / rows;
  const int chunks = (sums < 8 ? sums : 8) * kWidth / K::kStep;
  return chunks > 1 ? chunks : 1;
}

// Adds the products of a chunk of J keys with R queries: whichever are fewer are held in registers.
template <typename K, int kPart = 0, int R, int J>
CLOVER_INLINE void add_products(const typename K::Stored* const* k, int d,
                                const typename K::Number* q, int k_dim, Vec (&sums)[R][J]) {
  if constexpr (R >= J && J < 4) {
    decltype(K::template take<kPart>(*k)) key[J];
    for (int j = 0; j < J; ++j) key[j] = K::template take<kPart>(k[j] + d);
    for (int r = 0; r < R; ++r) {
      const auto x = K::template take_query<kPart>(q + r * k_dim + d);
      for (int j = 0; j < J; ++j) sums[r][j] = K::add(sums[r][j], x, key[j]);
    }
  } else {
    decltype(K::template take_query<kPart>(q)) x[R];
    for (int r = 0; r < R; ++r) x[r] = K::template take_query<kPart>(q + r * k_dim + d);
    for (int j = 0; j < J; ++j) {
      const auto key = K::template take<kPart>(k[j] + d);
      for (int r = 0; r < R; ++r) sums[r][j] = K::add(sums[r][j], x[r], key);
    }
  }
  if constexpr (kPart + 1 < K::kParts) add_products<K, kPart + 1>(k, d, q, k_dim, sums);
}

// Of whole keys.
template <typename K, int R, int J>
CLOVER_INLINE void multiply(const typename K::Stored* const* k, const typename K::Number* q,
                            int k_dim, Ahead<typename K::Stored>& ahead, Vec (&sums)[R][J]) {
  const typename K::Stored* keys[J];
  for (int j = 0; j < J; ++j) keys[j] = k[j];
  in_batches(ahead, k_dim, K::kStep, [&](int d) __attribute__((always_inline)) {
    add_products<K>(keys, d, q, k_dim, sums);
  });
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < J; ++j) sums[r][j] = K::added(sums[r][j]);
}

// Scores of kWidth positions from `at` for R rows: scores[r * kTile + lane].
template <typename K, int R>
void score(int k_dim, const typename K::Number* q, const Tile<typename K::Stored>& tile,
           Ahead<typename K::Stored>& ahead, int at, float* scores) {
  Vec quads[R][kWidth / 4];
  for (int quad = 0; quad < kWidth / 4; ++quad) {
    Vec sums[R][4] = {};
    multiply<K>(tile.keys + at + 4 * quad, q, k_dim, ahead, sums);
    for (int r = 0; r < R; ++r)
      quads[r][quad] = fold_four(sums[r][0], sums[r][1], sums[r][2], sums[r][3]);
  }
  for (int r = 0; r < R; ++r) store(scores + r * kTile, fold_quads(quads[r]));
}

// Sums of three or four rows at each of J positions.
template <typename K, int R, int J>
CLOVER_INLINE void fold_rows(int k_dim, const typename K::Number* q,
                             const typename K::Stored* const* k, Ahead<typename K::Stored>& ahead,
                             Vec* folded) {
  Vec sums[R][J] = {};
  multiply<K>(k, q, k_dim, ahead, sums);
  for (int j = 0; j < J; ++j)
    folded[j] = fold_four(sums[0][j], sums[1][j], sums[2][j], sums[R - 1][j]);
}

// Scores of all positions for R rows, folded over the rows, since kKeys do not make whole vectors.
template <typename K, int R>
CLOVER_INLINE void score_turned(int k_dim, const typename K::Number* q,
                                const Tile<typename K::Stored>& tile,
                                Ahead<typename K::Stored>& ahead, float* scores) {
  Vec folded[kTile];
  int i = 0;
  for (; i + kKeys<K> <= tile.count; i += kKeys<K>)
    fold_rows<K, R, kKeys<K>>(k_dim, q, tile.keys + i, ahead, folded + i);
  for (; i < tile.count; ++i) fold_rows<K, R, 1>(k_dim, q, tile.keys + i, ahead, folded + i);
  for (; i % kWidth != 0; ++i) folded[i] = Vec{};
  for (i = 0; i < tile.count; i += kWidth) store_turned<R>(folded + i, scores + i, kTile);
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
    in_batches(ahead, tile.count, kWidth, [&](int i) __attribute__((always_inline)) {
      const Vec s = final_score(sight, load(scores + i), lanes + i, i);
      store(scores + i, s);
      top = bigger(top, s);
    });
    const float tile_best = largest(top);
    const float next = tile_best > *best ? tile_best : *best;
    if (next == -kInfinity) {  // nothing visible so far: weights of zero, not of NaN
      for (int i = 0; i < tile.count; i += kWidth) store(scores + i, Vec{});
      return 1.0f;
    }
    Vec sums = {};
    in_batches(ahead, tile.count, kWidth, [&](int i) __attribute__((always_inline)) {
      Vec weight = exponential(load(scores + i) - next);
      sums += weight;
      if (kScaled<T>) weight *= load(value_scales + i);
      store(scores + i, weight);
    });
    const float decay = next == *best ? 1.0f : __builtin_expf(*best - next);
    *best = next;
    *total = *total * decay + sum(sums);
    return decay;
  }
};

// Calls f.template run<R>(first row) for all rows, at most kMost at a time.
template <int kMost, typename F>
CLOVER_INLINE void over_rows(int rows, const F& f) {
  int r = 0;
  for (; r + kMost <= rows; r += kMost) f.template run<kMost>(r);
  if constexpr (kMost > 3)
    if (rows - r == 3) f.template run<3>(r);
  if constexpr (kMost > 2)
    if (rows - r == 2) f.template run<2>(r);
  if constexpr (kMost > 1)
    if (rows - r == 1) f.template run<1>(r);
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
    const auto* queries = q + r * layer.k_dim;
    float* to = scores + r * kTile;
    if constexpr (kTurned<K, R>) {
      score_turned<K, R>(layer.k_dim, queries, tile, ahead, to);
    } else {
      for (int i = 0; i < tile.count; i += kWidth)
        score<K, R>(layer.k_dim, queries, tile, ahead, i, to + i);
    }
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

  template <int R, int E>
  [[gnu::always_inline]] void add_some(int r, int e, int chunks) const {
    if (chunks == E)
      add<R, E>(r, e);
    else if constexpr (E > 1)
      add_some<R, E - 1>(r, e, chunks);
  }

  template <int R>
  [[gnu::always_inline]] void run(int r) const {
    constexpr int kMost = chunks_of<K>(R);
    int left = layer.v_dim / K::kStep;
    for (int parts = (left + kMost - 1) / kMost; parts > 0; --parts) {
      const int chunks = (left + parts - 1) / parts;
      add_some<R, kMost>(r, layer.v_dim - left * K::kStep, chunks);
      left -= chunks;
    }
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

// How often a tile of `count` positions asks ahead.
template <typename K>
int calls_of(const Layer& layer, int rows, int count) {
  int sum = rows * 2 * batches_of(count, kWidth);  // softened
  if constexpr (kTiled<K>) {
    sum += Registers<K>::rounds(layer, rows, count);
  } else {
    const int added = batches_of(count, K::kPositions);
    for (int left = rows; left > 0; left -= kMaxHeads) {
      const bool turned = left == 3 ? kTurned<K, 3> : left > 3 && kTurned<K, 4>;
      const int scored = turned ? count / kKeys<K> + count % kKeys<K>
                                : (count + kWidth - 1) / kWidth * (kWidth / 4);
      sum += scored * batches_of(layer.k_dim, K::kStep);
    }
    for (int left = rows; left > 0; left -= kAddedRows<K>) {
      const int most = chunks_of<K>(left < kAddedRows<K> ? left : kAddedRows<K>) * K::kStep;
      sum += added * ((layer.v_dim + most - 1) / most);
    }
  }
  return sum;
}

template <typename K>
CLOVER_INLINE void compute(const Layer& layer, const Span& span, int64_t at,
                           const Tile<typename K::Stored>& tile, Ahead<typename K::Stored>& ahead,
                           [[maybe_unused]] Registers<K>& registers, const Work<K>& work) {
  const int rows = span.queries * layer.group;
  if constexpr (kTiled<K>)
    score_tiled(layer.k_dim, rows, work.q, tile, ahead, registers, work.scores);
  else
    over_rows<kMaxHeads>(rows, ScoreRows<K>{layer, tile, ahead, work.q, work.scores});
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
    over_rows<kAddedRows<K>>(rows, AddRows<K>{layer, tile, ahead, work});
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
                     calls_of<K>(layer, rows, tiles[current].count));
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
