#include "core/optim/algorithms/sgd.h"

#include "core/optim/algorithms/first_moment.h"

namespace sotto {

StepPlan build_sgd_step(const StepShape& shape, bool momentum, bool nesterov) {
  const auto update = [=](StepFrame& frame, const GradientStage& gradient) {
    emit_first_moment<SgdElement>(frame, gradient, momentum, {nesterov, gradient.type},
                                  {gradient.type, frame.shape().state, nesterov});
  };
  return build_dense_step(shape, update, false);
}

std::vector<StateArraySpec> Sgd::arrays() const {
  if (d_.groups[0].sgd.momentum == 0) return {};
  return {moment("m")};
}

std::span<const std::string_view> Sgd::settable() const {
  static constexpr std::string_view kNames[] = {"lr", "weight_decay", "momentum"};
  return kNames;
}

Status Sgd::check_setting(std::string_view name, size_t group, double value) const {
  if (name != "momentum" || (value == 0) != has_momentum()) return ok_status();
  return invalid_argument(
      "momentum of group {} is {}; an optimizer that was created {} momentum keeps {}", group,
      value, has_momentum() ? "with" : "without", has_momentum() ? "one above 0" : "0");
}

StepPlan Sgd::build(const StepVariant&, const StepShape& shape) const {
  return build_sgd_step(shape, has_momentum(), d_.groups[0].sgd.nesterov);
}

void Sgd::write_scalars(const StepVariant& variant, size_t group, ScalarsRef scalars) const {
  Algorithm::write_scalars(variant, group, scalars);
  const OptimizerParams& p = d_.groups[group];
  auto* s = scalars.as<SgdGroupScalars>();
  s->momentum = static_cast<float>(p.sgd.momentum);
  s->one_minus_dampening = d_.step == 0 ? 1.0f : static_cast<float>(1.0 - p.sgd.dampening);
}

Status Sgd::check_importable() const {
  return unsupported("SGD has no arrays to import; allowed: Adam, AdamW, Lamb and the 1-bit types");
}

std::unique_ptr<Algorithm> make_sgd(OptimizerData& data) { return std::make_unique<Sgd>(data); }

}  // namespace sotto
