// A bare read of runs of memory in the order of a paged attention call: what the call's bytes take
// by themselves. Built and called by _paged.py; C++17, no other headers of the project.
#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#define CLONES __attribute__((target_clones("avx512f", "avx2", "default"), noinline))
#else
#define CLONES __attribute__((noinline))
#endif

typedef float Line __attribute__((vector_size(64)));

// Runs [begin, end), two at a time (keys and values), asked for `ahead` bytes before they are read.
CLONES static float read_share(const char* const* runs, int64_t begin, int64_t end, int64_t bytes,
                               int64_t ahead) {
  Line sums[4] = {};
  for (int64_t run = begin; run + 2 <= end; run += 2) {
    for (int64_t at = 0; at + 128 <= bytes; at += 128) {
      const int64_t later = run + (at + ahead / 2) / bytes * 2;
      if (later + 2 <= end) {
        const int64_t offset = (at + ahead / 2) % bytes;
        for (int side = 0; side < 2; ++side) {
          __builtin_prefetch(runs[later + side] + offset, 0, 2);
          __builtin_prefetch(runs[later + side] + offset + 64, 0, 2);
        }
      }
      for (int side = 0; side < 2; ++side) {
        const auto* line = reinterpret_cast<const Line*>(runs[run + side] + at);
        sums[2 * side] += line[0];
        sums[2 * side + 1] += line[1];
      }
    }
  }
  return (sums[0] + sums[1] + sums[2] + sums[3])[0];
}

// Seconds that `threads` threads take for `count` runs, an even number, of `bytes` each, which are
// a multiple of 128; every run begins at a cache line.
extern "C" double read_runs(const char* const* runs, int64_t count, int64_t bytes, int64_t ahead,
                            int threads) {
  std::vector<float> results(threads);
  const auto share = [&](int i) {
    const int64_t begin = count / 2 * i / threads * 2, end = count / 2 * (i + 1) / threads * 2;
    results[i] = read_share(runs, begin, end, bytes, ahead);
  };
  const auto started = std::chrono::steady_clock::now();
  std::vector<std::thread> others;
  for (int i = 1; i < threads; ++i) others.emplace_back(share, i);
  share(0);
  for (std::thread& other : others) other.join();
  const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - started;
  volatile float kept = 0;
  for (float result : results) kept = kept + result;
  return taken.count();
}
