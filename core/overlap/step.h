// Rounds that are steps of an optimizer, which averages and updates, and has the error feedback.
//
// What is hidden follows from the step: what needs all gradients, as a norm that clips before a
// compressed average, leaves nothing.
#pragma once

#include <memory>
#include <string_view>
#include <vector>

#include "core/optim/optimizer.h"
#include "core/overlap/work.h"

namespace sotto {

class StepRounds final : public RoundWork {
 public:
  // INVALID_ARGUMENT, UNSUPPORTED: an optimizer whose steps cannot begin before their gradients.
  static Status check(const Optimizer& optimizer);
  // Its gradients, as they are registered.
  static std::vector<OverlapTensor> gradients(const Optimizer& optimizer);

  explicit StepRounds(std::shared_ptr<Optimizer> optimizer);

  const std::shared_ptr<Comm>& comm() const override { return late_->comm; }
  void set_comm(std::shared_ptr<Comm> comm) override { late_->comm = std::move(comm); }
  void locate(std::vector<OverlapTensor>* tensors) const override;
  Status use(const std::vector<OverlapBucket>& buckets, bool observes) override;
  Result<OpRef> launch(const CallOptions& options, ReduceOp reduce,
                       std::shared_ptr<RoundOwner> owner) override;
  RoundTraffic traffic() const override;
  std::string_view why_not_hidden() const override;
  uint64_t bytes() const override;
  std::string_view leaves() const override { return "nothing was updated"; }

 private:
  const std::shared_ptr<Optimizer> optimizer_;
  const std::shared_ptr<LateSteps> late_;
  std::shared_ptr<PreparedPlan> plan_;  // of the step that began last, or of the next one
};

}  // namespace sotto
