// "optimizer" of a configuration file.
#include <algorithm>

#include "core/base/text.h"
#include "core/config/optimizer_types.h"
#include "core/config/sections.h"

namespace sotto {
namespace {

bool equal_without_case(std::string_view a, std::string_view b) {
  const auto lower = [](char c) {
    return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
  };
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [&](char x, char y) { return lower(x) == lower(y); });
}

Status read_type(const ObjectReader& reader, OptimizerKind& kind, Findings& findings) {
  std::string type;
  reader.get("type", type);
  std::vector<std::string_view> names;
  for (const OptimizerType& candidate : kOptimizerTypes) {
    names.push_back(candidate.name);
    if (equal_without_case(type, candidate.name)) kind = candidate.kind;
  }
  if (kind != OptimizerKind::kNone) return ok_status();
  if (!reader.has("type")) {
    return findings.fail(reader.path_of("type"),
                         fmt::format("missing; write one of {}", word_list(names)));
  }
  return findings.fail(
      reader.path_of("type"),
      fmt::format("unknown type \"{}\"; the nearest one is {}, known are {}{}", printable(type),
                  nearest_word(type, names), word_list(names), placeholder_hint(type)));
}

// Keys with advice of their own, before the general check of unknown keys.
Status refuse_max_grad_norm(const Json& params, const std::string& path, Findings& findings) {
  if (!params.contains("max_grad_norm")) return ok_status();
  return findings.fail(
      path + ".max_grad_norm",
      "not allowed inside optimizer.params; use the top-level key gradient_clipping instead");
}

void read_values(const ObjectReader& reader, OptimizerParams& p) {
  OptimizerParams::each(p, [&](const char* key, auto& value) { reader.get(key, value); });
  std::vector<double> betas = {p.beta1, p.beta2};
  reader.get("betas", betas);
  p.beta1 = betas[0];
  p.beta2 = betas[1];
}

Status check_values(const ObjectReader& reader, const OptimizerParams& p, Findings& findings) {
  bool amsgrad = false;
  reader.get("amsgrad", amsgrad);
  if (amsgrad) {
    return findings.fail(
        reader.path_of("amsgrad"),
        "found true, which no optimizer here has; set it to false or leave it out");
  }
  if (p.lamb.min_coeff > p.lamb.max_coeff) {
    return findings.fail(
        reader.path_of(reader.has("min_coeff") ? "min_coeff" : "max_coeff"),
        fmt::format("min_coeff {} is above max_coeff {}; min_coeff has to be the smaller one",
                    p.lamb.min_coeff, p.lamb.max_coeff));
  }
  if (p.factor.factor_min > p.factor.factor_max) {
    return findings.fail(
        reader.path_of(reader.has("factor_min") ? "factor_min" : "factor_max"),
        fmt::format("factor_min {} is above factor_max {}; factor_min has to be the smaller one",
                    p.factor.factor_min, p.factor.factor_max));
  }
  if (p.sgd.nesterov && (p.sgd.momentum == 0 || p.sgd.dampening != 0)) {
    return findings.fail(reader.path_of("nesterov"),
                         "needs a momentum above 0 and a dampening of 0");
  }
  return ok_status();
}

// What the 1-bit types accept and do not act on.
Status apply_one_bit_rules(const ObjectReader& reader, OptimizerConfig& optimizer,
                           Findings& findings) {
  OptimizerParams& p = optimizer.params;
  const std::string_view name = optimizer_kind_name(optimizer.kind);
  if (reader.has("bias_correction") && p.bias_correction) {
    findings.warn(reader.path_of("bias_correction"),
                  fmt::format("true has no effect: {} never corrects bias", name));
  }
  if (p.eps_inside_sqrt) {
    findings.warn(reader.path_of("eps_inside_sqrt"),
                  fmt::format("true has no effect: {} adds eps outside the square root", name));
  }
  p.bias_correction = false;
  p.eps_inside_sqrt = false;
  reader.get("cuda_aware", optimizer.cuda_aware);
  reader.get("comm_backend_name", optimizer.comm_backend_name);
  const std::string& backend = optimizer.comm_backend_name;
  const std::string path = reader.path_of("comm_backend_name");
  if (backend != "nccl" && backend != "mpi" && backend != "compressed") {
    return findings.fail(
        path, fmt::format("found \"{}\", allowed is one of nccl, mpi, compressed; "
                          "\"compressed\" leaves the choice of transport to sotto.transport",
                          printable(backend)));
  }
  if (backend == "mpi") {
    findings.warn(
        path,
        "no MPI library is used; messages go through the transport that sotto.transport names");
  }
  if (optimizer.cuda_aware) {
    findings.warn(reader.path_of("cuda_aware"), "true has no effect: gradients are in host memory");
  }
  return ok_status();
}

void apply_adam_rules(const ObjectReader& reader, OptimizerConfig& optimizer, Findings& findings) {
  if (optimizer.kind != OptimizerKind::kAdamW || optimizer.params.adam.w_mode) return;
  findings.warn(
      reader.path_of("adam_w_mode"),
      "false has no effect with type AdamW; use type Adam for decay that is added to the gradient");
  optimizer.params.adam.w_mode = true;
}

}  // namespace

Status read_optimizer(const Json& object, Config& config, Findings& findings) {
  SOTTO_ASSIGN(const ObjectReader reader,
               ObjectReader::open(object, ConfigSection::kOptimizer, ~0u, "optimizer", findings));
  OptimizerConfig& optimizer = config.optimizer;
  SOTTO_TRY(read_type(reader, optimizer.kind, findings));
  static const Json* const kEmpty = new Json(Json::object());  // never destroyed
  const Json* params = reader.find("params");
  if (params == nullptr) params = kEmpty;
  const std::string path = reader.path_of("params");
  SOTTO_TRY(refuse_max_grad_norm(*params, path, findings));
  SOTTO_ASSIGN(const ObjectReader values,
               ObjectReader::open(*params, ConfigSection::kOptimizerParams,
                                  kind_bit(optimizer.kind), path, findings));
  read_values(values, optimizer.params);
  SOTTO_TRY(check_values(values, optimizer.params, findings));
  apply_adam_rules(values, optimizer, findings);
  if (optimizer_is_one_bit(optimizer.kind)) return apply_one_bit_rules(values, optimizer, findings);
  return ok_status();
}

}  // namespace sotto
