// Arguments of state export and import.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "core/base/status.h"
#include "core/state/optim_state.h"
#include "sotto/sotto.h"

namespace sotto::capi {

// Of any object. common, configured: what these modes are, for objects that have them.
inline Result<StateMode> take_mode(sotto_state_mode mode,
                                   std::optional<StateMode> common = std::nullopt,
                                   std::optional<StateMode> configured = std::nullopt) {
  switch (mode) {
    case SOTTO_STATE_EXACT: return StateMode::kExact;
    case SOTTO_STATE_RESET: return StateMode::kReset;
    case SOTTO_STATE_MEAN: return StateMode::kMean;
    case SOTTO_STATE_COMMON:
      if (common) return *common;
      break;
    case SOTTO_STATE_CONFIGURED:
      if (configured) return *configured;
      break;
    default: break;
  }
  std::string allowed = "1 (SOTTO_STATE_EXACT), 2 (SOTTO_STATE_RESET), 3 (SOTTO_STATE_MEAN)";
  if (common) allowed += ", 4 (SOTTO_STATE_COMMON)";
  if (configured) allowed = "0 (SOTTO_STATE_CONFIGURED), " + allowed;
  return invalid_argument("mode is {}; allowed: {}", mode, allowed);
}

// Of an optimizer, whose configuration names one.
inline Result<StateMode> take_optim_mode(const Optimizer& optimizer, sotto_state_mode mode) {
  StateMode configured = StateMode::kReset;
  switch (optimizer.config().sotto.checkpoint) {
    case CheckpointErrors::kExact: configured = StateMode::kExact; break;
    case CheckpointErrors::kMean: configured = StateMode::kMean; break;
    case CheckpointErrors::kReset: break;
  }
  return take_mode(mode, StateMode::kCommon, configured);
}

inline Result<std::span<const std::byte>> take_blob(const void* buf, uint64_t len) {
  if (buf == nullptr && len != 0) return invalid_argument("buf is NULL but len is {}", len);
  return std::span(static_cast<const std::byte*>(buf), len);
}

}  // namespace sotto::capi
