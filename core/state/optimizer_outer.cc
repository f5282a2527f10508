#include "core/state/optimizer_outer.h"

#include <utility>

#include "core/state/outer_state.h"

namespace sotto {
namespace {

class OptimizerOuter final : public OuterSteps {
 public:
  explicit OptimizerOuter(std::shared_ptr<Outer> outer) : outer_(std::move(outer)) {}

  Status check(double lr) const override { return outer_->check(lr); }
  bool due() const override { return outer_->due(); }
  void passed(double lr) override { outer_->passed(lr); }
  bool averages_gradients() const override { return outer_->averages_gradients(); }
  Result<OpRef> step(OpRef inner, double lr, const CallOptions& options) override {
    return outer_->step_behind(std::move(inner), lr, options);
  }
  void skipped(const Status& why) noexcept override { outer_->skipped(why); }
  bool busy() const override { return outer_->busy(); }
  Status set_parameters(std::span<const ParameterPlace> params,
                        std::span<const ParameterPlace> copies) override {
    return outer_->set_parameters(params, copies);
  }
  Result<PeerTraffic> next_traffic() override { return outer_->next_traffic(); }
  uint64_t state_bytes() const override { return outer_->state_bytes(); }

  Result<std::vector<std::byte>> state(StateErrors errors) override {
    return export_outer(*outer_, errors);
  }
  Status check_state(std::span<const std::byte> state, bool own) const override {
    SOTTO_ASSIGN(const OuterSnapshot snapshot, decode_outer(state));
    return outer_->check(snapshot, own);
  }
  Status restore(std::span<const std::byte> state, bool own) override {
    SOTTO_ASSIGN(const OuterSnapshot snapshot, decode_outer(state));
    return outer_->restore(snapshot, own);
  }
  Status restart() override { return outer_->restart(); }

 private:
  const std::shared_ptr<Outer> outer_;
};

}  // namespace

Result<std::shared_ptr<OuterSteps>> make_outer_steps(const std::shared_ptr<Comm>& comm,
                                                     const Config& config,
                                                     std::vector<ParamSpec> params,
                                                     std::shared_ptr<Device> device,
                                                     std::shared_ptr<Outer>* out_outer) {
  // Groups, gradients and masks are the optimizer's.
  for (ParamSpec& p : params) {
    p.group = 0;
    p.grad = nullptr;
    p.grad_dtype = Dtype::kF32;
    p.mask = nullptr;
  }
  const bool compares = config.sotto.initial_parameters == InitialParameters::kCheck;
  SOTTO_ASSIGN(*out_outer, Outer::create(comm, *config.sotto.outer, std::move(params),
                                         std::move(device), compares));
  return std::shared_ptr<OuterSteps>(std::make_shared<OptimizerOuter>(*out_outer));
}

}  // namespace sotto
