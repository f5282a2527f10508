// The parameter groups of an optimizer: their settings, and what the schedule and callers have put
// in their place.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/config/config.h"
#include "core/config/schedule.h"

namespace sotto {

class ParamGroups {
 public:
  // groups: at least one.
  ParamGroups(std::vector<OptimizerParams> groups, LrSchedule schedule);

  size_t size() const { return groups_.size(); }
  const OptimizerParams& operator[](size_t group) const { return groups_[group]; }
  const std::vector<OptimizerParams>& all() const { return groups_; }
  LrSchedule& schedule() { return schedule_; }
  const LrSchedule& schedule() const { return schedule_; }

  // In force in the next step: the learning rate, and everything else.
  double lr(size_t group) const;
  OptimizerParams params(size_t group) const;

  // INVALID_ARGUMENT: `name` is not in `settable` (text of the names that are: `allowed`), or the
  // value is not allowed. lr, beta1 and beta2 take NaN: the schedule's or the configuration's
  // again.
  Status check(std::string_view name, size_t group, double value,
               std::span<const std::string_view> settable, std::string_view allowed) const;
  void set(std::string_view name, size_t group, double value);

  // Where the schedule goes on: -1 or a whole number of at least 0, else INVALID_ARGUMENT.
  Status set_iteration(double value);

  // Of what the file says, of all groups.
  uint64_t settings_hash() const;
  // Of rate, weight decay and betas of the next step, as float32: between machines a schedule may
  // differ in the last bits of a double.
  uint64_t step_hash(size_t group) const;
  // Of what else callers may set between steps, on top of `seed`.
  uint64_t other_hash(uint64_t seed) const;

 private:
  std::vector<OptimizerParams> groups_;
  LrSchedule schedule_;
  std::vector<double> lr_, beta1_, beta2_;  // the callers' own; NaN: none
};

}  // namespace sotto
