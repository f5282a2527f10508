#include "core/overlap/step.h"

#include <utility>

namespace sotto {

Status StepRounds::check(const Optimizer& optimizer) {
  const Config& config = optimizer.config();
  if (config.sotto.outer) {
    return unsupported(
        "the optimizer's file has sotto.outer: its steps are local and send nothing that gradients "
        "could overlap with");
  }
  if (config.sotto.mode == Mode::kCompat && optimizer_is_one_bit(config.optimizer.kind)) {
    return unsupported(
        "sotto.mode is compat, the published arithmetic, whose steps begin when all gradients are "
        "there; allowed here is strict");
  }
  return ok_status();
}

std::vector<OverlapTensor> StepRounds::gradients(const Optimizer& optimizer) {
  std::vector<OverlapTensor> out;
  for (const ParamSpec& p : optimizer.parameters())
    out.push_back({p.count, p.grad_dtype, const_cast<void*>(p.grad)});
  return out;
}

StepRounds::StepRounds(std::shared_ptr<Optimizer> optimizer)
    : optimizer_(std::move(optimizer)), late_(std::make_shared<LateSteps>()) {}

void StepRounds::locate(std::vector<OverlapTensor>* tensors) const {
  const ParameterSet& parameters = optimizer_->parameters();
  for (size_t t = 0; t < tensors->size(); ++t)
    (*tensors)[t].data = const_cast<void*>(parameters[t].grad);
}

Status StepRounds::use(const std::vector<OverlapBucket>& buckets, bool observes) {
  late_->gradients = {};
  for (const OverlapBucket& bucket : buckets) late_->gradients.inputs.push_back(bucket.tensors);
  late_->gradients.observes = observes;
  late_->prepared.clear();
  SOTTO_ASSIGN(const PreparedStep* step, optimizer_->next_plan(late_.get()));
  plan_ = step->plan;
  return ok_status();
}

Result<OpRef> StepRounds::launch(const CallOptions& options, ReduceOp,
                                 std::shared_ptr<RoundOwner> owner) {
  // Which plan is next a step in flight still decides.
  SOTTO_TRY(optimizer_->check_idle());
  SOTTO_ASSIGN(const PreparedStep* step, optimizer_->next_plan(late_.get()));
  plan_ = step->plan;
  return optimizer_->begin(options, late_, std::move(owner));
}

RoundTraffic StepRounds::traffic() const {
  return RoundTraffic::of(plan_->plan(), late_->gradients.inputs.size());
}

std::string_view StepRounds::why_not_hidden() const {
  if (plan_->plan().traffic.total.payload_bytes_sent == 0) return "the step sends no gradients";
  if (late_->gradients.inputs.size() == 1) return "all gradients are in one bucket";
  const Config& config = optimizer_->config();
  if (config.gradient_clipping > 0) return "gradient_clipping needs all gradients";
  if (config.fp16.enabled) return "the loss scale needs to know that all gradients are finite";
  return "what is sent needs all gradients";
}

uint64_t StepRounds::bytes() const {
  uint64_t bytes = late_->scratch == nullptr ? 0 : late_->scratch->held_bytes();
  for (const auto& [variant, step] : late_->prepared) bytes += step.plan->held_bytes();
  return bytes;
}

}  // namespace sotto
