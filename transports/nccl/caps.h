// What plans are told of NCCL.
#pragma once

#include "core/iface/transport.h"

namespace sotto::nccl {

// A round is one NCCL group, which waits for all kernels in front of it and costs 10 to 100 us. So
// messages are not cut, and a reduction has few windows: one up to 768 MiB, two for the 336 million
// float32 of BERT-Large. More memory would spare them one group.
constexpr TransportCaps caps_of(NativeCollectives native) {
  return {.name = "nccl",
          .host_memory_only = false,
          .segment_bytes = 0,
          .held = {.count = 1, .bytes = uint64_t{768} << 20},
          .stream_ordered = true,
          .native = native};
}

}  // namespace sotto::nccl
