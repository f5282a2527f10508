// Waits for NCCL and CUDA during set-up. Neither signals what it has done, so it is asked.
#pragma once

#include <functional>

#include "core/iface/rendezvous.h"

namespace sotto::nccl {

// Drives the context until done(), which is asked every millisecond, or the deadline has passed.
inline void ask_until(const std::function<bool()>& done, Driver& driver, Deadline deadline) {
  constexpr int64_t kAskUs = 1000;
  while (!done() && !deadline.passed(driver.clock()))
    driver.run_until(done, Deadline::in_us(driver.clock(), kAskUs));
}

}  // namespace sotto::nccl
