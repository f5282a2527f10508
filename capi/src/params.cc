#include "capi/src/params.h"

#include <algorithm>
#include <functional>
#include <initializer_list>
#include <memory>
#include <string>
#include <utility>

#include "capi/src/struct_in.h"
#include "core/base/text.h"

namespace sotto::capi {
namespace {

// What the parameters of an optimizer have in common.
struct Registered {
  std::vector<MemoryRange> ranges;
  CommonDevice device;
};

Status check_like(const Buffer& b, const Buffer& param, std::initializer_list<Dtype> allowed,
                  std::string_view name) {
  if (std::find(allowed.begin(), allowed.end(), b.dtype) == allowed.end()) {
    std::string names;
    for (const Dtype d : allowed)
      names += fmt::format("{}{}", names.empty() ? "" : ", ", dtype_name(d));
    return unsupported("{} is {}; allowed: {}", name, dtype_name(b.dtype), names);
  }
  if (b.count != param.count) {
    return invalid_argument("{}.count is {} but its parameter has {}", name, b.count,
                            counted(param.count, "element"));
  }
  return ok_status();
}

// What has no meaning for an outer optimizer.
Status check_averaged(const sotto_param& p, const std::string& name) {
  const auto refuse = [&](std::string_view field) {
    return invalid_argument("{}.{} is given; an outer optimizer needs it empty", name, field);
  };
  if (p.grad.count != 0) return refuse("grad");
  if (p.mask.count != 0) return refuse("mask");
  if (p.group != 0) return invalid_argument("{}.group is {}; allowed: 0", name, p.group);
  return ok_status();
}

Result<ParamSpec> take_param(const sotto_param& p, uint64_t index, ParamUse use, Registered* all) {
  std::vector<MemoryRange>* const ranges = &all->ranges;
  const std::string name = fmt::format("params[{}]", index);
  if (p.models > 1)
    return unsupported("{}.models is {}; fused arrays are not built: it must be 0 or 1", name,
                       p.models);
  ParamSpec spec;
  spec.name = p.name == nullptr ? fmt::format("param{}", index) : p.name;
  spec.group = p.group;
  SOTTO_ASSIGN(const Buffer param, take_buffer(p.param, name + ".param"));
  SOTTO_TRY(check_like(param, param, {Dtype::kF32}, name + ".param"));
  SOTTO_TRY(all->device.add(param, name + ".param"));
  spec.count = param.count;
  spec.param = static_cast<float*>(param.data);
  ranges->push_back({param.data, param.bytes(), true, "params.param", index});
  if (use == ParamUse::kAveraged) {
    SOTTO_TRY(check_averaged(p, name));
  } else {
    if (p.grad.data == nullptr && p.grad.dtype == 0)
      return invalid_argument("{}.grad is missing: gradients lie in the caller's memory", name);
    SOTTO_ASSIGN(const Buffer grad, take_buffer(p.grad, name + ".grad"));
    SOTTO_TRY(check_like(grad, param, {Dtype::kF32, Dtype::kF16, Dtype::kBF16}, name + ".grad"));
    SOTTO_TRY(all->device.add(grad, name + ".grad"));
    spec.grad = grad.data;
    spec.grad_dtype = grad.dtype;
    ranges->push_back({grad.data, grad.bytes(), false, "params.grad", index});
  }
  if (p.model_copy.count != 0) {
    SOTTO_ASSIGN(const Buffer copy, take_buffer(p.model_copy, name + ".model_copy"));
    SOTTO_TRY(check_like(copy, param, {Dtype::kF16, Dtype::kBF16}, name + ".model_copy"));
    SOTTO_TRY(all->device.add(copy, name + ".model_copy"));
    spec.copy = copy.data;
    spec.copy_dtype = copy.dtype;
    ranges->push_back({copy.data, copy.bytes(), true, "params.model_copy", index});
  }
  if (p.mask.count != 0) {
    SOTTO_ASSIGN(const Buffer mask, take_buffer(p.mask, name + ".mask"));
    SOTTO_TRY(check_like(mask, param, {Dtype::kU8}, name + ".mask"));
    SOTTO_TRY(all->device.add(mask, name + ".mask"));
    spec.mask = static_cast<const uint8_t*>(mask.data);
    ranges->push_back({mask.data, mask.bytes(), false, "params.mask", index});
  }
  return spec;
}

Result<std::vector<ParamSpec>> take_params(const sotto_param* params, uint64_t n, ParamUse use,
                                           Registered* all) {
  if (n == 0 || n > kMaxParams)
    return invalid_argument("n is {}; allowed: 1 to {} parameters", n, kMaxParams);
  std::vector<ParamSpec> specs;
  for (uint64_t i = 0; i < n; ++i) {
    sotto_param p;
    SOTTO_TRY(take_element(params, i, sizeof(sotto_param), "params", p));
    SOTTO_ASSIGN(ParamSpec spec, take_param(p, i, use, all));
    specs.push_back(std::move(spec));
  }
  SOTTO_TRY(check_overlap(all->ranges));
  return specs;
}

// Memory that is written, in the order of addresses.
std::vector<MemoryRange> written_in_order(std::vector<MemoryRange> ranges) {
  std::erase_if(ranges, [](const MemoryRange& r) { return !r.written || r.bytes == 0; });
  std::sort(ranges.begin(), ranges.end(), [](const MemoryRange& a, const MemoryRange& b) {
    return std::less<const void*>()(a.data, b.data);
  });
  ranges.shrink_to_fit();
  return ranges;
}

}  // namespace

Result<Registration> take_registration(const sotto_comm& comm, const char* json,
                                       const sotto_param* params, uint64_t n, ParamUse use) {
  SOTTO_TRY(check_no_group(*comm.state));
  SOTTO_TRY(check_pointer(json, "json"));
  Registered all;
  Registration out;
  SOTTO_ASSIGN(out.specs, take_params(params, n, use, &all));
  SOTTO_ASSIGN(out.device, all.device.find(*comm.state->core->context()));
  out.written = written_in_order(std::move(all.ranges));
  return out;
}

Result<Places> take_places(const sotto_buffer* params, const sotto_buffer* model_copies, uint64_t n,
                           const std::vector<MemoryRange>& written) {
  std::vector<MemoryRange> ranges;
  const auto take = [&](const sotto_buffer* given,
                        const char* name) -> Result<std::vector<ParameterPlace>> {
    if (n == 0 || n > kMaxParams)
      return invalid_argument("n is {}; allowed: 1 to {} parameters", n, kMaxParams);
    SOTTO_TRY(check_pointer(given, name));
    std::vector<ParameterPlace> places(n);
    for (uint64_t i = 0; i < n; ++i) {
      if (given == model_copies && given[i].count == 0) continue;  // the parameter has none
      SOTTO_ASSIGN(const Buffer b, take_buffer(given[i], fmt::format("{}[{}]", name, i)));
      ranges.push_back({b.data, b.bytes(), true, name, i});
      places[i] = {b.data, b.count, b.dtype, b.device};
    }
    return places;
  };
  Places out;
  SOTTO_ASSIGN(out.params, take(params, "params"));
  if (model_copies != nullptr) {
    SOTTO_ASSIGN(out.copies, take(model_copies, "model_copies"));
  } else {
    for (const MemoryRange& r : written)
      if (r.name == "params.model_copy") ranges.push_back(r);
  }
  SOTTO_TRY(check_overlap(ranges));
  for (MemoryRange& r : ranges) r.name = r.name == "params" ? "params.param" : "params.model_copy";
  out.written = written_in_order(std::move(ranges));
  return out;
}

}  // namespace sotto::capi
