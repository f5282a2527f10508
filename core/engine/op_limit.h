// The limit of operations in flight.
#pragma once

#include "core/base/status.h"
#include "core/base/text.h"

namespace sotto {

// BUSY: as many operations are in flight as the context allows.
inline Status no_room(uint32_t max_ops) {
  return error(Code::kBusy, "{} in flight, the limit of this context",
               counted(max_ops, "operation"));
}

}  // namespace sotto
