#include "core/optim/param_groups.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/base/hash.h"
#include "core/base/text.h"
#include "core/optim/settings.h"

namespace sotto {
namespace {

bool is_beta(std::string_view name) { return name == "beta1" || name == "beta2"; }

}  // namespace

ParamGroups::ParamGroups(std::vector<OptimizerParams> groups, LrSchedule schedule)
    : groups_(std::move(groups)),
      schedule_(std::move(schedule)),
      lr_(groups_.size(), std::numeric_limits<double>::quiet_NaN()),
      beta1_(lr_),
      beta2_(lr_) {}

double ParamGroups::lr(size_t group) const {
  return std::isnan(lr_[group]) ? schedule_.lr(group) : lr_[group];
}

OptimizerParams ParamGroups::params(size_t group) const {
  OptimizerParams p = groups_[group];
  if (const auto betas = schedule_.betas()) {
    p.beta1 = betas->beta1;
    p.beta2 = betas->beta2;
  }
  if (!std::isnan(beta1_[group])) p.beta1 = beta1_[group];
  if (!std::isnan(beta2_[group])) p.beta2 = beta2_[group];
  return p;
}

Status ParamGroups::check(std::string_view name, size_t group, double value,
                          std::span<const std::string_view> settable,
                          std::string_view allowed) const {
  if (std::find(settable.begin(), settable.end(), name) == settable.end())
    return invalid_argument("\"{}\" cannot be set; allowed: {}", name, allowed);
  const bool resets = name == "lr" || is_beta(name);
  if (resets && std::isnan(value)) return ok_status();
  const auto rounded = static_cast<float>(value);
  if (!fits_float32(value) || value < 0) {
    return invalid_argument(
        "{} is {}{}; allowed: a finite number of at least 0{}", name, value,
        fits_float32(value) || !std::isfinite(value) ? "" : fmt::format(", {} in float32", rounded),
        resets ? ", or NaN for the schedule" : "");
  }
  if (is_beta(name) && rounded >= 1)
    return invalid_argument("{} is {}; allowed: from 0 to below 1, in float32 too", name, value);
  const OptimizerParams& p = groups_[group];
  if ((name == "max_coeff" && value < p.lamb.min_coeff) ||
      (name == "min_coeff" && value > p.lamb.max_coeff))
    return invalid_argument("{} of group {} is {}; min_coeff is {}, max_coeff {}", name, group,
                            value, p.lamb.min_coeff, p.lamb.max_coeff);
  return ok_status();
}

void ParamGroups::set(std::string_view name, size_t group, double value) {
  if (name == "lr") lr_[group] = value;
  if (name == "beta1") beta1_[group] = value;
  if (name == "beta2") beta2_[group] = value;
  if (name == "lr" || is_beta(name)) return;
  OptimizerParams::each(groups_[group], [&](std::string_view key, auto& out) {
    if constexpr (std::is_same_v<decltype(out), double&>) {
      if (key == name) out = value;
    }
  });
}

Status ParamGroups::set_iteration(double value) {
  constexpr double kMost = 9007199254740992.0;  // from here on doubles leave whole numbers out
  if (!(value >= -1 && value < kMost) || value != std::floor(value)) {
    return invalid_argument("scheduler_iteration is {}; allowed: -1 and whole numbers from 0",
                            value);
  }
  return schedule_.restore(static_cast<int64_t>(value));
}

uint64_t ParamGroups::settings_hash() const {
  uint64_t hash = 0;
  for (const OptimizerParams& group : groups_) {
    const uint64_t of_group = hash_of_settings(group);
    hash = hash64(&of_group, sizeof of_group, hash);
  }
  return hash;
}

uint64_t ParamGroups::step_hash(size_t group) const {
  const OptimizerParams p = params(group);
  // Adding 0 makes one number of 0 and -0.
  const float values[] = {static_cast<float>(lr(group)) + 0.0f,
                          static_cast<float>(p.weight_decay) + 0.0f, static_cast<float>(p.beta1),
                          static_cast<float>(p.beta2)};
  return hash64(values, sizeof values);
}

uint64_t ParamGroups::other_hash(uint64_t seed) const {
  for (const OptimizerParams& p : groups_) {
    const double values[] = {p.eps, p.sgd.momentum, p.lamb.max_coeff, p.lamb.min_coeff};
    seed = hash64(values, sizeof values, seed);
  }
  return seed;
}

}  // namespace sotto
