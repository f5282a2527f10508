// Steps: which kind comes next, its plan, and what its end changes.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <set>

#include "core/base/log.h"
#include "core/optim/optimizer.h"

namespace sotto {
namespace {

constexpr char kStepInFlight[] =
    "the previous step of this optimizer is still in flight; wait for it first";

}  // namespace

class Optimizer::StepHooks final : public OpHooks {
 public:
  StepHooks(std::shared_ptr<Optimizer> optimizer, Variant variant, const StepVerdict& verdict)
      : optimizer_(std::move(optimizer)), variant_(variant), verdict_(verdict) {}
  void on_complete(Status& status, std::span<const std::byte> bytes) noexcept override {
    optimizer_->completed(variant_, verdict_, status, bytes);
  }

 private:
  std::shared_ptr<Optimizer> optimizer_;
  Variant variant_;
  StepVerdict verdict_;
};

Optimizer::Variant Optimizer::next_variant() const {
  if (zeroone()) return next_zeroone_variant();
  if (!compressed_) return Variant::kFull;
  if (!stage_started_) return Variant::kFirstCompressed;
  return momentum_bits_ ? Variant::kCompressedBits : Variant::kCompressedFloats;
}

Optimizer::Variant Optimizer::next_zeroone_variant() const {
  bool moved = false;
  for (size_t g = 0; g < groups_.size(); ++g) moved = moved || next_lr_sum(g) > 0;
  switch (zeroone_.kind(next_t(), moved)) {
    case ZeroOneUpdate::kVariance: return Variant::kFull;
    case ZeroOneUpdate::kCompressed:
      return mask_is_old_ && !compat() ? Variant::kGradientNewMask : Variant::kGradient;
    case ZeroOneUpdate::kLocal: return stage_started_ ? Variant::kLocal : Variant::kFirstLocal;
    case ZeroOneUpdate::kSync: return stage_started_ ? Variant::kSync : Variant::kFirstSync;
  }
  return Variant::kFull;
}

double Optimizer::lr_of(uint64_t group) const {
  return std::isnan(lr_override_[group]) ? schedule_.lr(group) : lr_override_[group];
}

OptimizerParams Optimizer::params_of(uint64_t group) const {
  OptimizerParams p = groups_[group];
  if (const auto betas = schedule_.betas()) {
    p.beta1 = betas->beta1;
    p.beta2 = betas->beta2;
  }
  if (!std::isnan(beta1_override_[group])) p.beta1 = beta1_override_[group];
  if (!std::isnan(beta2_override_[group])) p.beta2 = beta2_override_[group];
  return p;
}

double Optimizer::next_anchor_decay(uint64_t group) const {
  return anchor_decays_[group] * (1 - lr_of(group) * groups_[group].weight_decay);
}

StepShape Optimizer::shape() const {
  StepShape shape;
  shape.rank = comm_->rank();
  shape.size = comm_->size();
  shape.layout = layout_.get();
  shape.compat = compat();
  shape.groups = groups_.size() + (layout_->padding().empty() ? 0 : 1);
  shape.clip = config_.gradient_clipping;
  shape.gradients = params_[0].grad_dtype;
  shape.wire = config_.communication_data_type.value_or(shape.gradients);
  // Specification 11.2.
  const double world = comm_->size();
  if (config_.prescale_gradients) {
    shape.prescale = static_cast<float>(1 / world);
  } else if (const double factor = config_.gradient_predivide_factor; factor != 1) {
    shape.prescale = static_cast<float>(1 / factor);
    shape.postscale = static_cast<float>(factor / world);
  }
  shape.loss_scaled = loss_scaler_.enabled();
  for (uint32_t t = 0; t < params_.size(); ++t) {
    if (params_[t].copy == nullptr) continue;
    shape.copied.push_back(t);
    shape.copies = params_[t].copy_dtype;
  }
  shape.frozen = frozen_;
  shape.masked = masked_;
  shape.state = state_type();
  if (!onebit()) shape.codec = codec_;
  shape.segment_bytes = comm_->segment_bytes();
  return shape;
}

StepPlan Optimizer::build(Variant variant, bool accumulated) const {
  StepShape shape = this->shape();
  shape.accumulated = accumulated;
  const auto zeroone_step = [&](ZeroOneUpdate update, bool refresh, bool begin) {
    return build_zeroone_step({shape, codec_->scale, update, refresh, may_mask_zero_variance(),
                               begin, memory_.base_valid.bytes() != 0});
  };
  const auto compressed_step = [&](bool bits, bool first) {
    CompressedStepRequest request;
    request.shape = shape;
    request.scale = codec_->scale;
    request.lamb = onebit_lamb();
    request.momentum_bits = bits;
    request.first = first;
    request.mask_zero_variance = may_mask_zero_variance();
    if (first && config_.sotto.coeff_debias) {
      request.debias =
          1.0 - std::pow(groups_[0].coeff_beta, static_cast<double>(step_ - average_since_));
    }
    return build_compressed_step(request);
  };
  switch (variant) {
    case Variant::kFull: {
      FullStepRequest request{shape, DenseUpdate::kAdam, has_momentum(), groups_[0].nesterov};
      if (kind() == OptimizerKind::kLamb) request.update = DenseUpdate::kLamb;
      if (onebit_lamb()) request.update = DenseUpdate::kLambAverage;
      if (kind() == OptimizerKind::kSgd) request.update = DenseUpdate::kSgd;
      return build_full_step(request);
    }
    case Variant::kFirstCompressed: return compressed_step(false, true);
    case Variant::kCompressedFloats: return compressed_step(false, false);
    case Variant::kCompressedBits: return compressed_step(true, false);
    case Variant::kGradient: return zeroone_step(ZeroOneUpdate::kCompressed, false, false);
    case Variant::kGradientNewMask: return zeroone_step(ZeroOneUpdate::kCompressed, true, false);
    case Variant::kLocal: return zeroone_step(ZeroOneUpdate::kLocal, false, false);
    case Variant::kFirstLocal: return zeroone_step(ZeroOneUpdate::kLocal, true, true);
    case Variant::kSync: return zeroone_step(ZeroOneUpdate::kSync, false, false);
    case Variant::kFirstSync: return zeroone_step(ZeroOneUpdate::kSync, true, true);
    case Variant::kForcedSync: {
      ZeroOneRequest request{shape, codec_->scale, ZeroOneUpdate::kSync};
      request.shape.clip = 0;
      request.shape.loss_scaled = false;
      request.shape.gradients = Dtype::kF32;  // they are not read
      request.gradients = false;
      return build_zeroone_step(request);
    }
    case Variant::kAccumulation: return build_accumulation(shape, false);
    case Variant::kFirstAccumulation: return build_accumulation(shape, true);
  }
  return {};
}

Result<Optimizer::Prepared*> Optimizer::prepared(Variant variant) {
  const std::pair key(variant, accumulated(variant));
  if (const auto it = prepared_.find(key); it != prepared_.end()) return &it->second;
  SOTTO_ASSIGN(Prepared p, prepare(variant, key.second, access_.device()));
  return &prepared_.insert_or_assign(key, std::move(p)).first->second;
}

Result<Optimizer::Prepared> Optimizer::prepare(Variant variant, bool accumulated,
                                               const std::shared_ptr<Device>& device) const {
  StepPlan step = build(variant, accumulated);
  Prepared p;
  p.slots = step.slots;
  p.verdict = step.verdict;
  SOTTO_ASSIGN(p.plan, comm_->prepare(std::move(step.plan), device));
  return p;
}

SmallVector<GroupScalars> Optimizer::scalars_of(Variant variant) const {
  const bool forced = variant == Variant::kForcedSync;
  SmallVector<GroupScalars> out;
  const auto t = static_cast<double>(next_t());
  for (size_t g = 0; g < groups_.size(); ++g) {
    const OptimizerParams p = params_of(g);
    GroupScalars s;
    s.lr = lr_of(g);
    const double correction1 = p.bias_correction ? 1.0 - std::pow(p.beta1, t) : 1.0;
    const double correction2 = p.bias_correction ? 1.0 - std::pow(p.beta2, t) : 1.0;
    s.lamb_lr = s.lr * (p.bias_correction ? std::sqrt(correction2) / correction1 : 1.0);
    s.max_coeff = p.max_coeff;
    s.min_coeff = p.min_coeff;
    s.coeff_beta = p.coeff_beta;
    s.factor_max = p.factor_max;
    s.factor_min = p.factor_min;
    s.factor_threshold = p.factor_threshold;
    s.b1 = static_cast<float>(p.beta1);
    s.one_minus_b1 = static_cast<float>(1.0 - p.beta1);
    s.b2 = static_cast<float>(p.beta2);
    s.one_minus_b2 = static_cast<float>(1.0 - p.beta2);
    s.eps = static_cast<float>(p.eps);
    s.weight_decay = static_cast<float>(p.weight_decay);
    s.c1 = static_cast<float>(correction1);
    s.c2 = static_cast<float>(correction2);
    s.eps_inside_sqrt = kind() == OptimizerKind::kLamb && p.eps_inside_sqrt;
    s.decoupled = p.adam_w_mode;
    s.lr_sum = static_cast<float>(forced ? lr_sums_[g] : next_lr_sum(g));
    s.anchor_decay = static_cast<float>(forced ? anchor_decays_[g] : next_anchor_decay(g));
    if (kind() == OptimizerKind::kSgd) {
      s.b1 = static_cast<float>(p.momentum);
      s.one_minus_b1 = step_ == 0 ? 1.0f : static_cast<float>(1.0 - p.dampening);
    }
    // As published, one rank leaves such a gradient out.
    if (compat() && comm_->size() == 1 && variant == Variant::kGradient) {
      s.b1 = 1;
      s.one_minus_b1 = 0;
    }
    out.push_back(s);
  }
  if (!layout_->padding().empty()) {
    // 1-bit LAMB keeps in the padding of its momentum what it averaged there; the others average
    // zeros.
    GroupScalars s;
    s.b1 = onebit_lamb() ? 1.0f : 0.0f;
    s.one_minus_b1 = 1.0f - s.b1;
    out.push_back(s);
  }
  return out;
}

void Optimizer::bind(Run& run, const Prepared& p, Variant variant) const {
  const auto set = [&](uint32_t slot, const DeviceArray& array) {
    if (slot != kNoSlot) run.bases[slot] = array.data();
  };
  auto* sums = static_cast<std::byte*>(memory_.micro_sums.data());
  for (uint32_t t = 0; t < params_.size(); ++t) {
    run.bases[p.slots.params + t] = params_[t].param;
    run.bases[p.slots.grads + t] = const_cast<void*>(params_[t].grad);
    if (p.slots.copies != kNoSlot) run.bases[p.slots.copies + t] = params_[t].copy;
    if (p.slots.sums != kNoSlot) run.bases[p.slots.sums + t] = sums;
    sums += params_[t].count * 4;
  }
  const StepSlots& s = p.slots;
  set(s.m, memory_.m);
  set(s.v, memory_.v);
  set(s.m_exponents, memory_.m_exponents);
  set(s.v_exponents, memory_.v_exponents);
  set(s.valid, memory_.valid);
  set(s.tensor_states, memory_.tensor_states);
  set(s.vf, memory_.vf);
  set(s.den, memory_.den);
  set(s.tensor_counts, memory_.tensor_counts);
  set(s.local_sum, memory_.local_sum);
  set(s.anchor, memory_.anchor);
  set(s.base_valid, memory_.base_valid);
  if (codec_) compressed_state_.bind(run, s.codec);
  if (s.old_bits != kNoSlot) compressed_state_.bind_current(run, s.old_bits, s.old_messages);
  const SmallVector<GroupScalars> scalars = scalars_of(variant);
  const uint64_t bytes = scalars.size() * sizeof(GroupScalars);
  const StepScalars step{1 / loss_scaler_.scale(), 1 / static_cast<double>(micro_batches_ + 1),
                         next_t()};
  std::memcpy(run.bases[s.scalars], scalars.data(), bytes);
  std::memcpy(static_cast<std::byte*>(run.bases[s.scalars]) + bytes, &step, sizeof step);
}

// Steps that exchange the same messages.
uint64_t Optimizer::traffic_of(Variant variant) {
  switch (variant) {
    case Variant::kFull: return 0;
    case Variant::kFirstCompressed:
    case Variant::kCompressedFloats:
    case Variant::kCompressedBits: return 1;
    case Variant::kGradient:
    case Variant::kGradientNewMask: return 2;
    case Variant::kLocal:
    case Variant::kFirstLocal: return 3;
    case Variant::kSync:
    case Variant::kFirstSync: return 4;
    case Variant::kForcedSync: return 5;
    case Variant::kAccumulation:
    case Variant::kFirstAccumulation: break;  // exchange nothing
  }
  return 0;
}

Result<OpRef> Optimizer::accumulate(const CallOptions& options) {
  if (busy()) return error(Code::kBusy, kStepInFlight);
  if (accumulation_steps_ != 0 && micro_batches_ + 1 >= accumulation_steps_) {
    return invalid_state(
        "{} micro-batches are accumulated, and gradient_accumulation_steps is {}: the gradients of "
        "the last one are the step's",
        micro_batches_, accumulation_steps_);
  }
  if (memory_.micro_sums.bytes() == 0) {
    SOTTO_ASSIGN(
        memory_.micro_sums,
        DeviceArray::make(access_.device(), std::max<uint64_t>(1, layout_->elements() * 4)));
  }
  return launch(micro_batches_ == 0 ? Variant::kFirstAccumulation : Variant::kAccumulation,
                options);
}

// What has been accumulated belongs to the next step, which a failed comm never takes: the state
// then is that of the last step.
Status Optimizer::check_nothing_accumulated() const {
  if (micro_batches_ == 0 || !comm_->failure().ok()) return ok_status();
  return invalid_state("{} micro-batches are accumulated: possible after the step that takes them",
                       micro_batches_);
}

// An import that ended in the middle leaves nothing to go on from.
Status Optimizer::check_whole() const {
  if (!torn_) return ok_status();
  return invalid_state("the last import ended in the middle of the state; import one first");
}

Result<OpRef> Optimizer::step(const CallOptions& options) {
  if (busy()) return error(Code::kBusy, kStepInFlight);
  SOTTO_TRY(check_whole());
  if (micro_batches_ != 0 && accumulation_steps_ != 0 &&
      micro_batches_ + 1 != accumulation_steps_) {
    return invalid_state(
        "gradient_accumulation_steps is {}, but the step has {} micro-batches: {} accumulated and "
        "its own",
        accumulation_steps_, micro_batches_ + 1, micro_batches_);
  }
  const Variant variant = next_variant();
  if (options.stream) {
    SOTTO_ASSIGN(std::shared_ptr<GraphRecorder> recorder,
                 access_.device()->record_graph(*options.stream));
    if (recorder != nullptr) return record(variant, options, std::move(recorder));
  }
  if (starts_compression(variant)) SOTTO_TRY(check_zero_variance());
  return launch(variant, options);
}

// 0/1 Adam: with zero_variance_policy "error" every new mask is a place where compression starts.
bool Optimizer::starts_compression(Variant variant) {
  return variant == Variant::kFirstCompressed || variant == Variant::kGradientNewMask ||
         variant == Variant::kFirstLocal || variant == Variant::kFirstSync;
}

// Whether there is something to average follows from counters, so ranks agree on it.
Result<OpRef> Optimizer::synchronise(const CallOptions& options) {
  if (busy()) return error(Code::kBusy, kStepInFlight);
  SOTTO_TRY(check_whole());
  SOTTO_TRY(check_nothing_accumulated());
  if (moved_since_synchronisation()) return launch(Variant::kForcedSync, options);
  SOTTO_ASSIGN(std::shared_ptr<PreparedPlan> nothing,
               comm_->prepare(LogicalPlan(), access_.device()));
  return comm_->launch_local(
      std::move(nothing), [](Run&) {}, nullptr, options);
}

Status Optimizer::synchronise() {
  SOTTO_ASSIGN(const OpRef op, synchronise(CallOptions{}));
  return comm_->engine().wait(op, -1);
}

Result<OpRef> Optimizer::launch(Variant variant, CallOptions options) {
  if (options.timeout_us == 0 && config_.sotto.timeout_ms)
    options.timeout_us = static_cast<int64_t>(*config_.sotto.timeout_ms) * 1000;
  SOTTO_ASSIGN(Prepared * p, prepared(variant));
  OpSignature s = signature(variant);
  s.tag = options.tag;
  in_flight_.store(true, std::memory_order_release);
  auto hooks = comm_->engine().pool().make<StepHooks>(shared_from_this(), variant, p->verdict);
  const auto bind_run = [&](Run& run) { bind(run, *p, variant); };
  Result<OpRef> op =
      accumulates(variant)
          ? comm_->launch_local(p->plan, std::ref(bind_run), std::move(hooks), options)
          : comm_->launch(p->plan, s, std::ref(bind_run), std::move(hooks), options);
  if (!op.ok()) in_flight_.store(false, std::memory_order_release);
  return op;
}

// zero_variance_policy "error": the stage does not start with elements that have never had a
// gradient. v is the same on all ranks, so all of them stop here.
Status Optimizer::check_zero_variance() {
  if (config_.sotto.zero_variance_policy != ZeroVariancePolicy::kError) return ok_status();
  SOTTO_ASSIGN(const std::vector<float> v,
               access_.download<float>(memory_.v.data(), layout_->flat_elements()));
  for (uint32_t t = 0; t < params_.size(); ++t) {
    if (!layout_->compressed(t)) continue;
    for (const Piece& p : layout_->tensor_pieces(t)) {
      for (uint64_t j = 0; j < p.count; ++j) {
        if (v[p.flat + j] != 0.0f ||
            (params_[t].mask != nullptr && params_[t].mask[p.offset + j] == 0))
          continue;
        return invalid_state(
            "the compressed stage cannot start: element {} of \"{}\" has variance 0 (its gradient "
            "was always 0); mask it, or set "
            "sotto.zero_variance_policy to \"mask\" or \"eps\"",
            p.offset + j, params_[t].name);
      }
    }
  }
  return ok_status();
}

void Optimizer::advance_zeroone(Variant variant) {
  const bool frozen = zeroone_.counters().frozen;
  const uint64_t traffic = traffic_of(variant);
  const bool sync = traffic >= traffic_of(Variant::kSync);
  for (size_t g = 0; g < groups_.size() && frozen; ++g) {
    lr_sums_[g] = sync ? 0.0 : next_lr_sum(g);
    anchor_decays_[g] = sync ? 1.0 : next_anchor_decay(g);
  }
  if (sync || traffic == traffic_of(Variant::kGradient)) compressed_state_.flip();
  if (variant == Variant::kForcedSync) return;
  mask_is_old_ = variant == Variant::kFull;
  stage_started_ = frozen;
  zeroone_.advance(next_t());
}

// The step has committed.
void Optimizer::advance(Variant variant) {
  const uint64_t t = next_t();
  if (zeroone()) {
    advance_zeroone(variant);
    if (variant == Variant::kForcedSync) return;
  } else if (!onebit() && codec_) {
    compressed_state_.flip();
  } else if (variant != Variant::kFull) {
    stage_started_ = true;
    if (comm_->size() > 1) {
      compressed_state_.flip();
      momentum_bits_ = !compat();
    }
  } else if (onebit() && t >= groups_[0].freeze_step && layout_->instances() > 0) {
    compressed_ = true;
    stage_started_ = false;
    momentum_bits_ = false;
  }
  ++step_;
  schedule_.advance();
}

// On the driver, before anybody learns that the step has ended.
void Optimizer::completed(Variant variant, const StepVerdict& verdict, Status& status,
                          std::span<const std::byte> bytes) {
  if (accumulates(variant)) {
    micro_batches_ += status.ok();
    return in_flight_.store(false, std::memory_order_release);
  }
  imported_ = 0;
  // Whatever has become of the step, its micro-batches are gone.
  if (variant != Variant::kForcedSync) micro_batches_ = 0;
  if (!bytes.empty() && verdict.norm != 0) std::memcpy(&grad_norm_, bytes.data() + verdict.norm, 8);
  if (status.ok()) {
    last_steps_.resize(verdict.tensor_step_count);
    if (verdict.tensor_step_count > 0) {
      std::memcpy(last_steps_.data(), bytes.data() + verdict.tensor_steps,
                  last_steps_.size() * sizeof(TensorStep));
    }
    advance(variant);
    skipped_in_a_row_ = 0;
    if (variant != Variant::kForcedSync) loss_scaler_.advance(false);
  } else {
    // The residual, if there is one, was taken back to S = 0; a server residual may have been
    // reset.
    if (status.code() == Code::kNonfinite) {
      ++skipped_;
      status = Status(Code::kNonfinite, nonfinite_text(variant, bytes, verdict));
      // The other ranks know nothing of it and go on.
      if (silent(variant)) advance(variant);
      if (loss_scaler_.enabled()) overflowed(status);
    }
  }
  in_flight_.store(false, std::memory_order_release);
}

std::string Optimizer::first_nonfinite_gradient() const {
  if (!access_.device()->caps().host_memory) return "";
  for (const ParamSpec& p : params_) {
    for (uint64_t i = 0; i < p.count; ++i) {
      const float g = float_at(p.grad_dtype, p.grad, i);
      if (!std::isfinite(g))
        return fmt::format("; here: gradient of \"{}\", element {} is {}", p.name, i, g);
    }
  }
  return "";
}

// With a dynamic loss scale an overflow is no error: the scale is halved and the step left out, a
// limited number of times in a row.
void Optimizer::overflowed(Status& status) {
  const double used = loss_scaler_.scale();
  loss_scaler_.advance(true);
  if (!loss_scaler_.dynamic()) return;
  const uint64_t limit = config_.sotto.max_consecutive_skips;
  if (++skipped_in_a_row_ < limit) {
    log(LogLevel::kInfo, "{}; loss scale {} -> {}", status.text(), used, loss_scaler_.scale());
    status = ok_status();
    return;
  }
  status = error(Code::kNonfinite,
                 "{}; {} steps in a row have overflowed (sotto.max_consecutive_skips), the loss "
                 "scale is down to {}: the gradients themselves are not finite",
                 status.text(), skipped_in_a_row_, loss_scaler_.scale());
}

// Ranks decide about such a step alone, without a message.
bool Optimizer::silent(Variant variant) const {
  return traffic_of(variant) == traffic_of(Variant::kLocal) && comm_->size() > 1 &&
         config_.gradient_clipping == 0 && !loss_scaler_.enabled();
}

std::string Optimizer::nonfinite_text(Variant variant, std::span<const std::byte> bytes,
                                      const StepVerdict& verdict) const {
  if (silent(variant)) {
    return fmt::format(
        "optimizer step {}: NaN or Inf in this rank's gradient{}; this rank takes no part in this "
        "local step, the others do",
        step_ + 1, first_nonfinite_gradient());
  }
  std::set<uint32_t> ranks;
  const auto flagged = [&](uint64_t first, uint32_t count, uint64_t stride, uint64_t at) {
    for (uint32_t r = 0; r < count; ++r) {
      uint32_t flags = 0;
      std::memcpy(&flags, bytes.data() + first + r * stride + at, 4);
      if (flags != 0) ranks.insert(r);
    }
  };
  if (!bytes.empty()) {
    if (verdict.norm_message_count > 1)
      flagged(verdict.norm_messages, verdict.norm_message_count, 16, 8);
    // Whose gradients they are, if that was exchanged; else who met them first.
    if (ranks.empty() && verdict.worker_message_count != 0) {
      for (const uint32_t r :
           layout_->flagged_ranks(bytes.subspan(verdict.worker_messages, layout_->message_bytes())))
        ranks.insert(r);
    }
  }
  std::string who;
  for (uint32_t r : ranks) who += fmt::format("{}{}", who.empty() ? "" : ", ", r);
  const bool averaged = ranks.empty();
  return fmt::format("optimizer step {}: NaN or Inf {}{}{}; nothing was updated", step_ + 1,
                     averaged ? "in the averaged gradient" : "met by rank ", who,
                     first_nonfinite_gradient());
}

}  // namespace sotto
