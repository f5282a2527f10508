#include "core/config/schedule.h"
#include "core/base/text.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>

namespace sotto {
namespace {

constexpr double kCycleBeta2 = 0.99;  // what DeepSpeed's OneCycle sets

// One value for all groups, or one per group.
Status spread(std::vector<double>& values, const char* key, uint64_t groups) {
  if (values.size() == 1) values.resize(groups, values[0]);
  if (values.size() != groups) {
    return invalid_argument(
        "scheduler.params.{}: {} for {}; give one value, or a list with "
        "one per group",
        key, counted(values.size(), "value"), counted(groups, "parameter group"));
  }
  return ok_status();
}

}  // namespace

Result<LrSchedule> LrSchedule::create(const SchedulerConfig& config, std::vector<double> base_lr,
                                      Mode mode) {
  if (base_lr.empty()) return invalid_argument("a schedule needs at least one parameter group");
  LrSchedule schedule(config, std::move(base_lr), mode);
  SchedulerConfig& c = schedule.config_;
  c.warmup.num_steps = std::max<uint64_t>(c.warmup.num_steps, 2);
  const uint64_t groups = schedule.groups();
  switch (config.kind) {
    case SchedulerKind::kWarmupLR:
    case SchedulerKind::kWarmupDecayLR:
      if (c.warmup.max_lr.empty()) c.warmup.max_lr = {schedule.base_lr_[0]};
      SOTTO_TRY(spread(c.warmup.min_lr, "warmup_min_lr", groups));
      SOTTO_TRY(spread(c.warmup.max_lr, "warmup_max_lr", groups));
      break;
    case SchedulerKind::kLRRangeTest:
      SOTTO_TRY(spread(c.range_test.min_lr, "lr_range_test_min_lr", groups));
      break;
    case SchedulerKind::kNone:
    case SchedulerKind::kWarmupCosineLR:
    case SchedulerKind::kOneCycle: break;
  }
  return schedule;
}

// The part of the way to the peak that iteration i < warmup_num_steps has gone.
double LrSchedule::warmup(uint64_t i) const {
  const auto x = static_cast<double>(i);
  const auto w = static_cast<double>(config_.warmup.num_steps);
  return config_.warmup.type == WarmupType::kLog ? std::log(x + 1.0) / std::log(w) : x / w;
}

// WarmupLR stays at the peak, WarmupDecayLR falls to 0 at total_num_steps.
double LrSchedule::linear_decay(uint64_t i) const {
  if (config_.kind == SchedulerKind::kWarmupLR) return 1.0;
  const auto total = static_cast<double>(config_.warmup.total_num_steps);
  const auto w = static_cast<double>(config_.warmup.num_steps);
  return std::max(0.0, (total - static_cast<double>(i)) / std::max(1.0, total - w));
}

double LrSchedule::cosine_ratio(uint64_t i) const {
  const WarmupConfig& c = config_.warmup;
  if (i < c.num_steps) return c.min_ratio + (1.0 - c.min_ratio) * warmup(i);
  // The reference divides by 0 or by a negative length here; the end of the schedule is meant.
  if (c.total_num_steps <= c.num_steps) return c.cos_min_ratio;
  const auto length = static_cast<double>(c.total_num_steps - c.num_steps);
  const double x = static_cast<double>(i - c.num_steps + 1) / length;
  if (mode_ == Mode::kStrict && x >= 1.0) return c.cos_min_ratio;
  const double fall = (1.0 + std::cos(std::numbers::pi * x)) / 2.0;
  return std::max(0.0, c.cos_min_ratio + (1.0 - c.cos_min_ratio) * fall);
}

// Height within the cycle, 0 at its ends and 1 at its peak. In whole numbers, so that both are met
// exactly.
double LrSchedule::cycle_scale(uint64_t i) const {
  const uint64_t first = config_.cycle.first_step_size;
  const uint64_t second = config_.cycle.second_step_size;
  const uint64_t at = (i + 1) % (first + second);
  return at <= first ? static_cast<double>(at) / static_cast<double>(first)
                     : static_cast<double>(first + second - at) / static_cast<double>(second);
}

double LrSchedule::cycle_rate(uint64_t i) const {
  const OneCycleConfig& c = config_.cycle;
  const uint64_t cycle = c.steps();
  if (i < cycle) return c.min_lr + (c.max_lr - c.min_lr) * cycle_scale(i);
  if (c.decay_lr_rate == 0 || c.decay_step_size == 0) return c.min_lr;
  const double steps = static_cast<double>(i - cycle + 1) / static_cast<double>(c.decay_step_size);
  return c.min_lr / (1.0 + c.decay_lr_rate * steps);
}

double LrSchedule::range_test_growth(uint64_t i) const {
  const RangeTestConfig& c = config_.range_test;
  const double steps = static_cast<double>(i + 1) / static_cast<double>(c.step_size);
  return c.step_rate * (c.staircase ? std::floor(steps) : steps);
}

double LrSchedule::rate(uint64_t k, uint64_t group) const {
  const SchedulerConfig& c = config_;
  const bool initial = k < 2;
  const uint64_t i = initial ? 0 : k - 2;
  switch (c.kind) {
    case SchedulerKind::kNone: return base_lr_[group];
    case SchedulerKind::kWarmupLR:
    case SchedulerKind::kWarmupDecayLR: {
      const double lo = c.warmup.min_lr[group];
      if (initial) return lo;
      return lo +
             (c.warmup.max_lr[group] - lo) * (i < c.warmup.num_steps ? warmup(i) : linear_decay(i));
    }
    case SchedulerKind::kWarmupCosineLR:
      if (initial) return mode_ == Mode::kCompat && group > 0 ? base_lr_[group] : 0.0;
      return base_lr_[group] * cosine_ratio(i);
    case SchedulerKind::kOneCycle: return initial ? c.cycle.min_lr : cycle_rate(i);
    case SchedulerKind::kLRRangeTest: {
      const double lo = c.range_test.min_lr[group];
      // A rate of 0 stays 0, however large the growth.
      return initial || lo == 0 ? lo : lo + lo * range_test_growth(i);
    }
  }
  return base_lr_[group];
}

double LrSchedule::lr_of_update(uint64_t k, uint64_t group) const {
  return std::min(rate(k, group), std::numeric_limits<double>::max());
}

std::optional<Betas> LrSchedule::betas_of_update(uint64_t k) const {
  const OneCycleConfig& c = config_.cycle;
  if (config_.kind != SchedulerKind::kOneCycle || !c.momentum) return std::nullopt;
  if (k < 2) return Betas{c.min_mom, kCycleBeta2};
  const uint64_t i = k - 2;
  const uint64_t cycle = c.steps();
  const double span = c.max_mom - c.min_mom;
  if (i < cycle) return Betas{c.max_mom - span * cycle_scale(i), kCycleBeta2};
  if (c.decay_mom_rate == 0 || c.decay_step_size == 0) return Betas{c.max_mom, kCycleBeta2};
  const double steps = static_cast<double>(i - cycle + 1) / static_cast<double>(c.decay_step_size);
  const double grown = c.max_mom * (1.0 + c.decay_mom_rate * steps);
  return Betas{std::min(grown, std::max(c.max_mom, kLargestGrownBeta1)), kCycleBeta2};
}

Status LrSchedule::restore(int64_t iteration) {
  if (iteration < -1) return invalid_argument("last_batch_iteration {} is below -1", iteration);
  last_batch_iteration_ = iteration;
  return ok_status();
}

}  // namespace sotto
