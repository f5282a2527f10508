// Arguments of state export and import.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "core/base/status.h"
#include "core/state/optim_state.h"
#include "sotto/sotto.h"

namespace sotto::capi {

inline Result<StateMode> take_mode(sotto_state_mode mode) {
  switch (mode) {
    case SOTTO_STATE_EXACT: return StateMode::kExact;
    case SOTTO_STATE_RESET: return StateMode::kReset;
    case SOTTO_STATE_MEAN: return StateMode::kMean;
    default: break;
  }
  return invalid_argument(
      "mode is {}; allowed: {} (SOTTO_STATE_EXACT), {} (SOTTO_STATE_RESET), {} (SOTTO_STATE_MEAN)",
      mode, SOTTO_STATE_EXACT, SOTTO_STATE_RESET, SOTTO_STATE_MEAN);
}

// Of an optimizer, whose configuration names one.
inline Result<StateMode> take_optim_mode(const Optimizer& optimizer, sotto_state_mode mode) {
  if (mode == SOTTO_STATE_COMMON) return StateMode::kCommon;
  if (mode != SOTTO_STATE_CONFIGURED) return take_mode(mode);
  switch (optimizer.config().sotto.checkpoint) {
    case CheckpointErrors::kExact: return StateMode::kExact;
    case CheckpointErrors::kMean: return StateMode::kMean;
    case CheckpointErrors::kReset: break;
  }
  return StateMode::kReset;
}

inline Result<std::span<const std::byte>> take_blob(const void* buf, uint64_t len) {
  if (buf == nullptr && len != 0) return invalid_argument("buf is NULL but len is {}", len);
  return std::span(static_cast<const std::byte*>(buf), len);
}

}  // namespace sotto::capi
