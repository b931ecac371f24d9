// What has arrived over sockets, and which puts have finished.
#pragma once

#include "shm/inbox.h"
#include "tcp/status.h"

namespace clover::tcp {

using Event = shm::Event;
using Finished = shm::Finished<Status>;
using Arrivals = shm::Arrivals<Status>;
using Inbox = shm::Inbox<Status>;

}  // namespace clover::tcp
