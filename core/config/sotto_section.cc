// "sotto": the product's own section, and the hyper-parameters of parameter groups.
#include "core/base/text.h"
#include "core/base/transports.h"
#include "core/config/optimizer_types.h"
#include "core/config/sections.h"

namespace sotto {
namespace {

Status read_group(const Json& object, const std::string& path, OptimizerKind kind,
                  GroupOverride& group, Findings& findings) {
  const uint32_t kinds = kind == OptimizerKind::kNone ? ~0u : kind_bit(kind);
  SOTTO_ASSIGN(const ObjectReader reader,
               ObjectReader::open(object, ConfigSection::kGroup, kinds, path, findings));
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
  if (reader.has("non_freeze")) reader.get("non_freeze", group.non_freeze.emplace());
  std::vector<double> betas;
  reader.get("betas", betas);
  if (betas.size() == 2) {
    group.beta1 = betas[0];
    group.beta2 = betas[1];
  }
  return ok_status();
}

}  // namespace

std::string_view mode_name(Mode mode) { return mode == Mode::kStrict ? "strict" : "compat"; }
std::string_view zero_variance_policy_name(ZeroVariancePolicy policy) {
  switch (policy) {
    case ZeroVariancePolicy::kMask: return "mask";
    case ZeroVariancePolicy::kEps: return "eps";
    case ZeroVariancePolicy::kError: return "error";
  }
  return "?";
}

std::string_view checkpoint_name(CheckpointErrors checkpoint) {
  switch (checkpoint) {
    case CheckpointErrors::kExact: return "exact";
    case CheckpointErrors::kMean: return "mean";
    case CheckpointErrors::kReset: return "reset";
  }
  return "?";
}

std::string_view initial_parameters_name(InitialParameters policy) {
  switch (policy) {
    case InitialParameters::kBroadcast: return "broadcast";
    case InitialParameters::kCheck: return "check";
    case InitialParameters::kTrust: return "trust";
  }
  return "?";
}

namespace {

Status read_sizes(const ObjectReader& reader, SottoConfig& sotto, Findings& findings) {
  SOTTO_TRY(read_chunk_align(reader, sotto.chunk_align, findings));
  const std::string path = reader.path_of("bucket_elements");
  reader.get("bucket_elements", sotto.bucket_elements);
  if (sotto.bucket_elements % 512 != 0) {
    return findings.fail(
        path, fmt::format("found {}, allowed is a multiple of 512; {} would fit",
                          sotto.bucket_elements, (sotto.bucket_elements / 512 + 1) * 512));
  }
  if (reader.has("bucket_elements") && sotto.granularity != Granularity::kBucket) {
    findings.warn(path, "no effect: it acts with sotto.granularity \"bucket\" alone");
    findings.idle(path, "acts with sotto.granularity \"bucket\" alone");
  }
  return ok_status();
}

// sotto.hierarchy is that of a codec inside. path: the codec's.
Status use_hierarchy(const ObjectReader& reader, const Config& config, const std::string& path,
                     CodecSettings* codec, Findings& findings) {
  codec->hierarchy = config.sotto.hierarchy;
  if (!codec->row().sparse || codec->hierarchy == Hierarchy::kFlat) return ok_status();
  return findings.fail(
      reader.path_of("hierarchy"),
      fmt::format("found {} with {} of type {}, which has one level; allowed is flat",
                  hierarchy_name(codec->hierarchy), path, codec->row().name()));
}

// What compresses the gradients' average of the types that do not compress themselves.
Status read_gradient_codec(const ObjectReader& reader, Config& config, Findings& findings) {
  const Json* object = reader.find("gradient_codec");
  if (object == nullptr) return ok_status();
  const std::string path = reader.path_of("gradient_codec");
  const OptimizerKind kind = config.optimizer.kind;
  if (optimizer_is_one_bit(kind)) {
    return findings.fail(
        path, fmt::format("found with {}, which compresses by itself; leave it out, allowed is {}",
                          optimizer_kind_name(kind),
                          optimizer_names([](const OptimizerType& t) { return !t.one_bit; })));
  }
  SOTTO_ASSIGN(CodecSettings codec, read_codec(*object, path, findings));
  SOTTO_TRY(refuse_hierarchy(codec, path, findings));
  SOTTO_TRY(use_hierarchy(reader, config, path, &codec, findings));
  if (codec.compat) {
    return findings.fail(path + ".mode",
                         "found compat, which is the 1-bit optimizers' published arithmetic; "
                         "allowed here is strict");
  }
  config.sotto.gradient_codec = codec;
  return ok_status();
}

// Two levels have servers, one on each host, that encode the mean of a host.
Status read_hierarchy(const ObjectReader& reader, Config& config, Findings& findings) {
  Hierarchy& hierarchy = config.sotto.hierarchy;
  read_word(reader, "hierarchy", hierarchy);
  if (hierarchy == Hierarchy::kFlat) return ok_status();
  if (config.sotto.mode != Mode::kCompat || !optimizer_is_one_bit(config.optimizer.kind))
    return ok_status();
  return findings.fail(
      reader.path_of("hierarchy"),
      fmt::format("found {} with sotto.mode compat, which is the published arithmetic, in one "
                  "level; allowed is flat",
                  hierarchy_name(hierarchy)));
}

// For the types whose whole update is one pass over the elements.
Status read_state_dtype(const ObjectReader& reader, Config& config, Findings& findings) {
  SottoConfig& sotto = config.sotto;
  read_word(reader, "state_dtype", sotto.state_dtype);
  if (sotto.state_dtype == StateType::kF32) return ok_status();
  const OptimizerKind kind = config.optimizer.kind;
  const std::string path = reader.path_of("state_dtype");
  if (kind != OptimizerKind::kNone && !optimizer_type(kind).low_precision_state) {
    return findings.fail(
        path,
        fmt::format("found {} with {}, allowed is fp32; {} take fp32, bf16, fp8",
                    state_type_name(sotto.state_dtype), optimizer_kind_name(kind),
                    optimizer_names([](const OptimizerType& t) { return t.low_precision_state; },
                                    " and ")));
  }
  if (kind != OptimizerKind::kNone && !optimizer_type(kind).has_betas &&
      config.optimizer.params.sgd.momentum == 0) {
    const std::string why =
        fmt::format("{} without momentum has no state", optimizer_kind_name(kind));
    findings.warn(path, fmt::format("no effect: {}", why));
    findings.idle(path, why);
  }
  return ok_status();
}

// Mode compat has the layout, the masks and the granularities of the published arithmetic.
Status read_mode(const ObjectReader& reader, Config& config, Findings& findings) {
  SottoConfig& sotto = config.sotto;
  read_word(reader, "mode", sotto.mode);
  const OptimizerKind kind = config.optimizer.kind;
  if (sotto.mode != Mode::kCompat || !optimizer_is_one_bit(kind)) return ok_status();
  const auto refuse = [&](std::string_view key, std::string_view text) {
    return findings.fail(reader.path_of(key), fmt::format("in sotto.mode compat: {}", text));
  };
  if (sotto.granularity == Granularity::kBucket)
    return refuse("granularity", "found bucket, allowed is flat, tensor");
  const Granularity published = published_granularity(kind, config.half_gradients());
  if (sotto.granularity.value_or(published) != published) {
    findings.warn(
        reader.path_of("granularity"),
        fmt::format("{} is not what DeepSpeed's {} compresses as one with these gradients, "
                    "so results are not DeepSpeed's; {} is",
                    granularity_name(*sotto.granularity), optimizer_kind_name(kind),
                    granularity_name(published)));
  }
  if (reader.has("chunk_align"))
    return refuse("chunk_align", "it is lcm(number of ranks, 8), remove the key");
  if (!reader.has("zero_variance_policy")) sotto.zero_variance_policy = ZeroVariancePolicy::kEps;
  if (sotto.zero_variance_policy == ZeroVariancePolicy::kMask)
    return refuse("zero_variance_policy", "found mask, allowed is eps, error");
  return ok_status();
}

// Policies that depend on what else the file says.
void warn_of_idle_keys(const ObjectReader& reader, const Config& config, Findings& findings) {
  const OptimizerKind kind = config.optimizer.kind;
  const auto idle = [&](std::string_view key, std::string_view why) {
    if (!reader.has(key)) return;
    findings.warn(reader.path_of(key), fmt::format("no effect: {}", why));
    findings.idle(reader.path_of(key), why);
  };
  if (!config.fp16.enabled) {
    idle("max_consecutive_skips", "steps are skipped by loss scaling alone, and fp16 is off");
  }
  if (kind == OptimizerKind::kNone) return;
  if (!optimizer_is_one_bit(kind)) {
    const std::string why =
        config.sotto.gradient_codec
            ? std::string("of the 1-bit types; sotto.gradient_codec has keys of its own")
            : fmt::format("{} compresses nothing", optimizer_kind_name(kind));
    for (const std::string_view key : {"mode", "scale", "granularity", "chunk_align", "step_offset",
                                       "zero_variance_policy", "checkpoint"}) {
      const bool acts =
          (key == "mode" && config.scheduler.kind == SchedulerKind::kWarmupCosineLR) ||
          (key == "checkpoint" && (config.sotto.gradient_codec || config.sotto.outer));
      if (!acts) idle(key, why);
    }
  }
  if (!optimizer_type(kind).averages_trust_ratio) {
    idle("coeff_debias", fmt::format("{} has no average trust ratio", optimizer_kind_name(kind)));
  }
}

}  // namespace

Status read_chunk_align(const ObjectReader& reader, uint64_t& out, Findings& findings) {
  reader.get("chunk_align", out);
  if (out % 8 == 0) return ok_status();
  return findings.fail(
      reader.path_of("chunk_align"),
      fmt::format("found {}, allowed is a multiple of 8: chunks are whole bytes of bits", out));
}

Status read_sotto(const Json& object, Config& config, Findings& findings) {
  SOTTO_ASSIGN(const ObjectReader reader,
               ObjectReader::open(object, ConfigSection::kSotto, ~0u, "sotto", findings));
  SottoConfig& sotto = config.sotto;
  read_word(reader, "scale", sotto.scale);
  if (reader.has("granularity"))
    read_word(reader, "granularity", sotto.granularity.emplace(Granularity::kFlat));
  read_word(reader, "zero_variance_policy", sotto.zero_variance_policy);
  SOTTO_TRY(read_mode(reader, config, findings));
  if (const auto word = reader.word("transport")) sotto.transport = kTransportChoices[*word];
  SOTTO_TRY(read_sizes(reader, sotto, findings));
  uint64_t step_offset = sotto.step_offset;
  reader.get("step_offset", step_offset);
  sotto.step_offset = static_cast<uint32_t>(step_offset);
  reader.get("coeff_debias", sotto.coeff_debias);
  read_word(reader, "checkpoint", sotto.checkpoint);
  read_word(reader, "initial_parameters", sotto.initial_parameters);
  reader.get("timeout_ms", sotto.timeout_ms);
  reader.get("max_consecutive_skips", sotto.max_consecutive_skips);
  SOTTO_TRY(read_state_dtype(reader, config, findings));
  SOTTO_TRY(read_hierarchy(reader, config, findings));
  SOTTO_TRY(read_gradient_codec(reader, config, findings));
  if (const Json* outer = reader.find("outer")) {
    const std::string path = reader.path_of("outer");
    SOTTO_ASSIGN(sotto.outer, read_outer(*outer, path, findings));
    sotto.outer->hierarchy = sotto.hierarchy;
    sotto.outer->timeout_ms = sotto.timeout_ms;
    if (auto& codec = sotto.outer->codec)
      SOTTO_TRY(use_hierarchy(reader, config, path + ".codec", &*codec, findings));
  }
  if (const Json* overlap = reader.find("overlap")) {
    const std::string path = reader.path_of("overlap");
    if (sotto.outer) {
      return findings.fail(path,
                           "found together with sotto.outer, whose steps are local: no gradient is "
                           "sent; leave one of them out");
    }
    SOTTO_ASSIGN(sotto.overlap, read_step_overlap(*overlap, path, config, findings));
  }
  warn_of_idle_keys(reader, config, findings);
  const Json* groups = reader.find("param_groups");
  for (size_t i = 0; groups != nullptr && i < groups->size(); ++i) {
    const std::string path = fmt::format("sotto.param_groups[{}]", i);
    SOTTO_TRY(read_group((*groups)[i], path, config.optimizer.kind,
                         sotto.param_groups.emplace_back(), findings));
  }
  return ok_status();
}

void warn_of_refused_states(const SottoConfig& sotto, Findings& findings) {
  const bool keeps_errors = sotto.outer && sotto.outer->codec && sotto.outer->codec->residual;
  if (!keeps_errors || sotto.checkpoint != CheckpointErrors::kMean) return;
  constexpr std::string_view kPath = "sotto.checkpoint";
  findings.warn(kPath,
                fmt::format("mean{} does not hold the error feedback of sotto.outer.codec: on "
                            "several ranks exports as configured are refused; set exact or reset",
                            findings.noted(kPath) ? "" : ", the default,"));
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
  p.lamb.max_coeff = group.max_coeff.value_or(p.lamb.max_coeff);
  p.lamb.min_coeff = group.min_coeff.value_or(p.lamb.min_coeff);
  p.freeze.non_freeze = group.non_freeze.value_or(p.freeze.non_freeze);
  if (p.lamb.min_coeff > p.lamb.max_coeff) {
    return invalid_argument(
        "sotto.param_groups[{}]: min_coeff {} is above max_coeff {} for this group; min_coeff has "
        "to be the smaller one",
        index, p.lamb.min_coeff, p.lamb.max_coeff);
  }
  return p;
}

Result<std::vector<OptimizerParams>> Config::resolve_groups(uint64_t n_groups) const {
  if (sotto.param_groups.size() > n_groups) {
    return invalid_argument("sotto.param_groups describes {}, but the parameters have {} (0 to {})",
                            counted(sotto.param_groups.size(), "group"), counted(n_groups, "group"),
                            n_groups == 0 ? 0 : n_groups - 1);
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
