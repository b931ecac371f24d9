// Copies that go past the caches, for memory that is large and not read again soon.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace clover::shm {

// A store that goes through the cache first reads the line that it is about to overwrite, half as
// many bytes again on the bus; a streaming store does not. SSE2 is every x86-64's, and wider stores
// were measured no faster: the write-combining buffer is a line wide for all of them.
inline void stream_copy(std::byte* to, const std::byte* from, size_t nbytes) {
#if defined(__SSE2__)
  constexpr size_t kLine = 64;
  constexpr size_t kLeast = 1024;  // below, the ends that are not whole lines weigh too much
  if (nbytes >= kLeast) {
    const size_t head = (kLine - reinterpret_cast<uintptr_t>(to) % kLine) % kLine;
    std::memcpy(to, from, head);
    const size_t lines = (nbytes - head) / kLine;
    const auto* source = reinterpret_cast<const __m128i*>(from + head);
    auto* target = reinterpret_cast<__m128i*>(to + head);
    for (size_t i = 0; i < lines; ++i, source += 4, target += 4) {
      const __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1);
      const __m128i c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
      _mm_stream_si128(target, a);
      _mm_stream_si128(target + 1, b);
      _mm_stream_si128(target + 2, c);
      _mm_stream_si128(target + 3, d);
    }
    const size_t done = head + lines * kLine;
    to += done;
    from += done;
    nbytes -= done;
  }
#endif
  std::memcpy(to, from, nbytes);
}

// Streaming stores are not ordered by a release store; this makes them so. Call it before what was
// copied is announced.
inline void stream_fence() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

}  // namespace clover::shm
