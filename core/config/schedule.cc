#include "core/config/schedule.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace sotto {
namespace {

// One value for all groups, or one per group.
Status spread(std::vector<double>& values, const char* key, uint64_t groups) {
  if (values.size() == 1) values.resize(groups, values[0]);
  if (values.size() != groups) {
    return invalid_argument(
        "scheduler.params.{}: {} values for {} parameter groups; give one value, or a list with "
        "one per group",
        key, values.size(), groups);
  }
  return ok_status();
}

}  // namespace

LrSchedule::LrSchedule(const SchedulerConfig& config, std::vector<double> base_lr)
    : kind_(config.kind),
      warmup_type_(config.warmup_type),
      warmup_num_steps_(std::max<uint64_t>(config.warmup_num_steps, 2)),
      total_num_steps_(config.total_num_steps),
      min_lr_(config.warmup_min_lr),
      max_lr_(config.warmup_max_lr),
      base_lr_(std::move(base_lr)) {}

Result<LrSchedule> LrSchedule::create(const SchedulerConfig& config, std::vector<double> base_lr) {
  if (base_lr.empty()) return invalid_argument("a schedule needs at least one parameter group");
  LrSchedule schedule(config, std::move(base_lr));
  switch (config.kind) {
    case SchedulerKind::kNone: return schedule;
    case SchedulerKind::kWarmupLR:
    case SchedulerKind::kWarmupDecayLR:
      SOTTO_TRY(spread(schedule.min_lr_, "warmup_min_lr", schedule.groups()));
      SOTTO_TRY(spread(schedule.max_lr_, "warmup_max_lr", schedule.groups()));
      return schedule;
    case SchedulerKind::kWarmupCosineLR:
    case SchedulerKind::kOneCycle:
    case SchedulerKind::kLRRangeTest: break;
  }
  return unsupported("scheduler.type {}: supported are WarmupLR and WarmupDecayLR",
                     scheduler_kind_name(config.kind));
}

double LrSchedule::gamma(int64_t i) const {
  if (i < 0) return 0.0;
  const auto w = static_cast<double>(warmup_num_steps_);
  if (static_cast<uint64_t>(i) < warmup_num_steps_) {
    const auto x = static_cast<double>(i);
    return warmup_type_ == WarmupType::kLog ? std::log(x + 1.0) / std::log(w) : x / w;
  }
  if (kind_ == SchedulerKind::kWarmupLR) return 1.0;
  const auto total = static_cast<double>(total_num_steps_);
  return std::max(0.0, (total - static_cast<double>(i)) / std::max(1.0, total - w));
}

double LrSchedule::lr_of_update(uint64_t k, uint64_t group) const {
  if (kind_ == SchedulerKind::kNone) return base_lr_[group];
  const double lo = min_lr_[group];
  return lo + (max_lr_[group] - lo) * gamma(static_cast<int64_t>(k) - 2);
}

double LrSchedule::lr(uint64_t group) const {
  return lr_of_update(static_cast<uint64_t>(last_batch_iteration_ + 2), group);
}

Status LrSchedule::restore(int64_t iteration) {
  if (iteration < -1) return invalid_argument("last_batch_iteration {} is below -1", iteration);
  last_batch_iteration_ = iteration;
  return ok_status();
}

}  // namespace sotto
