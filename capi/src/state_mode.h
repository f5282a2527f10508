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
  if (mode == SOTTO_STATE_EXACT) return StateMode::kExact;
  if (mode == SOTTO_STATE_RESET) return StateMode::kReset;
  return invalid_argument("mode is {}; allowed: {} (SOTTO_STATE_EXACT), {} (SOTTO_STATE_RESET)",
                          mode, SOTTO_STATE_EXACT, SOTTO_STATE_RESET);
}

// Of a codec, which has one mode more.
inline Result<StateMode> take_codec_mode(sotto_state_mode mode) {
  if (mode == SOTTO_STATE_MEAN) return StateMode::kMean;
  if (const Result<StateMode> common = take_mode(mode); common.ok()) return common;
  return invalid_argument(
      "mode is {}; allowed: {} (SOTTO_STATE_EXACT), {} (SOTTO_STATE_RESET), {} (SOTTO_STATE_MEAN)",
      mode, SOTTO_STATE_EXACT, SOTTO_STATE_RESET, SOTTO_STATE_MEAN);
}

inline Result<std::span<const std::byte>> take_blob(const void* buf, uint64_t len) {
  if (buf == nullptr && len != 0) return invalid_argument("buf is NULL but len is {}", len);
  return std::span(static_cast<const std::byte*>(buf), len);
}

}  // namespace sotto::capi
