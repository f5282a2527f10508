// Learning rates over the updates of a run.
#pragma once

#include <cstdint>
#include <vector>

#include "core/base/status.h"
#include "core/config/config.h"

namespace sotto {

// The learning rate of every group for update k = 1, 2, ... Built: no scheduler (each group's own
// lr), WarmupLR and WarmupDecayLR. Like DeepSpeed's, a scheduler steps after each update, so update
// k uses iteration i = k - 2 and updates 1 and 2 both use warmup_min_lr.
class LrSchedule {
 public:
  // base_lr: optimizer lr of each group, at least one. UNSUPPORTED for a scheduler that is not
  // built; INVALID_ARGUMENT if a list of the file has neither one value nor one per group.
  static Result<LrSchedule> create(const SchedulerConfig& config, std::vector<double> base_lr);

  uint64_t groups() const { return base_lr_.size(); }
  // Rate of update k (k >= 1), whatever the state is. group < groups().
  double lr_of_update(uint64_t k, uint64_t group) const;
  // Rate of the next update: k = last_batch_iteration() + 2.
  double lr(uint64_t group) const;
  // After an update that was not skipped.
  void advance() { ++last_batch_iteration_; }

  // The whole state: -1 before the first update, then the number of updates done less one.
  int64_t last_batch_iteration() const { return last_batch_iteration_; }
  // INVALID_ARGUMENT if iteration < -1.
  Status restore(int64_t iteration);

 private:
  LrSchedule(const SchedulerConfig& config, std::vector<double> base_lr);
  double gamma(int64_t i) const;

  SchedulerKind kind_;
  WarmupType warmup_type_;
  uint64_t warmup_num_steps_;
  uint64_t total_num_steps_;
  std::vector<double> min_lr_, max_lr_;  // per group
  std::vector<double> base_lr_;
  int64_t last_batch_iteration_ = -1;
};

}  // namespace sotto
