// What the NCCL backend can be told.
#pragma once

#include <string>

#include "core/iface/transport.h"

namespace sotto {

struct NcclOptions {
  std::string library;           // path of libnccl.so.2; empty: where it is found
  NativeCollectives native = 0;  // that plans may use; equal on all ranks
};

}  // namespace sotto
