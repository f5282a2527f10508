// Groups that are part of CUDA graphs, which have their memory, until they are forgotten. They are
// executed by launches of the graphs. An operation is known by the place of its descriptor.
#pragma once

#include <list>

#include "transports/nccl/message_group.h"

namespace sotto::nccl {

class CapturedGroups {
 public:
  void add(std::list<MessageGroup> captured) { groups_.splice(groups_.end(), captured); }
  // The groups of an operation that is not launched any more.
  std::list<MessageGroup> forget(const OpDescriptor& op);

  // A launch is awaited of the operation that is there now; or it has ended.
  void restart(const OpDescriptor& op, Counters& counters);
  void complete(const OpDescriptor& op, Counters& counters);
  // Whether a launch is awaited.
  bool executing() const;

  // Compares headers that launches have received. Null: nothing is meant for something else.
  const PeerHeader* check();
  // PROTOCOL if what a launch of the operation has received was meant for something else, or, when
  // it was `complete`, has come without headers.
  Status verify(const OpDescriptor& op, bool complete);

 private:
  std::list<MessageGroup> groups_;  // in the order of capture
};

}  // namespace sotto::nccl
