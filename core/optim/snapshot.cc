// Optimizer state in and out, in the order of the tensors and without padding.
#include <algorithm>
#include <cmath>
#include <utility>

#include "core/base/hash.h"
#include "core/base/text.h"
#include "core/optim/optimizer.h"
#include "core/optim/step_frame.h"

namespace sotto {
namespace {

Status check_size(const char* what, uint64_t values, uint64_t want) {
  if (values == want) return ok_status();
  return invalid_argument("the state has {} values of {}, this optimizer {}", values, what, want);
}

// The model's own parameter, as a step leaves it.
Status write_copy(const DeviceAccess& access, const ParamSpec& p, uint64_t at,
                  std::span<const float> values) {
  std::vector<uint16_t> copy(values.size());
  std::transform(values.begin(), values.end(), copy.begin(),
                 p.copy_dtype == Dtype::kBF16 ? f32_to_bf16 : f32_to_f16);
  return access.upload(static_cast<uint16_t*>(p.copy) + at, std::span<const uint16_t>(copy));
}

}  // namespace

// m from {bits, messages, scaling coefficients}: the same values, so the next step gives the same
// bits.
Status Optimizer::momentum_to_floats() {
  const std::vector<Piece> pieces = compressed_pieces(*layout_);
  const kernels::MomentumFromBitsOperands<Operand> operands{
      .bits = {compressed_state_.current_bits().data()},
      .messages = {compressed_state_.current_messages().data()},
      .states = {memory_.tensor_states.data()},
      .m = {memory_.m.data()},
      .valid = {masked_ ? memory_.valid.data() : nullptr}};
  KernelCall call = call_of<kernels::MomentumFromBits>(operands);
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
  return for_each_run(*layout_, false, [&](const TensorRun& run) -> Status {
    const ParamSpec& p = params_[run.tensor];
    if (p.copy == nullptr) return ok_status();
    SOTTO_ASSIGN(const std::vector<float> values,
                 access_.download<float>(p.param + run.at, run.count));
    return write_copy(access_, p, run.at, values);
  });
}

std::vector<float>* OptimSnapshot::part(StatePart which) {
  switch (which) {
    case StatePart::kParams: return &params;
    case StatePart::kM: return &m;
    case StatePart::kV: return &v;
    case StatePart::kVf: return &vf;
    case StatePart::kPaddingM: return &padding_m;
    case StatePart::kLocalSum: return &local_sum;
    case StatePart::kAnchor: return &anchor;
    case StatePart::kWorkerError: return residual ? &residual->worker : nullptr;
    case StatePart::kServerError: return residual ? &residual->server : nullptr;
    case StatePart::kMeanWorkerError: return mean ? &mean->worker : nullptr;
    case StatePart::kMeanServerError: return mean ? &mean->server : nullptr;
  }
  return nullptr;
}

Result<OptimSnapshot> Optimizer::describe(StateErrors errors) {
  if (busy()) return error(Code::kBusy, "a step of this optimizer is in flight");
  SOTTO_TRY(check_whole());
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
  }
  const uint64_t n = layout_->elements();
  const auto has = [&s](StatePart part, uint64_t values) {
    s.outside[static_cast<size_t>(part)] = values;
  };
  has(StatePart::kParams, n);
  if (has_momentum()) has(StatePart::kM, n);
  if (has_variance()) has(StatePart::kV, n);
  if (zeroone()) {
    s.zeroone = zeroone_.counters();
    s.lr_sums = lr_sums_;
    s.anchor_decays = anchor_decays_;
    if (errors != StateErrors::kOwn && moved_since_synchronisation()) {
      s.lr_sums.assign(groups_.size(), 0.0);
      s.anchor_decays.assign(groups_.size(), 1.0);
    }
    if (stage_started_) {
      has(StatePart::kLocalSum, n);
      if (!compat()) has(StatePart::kAnchor, n);
    }
  }
  if (onebit()) {
    if (onebit_lamb() && stage_started_) has(StatePart::kVf, n);
    SOTTO_ASSIGN(s.tensor_states,
                 access_.download<TensorState>(memory_.tensor_states.data(), params_.size()));
  }
  if (momentum_bits_) SOTTO_TRY(momentum_to_floats());
  if (errors == StateErrors::kOwn || !moved_since_synchronisation()) {
    SOTTO_ASSIGN(s.frozen_m, exchanged_momentum());
  }
  if (errors == StateErrors::kMean && keeps_errors()) {
    s.mean.emplace();
    has(StatePart::kMeanWorkerError, n);
    has(StatePart::kMeanServerError, n);
  }
  if (!codec_ || errors != StateErrors::kOwn || comm_->size() == 1) return s;
  s.residual = compressed_state_.no_errors();
  has(StatePart::kWorkerError, compressed_state_.worker_values());
  has(StatePart::kServerError, compressed_state_.server_values());
  if (onebit_lamb()) has(StatePart::kPaddingM, layout_->elements_with_padding() - n);
  return s;
}

// Flat, float32.
const DeviceArray* Optimizer::flat_array(StatePart part) const {
  switch (part) {
    case StatePart::kVf: return &memory_.vf;
    case StatePart::kLocalSum: return &memory_.local_sum;
    case StatePart::kAnchor: return &memory_.anchor;
    default: return nullptr;
  }
}

Status Optimizer::stream(StatePart part, StateErrors errors, const FloatSink& sink) {
  const bool common = errors != StateErrors::kOwn && moved_since_synchronisation();
  std::vector<float> values;
  const auto runs = [&](uint32_t first, uint32_t last, auto&& read) {
    return for_each_tensor_run(*layout_, first, last, [&](const TensorRun& run) -> Status {
      values.resize(run.count);
      SOTTO_TRY(read(run, values.data()));
      return sink(values);
    });
  };
  const uint32_t tensors = tensor_count(*layout_, false), all = tensor_count(*layout_, true);
  const auto arrays = [&](const StateArray& array, uint32_t first, uint32_t last) {
    return runs(first, last, [&](const TensorRun& run, float* out) {
      return read_state(access_, array, run, out);
    });
  };
  switch (part) {
    case StatePart::kParams:
      if (common) return stream_common(part, sink);
      return runs(0, tensors, [&](const TensorRun& run, float* out) {
        return access_.copy_and_wait(out, params_[run.tensor].param + run.at,
                                     run.count * sizeof(float));
      });
    case StatePart::kM:
      if (common) return stream_common(part, sink);
      return runs(0, tensors, [&](const TensorRun& run, float* out) {
        return read_aside(run, out) ? ok_status() : read_state(access_, m_array(), run, out);
      });
    case StatePart::kV: return arrays(v_array(), 0, tensors);
    case StatePart::kPaddingM: return arrays(m_array(), tensors, all);
    case StatePart::kVf:
    case StatePart::kLocalSum:
    case StatePart::kAnchor:
      if (common && part != StatePart::kVf) return stream_common(part, sink);
      return arrays({StateType::kF32, false, flat_array(part)->data(), nullptr}, 0, tensors);
    default: break;
  }
  SOTTO_ASSIGN(const std::vector<uint8_t> valid, valid_bits());
  if (part == StatePart::kWorkerError) return compressed_state_.worker_errors(valid, sink);
  if (part == StatePart::kServerError) return compressed_state_.server_errors(valid, sink);
  if (comm_->size() == 1) {  // averages nothing
    return runs(0, tensors, [](const TensorRun& run, float* out) {
      std::fill_n(out, run.count, 0.0f);
      return ok_status();
    });
  }
  return part == StatePart::kMeanWorkerError
             ? compressed_state_.mean_worker_errors(*comm_, valid, sink)
             : compressed_state_.mean_server_errors(*comm_, valid, sink);
}

Result<std::vector<float>> Optimizer::exchanged_momentum() const {
  std::vector<float> out;
  for (uint32_t t = 0; t < params_.size() && !aside_m_.empty(); ++t) {
    if (frozen_[t] == 0) continue;
    SOTTO_TRY(for_each_tensor_run(*layout_, t, t + 1, [&](const TensorRun& run) -> Status {
      out.resize(out.size() + run.count);
      return read_state(access_, m_array(), run, out.data() + (out.size() - run.count));
    }));
  }
  return out;
}

// False: the run is not of a frozen parameter whose momentum was put aside.
bool Optimizer::read_aside(const TensorRun& run, float* out) const {
  if (aside_m_.empty() || run.tensor >= frozen_.size() || frozen_[run.tensor] == 0) return false;
  uint64_t first = 0;
  for (uint32_t t = 0; t < run.tensor; ++t) first += frozen_[t] != 0 ? params_[t].count : 0;
  std::copy_n(aside_m_.begin() + static_cast<ptrdiff_t>(first + run.at), run.count, out);
  return true;
}

// Elements that have error feedback; empty: all.
Result<std::vector<uint8_t>> Optimizer::valid_bits() const {
  const bool signs = codec_ && codec_->kind == CodecKind::kOnebit;
  if (!masked_ || compat() || !signs) return std::vector<uint8_t>();
  return access_.download<uint8_t>(memory_.valid.data(), layout_->flat_elements() / 8);
}

// What 0/1 Adam's ranks have summed up is this rank's, with error feedback or without.
Result<OptimSnapshot> Optimizer::snapshot(bool with_residual) {
  SOTTO_ASSIGN(OptimSnapshot s, describe(StateErrors::kOwn));
  if (!with_residual) {
    s.residual.reset();
    for (const StatePart part :
         {StatePart::kWorkerError, StatePart::kServerError, StatePart::kPaddingM})
      s.outside[static_cast<size_t>(part)] = 0;
  }
  for (size_t i = 0; i < kStateParts; ++i) {
    const auto part = static_cast<StatePart>(i);
    if (std::exchange(s.outside[i], 0) == 0) continue;
    SOTTO_TRY(stream(part, StateErrors::kOwn, [&](std::span<const float> values) {
      s.part(part)->insert(s.part(part)->end(), values.begin(), values.end());
      return ok_status();
    }));
  }
  return s;
}

Status Optimizer::add_mean(OptimSnapshot* s) {
  if (!keeps_errors()) return ok_status();
  s->mean.emplace();
  for (const StatePart part : {StatePart::kMeanWorkerError, StatePart::kMeanServerError}) {
    SOTTO_TRY(stream(part, StateErrors::kMean, [&](std::span<const float> values) {
      s->part(part)->insert(s->part(part)->end(), values.begin(), values.end());
      return ok_status();
    }));
  }
  return ok_status();
}

Status Optimizer::check_snapshot(const OptimSnapshot& s, StateErrors errors) const {
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
  if (s.names.size() != s.counts.size()) {
    return invalid_argument("the state's description has {} parameters, its counts are of {}",
                            s.names.size(), s.counts.size());
  }
  for (size_t i = 0; i < std::max(s.names.size(), params_.size()); ++i) {
    const bool found = i < s.names.size(), wanted = i < params_.size();
    if (found && wanted && s.names[i] == params_[i].name && s.counts[i] == params_[i].count)
      continue;
    const auto text_of = [](std::string_view name, uint64_t count) {
      return fmt::format("\"{}\" with {} element(s)", printable(name), count);
    };
    return invalid_argument(
        "parameter {} of the state is {}, of this optimizer {}; they have {} and {} parameter(s)",
        i, found ? text_of(s.names[i], s.counts[i]) : "not there",
        wanted ? text_of(params_[i].name, params_[i].count) : "not there", s.names.size(),
        params_.size());
  }
  const uint64_t n = layout_->elements();
  SOTTO_TRY(check_size("parameters", s.values(StatePart::kParams), n));
  SOTTO_TRY(check_size("m", s.values(StatePart::kM), has_momentum() ? n : 0));
  SOTTO_TRY(check_size("v", s.values(StatePart::kV), has_variance() ? n : 0));
  if (!std::isfinite(s.loss_scale.scale) || s.loss_scale.scale <= 0)
    return invalid_argument("the state's loss scale is {}", s.loss_scale.scale);
  if (s.scheduler_iteration < -1)
    return invalid_argument("the state's scheduler iteration is {}", s.scheduler_iteration);
  if (onebit()) SOTTO_TRY(check_onebit(s, errors));
  if (errors == StateErrors::kMean && keeps_errors()) {
    if (!s.mean && s.residual) {
      return invalid_argument(
          "the state has the error feedback of one rank alone (it was exported in mode exact on "
          "rank {0} of {1}); import it in mode exact on that rank of {1}, or in mode reset, where "
          "error feedback starts at zero; for another number of ranks have the {1} ranks export it "
          "in mode mean",
          s.residual->rank, s.residual->size);
    }
    if (!s.mean) {
      return invalid_argument(
          "the state has no error feedback (it was exported in mode reset); import it in mode "
          "reset");
    }
    SOTTO_TRY(check_size("mean worker errors", s.values(StatePart::kMeanWorkerError), n));
    SOTTO_TRY(check_size("server errors", s.values(StatePart::kMeanServerError), n));
  }
  if (!codec_ || errors != StateErrors::kOwn || comm_->size() == 1) return ok_status();
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
    SOTTO_TRY(check_size("the momentum's padding", s.values(StatePart::kPaddingM),
                         layout_->elements_with_padding() - layout_->elements()));
  return compressed_state_.check_settings(*s.residual, s.values(StatePart::kWorkerError),
                                          s.values(StatePart::kServerError));
}

Status Optimizer::check_onebit(const OptimSnapshot& s, StateErrors errors) const {
  SOTTO_TRY(check_size("per-tensor state", s.tensor_states.size(), params_.size()));
  if (s.stage_started && onebit_lamb())
    SOTTO_TRY(check_size("vf", s.values(StatePart::kVf), layout_->elements()));
  if (s.stage_started && !(zeroone() ? s.zeroone.frozen : s.compressed))
    return invalid_argument("the state's stage flags contradict each other");
  if (zeroone()) SOTTO_TRY(check_zeroone(s, errors));
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

Status Optimizer::check_zeroone(const OptimSnapshot& s, StateErrors errors) const {
  ZeroOneSchedule schedule(groups_[0]);
  SOTTO_TRY(schedule.restore(s.zeroone, s.step, s.step + config_.sotto.step_offset));
  SOTTO_TRY(
      check_size("learning-rate sums, one per parameter group", s.lr_sums.size(), groups_.size()));
  SOTTO_TRY(
      check_size("anchor decays, one per parameter group", s.anchor_decays.size(), groups_.size()));
  if (!s.stage_started) return ok_status();
  SOTTO_TRY(
      check_size("the anchor", s.values(StatePart::kAnchor), compat() ? 0 : layout_->elements()));
  SOTTO_TRY(check_size("local updates", s.values(StatePart::kLocalSum), layout_->elements()));
  const bool moved =
      std::any_of(s.lr_sums.begin(), s.lr_sums.end(), [](double sum) { return sum > 0; });
  if (errors == StateErrors::kOwn || s.local_sum_is_common || !moved) return ok_status();
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

// Values of error feedback; those of other parts are taken as they are.
Status Optimizer::check_errors(const OptimSnapshot& s, StateErrors errors,
                               const PartSource& source) const {
  const bool own = errors == StateErrors::kOwn && codec_ && comm_->size() > 1;
  const bool mean = errors == StateErrors::kMean && keeps_errors();
  if (!own && !mean) return ok_status();
  std::vector<float> values;
  for (const StatePart part : {own ? StatePart::kWorkerError : StatePart::kMeanWorkerError,
                               own ? StatePart::kServerError : StatePart::kMeanServerError}) {
    SOTTO_ASSIGN(const FloatSource read, source(part));
    const uint64_t n = s.values(part);
    for (uint64_t at = 0; at < n; at += kRunElements) {
      values.resize(std::min(kRunElements, n - at));
      SOTTO_TRY(read(values));
      for (const float e : values) {
        if (!std::isfinite(e)) return invalid_argument("the error feedback has a value {}", e);
      }
    }
  }
  return ok_status();
}

Status Optimizer::restore(const OptimSnapshot& s, bool with_residual) {
  const StateErrors errors = with_residual ? StateErrors::kOwn : StateErrors::kNone;
  return restore(s, errors, [&](StatePart part) -> Result<FloatSource> {
    const std::vector<float>* values = s.part(part);
    return FloatSource([values, at = size_t{0}](std::span<float> out) mutable {
      std::copy_n(values->begin() + static_cast<ptrdiff_t>(at), out.size(), out.begin());
      at += out.size();
      return ok_status();
    });
  });
}

Status Optimizer::restore(const OptimSnapshot& s, StateErrors errors, const PartSource& source) {
  if (busy()) return error(Code::kBusy, "a step of this optimizer is in flight");
  SOTTO_TRY(check_snapshot(s, errors));
  SOTTO_TRY(check_errors(s, errors, source));
  torn_ = true;
  SOTTO_TRY(apply(s, errors, source));
  torn_ = false;
  return ok_status();
}

// Parameters and moments.
Status Optimizer::apply_arrays(const OptimSnapshot& s, StateErrors errors,
                               const PartSource& source) {
  std::array<uint64_t, kStateParts> hashes{};
  std::vector<float> values;
  const auto load = [&](StatePart part, auto&& write) -> Status {
    SOTTO_ASSIGN(const FloatSource read, source(part));
    Hasher64 hasher;
    const auto take = [&](const TensorRun& run) -> Status {
      values.resize(run.count);
      SOTTO_TRY(read(values));
      hasher.update(values.data(), values.size() * sizeof(float));
      return write(run);
    };
    SOTTO_TRY(for_each_run(*layout_, false, take));
    hashes[static_cast<size_t>(part)] = hasher.digest();
    return ok_status();
  };
  const auto to = [&](StatePart part, const StateArray& array) {
    return load(part,
                [&](const TensorRun& run) { return write_state(access_, array, run, values); });
  };
  const auto write_params = [&](const TensorRun& run) -> Status {
    const ParamSpec& p = params_[run.tensor];
    SOTTO_TRY(access_.upload(p.param + run.at, std::span<const float>(values)));
    return p.copy == nullptr ? ok_status() : write_copy(access_, p, run.at, values);
  };
  SOTTO_TRY(load(StatePart::kParams, write_params));
  if (has_momentum()) SOTTO_TRY(to(StatePart::kM, m_array()));
  if (has_variance()) SOTTO_TRY(to(StatePart::kV, v_array()));
  // Padding that is data: only this rank's own state has its momentum.
  FloatSource padding;
  if (errors == StateErrors::kOwn && s.values(StatePart::kPaddingM) != 0) {
    SOTTO_ASSIGN(padding, source(StatePart::kPaddingM));
  }
  const uint32_t tensors = tensor_count(*layout_, false), all = tensor_count(*layout_, true);
  const auto write_padding = [&](const TensorRun& run) -> Status {
    values.assign(run.count, 0.0f);
    if (padding) SOTTO_TRY(padding(values));
    return write_state(access_, m_array(), run, values);
  };
  SOTTO_TRY(for_each_tensor_run(*layout_, tensors, all, write_padding));
  if (late_stage(s.step) && s.stage_started) {
    for (const StatePart part : {StatePart::kVf, StatePart::kLocalSum, StatePart::kAnchor}) {
      if (s.values(part) == 0) continue;
      SOTTO_TRY(to(part, {StateType::kF32, false, flat_array(part)->data(), nullptr}));
    }
  }
  imported_ = import_hash(s, hashes);
  return ok_status();
}

Status Optimizer::apply_errors(const OptimSnapshot& s, StateErrors errors,
                               const PartSource& source) {
  if (!codec_ || comm_->size() == 1) return ok_status();  // one rank has no errors
  SOTTO_TRY(compressed_state_.clear_errors());
  if (!keeps_errors() || errors == StateErrors::kNone) return ok_status();
  const bool own = errors == StateErrors::kOwn;
  if (own && !s.residual) return ok_status();
  SOTTO_ASSIGN(const FloatSource worker,
               source(own ? StatePart::kWorkerError : StatePart::kMeanWorkerError));
  SOTTO_TRY(compressed_state_.put_worker_errors(worker, own));
  SOTTO_ASSIGN(const FloatSource server,
               source(own ? StatePart::kServerError : StatePart::kMeanServerError));
  return own ? compressed_state_.put_server_errors(server)
             : compressed_state_.put_mean_server_errors(server);
}

Status Optimizer::apply(const OptimSnapshot& s, StateErrors errors, const PartSource& source) {
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
  SOTTO_TRY(apply_arrays(s, errors, source));
  SOTTO_TRY(access_.upload(memory_.tensor_states.data(), std::span<const TensorState>(states)));
  SOTTO_TRY(write_valid_bits(keep_stage && may_mask_zero_variance()));
  if (keep_stage) SOTTO_TRY(restore_stage());
  SOTTO_TRY(apply_errors(s, errors, source));
  if (zeroone()) {
    ZeroOneCounters counters = s.zeroone;
    counters.frozen = frozen;
    SOTTO_TRY(zeroone_.restore(counters, s.step, s.step + config_.sotto.step_offset));
    const std::vector<double> none(groups_.size(), 0.0), whole(groups_.size(), 1.0);
    lr_sums_ = keep_stage ? s.lr_sums : none;
    anchor_decays_ = keep_stage ? s.anchor_decays : whole;
    mask_is_old_ = true;
  }
  if (onebit() && !frozen_.empty()) {
    const std::vector<uint8_t> aside = std::exchange(frozen_, {});
    aside_m_.clear();
    SOTTO_TRY(set_momentum_aside(aside, &aside_m_, s.frozen_m));
    frozen_ = aside;
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
  return schedule_.restore(s.scheduler_iteration);
}

// What a compressed stage that goes on derives from v, and its counts of valid elements.
Status Optimizer::restore_stage() {
  std::vector<float> den;
  const StateArray to{StateType::kF32, false, memory_.den.data(), nullptr};
  const auto write_den = [&](const TensorRun& run) -> Status {
    den.resize(run.count);
    SOTTO_TRY(read_state(access_, v_array(), run, den.data()));
    const auto eps = static_cast<float>(groups_[params_[run.tensor].group].eps);
    for (float& x : den) x = std::sqrt(x) + eps;
    return write_state(access_, to, run, den);
  };
  SOTTO_TRY(for_each_run(*layout_, false, write_den));
  std::vector<uint8_t> bits(layout_->flat_elements() / 8, 0xff);
  if (masked_ && !compat()) {
    SOTTO_ASSIGN(bits, access_.download<uint8_t>(memory_.valid.data(), bits.size()));
  }
  if (onebit_lamb()) {
    std::vector<uint64_t> tensors(params_.size());
    SOTTO_TRY(for_each_run(*layout_, false, [&](const TensorRun& run) {
      return run.each_part([&](const Piece&, uint64_t flat, uint64_t, uint64_t n) {
        for (uint64_t f = flat; f < flat + n; ++f)
          tensors[run.tensor] += (bits[f / 8] >> (7 - f % 8)) & 1u;
        return ok_status();
      });
    }));
    SOTTO_TRY(access_.upload(memory_.tensor_counts.data(), std::span<const uint64_t>(tensors)));
  }
  return compressed_state_.set_counts(bits);
}

}  // namespace sotto
