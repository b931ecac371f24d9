// What travels on a connection after the handshake. Bytes are little-endian.
//
// A put, a message or a query is one op of a link (the connections from one endpoint to another),
// numbered without gaps. Its bytes travel in frames, spread over the link's connections as they
// have room. The receiver puts ops in order again, and answers on the link's first connection.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace clover::tcp {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "frames are little-endian");

enum class Kind : uint32_t {
  kPut = 1,      // runs of bytes into a region, then a notice
  kMessage = 2,  // bytes for the mailbox
  kQuery = 3,    // asks whether a region of `total` bytes is there
};

constexpr uint32_t kFrameMagic = 0x46564c43;   // "CLVF"
constexpr uint32_t kAnswerMagic = 0x41564c43;  // "CLVA"
constexpr uint32_t kMaxRuns = 512;             // of one frame
constexpr uint32_t kMaxFrameBytes = 1 << 20;   // of one frame's payload
constexpr uint64_t kMaxMessageBytes = 64 << 20;
constexpr uint64_t kMaxPutBytes = uint64_t{1} << 40;
constexpr uint64_t kMaxOpsInFlight = 16384;  // of one link, sent and not answered
constexpr uint64_t kMaxMessageBytesInFlight = 128 << 20;

// Followed by `runs` records of Run (puts only), then `nbytes` of payload.
struct FrameHeader {
  uint32_t magic;
  Kind kind;
  uint64_t seq;     // of the op in its link, from 0
  uint64_t total;   // bytes of the whole op; for a query the region's size
  uint64_t offset;  // of this payload in its message; 0 for others
  uint64_t region;  // 0 for messages
  uint32_t notice;
  uint32_t nbytes;  // of payload in this frame
  uint32_t runs;
  uint32_t reserved;
};
static_assert(sizeof(FrameHeader) == 56, "the wire's layout");

// Adjoining bytes: of the target region where it travels, at an address on the sending side.
struct Run {
  uint64_t offset;
  uint64_t length;
};
static_assert(sizeof(Run) == 16, "the wire's layout");

enum class Outcome : uint32_t {
  kDone = 0,      // this op and all before it are done; failures were told before
  kNoRegion = 1,  // this op failed: its region is unknown or closed
};

struct Answer {
  uint32_t magic;
  Outcome outcome;
  uint64_t seq;
};
static_assert(sizeof(Answer) == 16, "the wire's layout");

constexpr size_t kMaxHeadBytes = sizeof(FrameHeader) + kMaxRuns * sizeof(Run);

// A place in a list of runs.
struct Cursor {
  size_t run = 0;
  uint64_t offset = 0;  // within that run
};

// How many of `nbytes` the next `most` runs from `at` cover.
uint64_t covered(const std::vector<Run>& runs, Cursor at, uint64_t nbytes, uint32_t most);

// Appends the next `nbytes` from `at` to `out` and moves `at` behind them.
void take(const std::vector<Run>& runs, Cursor* at, uint64_t nbytes, std::vector<Run>* out);

// Whether two lists of runs, both in the order of their offsets, have a byte in common.
bool overlap(const std::vector<Run>& a, const std::vector<Run>& b);

// Whether a header can be of a frame at all, whatever regions there are.
bool plausible(const FrameHeader& header);

// Whether `runs` add up to the header's payload and lie inside `region_bytes`.
bool fits(const FrameHeader& header, const Run* runs, uint64_t region_bytes);

}  // namespace clover::tcp
