// A put or a message of a link that leads out.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tcp/loop.h"

namespace clover::verbs {

// Adjoining bytes on both sides, of one write.
struct Piece {
  uint64_t local;   // address
  uint64_t remote;  // offset in the region
  uint32_t length;
};

struct Op {
  bool is_message = false;
  uint64_t id = 0;  // what Finished calls a put
  int64_t deadline_ns = tcp::kNever;

  uint64_t region = 0;  // the peer's number of it
  uint64_t region_bytes = 0;
  uint32_t lkey = 0;
  uint32_t notice = 0;
  uint64_t total = 0;         // bytes of all pieces
  std::vector<Piece> pieces;  // the memory stays as it is until the op is done
  std::string message;

  // The link's own from here on.
  uint64_t serial = 0;       // from 1
  bool striped = false;      // over all queue pairs
  bool started = false;      // some of it may be on its way
  uint64_t remote_base = 0;  // address of the region
  uint32_t rkey = 0;
  size_t next = 0;            // piece, or byte of the message
  uint64_t last_request = 0;  // on the first queue pair
};

// Equal-sized pieces on both sides of a put.
struct Slices {
  uint64_t base;  // address of local memory
  uint64_t size;  // bytes of it
  const int64_t* local;
  int64_t num_local;
  uint64_t region;
  uint64_t region_bytes;
  const int64_t* remote;
  int64_t num_remote;
  int64_t length;
};

// Fills in a put from the rows of `index` [rows, 2], no piece longer than `block_size`; false where
// a row names no slice, or one that reaches outside its memory.
bool make_put(const Slices& slices, const int32_t* index, int64_t rows, uint64_t block_size,
              Op* op);

}  // namespace clover::verbs
