// Optimizer state in and out, in the order of the tensors and without padding.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/base/text.h"
#include "core/optim/optimizer.h"
#include "core/optim/step_frame.h"

namespace sotto {
namespace {

template <class T>
Status check_size(const char* what, const std::vector<T>& values, uint64_t want) {
  if (values.size() == want) return ok_status();
  return invalid_argument("the state has {} values of {}, this optimizer {}", values.size(), what,
                          want);
}

// The model's own parameter, as a step leaves it.
Status write_copy(const DeviceAccess& access, const ParamSpec& p, std::span<const float> values) {
  std::vector<uint16_t> copy(values.size());
  std::transform(values.begin(), values.end(), copy.begin(),
                 p.copy_dtype == Dtype::kBF16 ? f32_to_bf16 : f32_to_f16);
  return access.upload(p.copy, std::span<const uint16_t>(copy));
}

}  // namespace

// m from {bits, messages, scaling coefficients}: the same values, so the next step gives the same
// bits.
Status Optimizer::momentum_to_floats() {
  const std::vector<Piece> pieces = compressed_pieces(*layout_);
  const Operand operands[] = {{compressed_state_.current_bits().data()},
                              {compressed_state_.current_messages().data()},
                              {memory_.tensor_states.data()},
                              {memory_.m.data()},
                              {masked_ ? memory_.valid.data() : nullptr}};
  KernelCall call;
  call.id = KernelId::kMomentumFromBits;
  call.operands = operands;
  call.pieces = pieces;
  return access_.run_and_wait(call);
}

// All parameters become rank 0's, and model copies theirs.
Status Optimizer::broadcast_parameters() {
  Call call;
  CollectiveRequest& request = call.request;
  request.kind = OpKind::kBroadcast;
  request.rank = comm_->rank();
  request.size = comm_->size();
  call.device = device();
  for (const ParamSpec& p : params_) {
    request.counts.push_back(p.count);
    request.dtypes.push_back(Dtype::kF32);
    request.in_place.push_back(p.count != 0 ? 1 : 0);
    call.in.push_back(p.param);
    call.out.push_back(p.param);
  }
  SOTTO_TRY(comm_->run(std::move(call)));
  for (const ParamSpec& p : params_) {
    if (p.copy == nullptr) continue;
    SOTTO_ASSIGN(const std::vector<float> values, access_.download<float>(p.param, p.count));
    SOTTO_TRY(write_copy(access_, p, values));
  }
  return ok_status();
}

Result<OptimSnapshot> Optimizer::snapshot(bool with_residual) {
  if (busy()) return error(Code::kBusy, "a step of this optimizer is in flight");
  SOTTO_TRY(check_nothing_accumulated());
  OptimSnapshot s;
  s.algorithm = std::string(optimizer_kind_name(config_.optimizer.kind));
  s.mode = std::string(mode_name(compat() ? Mode::kCompat : Mode::kStrict));
  s.step = step_;
  s.step_offset = onebit() ? config_.sotto.step_offset : 0;
  s.average_since = average_since_;
  s.compressed = compressed_;
  s.stage_started = stage_started_;
  s.scheduler_iteration = schedule_.last_batch_iteration();
  s.skipped_steps = skipped_;
  s.user = user_state_;
  s.loss_scale = loss_scaler_.state();
  for (const ParamSpec& p : params_) {
    s.names.push_back(p.name);
    s.counts.push_back(p.count);
    SOTTO_ASSIGN(const std::vector<float> values, access_.download<float>(p.param, p.count));
    s.params.insert(s.params.end(), values.begin(), values.end());
  }
  if (momentum_bits_) SOTTO_TRY(momentum_to_floats());
  const auto state = [&](const DeviceArray& array, std::vector<float>* out) -> Status {
    SOTTO_ASSIGN(const std::vector<float> flat,
                 access_.download<float>(array.data(), layout_->flat_elements()));
    *out = to_tensors(*layout_, flat);
    return ok_status();
  };
  if (has_momentum()) {
    SOTTO_ASSIGN(s.m, read_state(access_, *layout_, m_array()));
  }
  if (has_variance()) {
    SOTTO_ASSIGN(s.v, read_state(access_, *layout_, v_array()));
  }
  if (zeroone()) {
    s.zeroone = zeroone_.counters();
    s.lr_sums = lr_sums_;
    s.anchor_decays = anchor_decays_;
    if (stage_started_) {
      SOTTO_TRY(state(memory_.local_sum, &s.local_sum));
      if (!compat()) SOTTO_TRY(state(memory_.anchor, &s.anchor));
    }
  }
  if (onebit()) {
    if (onebit_lamb() && stage_started_) SOTTO_TRY(state(memory_.vf, &s.vf));
    SOTTO_ASSIGN(s.tensor_states,
                 access_.download<TensorState>(memory_.tensor_states.data(), params_.size()));
  }
  if (!codec_ || !with_residual || comm_->size() == 1) return s;
  SOTTO_ASSIGN(const std::vector<uint8_t> valid, valid_bits());
  SOTTO_ASSIGN(s.residual, compressed_state_.residual(valid.empty() ? nullptr : &valid));
  if (onebit_lamb()) {
    SOTTO_ASSIGN(const std::vector<float> m,
                 access_.download<float>(memory_.m.data(), layout_->flat_elements()));
    const std::vector<float> all = to_tensors(*layout_, m, true);
    s.padding_m.assign(all.begin() + static_cast<ptrdiff_t>(s.m.size()), all.end());
  }
  return s;
}

// Elements that have error feedback; empty: all.
Result<std::vector<uint8_t>> Optimizer::valid_bits() const {
  const bool signs = codec_ && codec_->kind == CodecKind::kOnebit;
  if (!masked_ || compat() || !signs) return std::vector<uint8_t>();
  return access_.download<uint8_t>(memory_.valid.data(), layout_->flat_elements() / 8);
}

Status Optimizer::add_mean(OptimSnapshot* s) {
  if (!keeps_errors()) return ok_status();
  if (comm_->size() == 1) {
    const std::vector<float> none(layout_->elements(), 0.0f);
    s->mean = MeanErrorFeedback{none, none};
    return ok_status();
  }
  SOTTO_ASSIGN(const std::vector<uint8_t> valid, valid_bits());
  SOTTO_ASSIGN(s->mean, compressed_state_.mean(*comm_, valid.empty() ? nullptr : &valid));
  return ok_status();
}

Status Optimizer::restore_with_mean(const OptimSnapshot& s) {
  if (keeps_errors()) {
    if (!s.mean && s.residual) {
      return invalid_argument(
          "the state has the error feedback of one rank alone (it was exported in mode exact on "
          "rank "
          "{0} of {1}); import it in mode exact on that rank of {1}, or in mode reset, where error "
          "feedback starts at zero; for another number of ranks have the {1} ranks export it in "
          "mode "
          "mean",
          s.residual->rank, s.residual->size);
    }
    if (!s.mean) {
      return invalid_argument(
          "the state has no error feedback (it was exported in mode reset); import it in mode "
          "reset");
    }
    SOTTO_TRY(check_size("mean worker errors", s.mean->worker, layout_->elements()));
    SOTTO_TRY(check_size("server errors", s.mean->server, layout_->elements()));
  }
  SOTTO_TRY(restore(s, false));
  if (!keeps_errors() || comm_->size() == 1) return ok_status();
  return compressed_state_.restore_mean(*s.mean);
}

Status Optimizer::check_snapshot(const OptimSnapshot& s, bool with_residual) const {
  const std::string_view mine = optimizer_kind_name(config_.optimizer.kind);
  if (s.algorithm != mine) {
    return invalid_argument("the state is of optimizer \"{}\", this one is \"{}\"",
                            printable(s.algorithm), mine);
  }
  if (const std::string_view mode = mode_name(compat() ? Mode::kCompat : Mode::kStrict);
      s.mode != mode) {
    return invalid_argument("the state was made in sotto.mode \"{}\", this optimizer is in \"{}\"",
                            printable(s.mode), mode);
  }
  if (s.names.size() != params_.size() || s.counts.size() != params_.size()) {
    return invalid_argument("the state has {} parameters, this optimizer {}", s.names.size(),
                            params_.size());
  }
  for (size_t i = 0; i < params_.size(); ++i) {
    if (s.names[i] != params_[i].name || s.counts[i] != params_[i].count) {
      return invalid_argument(
          "parameter {} of the state is \"{}\" with {} elements, here it is \"{}\" with {}", i,
          printable(s.names[i]), s.counts[i], params_[i].name, params_[i].count);
    }
  }
  const uint64_t n = layout_->elements();
  SOTTO_TRY(check_size("parameters", s.params, n));
  SOTTO_TRY(check_size("m", s.m, has_momentum() ? n : 0));
  SOTTO_TRY(check_size("v", s.v, has_variance() ? n : 0));
  if (!std::isfinite(s.loss_scale.scale) || s.loss_scale.scale <= 0)
    return invalid_argument("the state's loss scale is {}", s.loss_scale.scale);
  if (s.scheduler_iteration < -1)
    return invalid_argument("the state's scheduler iteration is {}", s.scheduler_iteration);
  if (onebit()) SOTTO_TRY(check_onebit(s, with_residual));
  if (!codec_ || !with_residual || comm_->size() == 1) return ok_status();
  if (!s.residual && s.mean) {
    return invalid_argument(
        "the state has the mean of the error feedback of all ranks (it was exported in mode mean); "
        "import it in mode mean, or in mode reset");
  }
  if (!s.residual) {
    return invalid_argument(
        "the state has no error feedback (it was exported in mode reset, or on one rank); import "
        "it in mode reset");
  }
  if (onebit_lamb())
    SOTTO_TRY(check_size("the momentum's padding", s.padding_m,
                         layout_->elements_with_padding() - layout_->elements()));
  return compressed_state_.check(*s.residual);
}

Status Optimizer::check_onebit(const OptimSnapshot& s, bool with_residual) const {
  SOTTO_TRY(check_size("per-tensor state", s.tensor_states, params_.size()));
  if (s.stage_started && onebit_lamb()) SOTTO_TRY(check_size("vf", s.vf, layout_->elements()));
  if (s.stage_started && !(zeroone() ? s.zeroone.frozen : s.compressed))
    return invalid_argument("the state's stage flags contradict each other");
  if (zeroone()) SOTTO_TRY(check_zeroone(s, with_residual));
  // Before the switch there has to be an average to divide.
  if (s.average_since > s.step || (s.average_since == s.step && s.step > 0 && late_stage(s.step)))
    return invalid_argument("the state's average trust ratios start after {} of {} updates",
                            s.average_since, s.step);
  if (s.step_offset != config_.sotto.step_offset) {
    return invalid_argument("the state has step_offset {}, this configuration {}", s.step_offset,
                            config_.sotto.step_offset);
  }
  return ok_status();
}

Status Optimizer::check_zeroone(const OptimSnapshot& s, bool with_residual) const {
  ZeroOneSchedule schedule(groups_[0]);
  SOTTO_TRY(schedule.restore(s.zeroone, s.step, s.step + config_.sotto.step_offset));
  SOTTO_TRY(check_size("learning-rate sums", s.lr_sums, groups_.size()));
  SOTTO_TRY(check_size("anchor decays", s.anchor_decays, groups_.size()));
  if (!s.stage_started) return ok_status();
  SOTTO_TRY(check_size("the anchor", s.anchor, compat() ? 0 : layout_->elements()));
  SOTTO_TRY(check_size("local updates", s.local_sum, layout_->elements()));
  const bool moved =
      std::any_of(s.lr_sums.begin(), s.lr_sums.end(), [](double sum) { return sum > 0; });
  if (with_residual || s.local_sum_is_common || !moved) return ok_status();
  return invalid_argument(
      "the state holds local updates of one rank since the last synchronisation; import it in mode "
      "exact on that rank, or export it in another mode, which synchronises first");
}

// Whether the next step after `step` updates is of the compressed stage (0/1 Adam: of the one with
// a frozen variance). freeze_step and var_freeze_step count on from a state's step, and this
// configuration's may be others than those that the state was made with.
bool Optimizer::late_stage(uint64_t step) const {
  if (!onebit() || step == 0 || layout_->instances() == 0) return false;
  const uint64_t t = step + config_.sotto.step_offset;
  return zeroone() ? t > groups_[0].var_freeze_step : t >= groups_[0].freeze_step;
}

Status Optimizer::restore(const OptimSnapshot& s, bool with_residual) {
  if (busy()) return error(Code::kBusy, "a step of this optimizer is in flight");
  SOTTO_TRY(check_snapshot(s, with_residual));
  const bool compressed = !zeroone() && late_stage(s.step);
  const bool frozen = zeroone() && late_stage(s.step);
  const bool keep_stage = late_stage(s.step) && s.stage_started;
  std::vector<TensorState> states(params_.size());
  uint64_t average_since = s.average_since;
  if (onebit()) {
    states = s.tensor_states;
    // Back in warm-up after a compressed stage: its coefficients start again.
    if (s.compressed && !compressed) {
      states.assign(params_.size(), TensorState{});
      if (onebit_lamb()) average_since = s.step;
    }
  }
  uint64_t first = 0;
  for (const ParamSpec& p : params_) {
    const std::span<const float> values(s.params.data() + first, p.count);
    SOTTO_TRY(access_.upload(p.param, values));
    if (p.copy != nullptr) SOTTO_TRY(write_copy(access_, p, values));
    first += p.count;
  }
  if (has_momentum()) {
    std::vector<float> m = s.m;
    if (with_residual) m.insert(m.end(), s.padding_m.begin(), s.padding_m.end());
    SOTTO_TRY(write_state(access_, *layout_, m_array(), m));
  }
  if (has_variance()) SOTTO_TRY(write_state(access_, *layout_, v_array(), s.v));
  SOTTO_TRY(access_.upload(memory_.tensor_states.data(), std::span<const TensorState>(states)));
  SOTTO_TRY(write_valid_bits(keep_stage && may_mask_zero_variance() ? &s.v : nullptr));
  if (keep_stage) SOTTO_TRY(restore_stage(s));
  if (codec_)
    SOTTO_TRY(compressed_state_.restore(with_residual && s.residual ? &*s.residual : nullptr));
  if (zeroone()) {
    ZeroOneCounters counters = s.zeroone;
    counters.frozen = frozen;
    SOTTO_TRY(zeroone_.restore(counters, s.step, s.step + config_.sotto.step_offset));
    const std::vector<double> none(groups_.size(), 0.0), whole(groups_.size(), 1.0);
    lr_sums_ = keep_stage ? s.lr_sums : none;
    anchor_decays_ = keep_stage ? s.anchor_decays : whole;
    mask_is_old_ = true;
  }
  step_ = s.step;
  average_since_ = average_since;
  compressed_ = compressed;
  stage_started_ = keep_stage;
  momentum_bits_ = false;
  micro_batches_ = 0;
  for (const bool accumulated : {false, true})
    prepared_.erase({Variant::kFirstCompressed, accumulated});
  grad_norm_ = std::numeric_limits<double>::quiet_NaN();
  skipped_ = s.skipped_steps;
  skipped_in_a_row_ = 0;
  user_state_ = s.user;
  // A static scale is the configuration's.
  if (loss_scaler_.dynamic()) loss_scaler_.restore(s.loss_scale);
  note_import(s);
  return schedule_.restore(s.scheduler_iteration);
}

// What a compressed stage that goes on has beside m and v, and its counts of valid elements.
Status Optimizer::restore_stage(const OptimSnapshot& s) {
  std::vector<float> den(layout_->elements());
  uint64_t first = 0;
  for (const ParamSpec& p : params_) {
    const auto eps = static_cast<float>(groups_[p.group].eps);
    for (uint64_t i = first; i < first + p.count; ++i) den[i] = std::sqrt(s.v[i]) + eps;
    first += p.count;
  }
  const std::vector<float> den_flat = to_flat(*layout_, den);
  SOTTO_TRY(access_.upload(memory_.den.data(), std::span<const float>(den_flat)));
  const auto put = [&](DeviceArray& array, const std::vector<float>& values) {
    const std::vector<float> flat = to_flat(*layout_, values);
    return access_.upload(array.data(), std::span<const float>(flat));
  };
  if (onebit_lamb()) SOTTO_TRY(put(memory_.vf, s.vf));
  if (zeroone()) {
    SOTTO_TRY(put(memory_.local_sum, s.local_sum));
    if (!compat()) SOTTO_TRY(put(memory_.anchor, s.anchor));
  }
  std::vector<uint8_t> bits(layout_->flat_elements() / 8, 0xff);
  if (masked_ && !compat()) {
    SOTTO_ASSIGN(bits, access_.download<uint8_t>(memory_.valid.data(), bits.size()));
  }
  if (onebit_lamb()) {
    std::vector<uint64_t> tensors(params_.size());
    for (uint32_t t = 0; t < params_.size(); ++t) {
      for (const Piece& p : layout_->tensor_pieces(t)) {
        for (uint64_t f = p.flat; f < p.flat + p.count; ++f)
          tensors[t] += (bits[f / 8] >> (7 - f % 8)) & 1u;
      }
    }
    SOTTO_TRY(access_.upload(memory_.tensor_counts.data(), std::span<const uint64_t>(tensors)));
  }
  return compressed_state_.set_counts(bits);
}

}  // namespace sotto
