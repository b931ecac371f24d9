#include "loop/hop.h"

#include "loop/timer.h"

namespace clover::loop {

void OwnHop::send(int layer) {
  const Timer timer(&seconds_);
  Failure failure;
  require(table_.answer(table_.self, layer, qkv_, rows_, o_, lse_, &failure), failure);
}

}  // namespace clover::loop
