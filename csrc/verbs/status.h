// What the rdma engine answers; the binding turns each into one exception. What is wrong before
// there is a link (no device, memory that cannot be registered) is an Error with a text of its own.
#pragma once

#include <stdexcept>

namespace clover::verbs {

enum class Status {
  kOk,
  kTimeout,       // it did not happen by its deadline
  kPeerGone,      // the control connection ended
  kDropped,       // this side dropped the link, since another put missed its deadline
  kNoRegion,      // the peer has no such region, or has closed it
  kClosed,        // this endpoint is closed
  kOutOfRange,    // an index or an offset reaches outside its memory
  kMalformed,     // the peer said what makes no sense
  kRetries,       // RETRY_EXC_ERR: the network card got no answer
  kCannotSend,    // LOC_QP_OP_ERR: the card has no way to send
  kNotReady,      // RNR_RETRY_EXC_ERR: the peer has no room for notices
  kRemoteAccess,  // REM_ACCESS_ERR, REM_INV_REQ_ERR, REM_OP_ERR: the peer's card refused
  kLocalMemory,   // LOC_PROT_ERR and the like: local memory is not registered any more
  kQueuePair,     // any other completion with an error, or a request that was not taken
  kDevice,        // the device has failed or was removed
};

class Error : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

}  // namespace clover::verbs
