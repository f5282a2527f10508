// The loss scale of 16-bit training (specification 11.4).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "core/base/status.h"
#include "core/config/config.h"

namespace sotto {

// What a checkpoint keeps.
struct LossScale {
  double scale = 1;
  uint64_t iteration = 0;      // attempts, overflows included
  int64_t last_overflow = -1;  // attempt; -1: none
  bool operator==(const LossScale&) const = default;
};

class LossScaler {
 public:
  // Gradients are not scaled.
  LossScaler() = default;
  explicit LossScaler(const Fp16Config& config)
      : enabled_(config.enabled),
        dynamic_(config.enabled && config.loss_scale == 0),
        window_(config.loss_scale_window),
        min_scale_(config.min_loss_scale) {
    if (!enabled_) return;
    state_.scale = dynamic_ ? std::ldexp(1.0, static_cast<int>(config.initial_scale_power))
                            : config.loss_scale;
  }

  bool enabled() const { return enabled_; }
  bool dynamic() const { return dynamic_; }
  double scale() const { return state_.scale; }
  // INVALID_ARGUMENT: there is no scale, or it cannot be set to this, or not for this group.
  Status check(int32_t group, double scale) const {
    if (!enabled_) return invalid_argument("loss_scale cannot be set: fp16.enabled is false");
    if (group != -1) return invalid_argument("group is {}; loss_scale is one for all: -1", group);
    if (scale >= Fp16Config::kSmallestScale && scale <= Fp16Config::kLargestScale)
      return ok_status();
    return invalid_argument("loss_scale is {}; allowed: {} to {}", scale,
                            Fp16Config::kSmallestScale, Fp16Config::kLargestScale);
  }
  void set(double scale) { state_.scale = scale; }
  const LossScale& state() const { return state_; }
  void restore(const LossScale& state) { state_ = state; }

  // An attempt has ended. Only a dynamic scale depends on their number, and is restored with it.
  void advance(bool overflow) {
    if (!dynamic_) return;
    const auto now = static_cast<int64_t>(state_.iteration++);
    if (overflow) {
      state_.scale = std::max(state_.scale / 2, min_scale_);
      state_.last_overflow = now;
      return;
    }
    const int64_t stable = now - state_.last_overflow - 1;
    if (stable > 0 && stable % static_cast<int64_t>(window_) == 0) state_.scale *= 2;
  }

 private:
  bool enabled_ = false, dynamic_ = false;
  uint64_t window_ = 1000;
  double min_scale_ = 1;
  LossScale state_;
};

}  // namespace sotto
