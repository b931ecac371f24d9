// An attention node's steps under way, answered layer by layer without its Python, on whichever
// thread a hop is noticed.
//
// What it does not answer (a step that it does not know, a layer that fails) is left to the node
// itself.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "common/gate.h"
#include "common/tables.h"

namespace clover::loop {

// A step's hops by their dense node and the notice of their first layer.
struct StepKey {
  int source;
  uint32_t notice;
  bool operator<(const StepKey& other) const {
    return std::pair(source, notice) < std::pair(other.source, other.notice);
  }
};

// What was done of a step, for its dense node.
struct Told {
  uint32_t notice;  // of the first layer
  uint32_t layers;
  double seconds;
};
static_assert(sizeof(Told) == 16, "its reader is another process's Python");

struct AnswerStep {
  AttentionRows rows;
  QkvRows in;  // where hops over a wire leave their rows
  void* out;   // where their output goes
  Told* told;  // what is told over a wire with the last layer's output; null: nothing
};

struct AnswerTotals {
  int layers;
  double seconds;
};

class Answerer {
 public:
  // The table outlives this; `gate` may be null.
  Answerer(const AttentionTable& table, int heads, Gate* gate)
      : table_(table), heads_(heads), gate_(gate) {}

  // All that the step points to stays until `end`.
  void begin(StepKey key, const AnswerStep& step);
  // After it nothing is answered of the step; waits for the answer under way.
  AnswerTotals end(StepKey key);
  // Ends all steps, and takes no more.
  void close();

  // Whether the step is known, now or within `timeout_ns`.
  bool await(StepKey key, int64_t timeout_ns);
  // False: the node's own to answer.
  bool answer(StepKey key, int layer);
  // From and to the caller's own rows, as many as the step has; the caller tells what was done.
  bool answer(StepKey key, int layer, const QkvRows& in, int64_t tokens, void* out);

 private:
  struct Entry {
    AnswerStep step;
    AnswerTotals totals;
  };

  bool run(Entry& entry, int layer, const QkvRows& in, void* out);

  AttentionTable table_;
  int heads_;
  Gate* gate_;
  std::mutex mutex_;  // of all below; entered after the gate, never before
  std::condition_variable begun_;
  std::map<StepKey, Entry> steps_;
  std::vector<float> lse_;
  bool closed_ = false;
};

}  // namespace clover::loop
