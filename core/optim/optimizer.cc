// Creation and steps. What goes in and out as a snapshot is in snapshot.cc, reports are in
// report.cc.
#include "core/optim/optimizer.h"

#include <cmath>
#include <cstring>
#include <set>

#include "core/base/hash.h"
#include "core/base/log.h"

namespace sotto {

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

// ---- creation ----

Optimizer::Optimizer(std::shared_ptr<Comm> comm, Config config, std::vector<OptimizerParams> groups,
                     LrSchedule schedule, std::vector<ParamSpec> params)
    : comm_(std::move(comm)),
      config_(std::move(config)),
      groups_(std::move(groups)),
      lr_override_(groups_.size(), std::numeric_limits<double>::quiet_NaN()),
      schedule_(std::move(schedule)),
      params_(std::move(params)) {}

Result<std::shared_ptr<Optimizer>> Optimizer::create(std::shared_ptr<Comm> comm,
                                                     std::string_view config_text,
                                                     std::vector<ParamSpec> params) {
  SOTTO_ASSIGN(Config config, parse_config(config_text));
  SOTTO_TRY(check_supported(config));
  for (const std::string& warning : config.warnings) log(LogLevel::kWarn, "{}", warning);
  if (const std::string& wanted = config.sotto.transport;
      wanted != "auto" && wanted != comm->transport()) {
    return invalid_argument(
        "sotto.transport is \"{}\", but this comm runs on \"{}\"; create the comm with that "
        "transport",
        wanted, comm->transport());
  }
  SOTTO_ASSIGN([[maybe_unused]] const auto batch,
               config.resolve_batch(static_cast<uint64_t>(comm->size())));
  uint64_t n_groups = std::max<uint64_t>(1, config.sotto.param_groups.size());
  for (const ParamSpec& p : params) n_groups = std::max<uint64_t>(n_groups, uint64_t{p.group} + 1);
  SOTTO_ASSIGN(std::vector<OptimizerParams> groups, config.resolve_groups(n_groups));
  std::vector<double> base_lr;
  for (const OptimizerParams& g : groups) base_lr.push_back(g.lr);
  SOTTO_ASSIGN(LrSchedule schedule, LrSchedule::create(config.scheduler, std::move(base_lr)));
  std::shared_ptr<Optimizer> optimizer(new Optimizer(std::move(comm), std::move(config),
                                                     std::move(groups), std::move(schedule),
                                                     std::move(params)));
  // All ranks take part in the comparison, also one that found a fault of its own.
  const Status valid = optimizer->check_params();
  const Status same = optimizer->compare_with_others();
  SOTTO_TRY(valid);
  SOTTO_TRY(same);
  SOTTO_TRY(optimizer->allocate());
  return optimizer;
}

Status Optimizer::check_params() const {
  std::set<std::string_view> names;
  if (params_.empty()) return invalid_argument("no parameters were given");
  for (size_t i = 0; i < params_.size(); ++i) {
    const ParamSpec& p = params_[i];
    if (p.name.empty() || p.name.size() > 255) {
      return invalid_argument("parameter {} has a name of {} bytes; allowed: 1 to 255", i,
                              p.name.size());
    }
    if (!names.insert(p.name).second)
      return invalid_argument("parameter {}: the name \"{}\" is used twice", i, p.name);
    if (p.mask == nullptr) continue;
    for (uint64_t e = 0; e < p.count; ++e) {
      if (p.mask[e] > 1) {
        return invalid_argument("parameter \"{}\": mask element {} is {}; allowed: 0 or 1", p.name,
                                e, p.mask[e]);
      }
    }
  }
  return ok_status();
}

Status Optimizer::compare_with_others() const {
  Hasher64 hasher;
  uint64_t elements = 0;
  for (const ParamSpec& p : params_) {
    hasher.update(p.name.data(), p.name.size() + 1);
    hasher.update(&p.count, sizeof p.count);
    hasher.update(&p.group, sizeof p.group);
    const uint64_t mask = p.mask == nullptr ? 0 : hash64(p.mask, p.count, 1);
    hasher.update(&mask, sizeof mask);
    elements += p.count;
  }
  const OptimizerParams& g = groups_[0];
  const double numbers[] = {static_cast<double>(config_.optimizer.kind),
                            static_cast<double>(config_.sotto.chunk_align),
                            static_cast<double>(config_.sotto.granularity),
                            static_cast<double>(config_.sotto.scale),
                            static_cast<double>(config_.sotto.step_offset),
                            static_cast<double>(g.freeze_step),
                            config_.gradient_clipping,
                            g.beta1,
                            g.beta2,
                            g.eps};
  const uint64_t mine[] = {params_.size(), elements, hasher.digest(),
                           hash64(numbers, sizeof numbers)};
  SOTTO_ASSIGN(const std::vector<std::string> all,
               comm_->exchange(std::string(reinterpret_cast<const char*>(mine), sizeof mine)));
  for (size_t r = 0; r < all.size(); ++r) {
    uint64_t theirs[4];
    std::memcpy(theirs, all[r].data(), sizeof theirs);
    const int32_t me = comm_->rank();
    if (theirs[0] != mine[0] || theirs[1] != mine[1]) {
      return error(Code::kProtocol,
                   "rank {} registers {} parameters with {} elements, rank {} {} with {}", r,
                   theirs[0], theirs[1], me, mine[0], mine[1]);
    }
    if (theirs[2] != mine[2]) {
      return error(Code::kProtocol,
                   "ranks {} and {} register parameters with other names, sizes, groups, masks or "
                   "in another order",
                   r, me);
    }
    if (theirs[3] != mine[3]) {
      return error(Code::kProtocol,
                   "ranks {} and {} have configurations with other optimizer settings", r, me);
    }
  }
  return ok_status();
}

bool Optimizer::may_mask_zero_variance() const {
  return onebit() && config_.sotto.zero_variance_policy == ZeroVariancePolicy::kMask;
}

Status Optimizer::allocate() {
  std::vector<OnebitTensor> tensors;
  for (const ParamSpec& p : params_) {
    tensors.push_back({p.count, p.group});
    masked_ = masked_ || p.mask != nullptr;
  }
  OnebitSettings& o = onebit_settings_;
  o.rank = comm_->rank();
  o.size = comm_->size();
  o.chunk_align = config_.sotto.chunk_align;
  o.granularity = config_.sotto.granularity == Granularity::kTensor ? OnebitGranularity::kTensor
                                                                    : OnebitGranularity::kFlat;
  o.scale = config_.sotto.scale == CompressionScale::kL1 ? ScaleKind::kL1 : ScaleKind::kL2;
  const auto ranks = onebit() ? static_cast<uint32_t>(comm_->size()) : 1u;
  layout_ = std::make_unique<OnebitLayout>(std::move(tensors), ranks, o.chunk_align, o.granularity);
  masked_ = masked_ || may_mask_zero_variance();
  const auto take = [&](DeviceArray& array, uint64_t bytes) -> Status {
    SOTTO_ASSIGN(array, DeviceArray::make(comm_->context()->device(), bytes));
    return ok_status();
  };
  const uint64_t flat = layout_->flat_elements() * 4;
  SOTTO_TRY(take(memory_.m, flat));
  SOTTO_TRY(take(memory_.v, flat));
  SOTTO_TRY(take(memory_.tensor_states, params_.size() * sizeof(TensorState)));
  const std::vector<TensorState> states(params_.size());
  SOTTO_TRY(
      upload(comm_->engine(), memory_.tensor_states.data(), std::span<const TensorState>(states)));
  if (masked_) SOTTO_TRY(take(memory_.valid, layout_->flat_elements() / 8));
  if (onebit()) {
    SOTTO_TRY(take(memory_.vf, flat));
    SOTTO_TRY(take(memory_.den, flat));
    SOTTO_TRY(take(memory_.tensor_counts, params_.size() * 8));
    SOTTO_ASSIGN(onebit_state_, OnebitState::make(comm_->engine(), *layout_, onebit_settings_));
  }
  return write_valid_bits(nullptr);
}

// Valid bits from the callers' masks and, in the compressed stage, from the frozen variance; and
// the counts that follow.
Status Optimizer::write_valid_bits(const std::vector<float>* frozen_v) {
  if (!masked_) return ok_status();
  std::vector<uint8_t> bits(layout_->flat_elements() / 8, 0);
  uint64_t first = 0;
  for (uint32_t t = 0; t < params_.size(); ++t) {
    for (const Piece& piece : layout_->tensor_pieces(t)) {
      for (uint64_t j = 0; j < piece.count; ++j) {
        const bool zero_variance =
            frozen_v != nullptr && (*frozen_v)[first + piece.offset + j] == 0.0f;
        const bool valid = (params_[t].mask == nullptr || params_[t].mask[piece.offset + j] != 0) &&
                           !zero_variance;
        const uint64_t f = piece.flat + j;
        if (valid) bits[f / 8] = static_cast<uint8_t>(bits[f / 8] | (0x80u >> (f % 8)));
      }
    }
    first += params_[t].count;
  }
  SOTTO_TRY(upload(comm_->engine(), memory_.valid.data(), std::span<const uint8_t>(bits)));
  return ok_status();
}

// ---- steps ----

Optimizer::Variant Optimizer::next_variant() const {
  if (!compressed_) return Variant::kFull;
  if (!stage_started_) return Variant::kFirstCompressed;
  return momentum_bits_ ? Variant::kCompressedBits : Variant::kCompressedFloats;
}

double Optimizer::lr_of(uint64_t group) const {
  return std::isnan(lr_override_[group]) ? schedule_.lr(group) : lr_override_[group];
}

Result<Optimizer::Prepared*> Optimizer::prepared(Variant variant) {
  if (const auto it = prepared_.find(variant); it != prepared_.end()) return &it->second;
  StepShape shape;
  shape.rank = comm_->rank();
  shape.size = comm_->size();
  shape.layout = layout_.get();
  shape.groups = groups_.size();
  shape.clip = config_.gradient_clipping;
  shape.masked = masked_;
  shape.segment_bytes = comm_->segment_bytes();
  StepPlan step;
  if (variant == Variant::kFull) {
    const bool lamb = onebit() || config_.optimizer.kind == OptimizerKind::kLamb;
    step = build_full_step({shape, lamb, onebit()});
  } else {
    OnebitLambRequest request;
    request.shape = shape;
    request.scale = onebit_settings_.scale;
    request.momentum_bits = variant == Variant::kCompressedBits;
    request.first = variant == Variant::kFirstCompressed;
    request.mask_zero_variance = may_mask_zero_variance();
    if (request.first && config_.sotto.coeff_debias) {
      request.debias = 1.0 - std::pow(groups_[0].coeff_beta, static_cast<double>(step_));
    }
    step = build_onebit_lamb_step(request);
  }
  Prepared p;
  p.slots = step.slots;
  p.verdict = step.verdict;
  SOTTO_ASSIGN(p.plan, comm_->prepare(std::move(step.plan)));
  return &prepared_.insert_or_assign(variant, std::move(p)).first->second;
}

std::vector<GroupScalars> Optimizer::scalars_of_next_step() const {
  std::vector<GroupScalars> out;
  const auto t = static_cast<double>(next_t());
  for (size_t g = 0; g < groups_.size(); ++g) {
    const OptimizerParams& p = groups_[g];
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
    s.eps_inside_sqrt = config_.optimizer.kind == OptimizerKind::kLamb && p.eps_inside_sqrt;
    s.decoupled = p.adam_w_mode;
    out.push_back(s);
  }
  return out;
}

void Optimizer::bind(Run& run, const Prepared& p) const {
  const auto set = [&](uint32_t slot, const DeviceArray& array) {
    if (slot != kNoSlot) run.bases[slot] = array.data();
  };
  for (uint32_t t = 0; t < params_.size(); ++t) {
    run.bases[p.slots.params + t] = params_[t].param;
    run.bases[p.slots.grads + t] = const_cast<float*>(params_[t].grad);
  }
  const StepSlots& s = p.slots;
  set(s.m, memory_.m);
  set(s.v, memory_.v);
  set(s.valid, memory_.valid);
  set(s.tensor_states, memory_.tensor_states);
  set(s.vf, memory_.vf);
  set(s.den, memory_.den);
  set(s.tensor_counts, memory_.tensor_counts);
  if (s.onebit.worker != kNoSlot) onebit_state_.bind(run, s.onebit);
  if (s.old_bits != kNoSlot) onebit_state_.bind_current(run, s.old_bits, s.old_messages);
  const std::vector<GroupScalars> scalars = scalars_of_next_step();
  std::memcpy(run.bases[s.scalars], scalars.data(), scalars.size() * sizeof(GroupScalars));
}

OpSignature Optimizer::signature(Variant variant) const {
  OpSignature s;
  s.kind = OpKind::kOptimStep;
  s.dtype = static_cast<uint32_t>(Dtype::kF32);
  s.count = layout_->elements();
  // Ranks that are at different steps or stages must not mix.
  const uint64_t values[] = {next_t(), variant == Variant::kFull ? 0u : 1u,
                             static_cast<uint64_t>(config_.optimizer.kind), comm_->segment_bytes()};
  s.detail = static_cast<uint32_t>(hash64(values, sizeof values));
  return s;
}

Result<OpRef> Optimizer::step(const CallOptions& options) {
  if (busy())
    return error(Code::kBusy,
                 "the previous step of this optimizer is still in flight; wait for it first");
  const Variant variant = next_variant();
  if (variant == Variant::kFirstCompressed) SOTTO_TRY(check_zero_variance());
  SOTTO_ASSIGN(Prepared * p, prepared(variant));
  OpSignature s = signature(variant);
  s.tag = options.tag;
  in_flight_.store(true, std::memory_order_release);
  auto hooks = std::make_shared<StepHooks>(shared_from_this(), variant, p->verdict);
  Result<OpRef> op = comm_->launch(
      p->plan, s, [&](Run& run) { bind(run, *p); }, std::move(hooks), options);
  if (!op.ok()) in_flight_.store(false, std::memory_order_release);
  return op;
}

// zero_variance_policy "error": the stage does not start with elements that have never had a
// gradient. v is the same on all ranks, so all of them stop here.
Status Optimizer::check_zero_variance() {
  if (config_.sotto.zero_variance_policy != ZeroVariancePolicy::kError) return ok_status();
  SOTTO_ASSIGN(const std::vector<float> v,
               download<float>(comm_->engine(), memory_.v.data(), layout_->flat_elements()));
  for (uint32_t t = 0; t < params_.size(); ++t) {
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

// On the driver, before anybody learns that the step has ended.
void Optimizer::completed(Variant variant, const StepVerdict& verdict, Status& status,
                          std::span<const std::byte> bytes) {
  if (!bytes.empty() && verdict.norm != 0) std::memcpy(&grad_norm_, bytes.data() + verdict.norm, 8);
  if (status.ok()) {
    const uint64_t t = next_t();
    last_steps_.resize(verdict.tensor_step_count);
    if (verdict.tensor_step_count > 0) {
      std::memcpy(last_steps_.data(), bytes.data() + verdict.tensor_steps,
                  last_steps_.size() * sizeof(TensorStep));
    }
    ++step_;
    schedule_.advance();
    if (variant != Variant::kFull) {
      stage_started_ = true;
      if (comm_->size() > 1) {
        onebit_state_.flip();
        momentum_bits_ = true;
      }
    } else if (onebit() && t >= groups_[0].freeze_step) {
      compressed_ = true;
      stage_started_ = false;
      momentum_bits_ = false;
    }
  } else {
    // The residual, if there is one, was taken back to S = 0; a server residual may have been
    // reset.
    if (status.code() == Code::kNonfinite) {
      ++skipped_;
      status = Status(Code::kNonfinite, nonfinite_text(verdict, bytes));
    }
  }
  in_flight_.store(false, std::memory_order_release);
}

std::string Optimizer::first_nonfinite_gradient() const {
  if (!comm_->context()->device()->caps().host_memory) return "";
  for (const ParamSpec& p : params_) {
    for (uint64_t i = 0; i < p.count; ++i) {
      if (!std::isfinite(p.grad[i]))
        return fmt::format("; here: gradient of \"{}\", element {} is {}", p.name, i, p.grad[i]);
    }
  }
  return "";
}

std::string Optimizer::nonfinite_text(const StepVerdict& verdict,
                                      std::span<const std::byte> bytes) const {
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
    const uint64_t stride = scale_message_bytes(layout_->instances());
    flagged(verdict.worker_messages, verdict.worker_message_count, stride, stride - 4);
  }
  std::string who;
  for (uint32_t r : ranks) who += fmt::format("{}{}", who.empty() ? "" : ", ", r);
  const bool averaged = ranks.empty();
  return fmt::format("optimizer step {}: NaN or Inf {}{}{}; nothing was updated", step_ + 1,
                     averaged ? "in the averaged gradient" : "met by rank ", who,
                     first_nonfinite_gradient());
}

Status Optimizer::set(std::string_view name, int32_t group, double value) {
  if (busy()) return error(Code::kBusy, "a step of this optimizer is in flight");
  const auto n = static_cast<int32_t>(groups_.size());
  if (group < -1 || group >= n)
    return invalid_argument("group is {}; allowed: -1 (all) to {}", group, n - 1);
  const bool is_lr = name == "lr";
  if (!is_lr && name != "weight_decay") {
    return invalid_argument("\"{}\" cannot be set; allowed: \"lr\", \"weight_decay\"", name);
  }
  const bool reset = is_lr && std::isnan(value);
  if (!reset && !(std::isfinite(value) && value >= 0)) {
    return invalid_argument("{} is {}; allowed: a finite number of at least 0{}", name, value,
                            is_lr ? ", or NaN for the schedule" : "");
  }
  for (int32_t g = group < 0 ? 0 : group; g < (group < 0 ? n : group + 1); ++g) {
    (is_lr ? lr_override_[static_cast<size_t>(g)] : groups_[static_cast<size_t>(g)].weight_decay) =
        value;
  }
  return ok_status();
}

Result<OptimInfo> Optimizer::info() {
  if (busy()) return error(Code::kBusy, "a step of this optimizer is in flight");
  OptimInfo info;
  info.stage = compressed_ ? 1 : 0;
  info.step = step_;
  info.state_step = step_ + (onebit() ? config_.sotto.step_offset : 0);
  info.lr = lr_of(0);
  info.grad_norm = grad_norm_;
  info.skipped_steps = skipped_;
  SOTTO_ASSIGN(const Prepared* p, prepared(next_variant()));
  const PeerTraffic& total = p->plan->plan().total;
  info.payload_bytes_next_step = total.payload_bytes_sent;
  info.header_bytes_next_step = total.header_bytes_sent + total.metadata_bytes_sent;
  const Memory& m = memory_;
  for (const DeviceArray* a :
       {&m.m, &m.v, &m.tensor_states, &m.valid, &m.vf, &m.den, &m.tensor_counts}) {
    info.state_bytes += a->bytes();
  }
  info.state_bytes += onebit_state_.bytes();
  for (const auto& [variant, plan] : prepared_) info.state_bytes += plan.plan->held_bytes();
  return info;
}

}  // namespace sotto
