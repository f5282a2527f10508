// Lion (arXiv 2302.06675, algorithm 2): the sign of an interpolated momentum, decoupled weight
// decay.
#include "core/kernels/lion.h"

#include "core/optim/algorithm.h"
#include "core/optim/algorithms/first_moment.h"

namespace sotto {
namespace {

class Lion final : public Algorithm {
 public:
  using Algorithm::Algorithm;
  std::vector<StateArraySpec> arrays() const override { return {moment("m")}; }
  std::span<const std::string_view> settable() const override {
    static constexpr std::string_view kNames[] = {"lr", "weight_decay", "beta1", "beta2"};
    return kNames;
  }
  StepPlan build(const StepVariant&, const StepShape& shape) const override {
    const auto update = [](StepFrame& frame, const GradientStage& gradient) {
      emit_first_moment<LionElement>(frame, gradient, true, SourceArgs{gradient.type},
                                     LowPrecisionArgs{gradient.type, frame.shape().state});
    };
    return build_dense_step(shape, update, false);
  }
  void write_scalars(const StepVariant& variant, size_t group, ScalarsRef s) const override {
    Algorithm::write_scalars(variant, group, s);
    s.as<LionGroupScalars>()->decay =
        static_cast<float>(1.0 - s->lr * d_.groups.params(group).weight_decay);
  }
};

}  // namespace

std::unique_ptr<Algorithm> make_lion(OptimizerData& data) { return std::make_unique<Lion>(data); }

}  // namespace sotto
