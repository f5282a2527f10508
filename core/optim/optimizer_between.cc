// What callers change between steps: numbers of groups, where parameters lie, which of them stand
// still.
#include <algorithm>
#include <cmath>

#include "core/base/hash.h"
#include "core/optim/optimizer.h"

namespace sotto {
namespace {

bool is_beta(std::string_view name) { return name == "beta1" || name == "beta2"; }

std::string settable(OptimizerKind kind) {
  std::string names = "\"lr\", \"weight_decay\"";
  names += kind == OptimizerKind::kSgd ? ", \"momentum\"" : ", \"beta1\", \"beta2\", \"eps\"";
  if (kind == OptimizerKind::kLamb || kind == OptimizerKind::kOneBitLamb)
    names += ", \"max_coeff\", \"min_coeff\"";
  return names + ", \"scheduler_iteration\", \"loss_scale\"";
}

bool is_settable(OptimizerKind kind, std::string_view name) {
  if (name == "loss_scale" || name == "scheduler_iteration") return false;  // not a group's
  return settable(kind).find(fmt::format("\"{}\"", name)) != std::string::npos;
}

Status check_place(const ParameterPlace& place, std::string_view what, size_t index,
                   const ParamSpec& p, Dtype dtype, const DeviceId& here) {
  if (place.count != 0 && place.device != here) {
    return invalid_argument("{}[{}], of parameter \"{}\", is on {}; the optimizer is on {}", what,
                            index, p.name, device_name(place.device), device_name(here));
  }
  if (place.count == p.count && place.dtype == dtype) return ok_status();
  return invalid_argument(
      "{}[{}], of parameter \"{}\", has {} elements of {}; registered were {} of {}", what, index,
      p.name, place.count, dtype_name(place.dtype), p.count, dtype_name(dtype));
}

}  // namespace

Status Optimizer::check_group_number(std::string_view name, uint64_t group, double value) const {
  if (!is_settable(kind(), name))
    return invalid_argument("\"{}\" cannot be set; allowed: {}", name, settable(kind()));
  const bool resets = name == "lr" || is_beta(name);
  if (resets && std::isnan(value)) return ok_status();
  if (!std::isfinite(value) || value < 0) {
    return invalid_argument("{} is {}; allowed: a finite number of at least 0{}", name, value,
                            resets ? ", or NaN for the schedule" : "");
  }
  if (is_beta(name) && value >= 1)
    return invalid_argument("{} is {}; allowed: from 0 to below 1", name, value);
  const OptimizerParams& p = groups_[group];
  if (name == "eps" && value != p.eps && onebit() && stage_started_ && !p.non_freeze) {
    return invalid_state(
        "eps of group {} cannot change from {} to {}: the variance is frozen, and eps is part of "
        "what was frozen",
        group, p.eps, value);
  }
  if (name == "momentum" && (value == 0) == has_momentum()) {
    return invalid_argument(
        "momentum of group {} is {}; an optimizer that was created {} momentum keeps {}", group,
        value, has_momentum() ? "with" : "without", has_momentum() ? "one above 0" : "0");
  }
  if ((name == "max_coeff" && value < p.min_coeff) || (name == "min_coeff" && value > p.max_coeff))
    return invalid_argument("{} of group {} is {}; min_coeff is {}, max_coeff {}", name, group,
                            value, p.min_coeff, p.max_coeff);
  return ok_status();
}

Status Optimizer::set_group_number(std::string_view name, uint64_t group, double value) {
  OptimizerParams& p = groups_[group];
  if (name == "lr") lr_override_[group] = value;
  if (name == "beta1") beta1_override_[group] = value;
  if (name == "beta2") beta2_override_[group] = value;
  if (name == "weight_decay") p.weight_decay = value;
  if (name == "eps") p.eps = value;
  if (name == "momentum") p.momentum = value;
  if (name == "max_coeff") p.max_coeff = value;
  if (name == "min_coeff") p.min_coeff = value;
  return ok_status();
}

Status Optimizer::set_scheduler_iteration(int32_t group, double value) {
  if (config_.scheduler.kind == SchedulerKind::kNone)
    return invalid_argument("scheduler_iteration cannot be set: there is no scheduler");
  if (group != -1)
    return invalid_argument("group is {}; scheduler_iteration is one for all: -1", group);
  constexpr double kMost = 9007199254740992.0;  // from here on doubles leave whole numbers out
  if (!(value >= -1 && value < kMost) || value != std::floor(value)) {
    return invalid_argument("scheduler_iteration is {}; allowed: -1 and whole numbers from 0",
                            value);
  }
  return schedule_.restore(static_cast<int64_t>(value));
}

Status Optimizer::set_parameters(std::span<const ParameterPlace> params,
                                 std::span<const ParameterPlace> copies) {
  if (busy()) return error(Code::kBusy, "a step of this optimizer is in flight");
  if (params.size() != params_.size()) {
    return invalid_argument("n is {}; it has to be {}, one place for every parameter",
                            params.size(), params_.size());
  }
  const DeviceId& here = device()->caps().id;
  for (size_t i = 0; i < params_.size(); ++i) {
    const ParamSpec& p = params_[i];
    SOTTO_TRY(check_place(params[i], "params", i, p, Dtype::kF32, here));
    if (copies.empty()) continue;
    if (p.copy != nullptr && p.count != 0) {
      SOTTO_TRY(check_place(copies[i], "model_copies", i, p, p.copy_dtype, here));
    } else if (copies[i].count != 0) {
      return invalid_argument(
          "model_copies[{}], of parameter \"{}\", has {} elements; none was registered", i, p.name,
          copies[i].count);
    }
  }
  for (size_t i = 0; i < params_.size(); ++i) {
    params_[i].param = static_cast<float*>(params[i].data);
    if (!copies.empty() && params_[i].copy != nullptr) params_[i].copy = copies[i].data;
  }
  return ok_status();
}

// Gives the momentum that was put aside back and puts aside, and sets to 0, that of the parameters
// with a flag, or to what a state has been exchanging there. All on the host: it happens when
// parameters are frozen, not in steps.
Status Optimizer::set_momentum_aside(std::span<const uint8_t> frozen, std::vector<float>* aside,
                                     std::span<const float> exchanged) const {
  SOTTO_ASSIGN(std::vector<float> flat,
               access_.download<float>(memory_.m.data(), layout_->flat_elements()));
  uint64_t at = 0;
  for (uint32_t t = 0; t < frozen_.size(); ++t) {
    if (frozen_[t] == 0) continue;
    for (const Piece& p : layout_->tensor_pieces(t)) {
      std::copy_n(aside->begin() + static_cast<ptrdiff_t>(at + p.offset), p.count,
                  flat.begin() + static_cast<ptrdiff_t>(p.flat));
    }
    at += params_[t].count;
  }
  aside->clear();
  uint64_t total = 0;
  for (size_t t = 0; t < frozen.size(); ++t) total += frozen[t] != 0 ? params_[t].count : 0;
  if (exchanged.size() != total) exchanged = {};
  for (uint32_t t = 0; t < frozen.size(); ++t) {
    if (frozen[t] == 0) continue;
    const size_t first = aside->size();
    aside->resize(first + params_[t].count);
    for (const Piece& p : layout_->tensor_pieces(t)) {
      const auto from = flat.begin() + static_cast<ptrdiff_t>(p.flat);
      std::copy_n(from, p.count, aside->begin() + static_cast<ptrdiff_t>(first + p.offset));
      std::fill_n(from, p.count, 0.0f);
      if (!exchanged.empty()) std::copy_n(exchanged.begin() + first + p.offset, p.count, from);
    }
  }
  return access_.upload(memory_.m.data(), std::span<const float>(flat));
}

Status Optimizer::set_frozen(std::span<const uint8_t> frozen) {
  if (busy()) return error(Code::kBusy, "a step of this optimizer is in flight");
  if (frozen.size() != params_.size()) {
    return invalid_argument("n is {}; it has to be {}, one flag for every parameter", frozen.size(),
                            params_.size());
  }
  for (size_t i = 0; i < frozen.size(); ++i) {
    if (frozen[i] > 1) {
      return invalid_argument("frozen[{}], of parameter \"{}\", is {}; allowed: 0 or 1", i,
                              params_[i].name, frozen[i]);
    }
  }
  std::vector<uint8_t> flags(frozen.begin(), frozen.end());
  if (std::find(flags.begin(), flags.end(), 1) == flags.end()) flags.clear();
  if (flags == frozen_) return ok_status();
  // What ranks have summed up since the last synchronisation is that of all parameters.
  SOTTO_TRY(synchronise());
  if (onebit()) {
    if (momentum_bits_) SOTTO_TRY(momentum_to_floats());
    momentum_bits_ = false;
    SOTTO_TRY(set_momentum_aside(flags, &aside_m_));
  }
  frozen_hash_ = flags.empty() ? 0 : hash64(flags.data(), flags.size());
  frozen_ = std::move(flags);
  prepared_.clear();
  return ok_status();
}

}  // namespace sotto
