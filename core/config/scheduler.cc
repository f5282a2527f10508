// "scheduler" of a configuration file.
#include <algorithm>

#include "core/base/text.h"
#include "core/config/optimizer_types.h"
#include "core/config/schedule.h"
#include "core/config/sections.h"

namespace sotto {
namespace {

constexpr SchedulerKind kKinds[] = {SchedulerKind::kWarmupLR, SchedulerKind::kWarmupDecayLR,
                                    SchedulerKind::kWarmupCosineLR, SchedulerKind::kOneCycle,
                                    SchedulerKind::kLRRangeTest};

Status read_type(const ObjectReader& reader, SchedulerKind& kind, Findings& findings) {
  std::string type;
  reader.get("type", type);
  std::vector<std::string_view> names;
  for (const SchedulerKind candidate : kKinds) {
    names.push_back(scheduler_kind_name(candidate));
    if (type == names.back()) kind = candidate;
  }
  if (kind != SchedulerKind::kNone) return ok_status();
  if (!reader.has("type")) {
    return findings.fail(reader.path_of("type"),
                         fmt::format("missing; write one of {}", word_list(names)));
  }
  return findings.fail(
      reader.path_of("type"),
      fmt::format("unknown type \"{}\"; the nearest one is {}, known are {} (case matters){}",
                  printable(type), nearest_word(type, names), word_list(names),
                  placeholder_hint(type)));
}

Status require(const ObjectReader& reader, std::string_view key, SchedulerKind kind,
               Findings& findings) {
  if (reader.has(key)) return ok_status();
  return findings.fail(reader.path_of(key),
                       fmt::format("missing; scheduler {} needs it", scheduler_kind_name(kind)));
}

Status read_warmup(const ObjectReader& reader, SchedulerKind kind, WarmupConfig& s,
                   Findings& findings) {
  reader.get("warmup_min_lr", s.min_lr);
  // As in DeepSpeed, one type goes up to the optimizer's own rate, the other to a fixed one.
  if (kind == SchedulerKind::kWarmupDecayLR) s.max_lr = {1e-3};
  reader.get("warmup_max_lr", s.max_lr);
  if (s.min_lr.size() > 1 && s.max_lr.size() > 1 && s.min_lr.size() != s.max_lr.size()) {
    return findings.fail(
        reader.path_of("warmup_max_lr"),
        fmt::format(
            "a list of {}, but warmup_min_lr has {}; both need one value per parameter group",
            s.max_lr.size(), s.min_lr.size()));
  }
  reader.get("warmup_num_steps", s.num_steps);
  if (s.num_steps < 2) {
    findings.warn(reader.path_of("warmup_num_steps"),
                  fmt::format("{} is raised to 2", s.num_steps));
    s.num_steps = 2;
  }
  std::string type = "log";
  reader.get("warmup_type", type);
  if (type != "log" && type != "linear") {
    findings.warn(reader.path_of("warmup_type"),
                  fmt::format("unknown type \"{}\", \"log\" is used; known are log and linear",
                              printable(type)));
  }
  s.type = type == "linear" ? WarmupType::kLinear : WarmupType::kLog;
  reader.get("warmup_min_ratio", s.min_ratio);
  reader.get("cos_min_ratio", s.cos_min_ratio);
  if (kind == SchedulerKind::kWarmupLR) return ok_status();
  SOTTO_TRY(require(reader, "total_num_steps", kind, findings));
  reader.get("total_num_steps", s.total_num_steps);
  if (s.total_num_steps <= s.num_steps) {
    findings.warn(reader.path_of("total_num_steps"),
                  fmt::format("{} is not above warmup_num_steps {}; the rate falls to its end "
                              "right behind the warm-up",
                              s.total_num_steps, s.num_steps));
  }
  return ok_status();
}

// What OneCycle does to the betas.
void warn_of_momentum(const ObjectReader& reader, const OneCycleConfig& s, OptimizerKind kind,
                      Findings& findings) {
  if (!s.momentum) return;
  const std::string path = reader.path_of("cycle_momentum");
  if (const OptimizerType& type = optimizer_type(kind); !type.has_betas) {
    return findings.warn(
        path, fmt::format("true (the default) has no effect: {} has no betas", type.name));
  }
  findings.warn(path,
                "true (the default) overwrites the optimizer's betas: beta1 follows the cycle, "
                "beta2 becomes 0.99");
  if (s.decay_mom_rate > 0 && s.decay_step_size > 0) {
    findings.warn(reader.path_of("decay_mom_rate"),
                  fmt::format("beta1 grows after the cycle and stays at {}, where DeepSpeed's "
                              "passes 1",
                              std::max(kLargestGrownBeta1, s.max_mom)));
  }
}

Status read_cycle(const ObjectReader& reader, OptimizerKind kind, OneCycleConfig& s,
                  Findings& findings) {
  SOTTO_TRY(require(reader, "cycle_min_lr", SchedulerKind::kOneCycle, findings));
  SOTTO_TRY(require(reader, "cycle_max_lr", SchedulerKind::kOneCycle, findings));
  reader.get("cycle_min_lr", s.min_lr);
  reader.get("cycle_max_lr", s.max_lr);
  reader.get("decay_lr_rate", s.decay_lr_rate);
  reader.get("cycle_first_step_size", s.first_step_size);
  s.second_step_size = s.first_step_size;
  reader.get("cycle_second_step_size", s.second_step_size);
  reader.get("decay_step_size", s.decay_step_size);
  reader.get("cycle_momentum", s.momentum);
  reader.get("cycle_min_mom", s.min_mom);
  reader.get("cycle_max_mom", s.max_mom);
  reader.get("decay_mom_rate", s.decay_mom_rate);
  warn_of_momentum(reader, s, kind, findings);
  return ok_status();
}

void read_range_test(const ObjectReader& reader, RangeTestConfig& s) {
  reader.get("lr_range_test_min_lr", s.min_lr);
  reader.get("lr_range_test_step_size", s.step_size);
  reader.get("lr_range_test_step_rate", s.step_rate);
  reader.get("lr_range_test_staircase", s.staircase);
}

}  // namespace

std::string_view scheduler_kind_name(SchedulerKind kind) {
  switch (kind) {
    case SchedulerKind::kNone: return "none";
    case SchedulerKind::kWarmupLR: return "WarmupLR";
    case SchedulerKind::kWarmupDecayLR: return "WarmupDecayLR";
    case SchedulerKind::kWarmupCosineLR: return "WarmupCosineLR";
    case SchedulerKind::kOneCycle: return "OneCycle";
    case SchedulerKind::kLRRangeTest: return "LRRangeTest";
  }
  return "?";
}

Status read_scheduler(const Json& object, Config& config, Findings& findings) {
  SOTTO_ASSIGN(const ObjectReader reader,
               ObjectReader::open(object, ConfigSection::kScheduler, ~0u, "scheduler", findings));
  SchedulerConfig& scheduler = config.scheduler;
  // {"type": null} is how some programs write "no scheduler".
  const auto type = object.find("type");
  if (type != object.end() && type->is_null()) return ok_status();
  SOTTO_TRY(read_type(reader, scheduler.kind, findings));
  static const Json* const kEmpty = new Json(Json::object());  // never destroyed
  const Json* params = reader.find("params");
  SOTTO_ASSIGN(
      const ObjectReader values,
      ObjectReader::open(params == nullptr ? *kEmpty : *params, ConfigSection::kSchedulerParams,
                         kind_bit(scheduler.kind), reader.path_of("params"), findings));
  switch (scheduler.kind) {
    case SchedulerKind::kNone: return ok_status();
    case SchedulerKind::kWarmupLR:
    case SchedulerKind::kWarmupDecayLR:
    case SchedulerKind::kWarmupCosineLR:
      return read_warmup(values, scheduler.kind, scheduler.warmup, findings);
    case SchedulerKind::kOneCycle:
      return read_cycle(values, config.optimizer.kind, scheduler.cycle, findings);
    case SchedulerKind::kLRRangeTest:
      read_range_test(values, scheduler.range_test);
      return ok_status();
  }
  return ok_status();
}

}  // namespace sotto
