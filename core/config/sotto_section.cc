// "sotto": the product's own section, and the hyper-parameters of parameter groups.
#include "core/config/sections.h"

namespace sotto {
namespace {

Status read_group(const Json& object, const std::string& path, OptimizerKind kind,
                  GroupOverride& group, Findings& findings) {
  const uint32_t kinds = kind == OptimizerKind::kNone ? ~0u : kind_bit(kind);
  SOTTO_ASSIGN(const ObjectReader reader,
               ObjectReader::open(object, Section::kGroup, kinds, path, findings));
  const auto get = [&](std::string_view key, std::optional<double>& out) {
    if (!reader.has(key)) return;
    out.emplace();
    reader.get(key, *out);
  };
  get("lr", group.lr);
  get("eps", group.eps);
  get("weight_decay", group.weight_decay);
  get("max_coeff", group.max_coeff);
  get("min_coeff", group.min_coeff);
  std::vector<double> betas;
  reader.get("betas", betas);
  if (betas.size() == 2) {
    group.beta1 = betas[0];
    group.beta2 = betas[1];
  }
  return ok_status();
}

template <class Enum>
void read_word(const ObjectReader& reader, std::string_view key, Enum& out) {
  // The words of the table are in the order of the enum, which starts at 1.
  if (const auto word = reader.word(key)) out = static_cast<Enum>(*word + 1);
}

}  // namespace

std::string_view mode_name(Mode mode) { return mode == Mode::kStrict ? "strict" : "compat"; }
std::string_view scale_name(CompressionScale scale) {
  return scale == CompressionScale::kL2 ? "l2" : "l1";
}
std::string_view granularity_name(Granularity granularity) {
  switch (granularity) {
    case Granularity::kFlat: return "flat";
    case Granularity::kTensor: return "tensor";
    case Granularity::kBucket: return "bucket";
  }
  return "?";
}
std::string_view zero_variance_policy_name(ZeroVariancePolicy policy) {
  switch (policy) {
    case ZeroVariancePolicy::kMask: return "mask";
    case ZeroVariancePolicy::kEps: return "eps";
    case ZeroVariancePolicy::kError: return "error";
  }
  return "?";
}

Status read_sotto(const Json& object, Config& config, Findings& findings) {
  SOTTO_ASSIGN(const ObjectReader reader,
               ObjectReader::open(object, Section::kSotto, ~0u, "sotto", findings));
  SottoConfig& sotto = config.sotto;
  read_word(reader, "mode", sotto.mode);
  read_word(reader, "scale", sotto.scale);
  read_word(reader, "granularity", sotto.granularity);
  read_word(reader, "zero_variance_policy", sotto.zero_variance_policy);
  constexpr std::string_view kTransports[] = {"auto", "inproc", "tcp"};
  if (const auto word = reader.word("transport")) sotto.transport = kTransports[*word];
  reader.get("chunk_align", sotto.chunk_align);
  if (sotto.chunk_align % 8 != 0) {
    return findings.fail(
        reader.path_of("chunk_align"),
        fmt::format("found {}, allowed is a multiple of 8: chunks are whole bytes of bits",
                    sotto.chunk_align));
  }
  uint64_t step_offset = sotto.step_offset;
  reader.get("step_offset", step_offset);
  sotto.step_offset = static_cast<uint32_t>(step_offset);
  reader.get("coeff_debias", sotto.coeff_debias);
  const Json* groups = reader.find("param_groups");
  for (size_t i = 0; groups != nullptr && i < groups->size(); ++i) {
    const std::string path = fmt::format("sotto.param_groups[{}]", i);
    SOTTO_TRY(read_group((*groups)[i], path, config.optimizer.kind,
                         sotto.param_groups.emplace_back(), findings));
  }
  return ok_status();
}

Result<OptimizerParams> resolve_group(const Config& config, uint64_t index) {
  OptimizerParams p = config.optimizer.params;
  if (index >= config.sotto.param_groups.size()) return p;
  const GroupOverride& group = config.sotto.param_groups[index];
  p.lr = group.lr.value_or(p.lr);
  p.beta1 = group.beta1.value_or(p.beta1);
  p.beta2 = group.beta2.value_or(p.beta2);
  p.eps = group.eps.value_or(p.eps);
  p.weight_decay = group.weight_decay.value_or(p.weight_decay);
  p.max_coeff = group.max_coeff.value_or(p.max_coeff);
  p.min_coeff = group.min_coeff.value_or(p.min_coeff);
  if (p.min_coeff > p.max_coeff) {
    return invalid_argument(
        "sotto.param_groups[{}]: min_coeff {} is above max_coeff {} for this group; min_coeff has "
        "to be the smaller one",
        index, p.min_coeff, p.max_coeff);
  }
  return p;
}

Result<std::vector<OptimizerParams>> Config::resolve_groups(uint64_t n_groups) const {
  if (sotto.param_groups.size() > n_groups) {
    return invalid_argument(
        "sotto.param_groups: {} entries, but the parameters have {} group(s) (0 to {})",
        sotto.param_groups.size(), n_groups, n_groups == 0 ? 0 : n_groups - 1);
  }
  std::vector<OptimizerParams> groups;
  groups.reserve(n_groups);
  for (uint64_t i = 0; i < n_groups; ++i) {
    SOTTO_ASSIGN(OptimizerParams group, resolve_group(*this, i));
    groups.push_back(group);
  }
  return groups;
}

}  // namespace sotto
