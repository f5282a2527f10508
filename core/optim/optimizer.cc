// Creation and settings. Steps are in optimizer_step.cc, snapshots in snapshot.cc, reports in
// report.cc.
#include "core/optim/optimizer.h"

#include <algorithm>
#include <cmath>
#include <unordered_set>

#include "core/base/log.h"
#include "core/base/text.h"

namespace sotto {
namespace {

// Groups are those of the file; a file without any leaves them to the program, which has at most
// one for every parameter. So memory is in proportion to what was given.
Result<uint64_t> count_groups(const Config& config, const std::vector<ParamSpec>& params) {
  const uint64_t named = config.sotto.param_groups.size();
  const uint64_t allowed = named != 0 ? named : std::max<uint64_t>(1, params.size());
  uint64_t n_groups = std::max<uint64_t>(1, named);
  for (size_t i = 0; i < params.size(); ++i) {
    const ParamSpec& p = params[i];
    if (p.group >= allowed) {
      return invalid_argument(
          "parameter {} (\"{}\"): group is {}; allowed: 0 to {}, {}", i, printable(p.name), p.group,
          allowed - 1,
          named != 0
              ? fmt::format("since sotto.param_groups has {} group(s)", named)
              : fmt::format("one group for each of {} parameter(s): the configuration has no "
                            "sotto.param_groups",
                            params.size()));
    }
    n_groups = std::max<uint64_t>(n_groups, uint64_t{p.group} + 1);
  }
  return n_groups;
}

// "group:3", "group:3/weight": what import_arrays takes for a group.
bool looks_like_group(std::string_view name) {
  constexpr std::string_view kPrefix = "group:";
  return name.starts_with(kPrefix) && name.size() > kPrefix.size() && name[kPrefix.size()] >= '0' &&
         name[kPrefix.size()] <= '9';
}

}  // namespace

Optimizer::Optimizer(std::shared_ptr<Comm> comm, std::shared_ptr<Device> device, Config config,
                     std::vector<OptimizerParams> groups, LrSchedule schedule,
                     std::vector<ParamSpec> params)
    : comm_(std::move(comm)),
      access_(comm_->context()->engine(),
              device != nullptr ? std::move(device) : comm_->context()->device()),
      config_(std::move(config)),
      groups_(std::move(groups)),
      lr_override_(groups_.size(), std::numeric_limits<double>::quiet_NaN()),
      beta1_override_(lr_override_),
      beta2_override_(lr_override_),
      schedule_(std::move(schedule)),
      params_(std::move(params)),
      zeroone_(groups_[0]),
      lr_sums_(groups_.size(), 0.0),
      anchor_decays_(groups_.size(), 1.0),
      loss_scaler_(config_.fp16) {}

Result<std::shared_ptr<Optimizer>> Optimizer::create(std::shared_ptr<Comm> comm,
                                                     std::string_view config_text,
                                                     std::vector<ParamSpec> params,
                                                     std::shared_ptr<Device> device,
                                                     const Status& refused) {
  // All ranks meet, also one that has found a fault of its own or has no memory.
  const Result<std::shared_ptr<Optimizer>> made =
      caught([&]() -> Result<std::shared_ptr<Optimizer>> {
        SOTTO_TRY(refused);
        return make(comm, config_text, std::move(params), std::move(device));
      });
  SOTTO_TRY(meet(*comm, made));
  if ((*made)->config_.sotto.initial_parameters == InitialParameters::kBroadcast)
    SOTTO_TRY((*made)->broadcast_parameters());
  return made;
}

Result<std::shared_ptr<Optimizer>> Optimizer::make(std::shared_ptr<Comm> comm,
                                                   std::string_view config_text,
                                                   std::vector<ParamSpec> params,
                                                   std::shared_ptr<Device> device) {
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
  SOTTO_ASSIGN(const std::optional<BatchNumbers> batch,
               config.resolve_batch(static_cast<uint64_t>(comm->size())));
  SOTTO_ASSIGN(const uint64_t n_groups, count_groups(config, params));
  SOTTO_ASSIGN(std::vector<OptimizerParams> groups, config.resolve_groups(n_groups));
  std::vector<double> base_lr;
  for (const OptimizerParams& g : groups) base_lr.push_back(g.lr);
  SOTTO_ASSIGN(LrSchedule schedule,
               LrSchedule::create(config.scheduler, std::move(base_lr), config.sotto.mode));
  std::shared_ptr<Optimizer> optimizer(new Optimizer(std::move(comm), std::move(device),
                                                     std::move(config), std::move(groups),
                                                     std::move(schedule), std::move(params)));
  if (batch) optimizer->accumulation_steps_ = batch->gas;
  SOTTO_TRY(optimizer->fetch_masks());
  SOTTO_TRY(optimizer->check_params());
  SOTTO_TRY(optimizer->allocate());
  SOTTO_TRY(optimizer->hash_values());
  return optimizer;
}

// What the host looks at must lie in its memory.
Status Optimizer::fetch_masks() {
  Status fetched;
  if (access_.device()->caps().host_memory) return fetched;
  for (ParamSpec& p : params_) {
    const uint8_t* mask = std::exchange(p.mask, nullptr);
    if (mask == nullptr || !fetched.ok()) continue;
    Result<std::vector<uint8_t>> values = access_.download<uint8_t>(mask, p.count);
    fetched = values.status();
    if (values.ok()) p.mask = masks_.emplace_back(values.take()).data();
  }
  return fetched;
}

Status Optimizer::check_params() const {
  std::unordered_set<std::string_view> names;
  if (params_.empty()) return invalid_argument("no parameters were given");
  for (size_t i = 0; i < params_.size(); ++i) {
    const ParamSpec& p = params_[i];
    if (p.name.empty() || p.name.size() > 255) {
      return invalid_argument("parameter {} has a name of {} bytes; allowed: 1 to 255", i,
                              p.name.size());
    }
    if (!is_utf8(p.name))
      return invalid_argument("parameter {}: the name \"{}\" is not UTF-8", i, printable(p.name));
    if (looks_like_group(p.name)) {
      return invalid_argument(
          "parameter {}: the name \"{}\" begins like that of a parameter group (group:<i>); give "
          "it "
          "another one",
          i, printable(p.name));
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
  return check_dtypes();
}

Status Optimizer::check_dtypes() const {
  const Dtype gradients = params_[0].grad_dtype;
  const ParamSpec* copied = nullptr;
  for (const ParamSpec& p : params_) {
    if (p.grad_dtype != gradients) {
      return invalid_argument(
          "parameter \"{}\" has {} gradients, parameter \"{}\" {}; all gradients of an optimizer "
          "have to be of one type",
          p.name, dtype_name(p.grad_dtype), params_[0].name, dtype_name(gradients));
    }
    if (p.copy == nullptr) continue;
    if (copied != nullptr && p.copy_dtype != copied->copy_dtype) {
      return invalid_argument(
          "parameter \"{}\" has a model copy of {}, parameter \"{}\" one of {}; all model copies "
          "of "
          "an optimizer have to be of one type",
          p.name, dtype_name(p.copy_dtype), copied->name, dtype_name(copied->copy_dtype));
    }
    copied = &p;
  }
  if (const auto& wanted = config_.grad_accum_dtype; wanted && *wanted != gradients) {
    return invalid_argument(
        "data_types.grad_accum_dtype is {}, but the gradients that are registered are {}; change "
        "the key or the buffers",
        dtype_name(*wanted), dtype_name(gradients));
  }
  return ok_status();
}

bool Optimizer::has_momentum() const {
  return kind() != OptimizerKind::kSgd || groups_[0].momentum != 0;
}

bool Optimizer::may_mask_zero_variance() const {
  return onebit() && !compat() && config_.sotto.zero_variance_policy == ZeroVariancePolicy::kMask;
}

Status Optimizer::allocate() {
  std::vector<LayoutTensor> tensors;
  for (const ParamSpec& p : params_) {
    tensors.push_back({p.count, p.group, !onebit() || !groups_[p.group].non_freeze});
    masked_ = masked_ || p.mask != nullptr;
  }
  const auto world = static_cast<uint32_t>(comm_->size());
  const bool half = config_.half_gradients() || params_[0].grad_dtype != Dtype::kF32;
  codec_ = config_.compression(world, half);
  const CodecSettings codec = codec_.value_or(CodecSettings{});
  // One rank averages nothing and needs no padding.
  std::optional<uint32_t> padding_group;
  if (compat() && world > 1) padding_group = static_cast<uint32_t>(groups_.size());
  layout_ = std::make_unique<CompressedLayout>(
      std::move(tensors), codec_ ? world : 1, codec.chunk_align, codec.granularity,
      codec.bucket_elements, codec.kind == CodecKind::kOnebit, padding_group);
  masked_ = masked_ || may_mask_zero_variance();
  const auto take = [&](DeviceArray& array, uint64_t bytes) -> Status {
    SOTTO_ASSIGN(array, DeviceArray::make(access_.device(), bytes));
    return ok_status();
  };
  const uint64_t flat = layout_->flat_elements() * 4;
  const auto take_state = [&](DeviceArray& array, DeviceArray& exponents) -> Status {
    SOTTO_TRY(take(array, state_element_bytes(*layout_, state_type())));
    if (state_type() != StateType::kFp8) return ok_status();
    return take(exponents, state_exponent_bytes(*layout_, state_type()));
  };
  if (has_momentum()) SOTTO_TRY(take_state(memory_.m, memory_.m_exponents));
  if (has_variance()) SOTTO_TRY(take_state(memory_.v, memory_.v_exponents));
  const std::vector<TensorState> states(params_.size() + layout_->padding().size());
  SOTTO_TRY(take(memory_.tensor_states, states.size() * sizeof(TensorState)));
  SOTTO_TRY(access_.upload(memory_.tensor_states.data(), std::span<const TensorState>(states)));
  if (masked_) SOTTO_TRY(take(memory_.valid, layout_->flat_elements() / 8));
  if (onebit_lamb()) {
    SOTTO_TRY(take(memory_.vf, flat));
    SOTTO_TRY(take(memory_.tensor_counts, params_.size() * 8));
  }
  if (zeroone()) {
    SOTTO_TRY(take(memory_.local_sum, flat));
    if (!compat()) SOTTO_TRY(take(memory_.anchor, flat));
  }
  if (onebit()) SOTTO_TRY(take(memory_.den, flat));
  if (codec_) {
    SOTTO_ASSIGN(compressed_state_, CompressedState::make(*comm_, access_, *layout_, *codec_));
  }
  SOTTO_TRY(write_valid_bits(false));
  const bool own_masks = std::any_of(params_.begin(), params_.end(),
                                     [](const ParamSpec& p) { return p.mask != nullptr; });
  if (!zeroone() || !own_masks) return ok_status();
  SOTTO_TRY(take(memory_.base_valid, memory_.valid.bytes()));
  SOTTO_ASSIGN(const std::vector<uint8_t> bits,
               access_.download<uint8_t>(memory_.valid.data(), memory_.valid.bytes()));
  return access_.upload(memory_.base_valid.data(), std::span<const uint8_t>(bits));
}

// Valid bits from the callers' masks and, in the compressed stage, from the frozen variance; and
// the counts that follow.
Status Optimizer::write_valid_bits(bool frozen_variance) {
  if (!masked_) return ok_status();
  std::vector<uint8_t> bits(layout_->flat_elements() / 8, 0);
  const auto set = [&bits](uint64_t f) {
    bits[f / 8] = static_cast<uint8_t>(bits[f / 8] | (0x80u >> (f % 8)));
  };
  std::vector<float> v;
  const auto write = [&](const TensorRun& run) -> Status {
    const bool padding = run.tensor >= params_.size();
    const bool by_variance = frozen_variance && !padding && layout_->compressed(run.tensor);
    const uint8_t* mask = padding ? nullptr : params_[run.tensor].mask;
    if (by_variance) {
      v.resize(run.count);
      SOTTO_TRY(read_state(access_, v_array(), run, v.data()));
    }
    return run.each_part([&](const Piece&, uint64_t flat, uint64_t at, uint64_t n) {
      for (uint64_t j = 0; j < n; ++j) {
        const bool valid =
            (mask == nullptr || mask[run.at + at + j] != 0) && !(by_variance && v[at + j] == 0.0f);
        if (valid) set(flat + j);
      }
      return ok_status();
    });
  };
  SOTTO_TRY(for_each_run(*layout_, true, write));
  if (!onebit() && codec_ && codec_->kind == CodecKind::kOnebit)
    SOTTO_TRY(compressed_state_.set_counts(bits));
  return access_.upload(memory_.valid.data(), std::span<const uint8_t>(bits));
}

Status Optimizer::set(std::string_view name, int32_t group, double value) {
  if (busy()) return error(Code::kBusy, "a step of this optimizer is in flight");
  const auto n = static_cast<int32_t>(groups_.size());
  if (group < -1 || group >= n)
    return invalid_argument("group is {}; allowed: -1 (all) to {}", group, n - 1);
  if (name == "loss_scale") {
    if (!loss_scaler_.enabled())
      return invalid_argument("loss_scale cannot be set: fp16.enabled is false");
    if (group != -1) return invalid_argument("group is {}; loss_scale is one for all: -1", group);
    if (!std::isfinite(value) || value <= 0)
      return invalid_argument("loss_scale is {}; allowed: a finite number above 0", value);
    SOTTO_TRY(check_nothing_accumulated());
    loss_scaler_.set(value);
    return ok_status();
  }
  if (name == "scheduler_iteration") return set_scheduler_iteration(group, value);
  const auto first = static_cast<uint64_t>(group < 0 ? 0 : group);
  const auto last = static_cast<uint64_t>(group < 0 ? n : group + 1);
  for (uint64_t g = first; g < last; ++g) SOTTO_TRY(check_group_number(name, g, value));
  for (uint64_t g = first; g < last; ++g) SOTTO_TRY(set_group_number(name, g, value));
  return ok_status();
}

Status Optimizer::set_gradients(std::span<const GradientPlace> grads) {
  if (busy()) return error(Code::kBusy, "a step of this optimizer is in flight");
  if (grads.size() != params_.size()) {
    return invalid_argument("n is {}; it has to be {}, one gradient for every parameter",
                            grads.size(), params_.size());
  }
  const DeviceId& here = device()->caps().id;
  for (size_t i = 0; i < grads.size(); ++i) {
    const ParamSpec& p = params_[i];
    if (grads[i].count != 0 && grads[i].device != here) {
      return invalid_argument("grads[{}], of parameter \"{}\", is on {}; the optimizer is on {}", i,
                              p.name, device_name(grads[i].device), device_name(here));
    }
    if (grads[i].count == p.count && grads[i].dtype == p.grad_dtype) continue;
    return invalid_argument(
        "grads[{}], of parameter \"{}\", has {} elements of {}; registered were {} of {}", i,
        p.name, grads[i].count, dtype_name(grads[i].dtype), p.count, dtype_name(p.grad_dtype));
  }
  for (size_t i = 0; i < grads.size(); ++i) params_[i].grad = grads[i].data;
  return ok_status();
}

Status Optimizer::set_user_state(std::vector<std::byte> bytes) {
  if (busy()) return error(Code::kBusy, "a step of this optimizer is in flight");
  user_state_ = std::move(bytes);
  return ok_status();
}

Result<OptimInfo> Optimizer::info() {
  if (busy()) return error(Code::kBusy, "a step of this optimizer is in flight");
  OptimInfo info;
  info.stage = compressed_ || zeroone_.counters().frozen ? 1 : 0;
  info.step = step_;
  info.state_step = step_ + (onebit() ? config_.sotto.step_offset : 0);
  info.lr = lr_of(0);
  info.grad_norm = grad_norm_;
  info.skipped_steps = skipped_;
  info.loss_scale = loss_scaler_.scale();
  info.micro_batches = micro_batches_;
  SOTTO_ASSIGN(const Prepared* p, prepared(next_variant()));
  const PeerTraffic& total = p->plan->plan().total;
  info.payload_bytes_next_step = total.payload_bytes_sent;
  info.header_bytes_next_step = total.header_bytes_sent + total.metadata_bytes_sent;
  for (const DeviceArray* array : memory_.all()) info.state_bytes += array->bytes();
  info.state_bytes += compressed_state_.bytes();
  for (const auto& [variant, plan] : prepared_) info.state_bytes += plan.plan->held_bytes();
  return info;
}

}  // namespace sotto
