// The plans of an optimizer's steps, and what their runs are given.
//
// Threads: as Optimizer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <tuple>

#include "core/optim/algorithm.h"
#include "core/optim/loss_scale.h"
#include "core/optim/optimizer_data.h"

namespace sotto {

struct PreparedStep {
  std::shared_ptr<PreparedPlan> plan;
  StepSlots slots;
  StepVerdict verdict;
};
// By the number of the variant, and whether all ranks make it together; with micro-batches or not.
using PreparedSteps = std::map<std::tuple<uint8_t, bool, bool>, PreparedStep>;

// Micro-batches before a step.
struct Accumulation {
  uint64_t steps = 0;  // gradient_accumulation_steps; 0: not given
  uint64_t done = 0;   // in the sums, which are float32 per element since the first one
  // INVALID_STATE: micro-batches belong to the next step. A failed comm never takes one: the state
  // then is that of the last step.
  Status check_none(const Comm& comm) const;
};

// No steps: one more micro-batch. Their numbers are above those of an algorithm's.
inline constexpr StepVariant kFirstAccumulation{.number = 254, .local = true, .update = false};
inline constexpr StepVariant kAccumulation{.number = 255, .local = true, .update = false};
inline bool accumulates(const StepVariant& v) {
  return v == kFirstAccumulation || v == kAccumulation;
}

// Steps that begin before their gradients are there (core/overlap).
struct LateSteps {
  LateGradients gradients;
  // Of the optimizer's ranks, for these steps alone: gradients become ready beside collectives of
  // the optimizer's comm.
  std::shared_ptr<Comm> comm;
  std::shared_ptr<ScratchPool> scratch;  // of all of them: one round is made at a time
  PreparedSteps prepared;                // StepPlans's
  uint64_t prepared_for = 0;             // what these were made for
};

class StepPlans {
 public:
  // What is passed outlives it.
  StepPlans(const OptimizerData& data, const Algorithm& algorithm, const LossScaler& scaler,
            const Accumulation& accumulation)
      : d_(data), algorithm_(algorithm), scaler_(scaler), accumulation_(accumulation) {}

  // Whether the step takes micro-batches that are accumulated now.
  bool accumulated(const StepVariant& variant) const {
    return accumulation_.done > 0 && variant.update;
  }
  // late: null: gradients are there.
  Result<PreparedStep*> get(const StepVariant& variant, LateSteps* late);
  // scratch: as PreparedPlan::make.
  Result<PreparedStep> make(const StepVariant& variant, bool accumulated,
                            const std::shared_ptr<Device>& device,
                            std::shared_ptr<ScratchPool> scratch, const LateSteps* late) const;
  void bind(Run& run, const PreparedStep& prepared, const StepVariant& variant) const;
  // What plans are made of has changed.
  void clear();
  uint64_t bytes() const;

 private:
  const OptimizerData& d_;
  const Algorithm& algorithm_;
  const LossScaler& scaler_;
  const Accumulation& accumulation_;
  std::shared_ptr<ScratchPool> scratch_;  // of all of them: one step is made at a time
  PreparedSteps prepared_;
  bool late_stage_ = false;  // plans of another stage are not needed any more, nor their scratch
  uint64_t made_for_ = 0;    // counts clear()
};

}  // namespace sotto
