#include "tcp/frame.h"

#include <algorithm>

namespace clover::tcp {

uint64_t covered(const std::vector<Run>& runs, Cursor at, uint64_t nbytes, uint32_t most) {
  uint64_t sum = 0;
  for (uint32_t i = 0; i < most && at.run < runs.size() && sum < nbytes; ++i, ++at.run) {
    sum += runs[at.run].length - at.offset;
    at.offset = 0;
  }
  return std::min(sum, nbytes);
}

void take(const std::vector<Run>& runs, Cursor* at, uint64_t nbytes, std::vector<Run>* out) {
  while (nbytes > 0) {
    const Run& run = runs[at->run];
    const uint64_t length = std::min(nbytes, run.length - at->offset);
    out->push_back({run.offset + at->offset, length});
    nbytes -= length;
    at->offset += length;
    if (at->offset == run.length) *at = {at->run + 1, 0};
  }
}

bool overlap(const std::vector<Run>& a, const std::vector<Run>& b) {
  for (size_t i = 0, j = 0; i < a.size() && j < b.size();) {
    if (a[i].offset + a[i].length <= b[j].offset) {
      ++i;
    } else if (b[j].offset + b[j].length <= a[i].offset) {
      ++j;
    } else {
      return true;
    }
  }
  return false;
}

bool plausible(const FrameHeader& header) {
  if (header.magic != kFrameMagic || header.reserved != 0) return false;
  if (header.nbytes > kMaxFrameBytes || header.runs > kMaxRuns) return false;
  // Only what is empty as a whole has an empty frame.
  if (header.kind != Kind::kQuery && (header.nbytes == 0) != (header.total == 0)) return false;
  switch (header.kind) {
    case Kind::kPut:
      return header.total <= kMaxPutBytes && header.nbytes <= header.total && header.offset == 0;
    case Kind::kMessage:
      return header.total <= kMaxMessageBytes && header.offset <= header.total &&
             header.nbytes <= header.total - header.offset && header.runs == 0;
    case Kind::kQuery:
      return header.nbytes == 0 && header.runs == 0 && header.offset == 0;
  }
  return false;  // a number that is no kind
}

bool fits(const FrameHeader& header, const Run* runs, uint64_t region_bytes) {
  uint64_t sum = 0;
  for (uint32_t i = 0; i < header.runs; ++i) {
    const Run& run = runs[i];
    if (run.length == 0 || run.length > header.nbytes || run.length > region_bytes) return false;
    if (run.offset > region_bytes - run.length) return false;
    sum += run.length;
  }
  return sum == header.nbytes;
}

}  // namespace clover::tcp
