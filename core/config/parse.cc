// parse_config: text -> JSON -> Config.
#include <algorithm>

#include "core/base/json_text.h"
#include "core/base/text.h"
#include "core/config/document.h"
#include "core/config/filter.h"
#include "core/config/sections.h"

namespace sotto {
namespace {

Status refuse_true(const ObjectReader& reader, const char* key, const char* why,
                   Findings& findings) {
  bool value = false;
  reader.get(key, value);
  return value ? findings.fail(reader.path_of(key), why) : ok_status();
}

Status read_fp16(const Json& object, Config& config, Findings& findings) {
  SOTTO_ASSIGN(const ObjectReader reader,
               ObjectReader::open(object, ConfigSection::kFp16, ~0u, "fp16", findings));
  Fp16Config& fp16 = config.fp16;
  reader.get("enabled", fp16.enabled);
  reader.get("auto_cast", fp16.auto_cast);
  reader.get("loss_scale", fp16.loss_scale);
  reader.get("initial_scale_power", fp16.initial_scale_power);
  reader.get("loss_scale_window", fp16.loss_scale_window);
  reader.get("hysteresis", fp16.hysteresis);
  reader.get("consecutive_hysteresis", fp16.consecutive_hysteresis);
  reader.get("min_loss_scale", fp16.min_loss_scale);
  if (fp16.loss_scale > 0 && fp16.loss_scale < Fp16Config::kSmallestScale) {
    return findings.fail(reader.path_of("loss_scale"),
                         fmt::format("found {}, allowed is 0 or {} to {}", fp16.loss_scale,
                                     Fp16Config::kSmallestScale, Fp16Config::kLargestScale));
  }
  for (const char* key :
       {"loss_scale", "initial_scale_power", "loss_scale_window", "min_loss_scale"}) {
    if (!fp16.enabled) {
      findings.idle(reader.path_of(key), "loss scaling, which acts together with fp16.enabled");
    } else if (fp16.loss_scale > 0 && std::string_view(key) != "loss_scale") {
      findings.idle(reader.path_of(key), "the loss scale is static: fp16.loss_scale is not 0");
    }
  }
  return refuse_true(reader, "fp16_master_weights_and_grads",
                     "found true, which needs ZeRO stage 2; set it to false: masters are fp32 here",
                     findings);
}

Status read_bf16_memory(const ObjectReader& reader, Findings& findings) {
  bool checks = false;
  reader.get("check_grad_overflow", checks);
  if (checks) {
    findings.warn(reader.path_of("check_grad_overflow"),
                  "NaN or Inf in a gradient is an error of the step, which DeepSpeed skips");
  }
  SOTTO_TRY(refuse_true(reader, "bf16_master_weights_and_grads",
                        "found true, allowed is false: masters are fp32 here", findings));
  return refuse_true(reader, "bf16_optimizer_states",
                     "found true, allowed is false; sotto.state_dtype has smaller states",
                     findings);
}

Status read_bf16(const ObjectReader& top, Config& config, Findings& findings) {
  if (top.has("bf16") && top.has("bfloat16")) {
    return findings.fail("bfloat16",
                         "the old name of bf16, which is there as well; leave bfloat16 out");
  }
  const std::string name = top.has("bfloat16") ? "bfloat16" : "bf16";
  const Json* object = top.find(name);
  if (object == nullptr) return ok_status();
  SOTTO_ASSIGN(const ObjectReader reader,
               ObjectReader::open(*object, ConfigSection::kBf16, ~0u, name, findings));
  reader.get("enabled", config.bf16_enabled);
  if (config.bf16_enabled && config.fp16.enabled) {
    return findings.fail(name + ".enabled",
                         "true together with fp16.enabled; switch one of them off");
  }
  return read_bf16_memory(reader, findings);
}

Status read_amp(const Json& object, Findings& findings) {
  SOTTO_ASSIGN(const ObjectReader reader,
               ObjectReader::open(object, ConfigSection::kAmp, ~0u, "amp", findings));
  return refuse_true(reader, "enabled",
                     "found true; apex AMP is not supported, leave the section out", findings);
}

Status read_data_types(const Json& object, Config& config, Findings& findings) {
  SOTTO_ASSIGN(const ObjectReader reader,
               ObjectReader::open(object, ConfigSection::kDataTypes, ~0u, "data_types", findings));
  config.grad_accum_dtype = dtype_of_word(reader.word("grad_accum_dtype"));
  return ok_status();
}

// Who asks for offloading expects memory to be saved.
void warn_of_offload(const ObjectReader& zero, Findings& findings) {
  for (const char* key : {"offload_optimizer", "offload_param", "cpu_offload", "cpu_offload_params",
                          "cpu_offload_param"}) {
    const Json* value = zero.find(key);
    if (value == nullptr || !is_active(*value)) continue;
    if (value->is_object() && value->value("device", Json("none")) == "none") continue;
    findings.warn(zero.path_of(key),
                  "no effect at ZeRO stage 0: the optimizer state lies where the gradients lie");
  }
}

Status read_zero(const Json& value, Config& config, Findings& findings) {
  if (value.is_boolean()) {
    config.zero_stage = value.get<bool>() ? 1 : 0;
    findings.warn("zero_optimization", fmt::format("{} is the old form of {{\"stage\": {}}}",
                                                   dump_text(value), config.zero_stage));
    return ok_status();
  }
  SOTTO_ASSIGN(const ObjectReader reader,
               ObjectReader::open(value, ConfigSection::kZero, ~0u, "zero_optimization", findings));
  uint64_t stage = 0;
  reader.get("stage", stage);
  config.zero_stage = static_cast<uint32_t>(stage);
  if (stage == 0) warn_of_offload(reader, findings);
  return ok_status();
}

Status read_sections(const ObjectReader& top, Config& config, Findings& findings) {
  if (const Json* o = top.find("optimizer")) SOTTO_TRY(read_optimizer(*o, config, findings));
  if (const Json* o = top.find("scheduler")) SOTTO_TRY(read_scheduler(*o, config, findings));
  if (const Json* o = top.find("fp16")) SOTTO_TRY(read_fp16(*o, config, findings));
  SOTTO_TRY(read_bf16(top, config, findings));
  if (const Json* o = top.find("amp")) SOTTO_TRY(read_amp(*o, findings));
  if (const Json* o = top.find("data_types")) SOTTO_TRY(read_data_types(*o, config, findings));
  if (const Json* o = top.find("zero_optimization")) SOTTO_TRY(read_zero(*o, config, findings));
  if (const Json* o = top.find("sotto")) SOTTO_TRY(read_sotto(*o, config, findings));
  return ok_status();
}

// What only the whole file shows.
Status check_together(const ObjectReader& top, const Config& config, Findings& findings) {
  const OptimizerKind kind = config.optimizer.kind;
  if (optimizer_is_one_bit(kind) && config.zero_stage > 0) {
    const Json* zero = top.find("zero_optimization");
    return findings.fail(zero->is_object() ? "zero_optimization.stage" : "zero_optimization",
                         fmt::format("stage {} cannot be combined with {}, which keeps its whole "
                                     "state on every rank; set stage 0",
                                     config.zero_stage, optimizer_kind_name(kind)));
  }
  if (optimizer_is_one_bit(kind) && config.sparse_gradients) {
    return findings.fail(
        "sparse_gradients",
        fmt::format("true cannot be combined with {}; set it to false", optimizer_kind_name(kind)));
  }
  if (config.sotto.gradient_codec && config.communication_data_type) {
    return findings.fail("communication_data_type",
                         "sotto.gradient_codec says what gradients are on the wire; leave one of "
                         "them out");
  }
  if (config.sotto.outer) SOTTO_TRY(check_outer_in_file(config, findings));
  for (size_t i = 0; i < config.sotto.param_groups.size(); ++i) {
    const Result<OptimizerParams> group = resolve_group(config, i);
    if (group.ok()) continue;
    findings.error_path = fmt::format("sotto.param_groups[{}]", i);
    return group.status();
  }
  return ok_status();
}

void warn_together(const Config& config, Findings& findings) {
  if (config.sotto.outer) warn_outer_in_file(config, findings);
  for (const char* key : {"prescale_gradients", "gradient_predivide_factor"}) {
    if (!config.sotto.gradient_codec || !findings.noted(key)) continue;
    const std::string why = "sotto.gradient_codec averages in fp32, where nothing overflows";
    findings.warn(key, fmt::format("no effect: {}", why));
    findings.idle(key, why);
  }
  if (config.prescale_gradients && config.gradient_predivide_factor != 1 &&
      !config.sotto.gradient_codec) {
    const char* why = "prescale_gradients divides by the number of ranks instead";
    findings.warn("gradient_predivide_factor", fmt::format("no effect: {}", why));
    findings.idle("gradient_predivide_factor", why);
  }
  if (config.scheduler.kind == SchedulerKind::kNone ||
      config.scheduler.kind == SchedulerKind::kWarmupCosineLR)
    return;
  const std::vector<GroupOverride>& groups = config.sotto.param_groups;
  const auto has_lr = [](const GroupOverride& group) { return group.lr.has_value(); };
  const auto first = std::find_if(groups.begin(), groups.end(), has_lr);
  if (first == groups.end()) return;
  const auto others = std::count_if(first + 1, groups.end(), has_lr);
  const bool has_lists = config.scheduler.kind != SchedulerKind::kOneCycle;
  findings.warn(
      fmt::format("sotto.param_groups[{}].lr", first - groups.begin()),
      fmt::format("{}no effect: scheduler {} sets {}",
                  others == 0 ? "" : fmt::format("here and in {} ", counted(others, "other group")),
                  scheduler_kind_name(config.scheduler.kind),
                  has_lists ? "the rate of every group; give it a list instead"
                            : "one rate for all groups"));
}

Status read_config(const Json& json, Config& config, Findings& findings) {
  SOTTO_ASSIGN(const ObjectReader top,
               ObjectReader::open(json, ConfigSection::kTop, ~0u, "", findings));
  top.get("train_batch_size", config.batch.train_batch_size);
  top.get("train_micro_batch_size_per_gpu", config.batch.train_micro_batch_size_per_gpu);
  top.get("gradient_accumulation_steps", config.batch.gradient_accumulation_steps);
  top.get("gradient_clipping", config.gradient_clipping);
  config.communication_data_type = dtype_of_word(top.word("communication_data_type"));
  top.get("prescale_gradients", config.prescale_gradients);
  top.get("gradient_predivide_factor", config.gradient_predivide_factor);
  top.get("sparse_gradients", config.sparse_gradients);
  SOTTO_TRY(read_sections(top, config, findings));
  SOTTO_TRY(check_together(top, config, findings));
  warn_together(config, findings);
  return ok_status();
}

Result<Config> parse_text(std::string_view text) {
  SOTTO_ASSIGN(const std::string plain, blank_comments(text));
  SOTTO_ASSIGN(const Json json, parse_document(plain));
  Findings findings;
  SOTTO_ASSIGN(Config config, read_file(json, plain, findings));
  warn_of_refused_states(config.sotto, findings);
  config.warnings = std::move(findings.warnings);
  config.keys = std::move(findings.keys);
  return config;
}

}  // namespace

std::optional<Dtype> dtype_of_word(std::optional<uint32_t> word) {
  constexpr Dtype kTypes[] = {Dtype::kF32, Dtype::kF16, Dtype::kBF16};
  if (!word) return std::nullopt;
  return kTypes[*word];
}

Result<Config> read_file(const Json& json, std::string_view text, Findings& findings) {
  Config config;
  const Status status = read_config(json, config, findings);
  if (!status.ok())
    return status.with_prefix(place_of(position_of_path(text, findings.error_path, 0)));
  return config;
}

Result<Config> parse_config(std::string_view text) { return from_source(text, parse_text); }

}  // namespace sotto
