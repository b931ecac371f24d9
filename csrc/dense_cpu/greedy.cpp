#include "dense_cpu/greedy.h"

#include <limits>

#include "common/simd.h"

namespace clover::dense {
namespace {

constexpr int kVecs = 4;  // maxima in flight, so that none waits for the one before
constexpr int64_t kStep = kVecs * kWidth;

}  // namespace

int64_t greedy(const float* x, int64_t size) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  Vec most[kVecs];
  for (Vec& vec : most) vec = splat(-kInfinity);
  Ints ordered = ~Ints{};
  int64_t i = 0;
  for (; i + kStep <= size; i += kStep)
    for (int v = 0; v < kVecs; ++v) {
      const Vec some = load(x + i + v * kWidth);
      most[v] = bigger(some, most[v]);
      ordered &= some == some;
    }
  float best = largest(bigger(bigger(most[0], most[1]), bigger(most[2], most[3])));
  for (int lane = 0; lane < kWidth; ++lane)
    if (!ordered[lane]) return -1;
  for (; i < size; ++i) {
    if (x[i] != x[i]) return -1;
    if (x[i] > best) best = x[i];
  }
  if (best == kInfinity || best == -kInfinity) return -1;
  for (i = 0; x[i] != best;) ++i;
  return i;
}

}  // namespace clover::dense
