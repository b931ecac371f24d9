// How a product is split among the threads of a pool: by its size and their number alone, so that
// the same call gives the same bits. And how rows are made ready for all of it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "common/thread_pool.h"
#include "dense_cpu/kernel.h"

namespace clover::dense {

constexpr int kPartsPerThread = 4;      // enough that threads finish at about one time
constexpr int kMany = 64;               // from here on tokens are split too
constexpr int kManyTokens = 96;         // of a part
constexpr int kManyBlocks = 4;          // of a part's outputs
constexpr int64_t kAloneBytes = 32768;  // of weights; less is multiplied on one thread
constexpr int64_t kAloneRows = 32768;   // numbers of rows; fewer are widened on one thread
constexpr int kFoundBlocks = 2;         // of a share: brought in with the end of the matrix before
constexpr int64_t kIdleBytes = 131072;  // and after these, by a thread that waits for the share

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Runs `run(0)` to `run(count - 1)`.
template <typename Run>
void each(ThreadPool& threads, int count, const Run& run) {
  threads.run(
      count, [](void* context, int i, int) { (*static_cast<const Run*>(context))(i); },
      const_cast<Run*>(&run));
}

// Rows of bfloat16 as `kernels` multiply them with bfloat16 weights; `wide` grows as they need it.
inline Rows rows_for(const Kernels& kernels, ThreadPool& pool, const Rows& x, int64_t inputs,
                     std::vector<float>& wide) {
  if (!kernels.wide_from || x.count < kernels.wide_from) return x;
  const int64_t stride = round_up(inputs, 2);
  if (static_cast<int64_t>(wide.size()) < x.count * stride) wide.resize(x.count * stride);
  const auto widen = [&](int t) {
    kernels.widen(x.data + t * x.stride, stride, wide.data() + t * stride);
  };
  const int count = static_cast<int>(x.count);
  if (x.count * stride >= kAloneRows) {
    each(pool, count, widen);
  } else {
    for (int t = 0; t < count; ++t) widen(t);
  }
  return {nullptr, stride, x.count, 0, nullptr, nullptr, wide.data()};
}

// Has threads that wait for `next` bring in what their shares of it begin with, after `found`
// blocks that are there by then; null: nothing.
inline void look_ahead(ThreadPool& pool, const Matrix* next, int found) {
  const int64_t blocks = next ? ceil_div(next->outputs, kBlock) : 0, threads = pool.threads();
  for (int64_t p = 0; p < threads; ++p) {
    const int64_t from = blocks * p / threads + found, until = blocks * (p + 1) / threads;
    if (from >= until) {
      pool.look_ahead(static_cast<int>(p), nullptr, nullptr);
      continue;
    }
    const uint8_t* first = next->weight + from * next->block();
    const int64_t bytes = std::min((until - from) * next->block(), kIdleBytes);
    pool.look_ahead(static_cast<int>(p), first, first + bytes);
  }
}

// A part is some blocks of outputs. A thread that has done its share finds the start of its share
// of the `next` matrix on the way. Nothing is asked for beside the products of a single token,
// where a core does little but read: its own prefetching has more lines under way than it lets a
// program ask for.
template <typename Run>
void few_parts(ThreadPool& pool, const Matrix& m, const Matrix* next, const Rows& x,
               const Run& run) {
  const int64_t blocks = ceil_div(m.outputs, kBlock), threads = pool.threads();
  const bool alone = blocks * m.block() < kAloneBytes;
  const int64_t parts = alone ? 1 : std::min(blocks, threads * kPartsPerThread);
  const bool asks = x.count > 1;
  look_ahead(pool, next, asks ? kFoundBlocks : 0);
  each(pool, static_cast<int>(parts), [&](int i) {
    const int64_t first = blocks * i / parts, last = blocks * (i + 1) / parts;
    const uint8_t* ahead = m.weight + (last < blocks ? last : 0) * m.block();
    for (int64_t p = 0; next && p < threads; ++p)
      if (i + 1 == (p + 1) * parts / threads)
        ahead = next->weight + ceil_div(next->outputs, kBlock) * p / threads * next->block();
    const int64_t end = std::min(last * kBlock, m.outputs);
    run(Part{first * kBlock, end, asks ? ahead : nullptr}, x, 0);
  });
}

// A part is some blocks of outputs for some tokens, whose rows stay in the cache meanwhile.
template <typename Run>
void many_parts(ThreadPool& pool, const Matrix& m, const Rows& x, const Run& run) {
  const int64_t across = ceil_div(ceil_div(m.outputs, kBlock), kManyBlocks);
  const int64_t down = ceil_div(x.count, kManyTokens);
  look_ahead(pool, nullptr, 0);
  each(pool, static_cast<int>(across * down), [&](int i) {
    const int64_t first = i % across * kManyBlocks * kBlock;
    const int64_t from = x.count * (i / across) / down, until = x.count * (i / across + 1) / down;
    Rows some = x.from(from);
    some.count = until - from;
    run(Part{first, std::min(first + kManyBlocks * kBlock, m.outputs), nullptr}, some, from);
  });
}

// Runs `run(part, rows, first row)` until all of `m`'s outputs are made for all of `x`. `next`: the
// matrix that is multiplied with after `m`, or null.
template <typename Run>
void each_part(ThreadPool& pool, const Matrix& m, const Matrix* next, const Rows& x,
               const Run& run) {
  if (x.count < kMany) return few_parts(pool, m, next, x, run);
  many_parts(pool, m, x, run);
}

}  // namespace clover::dense
