#include "core/optim/parameter_set.h"

#include <algorithm>
#include <cmath>
#include <unordered_set>

#include "core/base/hash.h"
#include "core/base/text.h"
#include "core/codec/tensor_runs.h"

namespace sotto {
namespace {

constexpr uint64_t kHashBytes = uint64_t{16} << 20;  // of device memory at a time

// "group:3", "group:3/weight": what imported arrays of a group are called.
bool looks_like_group(std::string_view name) {
  constexpr std::string_view kPrefix = "group:";
  return name.starts_with(kPrefix) && name.size() > kPrefix.size() && name[kPrefix.size()] >= '0' &&
         name[kPrefix.size()] <= '9';
}

Status check_place(const ParameterPlace& place, std::string_view what, size_t index,
                   const ParamSpec& p, Dtype dtype, const DeviceId& here) {
  if (place.count != 0 && place.device != here) {
    return invalid_argument("{}[{}], of parameter \"{}\", is on {}; the optimizer is on {}", what,
                            index, p.name, device_name(place.device), device_name(here));
  }
  if (place.count == p.count && place.dtype == dtype) return ok_status();
  return invalid_argument("{}[{}], of parameter \"{}\", has {} of {}; registered were {} of {}",
                          what, index, p.name, counted(place.count, "element"),
                          dtype_name(place.dtype), p.count, dtype_name(dtype));
}

}  // namespace

Status ParameterSet::check(const std::optional<Dtype>& grad_accum_dtype) {
  SOTTO_TRY(fetch_masks());
  std::unordered_set<std::string_view> names;
  if (specs_.empty()) return invalid_argument("no parameters were given");
  for (size_t i = 0; i < specs_.size(); ++i) {
    const ParamSpec& p = specs_[i];
    if (p.name.empty() || p.name.size() > 255) {
      return invalid_argument("parameter {} has a name of {} bytes; allowed: 1 to 255", i,
                              p.name.size());
    }
    if (!is_utf8(p.name))
      return invalid_argument("parameter {}: the name \"{}\" is not UTF-8", i, printable(p.name));
    if (looks_like_group(p.name)) {
      return invalid_argument(
          "parameter {}: the name \"{}\" begins like that of a parameter group (group:<i>); give "
          "it another one",
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
  return check_dtypes(grad_accum_dtype);
}

// What the host looks at must lie in its memory.
Status ParameterSet::fetch_masks() {
  Status fetched;
  if (access_.device()->caps().host_memory) return fetched;
  for (ParamSpec& p : specs_) {
    const uint8_t* mask = std::exchange(p.mask, nullptr);
    if (mask == nullptr || !fetched.ok()) continue;
    Result<std::vector<uint8_t>> values = access_.download<uint8_t>(mask, p.count);
    fetched = values.status();
    if (values.ok()) p.mask = masks_.emplace_back(values.take()).data();
  }
  return fetched;
}

Status ParameterSet::check_dtypes(const std::optional<Dtype>& grad_accum_dtype) const {
  const ParamSpec* copied = nullptr;
  for (const ParamSpec& p : specs_) {
    if (p.grad_dtype != gradients()) {
      return invalid_argument(
          "parameter \"{}\" has {} gradients, parameter \"{}\" {}; all gradients of an optimizer "
          "have to be of one type",
          p.name, dtype_name(p.grad_dtype), specs_[0].name, dtype_name(gradients()));
    }
    if (p.copy == nullptr) continue;
    if (copied != nullptr && p.copy_dtype != copied->copy_dtype) {
      return invalid_argument(
          "parameter \"{}\" has a model copy of {}, parameter \"{}\" one of {}; all model copies "
          "of an optimizer have to be of one type",
          p.name, dtype_name(p.copy_dtype), copied->name, dtype_name(copied->copy_dtype));
    }
    copied = &p;
  }
  if (grad_accum_dtype && *grad_accum_dtype != gradients()) {
    return invalid_argument(
        "data_types.grad_accum_dtype is {}, but the gradients that are registered are {}; change "
        "the key or the buffers",
        dtype_name(*grad_accum_dtype), dtype_name(gradients()));
  }
  return ok_status();
}

bool ParameterSet::has_masks() const {
  return std::any_of(begin(), end(), [](const ParamSpec& p) { return p.mask != nullptr; });
}

Status ParameterSet::set_gradients(std::span<const GradientPlace> grads) {
  if (grads.size() != size()) {
    return invalid_argument("n is {}; it has to be {}, one gradient for every parameter",
                            grads.size(), size());
  }
  const DeviceId& here = access_.device()->caps().id;
  for (size_t i = 0; i < grads.size(); ++i) {
    const ParamSpec& p = specs_[i];
    if (grads[i].count != 0 && grads[i].device != here) {
      return invalid_argument("grads[{}], of parameter \"{}\", is on {}; the optimizer is on {}", i,
                              p.name, device_name(grads[i].device), device_name(here));
    }
    if (grads[i].count == p.count && grads[i].dtype == p.grad_dtype) continue;
    return invalid_argument(
        "grads[{}], of parameter \"{}\", has {} of {}; registered were {} of {}", i, p.name,
        counted(grads[i].count, "element"), dtype_name(grads[i].dtype), p.count,
        dtype_name(p.grad_dtype));
  }
  for (size_t i = 0; i < grads.size(); ++i) specs_[i].grad = grads[i].data;
  return ok_status();
}

Status ParameterSet::set_parameters(std::span<const ParameterPlace> params,
                                    std::span<const ParameterPlace> copies) {
  if (params.size() != size()) {
    return invalid_argument("n is {}; it has to be {}, one place for every parameter",
                            params.size(), size());
  }
  const DeviceId& here = access_.device()->caps().id;
  for (size_t i = 0; i < size(); ++i) {
    const ParamSpec& p = specs_[i];
    SOTTO_TRY(check_place(params[i], "params", i, p, Dtype::kF32, here));
    if (copies.empty()) continue;
    if (p.copy != nullptr && p.count != 0) {
      SOTTO_TRY(check_place(copies[i], "model_copies", i, p, p.copy_dtype, here));
    } else if (copies[i].count != 0) {
      return invalid_argument("model_copies[{}], of parameter \"{}\", has {}; none was registered",
                              i, p.name, counted(copies[i].count, "element"));
    }
  }
  for (size_t i = 0; i < size(); ++i) {
    specs_[i].param = static_cast<float*>(params[i].data);
    if (!copies.empty() && specs_[i].copy != nullptr) specs_[i].copy = copies[i].data;
  }
  return ok_status();
}

Result<std::vector<uint8_t>> ParameterSet::frozen_flags(std::span<const uint8_t> flags) const {
  if (flags.size() != size()) {
    return invalid_argument("n is {}; it has to be {}, one flag for every parameter", flags.size(),
                            size());
  }
  for (size_t i = 0; i < flags.size(); ++i) {
    if (flags[i] > 1) {
      return invalid_argument("frozen[{}], of parameter \"{}\", is {}; allowed: 0 or 1", i,
                              specs_[i].name, flags[i]);
    }
  }
  if (std::find(flags.begin(), flags.end(), 1) == flags.end()) flags = {};
  return std::vector<uint8_t>(flags.begin(), flags.end());
}

void ParameterSet::set_frozen(std::vector<uint8_t> flags) {
  frozen_hash_ = flags.empty() ? 0 : hash64(flags.data(), flags.size());
  frozen_ = std::move(flags);
}

uint64_t ParameterSet::registration_hash() const {
  Hasher64 hasher;
  for (const ParamSpec& p : specs_) {
    hasher.update(p.name.data(), p.name.size() + 1);
    hasher.update(&p.count, sizeof p.count);
    hasher.update(&p.group, sizeof p.group);
    const uint64_t mask = p.mask == nullptr ? 0 : hash64(p.mask, p.count, 1);
    hasher.update(&mask, sizeof mask);
  }
  return hasher.digest();
}

Result<std::vector<uint64_t>> ParameterSet::value_hashes() const {
  const bool in_place = access_.device()->caps().host_memory;
  constexpr uint64_t kPart = kHashBytes / sizeof(float);
  std::vector<uint64_t> hashes;
  for (const ParamSpec& p : specs_) {
    if (in_place) {
      hashes.push_back(hash64(p.param, p.count * sizeof(float)));
      continue;
    }
    Hasher64 hasher;
    for (uint64_t at = 0; at < p.count; at += kPart) {
      SOTTO_ASSIGN(const std::vector<float> part,
                   access_.download<float>(p.param + at, std::min(kPart, p.count - at)));
      hasher.update(part.data(), part.size() * sizeof(float));
    }
    hashes.push_back(hasher.digest());
  }
  return hashes;
}

// The model's own parameter, as a step leaves it.
Status ParameterSet::write_copy(const ParamSpec& p, uint64_t at,
                                std::span<const float> values) const {
  if (p.copy == nullptr) return ok_status();
  std::vector<uint16_t> copy(values.size());
  std::transform(values.begin(), values.end(), copy.begin(),
                 p.copy_dtype == Dtype::kBF16 ? f32_to_bf16 : f32_to_f16);
  return access_.upload(static_cast<uint16_t*>(p.copy) + at, std::span<const uint16_t>(copy));
}

Status ParameterSet::write(uint32_t tensor, uint64_t at, std::span<const float> values) const {
  const ParamSpec& p = specs_[tensor];
  SOTTO_TRY(access_.upload(p.param + at, values));
  return write_copy(p, at, values);
}

Status ParameterSet::broadcast(Comm& comm, const CompressedLayout& layout) const {
  Call call;
  CollectiveRequest& request = call.request;
  request.kind = OpKind::kBroadcast;
  request.rank = comm.rank();
  request.size = comm.size();
  call.device = access_.device();
  for (const ParamSpec& p : specs_) {
    request.counts.push_back(p.count);
    request.dtypes.push_back(Dtype::kF32);
    request.in_place.push_back(p.count != 0 ? 1 : 0);
    call.in.push_back(p.param);
    call.out.push_back(p.param);
  }
  SOTTO_TRY(comm.run(std::move(call)));
  return for_each_run(layout, false, [&](const TensorRun& run) -> Status {
    const ParamSpec& p = specs_[run.tensor];
    if (p.copy == nullptr) return ok_status();
    SOTTO_ASSIGN(const std::vector<float> values,
                 access_.download<float>(p.param + run.at, run.count));
    return write_copy(p, run.at, values);
  });
}

std::string ParameterSet::first_nonfinite_gradient() const {
  if (!access_.device()->caps().host_memory) return "";
  for (const ParamSpec& p : specs_) {
    for (uint64_t i = 0; i < p.count; ++i) {
      const float g = float_at(p.grad_dtype, p.grad, i);
      if (!std::isfinite(g))
        return fmt::format("; here: gradient of \"{}\", element {} is {}", p.name, i, g);
    }
  }
  return "";
}

}  // namespace sotto
