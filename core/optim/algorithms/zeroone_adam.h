// 0/1 Adam (arXiv 2202.06009; specification section 6).
#pragma once

#include "core/optim/algorithms/onebit.h"
#include "core/optim/algorithms/zeroone_schedule.h"
#include "core/optim/algorithms/zeroone_step.h"

namespace sotto {

class ZeroOneAdam final : public OneBitAlgorithm {
 public:
  explicit ZeroOneAdam(OptimizerData& data);
  std::vector<StateArraySpec> arrays() const override;
  Status allocated() override;
  std::span<const std::string_view> settable() const override;
  StepVariant next() const override;
  std::optional<StepVariant> synchronisation() const override;
  Status start_stage() override;
  StepPlan build(const StepVariant& variant, const StepShape& shape) const override;
  void write_scalars(const StepVariant& variant, size_t group, ScalarsRef scalars) const override;
  void committed(const StepVariant& variant) override;
  bool late() const override { return schedule_.counters().frozen; }
  std::string_view stage() const override;
  void report_settings(nlohmann::ordered_json* report) const override;
  Status describe(StateErrors errors, OptimSnapshot* s) override;
  std::optional<Status> stream(std::string_view array, StateErrors errors,
                               const FloatSink& sink) override;
  Status check(const OptimSnapshot& s, StateErrors errors) const override;
  Status restore(const OptimSnapshot& s) override;
  std::vector<std::string_view> common_arrays(const OptimSnapshot& s) const override;
  std::span<const ArrayKey> array_keys() const override;
  Status read_arrays(const ArrayReader& reader, OptimSnapshot* s) const override;

 protected:
  bool late_after(uint64_t t) const override { return t > d_.groups[0].intervals.var_freeze_step; }
  bool says_late(const OptimSnapshot& s) const override { return s.flag("zeroone.frozen"); }

 private:
  struct CommonRun;

  // This step's learning rates and decays added to those since the last synchronisation.
  double next_lr_sum(size_t group) const { return lr_sums_[group] + d_.groups.lr(group); }
  double next_anchor_decay(size_t group) const;
  // Ranks have momentum of their own, also where no learning rate has moved a parameter.
  bool differs() const { return stage_started_ && schedule_.counters().frozen && local_steps_; }
  // Whether an element that was masked for want of variance has some now.
  Result<bool> mask_grows(const std::vector<uint8_t>& valid) const;
  Status common_run(const TensorRun& run, const std::vector<uint8_t>& valid, CommonRun* out) const;
  Status read_local_sum(const ArrayReader& reader, const std::vector<double>& lr_sums,
                        OptimSnapshot* s) const;

  ZeroOneSchedule schedule_;
  std::vector<double> lr_sums_, anchor_decays_;  // per group, since the last synchronisation
  bool local_steps_ = false;                     // there were some since then
  bool mask_is_old_ = true;                      // v has changed since the mask was made
};

}  // namespace sotto
