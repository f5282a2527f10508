// Learning rates, and with OneCycle betas, over the updates of a run.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "core/base/status.h"
#include "core/config/config.h"

namespace sotto {

struct Betas {
  double beta1 = 0;  // both in [0, 1)
  double beta2 = 0;
};

// Where OneCycle's decay_mom_rate would take beta1 to 1 and beyond, it stays here (or at
// cycle_max_mom, if that is higher).
inline constexpr double kLargestGrownBeta1 = 0.999;

// The learning rate of every group for update k = 1, 2, ... Like DeepSpeed's, a scheduler steps
// after each update: update 1 has the initial rate, update k >= 2 uses iteration i = k - 2. So
// updates 1 and 2 of WarmupLR both use warmup_min_lr. Rates are finite and not negative.
class LrSchedule {
 public:
  // base_lr: optimizer lr of each group, at least one. INVALID_ARGUMENT if a list of the file has
  // neither one value nor one per group.
  // mode kCompat keeps two oddities of WarmupCosineLR: update 1 zeroes the rate of the first group
  // alone, and behind total_num_steps the cosine rises again.
  static Result<LrSchedule> create(const SchedulerConfig& config, std::vector<double> base_lr,
                                   Mode mode = Mode::kStrict);

  uint64_t groups() const { return base_lr_.size(); }
  // Rate of update k (k >= 1), whatever the state is. group < groups().
  double lr_of_update(uint64_t k, uint64_t group) const;
  // Rate of the next update: k = last_batch_iteration() + 2.
  double lr(uint64_t group) const { return lr_of_update(next_update(), group); }

  // What takes the place of every group's betas: OneCycle with cycle_momentum. Else nothing.
  std::optional<Betas> betas_of_update(uint64_t k) const;
  std::optional<Betas> betas() const { return betas_of_update(next_update()); }

  // After an update that was not skipped.
  void advance() { ++last_batch_iteration_; }

  // The whole state: -1 before the first update, then the number of updates done less one.
  int64_t last_batch_iteration() const { return last_batch_iteration_; }
  // INVALID_ARGUMENT if iteration < -1.
  Status restore(int64_t iteration);

 private:
  LrSchedule(const SchedulerConfig& config, std::vector<double> base_lr, Mode mode)
      : config_(config), mode_(mode), base_lr_(std::move(base_lr)) {}
  uint64_t next_update() const { return static_cast<uint64_t>(last_batch_iteration_ + 2); }
  double rate(uint64_t k, uint64_t group) const;
  double warmup(uint64_t i) const;
  double linear_decay(uint64_t i) const;
  double cosine_ratio(uint64_t i) const;
  double cycle_scale(uint64_t i) const;
  double cycle_rate(uint64_t i) const;
  double range_test_growth(uint64_t i) const;

  SchedulerConfig config_;  // its lists hold one value per group
  Mode mode_;
  std::vector<double> base_lr_;
  int64_t last_batch_iteration_ = -1;
};

}  // namespace sotto
