// What the native half of the tcp transport answers; the binding turns each into one exception.
#pragma once

namespace clover::tcp {

enum class Status {
  kOk,
  kTimeout,     // it did not happen by its deadline
  kPeerGone,    // the connection ended
  kDropped,     // this side dropped the connection, since another put missed its deadline
  kNoRegion,    // the peer has no such region, or has closed it
  kClosed,      // this endpoint is closed
  kOutOfRange,  // an index or an offset reaches outside its memory
  kMalformed,   // the peer sent what is no frame
};

}  // namespace clover::tcp
