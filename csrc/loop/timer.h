// Adds the seconds of a scope to a sum.
#pragma once

#include <chrono>

namespace clover::loop {

class Timer {
 public:
  explicit Timer(double* sum) : sum_(sum), begin_(std::chrono::steady_clock::now()) {}
  ~Timer() {
    const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - begin_;
    *sum_ += passed.count();
  }
  Timer(const Timer&) = delete;
  Timer& operator=(const Timer&) = delete;

 private:
  double* sum_;
  std::chrono::steady_clock::time_point begin_;
};

}  // namespace clover::loop
