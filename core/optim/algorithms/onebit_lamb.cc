#include "core/optim/algorithms/onebit_lamb.h"

#include <cmath>
#include <limits>

#include "core/optim/algorithms/lamb.h"
#include "core/optim/named_arrays.h"

namespace sotto {
namespace {

constexpr double kPositive = std::numeric_limits<float>::min();

class OneBitLambStep final : public CompressedStep {
 public:
  OneBitLambStep(const CompressedStepRequest& request, double debias)
      : CompressedStep(request), debias_(debias) {}

 private:
  void bind() override {
    vf_ = frame_.flat_array("vf");
    if (!r_.first) b_.committed(vf_);
    counts_ = frame_.array("tensor_counts", frame_.tensors() * 8);
  }

  void freeze(kernels::FreezeVarianceOperands<OperandRef>* operands) override {
    m_blocks_ = b_.scratch(block_bytes());
    operands->m = flat(m(), Access::kRead, 32);
    operands->vf = flat(vf_, Access::kWrite, 32);
    operands->sums = blocks(m_blocks_, Access::kWrite);
  }

  // Scaling coefficients from the norms of the momentum.
  void after_freeze() override {
    std::vector<Piece> by_tensor = all_tensor_pieces(layout_);
    for (Piece& piece : by_tensor) piece.block = piece.tensor;
    frame_.count_valid(counts_, frame_.tensors(), std::move(by_tensor));
    const std::vector<NormRange> ranges = layout_.tensor_ranges();
    b_.kernel<kernels::OnebitLambScaling>(
        {.sums = whole(m_blocks_, Access::kRead, 0, block_bytes()),
         .counts = whole(counts_, Access::kRead, 0, frame_.tensors() * 8),
         .states = frame_.states_operand(Access::kReadWrite)},
        {}, ScalingArgs{b_.keep_array(std::span<const NormRange>(ranges)), ranges.size(), debias_});
  }

  // Passes A and B, tensor after tensor.
  void update(uint32_t word) override {
    const uint32_t u0_blocks = b_.scratch(block_bytes());
    const uint32_t u_blocks = b_.scratch(block_bytes());
    const uint32_t maxima = b_.scratch(block_bytes());
    const std::vector<NormRange> ranges = layout_.tensor_ranges();
    const KernelOptions commit = StepFrame::committing(word);
    for (uint32_t t = 0; t < ranges.size(); ++t) {
      if (ranges[t].count == 0 || frame_.frozen(t)) continue;
      std::vector<Piece> pieces = layout_.tensor_pieces(t);
      b_.kernel<kernels::OnebitLambFactor>({.m = new_momentum(),
                                            .old = old_momentum(),
                                            .vf = flat(vf_, Access::kReadWrite, 32),
                                            .den = flat(den_, Access::kRead, 32),
                                            .p = list(s_.params, Access::kRead, 32),
                                            .valid = frame_.valid_operand(),
                                            .u0_sums = blocks(u0_blocks, Access::kWrite),
                                            .u_sums = blocks(u_blocks, Access::kWrite),
                                            .maxima = blocks(maxima, Access::kWrite),
                                            .scalars = frame_.scalars_operand(),
                                            .states = frame_.states_operand(Access::kRead)},
                                           pieces, NoArgs{}, commit);
      b_.kernel<kernels::OnebitLambScalars>(
          {.u0_sums = StepFrame::blocks_operand(u0_blocks, ranges[t]),
           .u_sums = StepFrame::blocks_operand(u_blocks, ranges[t]),
           .maxima = StepFrame::blocks_operand(maxima, ranges[t]),
           .scalars = frame_.scalars_operand(),
           .states = frame_.states_operand(Access::kReadWrite),
           .steps = frame_.steps_operand(Access::kReadWrite)},
          {}, frame_.one_tensor(ranges[t], false), commit);
      emit_update(std::move(pieces), word);
    }
  }

  double debias_;
  uint32_t vf_ = kNoSlot, counts_ = kNoSlot, m_blocks_ = kNoSlot;
};

}  // namespace

StepPlan build_onebit_lamb_step(const CompressedStepRequest& request, double debias) {
  return OneBitLambStep(request, debias).build();
}

std::vector<StateArraySpec> OneBitLamb::arrays() const {
  std::vector<StateArraySpec> out = CompressedMomentum::arrays();
  out.push_back(floats("vf"));
  out.push_back({"tensor_counts", d_.parameters.size() * 8});
  return out;
}

std::span<const std::string_view> OneBitLamb::settable() const {
  static constexpr std::string_view kNames[] = {"lr",  "weight_decay", "beta1",    "beta2",
                                                "eps", "max_coeff",    "min_coeff"};
  return kNames;
}

StepPlan OneBitLamb::build_warm_up(const StepShape& shape) const {
  return build_lamb_step(shape, true);
}

StepPlan OneBitLamb::build_compressed(const CompressedStepRequest& request) const {
  double debias = 0;
  if (request.first && d_.config.sotto.coeff_debias) {
    debias = 1.0 - std::pow(d_.groups[0].coeff_beta, static_cast<double>(d_.step - average_since_));
  }
  return build_onebit_lamb_step(request, debias);
}

void OneBitLamb::write_scalars(const StepVariant&, size_t group, GroupScalars* s) const {
  const OptimizerParams p = d_.groups.params(group);
  write_lamb_scalars(p, d_.next_t(), s);
  s->coeff_beta = p.coeff_beta;
  s->factor_max = p.factor_max;
  s->factor_min = p.factor_min;
  s->factor_threshold = p.factor_threshold;
}

// Padding keeps in its momentum what was averaged there.
void OneBitLamb::write_padding_scalars(GroupScalars* s) const {
  s->b1 = 1;
  s->one_minus_b1 = 0;
}

// ---- state ----

Status OneBitLamb::describe(StateErrors errors, OptimSnapshot* s) {
  s->average_since = average_since_;
  const auto has = [s](StatePart part, uint64_t values) {
    s->outside[static_cast<size_t>(part)] = values;
  };
  if (stage_started_) has(StatePart::kVf, d_.layout->elements());
  if (d_.codec && errors == StateErrors::kOwn && !d_.alone())
    has(StatePart::kPaddingM, padding_values());
  return CompressedMomentum::describe(errors, s);
}

Status OneBitLamb::check(const OptimSnapshot& s, StateErrors errors) const {
  SOTTO_TRY(CompressedMomentum::check(s, errors));
  if (s.stage_started) SOTTO_TRY(check_size("vf", s.values(StatePart::kVf), d_.layout->elements()));
  if (!d_.codec || errors != StateErrors::kOwn || d_.alone() || !s.residual) return ok_status();
  return check_size("the momentum's padding", s.values(StatePart::kPaddingM), padding_values());
}

Status OneBitLamb::restore(const OptimSnapshot& s) {
  SOTTO_TRY(CompressedMomentum::restore(s));
  average_since_ = starts_again(s) ? s.step : s.average_since;
  return ok_status();
}

Status OneBitLamb::restore_stage(const std::vector<uint8_t>& valid) {
  std::vector<uint64_t> counts(d_.parameters.size());
  SOTTO_TRY(for_each_run(*d_.layout, false, [&](const TensorRun& run) {
    return run.each_part([&](const Piece&, uint64_t flat, uint64_t, uint64_t n) {
      for (uint64_t f = flat; f < flat + n; ++f)
        counts[run.tensor] += (valid[f / 8] >> (7 - f % 8)) & 1u;
      return ok_status();
    });
  }));
  SOTTO_TRY(d_.access.upload(d_.arrays.data("tensor_counts"), std::span<const uint64_t>(counts)));
  return CompressedMomentum::restore_stage(valid);
}

// Before freeze_step coefficients start again. Behind it they are the file's; without scaling
// coefficients the compressed stage has not made a step yet, and begins with the next one.
Status OneBitLamb::read_arrays(const ArrayReader& reader, OptimSnapshot* s) const {
  SOTTO_TRY(CompressedMomentum::read_arrays(reader, s));
  if (!s->compressed) {
    s->average_since = s->step;
    return ok_status();
  }
  std::vector<ArrayKey> needed{ArrayKey::kLambCoeffFreeze};
  s->stage_started = reader.has(ArrayKey::kScalingCoeff);
  if (s->stage_started) {
    needed.insert(needed.end(),
                  {ArrayKey::kScalingCoeff, ArrayKey::kLastFactor, ArrayKey::kExpAvgSqFresh});
  }
  SOTTO_TRY(reader.need(needed));
  for (uint64_t t = 0; t < d_.parameters.size(); ++t) {
    TensorState& state = s->tensor_states[t];
    SOTTO_ASSIGN(const auto average, reader.number(ArrayKey::kLambCoeffFreeze, t, 0));
    state.c_avg = average.value_or(state.c_avg);
    if (!s->stage_started) continue;
    SOTTO_ASSIGN(const auto factor, reader.number(ArrayKey::kLastFactor, t, kPositive));
    SOTTO_ASSIGN(const auto scaling, reader.number(ArrayKey::kScalingCoeff, t, kPositive));
    state.last_factor = factor.value_or(state.last_factor);
    state.scaling_coeff = scaling.value_or(state.scaling_coeff);
  }
  if (!s->stage_started) return ok_status();
  SOTTO_ASSIGN(s->vf, reader.elements(ArrayKey::kExpAvgSqFresh, 0));
  return ok_status();
}

}  // namespace sotto
