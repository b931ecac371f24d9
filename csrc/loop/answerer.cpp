#include "loop/answerer.h"

#include <chrono>

#include "loop/timer.h"

namespace clover::loop {

void Answerer::begin(StepKey key, const AnswerStep& step) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (closed_) return;
    steps_[key] = {step, {0, 0.0}};
  }
  begun_.notify_all();
}

AnswerTotals Answerer::end(StepKey key) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = steps_.find(key);
  if (found == steps_.end()) return {0, 0.0};
  const AnswerTotals totals = found->second.totals;
  steps_.erase(found);
  return totals;
}

void Answerer::close() {
  std::lock_guard<std::mutex> lock(mutex_);
  closed_ = true;
  steps_.clear();
}

bool Answerer::await(StepKey key, int64_t timeout_ns) {
  std::unique_lock<std::mutex> lock(mutex_);
  begun_.wait_for(lock, std::chrono::nanoseconds(timeout_ns),
                  [&] { return closed_ || steps_.count(key) != 0; });
  return steps_.count(key) != 0;
}

bool Answerer::answer(StepKey key, int layer) {
  const Turn turn(gate_);
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = steps_.find(key);
  if (found == steps_.end()) return false;
  const auto& [step, totals] = found->second;
  if (!run(found->second, layer, step.in, step.out)) return false;
  if (layer + 1 == table_.layers && step.told)
    *step.told = {key.notice, static_cast<uint32_t>(totals.layers), totals.seconds};
  return true;
}

bool Answerer::answer(StepKey key, int layer, const QkvRows& in, int64_t tokens, void* out) {
  const Turn turn(gate_);
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = steps_.find(key);
  if (found == steps_.end() || found->second.step.rows.tokens != tokens) return false;
  return run(found->second, layer, in, out);
}

bool Answerer::run(Entry& entry, int layer, const QkvRows& in, void* out) {
  if (layer < 0 || layer >= table_.layers) return false;
  const Timer timer(&entry.totals.seconds);
  const size_t floats = static_cast<size_t>(entry.step.rows.tokens) * heads_;
  if (lse_.size() < floats) lse_.resize(floats);
  Failure failure;  // the node meets it again, and tells it
  if (!table_.answer(table_.self, layer, in, entry.step.rows, out, lse_.data(), &failure))
    return false;
  ++entry.totals.layers;
  return true;
}

}  // namespace clover::loop
