// What the native half of the shm transport answers; bindings turn each into one exception class.
#pragma once

namespace clover::shm {

enum class Status {
  kOk,
  kTimeout,     // it did not happen in time
  kClosed,      // the other end has closed
  kTooLong,     // a record that can never fit the ring
  kOutOfRange,  // an index or an offset reaches outside its memory
  kDenied,      // the kernel does not let this process do it
  kMalformed,   // shared memory does not hold what it should
};

}  // namespace clover::shm
