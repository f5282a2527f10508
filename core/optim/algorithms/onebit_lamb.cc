#include "core/optim/algorithms/onebit_lamb.h"

#include <cmath>
#include <limits>

#include "core/optim/algorithms/lamb.h"

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

  // Passes A and B.
  void update(uint32_t word) override {
    const uint32_t u0_blocks = b_.scratch(block_bytes());
    const uint32_t u_blocks = b_.scratch(block_bytes());
    const uint32_t maxima = b_.scratch(block_bytes());
    const KernelOptions commit = StepFrame::committing(word);
    for (TensorBatch& batch : frame_.batches()) {
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
                                           batch.pieces, NoArgs{}, commit);
      b_.kernel<kernels::OnebitLambScalars>(
          {.u0_sums = StepFrame::blocks_operand(u0_blocks, batch),
           .u_sums = StepFrame::blocks_operand(u_blocks, batch),
           .maxima = StepFrame::blocks_operand(maxima, batch),
           .scalars = frame_.scalars_operand<OnebitLambGroupScalars>(),
           .states = frame_.states_operand(Access::kReadWrite),
           .steps = frame_.steps_operand(Access::kReadWrite)},
          {}, frame_.tensor_args(batch, false), commit);
      emit_update(std::move(batch.pieces), word);
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
  out.push_back(floats("vf", true));
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
    debias = 1.0 - std::pow(d_.groups[0].factor.coeff_beta,
                            static_cast<double>(d_.step - average_since_));
  }
  return build_onebit_lamb_step(request, debias);
}

void OneBitLamb::write_scalars(const StepVariant& variant, size_t group, ScalarsRef scalars) const {
  Algorithm::write_scalars(variant, group, scalars);
  const OptimizerParams p = d_.groups.params(group);
  write_lamb_scalars(p, d_.next_t(), scalars);
  if (auto* s = scalars.as<OnebitLambGroupScalars>()) {
    s->factor_max = p.factor.factor_max;
    s->factor_min = p.factor.factor_min;
    s->factor_threshold = p.factor.factor_threshold;
  }
}

// Padding keeps in its momentum what was averaged there.
void OneBitLamb::write_padding_scalars(ScalarsRef s) const {
  s->b1 = 1;
  s->one_minus_b1 = 0;
}

// ---- state ----

Status OneBitLamb::describe(StateErrors errors, OptimSnapshot* s) {
  s->set_number("average_since", average_since_);
  if (stage_started_) s->put_outside("vf", d_.layout->elements() * 4);
  const bool own = d_.codec && errors == StateErrors::kOwn && !d_.alone();
  if (own && padding_values() != 0) s->put_outside(kMomentumPadding, padding_values() * 4);
  return CompressedMomentum::describe(errors, s);
}

Status OneBitLamb::check(const OptimSnapshot& s, StateErrors errors) const {
  SOTTO_TRY(CompressedMomentum::check(s, errors));
  if (s.flag("stage_started")) SOTTO_TRY(check_values("vf", s.bytes("vf"), d_.layout->elements()));
  if (!d_.codec || errors != StateErrors::kOwn || d_.alone() || !s.residual) return ok_status();
  return check_values("the momentum's padding", s.bytes(kMomentumPadding), padding_values());
}

Status OneBitLamb::restore(const OptimSnapshot& s) {
  SOTTO_TRY(CompressedMomentum::restore(s));
  average_since_ = starts_again(s) ? s.step : s.number("average_since");
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

// ---- DeepSpeed checkpoints ----

std::span<const ArrayKey> OneBitLamb::array_keys() const {
  using Shape = ArrayKey::Shape;
  static constexpr ArrayKey kKeys[] = {
      {"exp_avg_sq_fresh", Shape::kElements, "vf"},
      {"lamb_coeff_freeze", Shape::kOwnNumber, {}},
      {"last_factor", Shape::kOwnNumber, {}},
      {"scaling_coeff", Shape::kOwnNumber, {}},
  };
  return kKeys;
}

// Before freeze_step coefficients start again. Behind it they are the file's; without scaling
// coefficients the compressed stage has not made a step yet, and begins with the next one.
Status OneBitLamb::read_arrays(const ArrayReader& reader, OptimSnapshot* s) const {
  SOTTO_TRY(CompressedMomentum::read_arrays(reader, s));
  if (!s->flag("compressed")) {
    s->set_number("average_since", s->step);
    return ok_status();
  }
  std::vector<std::string_view> needed{"lamb_coeff_freeze"};
  const bool started = reader.has("scaling_coeff");
  s->set_flag("stage_started", started);
  if (started) needed.insert(needed.end(), {"scaling_coeff", "last_factor", "exp_avg_sq_fresh"});
  SOTTO_TRY(reader.need(needed));
  const std::span<TensorState> states = s->values<TensorState>("tensor_states");
  for (uint64_t t = 0; t < d_.parameters.size(); ++t) {
    TensorState& state = states[t];
    SOTTO_ASSIGN(const auto average, reader.number("lamb_coeff_freeze", t, 0));
    state.c_avg = average.value_or(state.c_avg);
    if (!started) continue;
    SOTTO_ASSIGN(const auto factor, reader.number("last_factor", t, kPositive));
    SOTTO_ASSIGN(const auto scaling, reader.number("scaling_coeff", t, kPositive));
    state.last_factor = factor.value_or(state.last_factor);
    state.scaling_coeff = scaling.value_or(state.scaling_coeff);
  }
  if (!started) return ok_status();
  SOTTO_ASSIGN(const std::vector<float> fresh, reader.elements("exp_avg_sq_fresh", 0));
  s->put("vf", fresh);
  return ok_status();
}

std::unique_ptr<Algorithm> make_onebit_lamb(OptimizerData& data) {
  return std::make_unique<OneBitLamb>(data);
}

}  // namespace sotto
