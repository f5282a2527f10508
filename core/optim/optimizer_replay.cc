// Steps that are part of a graph of the caller's.
#include <algorithm>

#include "core/optim/optimizer.h"

namespace sotto {

// Of a step that is in a graph. The driver may be the last to know the operation, and must not be
// the one who takes the optimizer and its context down: they are held while a launch is awaited.
class Optimizer::CapturedHooks final : public OpHooks {
 public:
  CapturedHooks(std::weak_ptr<const Optimizer> optimizer, const StepVariant& variant,
                bool accumulated, PreparedStep prepared)
      : optimizer_(std::move(optimizer)),
        variant_(variant),
        accumulated_(accumulated),
        prepared_(std::move(prepared)) {}
  void on_complete(Status& status, std::span<const std::byte> bytes) noexcept override {
    const std::shared_ptr<Optimizer> optimizer = std::move(awaits_);
    optimizer->completed(variant_, prepared_.verdict, status, bytes);
  }
  // Not by the address, at which there may be a later one by now.
  bool is_of(const std::weak_ptr<const Optimizer>& optimizer) const {
    return !optimizer_.owner_before(optimizer) && !optimizer.owner_before(optimizer_);
  }
  const StepVariant& variant() const { return variant_; }
  bool accumulated() const { return accumulated_; }
  const PreparedStep& prepared() const { return prepared_; }
  void await(std::shared_ptr<Optimizer> optimizer) { awaits_ = std::move(optimizer); }

  std::vector<void*> bases;  // of the run: they are in the graph
  uint64_t frozen_hash = 0;  // of the parameters that the step leaves as they are

 private:
  const std::weak_ptr<const Optimizer> optimizer_;
  std::shared_ptr<Optimizer> awaits_;
  StepVariant variant_;
  bool accumulated_;
  PreparedStep prepared_;
};

Result<OpRef> Optimizer::capture(const StepVariant& variant, CallOptions options,
                                 std::shared_ptr<GraphCapture> graph) {
  if (options.waits) {
    return invalid_argument(
        "the stream is being captured into a CUDA graph: the step needs an operation, out_op, with "
        "which it is replayed");
  }
  if (options.on_done != nullptr) {
    return invalid_argument(
        "the stream is being captured into a CUDA graph: a recorded step, which completes once for "
        "every replay, takes no callback");
  }
  if (variant.begins_stage) {
    return invalid_state(
        "step {} is the first of a compressed stage and comes once: it cannot be recorded into a "
        "CUDA graph; let it happen first",
        data_.step + 1);
  }
  SOTTO_ASSIGN(PreparedStep p,
               plans_.make(variant, plans_.accumulated(variant), graph, nullptr, nullptr));
  const std::shared_ptr<PreparedPlan> plan = p.plan;
  OpSignature s = signature(variant);
  s.tag = options.tag;
  auto hooks = std::make_shared<CapturedHooks>(weak_from_this(), variant,
                                               plans_.accumulated(variant), std::move(p));
  const auto bind_run = [&](Run& run) {
    plans_.bind(run, hooks->prepared(), variant);
    hooks->bases = run.bases;
    hooks->frozen_hash = data_.parameters.frozen_hash();
  };
  SOTTO_ASSIGN(const OpRef op,
               data_.comm->launch(plan, s, std::ref(bind_run), hooks, options, std::move(graph)));
  SOTTO_TRY(data_.comm->engine().wait(op, -1));
  return op;
}

Status Optimizer::replay(const OpRef& op) {
  if (busy()) {
    return error(Code::kBusy,
                 "a step of this optimizer is in flight; wait for it, and so for the launch of its "
                 "graph");
  }
  in_flight_.store(true, std::memory_order_release);
  const auto bind_run = [&](Run& run, OpHooks* hooks) {
    auto* const recorded = dynamic_cast<CapturedHooks*>(hooks);
    if (recorded == nullptr || !recorded->is_of(weak_from_this()))
      return invalid_argument("the operation is no step of this optimizer");
    SOTTO_TRY(bind_again(*recorded, run));
    recorded->await(shared_from_this());
    return ok_status();
  };
  const Status status =
      caught([&] { return data_.comm->replay(op, signature(algorithm_->next()), bind_run); });
  if (!status.ok()) in_flight_.store(false, std::memory_order_release);
  return status;
}

// Where everything is is in the graph, but for the scalars, which copies of a launch take from the
// host.
Status Optimizer::bind_again(const CapturedHooks& recorded, Run& run) const {
  const StepVariant next = algorithm_->next();
  if (next != recorded.variant() || plans_.accumulated(next) != recorded.accumulated()) {
    return invalid_state(
        "step {} is of another kind than the recorded one (stage, synchronisation or micro-batches "
        "differ): call sotto_optim_step, or record one like it",
        data_.step + 1);
  }
  if (recorded.frozen_hash != data_.parameters.frozen_hash()) {
    return invalid_state(
        "step {} leaves other parameters as they are than the recorded one "
        "(sotto_optim_set_frozen): call sotto_optim_step, or record one like it",
        data_.step + 1);
  }
  plans_.bind(run, recorded.prepared(), next);
  if (std::equal(recorded.bases.begin(), recorded.bases.end(), run.bases.begin(),
                 [&](const void* then, const void* now) { return then == nullptr || then == now; }))
    return ok_status();
  for (size_t i = 0; i < run.bases.size(); ++i) {
    if (recorded.bases[i] != nullptr) run.bases[i] = recorded.bases[i];
  }
  return invalid_state(
      "step {} uses other memory than the recorded one: gradients or parameters have moved "
      "(sotto_optim_set_grads, sotto_optim_set_params), or error feedback is in the other one of "
      "its two places, for which "
      "a graph of its own can be recorded",
      data_.step + 1);
}

}  // namespace sotto
