// What CPU kernels need beside the arithmetic of elements that all devices share.
#pragma once

#include <atomic>

#include "core/kernels/elements.h"

namespace sotto {

// Threads of one call may meet here.
inline void raise_flags(uint32_t* target, uint32_t flags) {
  if (flags != 0) std::atomic_ref<uint32_t>(*target).fetch_or(flags, std::memory_order_relaxed);
}

}  // namespace sotto
