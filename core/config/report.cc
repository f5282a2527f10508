// config_report: what a file will do, as JSON.
#include <algorithm>

#include "core/config/schedule.h"
#include "core/config/sections.h"

namespace sotto {
namespace {

constexpr uint64_t kMaxWorld = uint64_t{1} << 20;
constexpr uint64_t kMaxParams = uint64_t{1} << 53;

// Bytes that one rank sends to average n elements in full precision: 2 (W-1)/W n, rounded up.
uint64_t full_precision_bytes(uint64_t n, uint64_t w, uint64_t element_bytes) {
  const uint64_t factor = 2 * element_bytes * (w - 1);
  return n / w * factor + (n % w * factor + w - 1) / w;
}

// Sizes of one error-compensated 1-bit all-reduce of n elements (chunk length K, padded length N =
// K W).
struct OneBitSizes {
  uint64_t chunk = 0;    // K, elements
  uint64_t payload = 0;  // sent by one rank
  uint64_t errors = 0;   // residuals held, bytes
  uint64_t scratch = 0;
};

OneBitSizes one_bit_sizes(uint64_t n, uint64_t w, uint64_t align) {
  OneBitSizes s;
  if (w == 1 || n == 0) return s;  // the identity: nothing is sent, no residuals
  s.chunk = align * ((n + align * w - 1) / (align * w));
  s.payload = 2 * (w - 1) * (s.chunk / 8);
  s.errors = 4 * n + 4 * s.chunk;
  s.scratch = 3 * (s.chunk * w / 8) + s.chunk / 8 + 8 * w + 4 * s.chunk;
  return s;
}

// Bytes of moments and the like per element, without residuals.
uint64_t moment_bytes(const Config& config) {
  switch (config.optimizer.kind) {
    case OptimizerKind::kNone: return 0;
    case OptimizerKind::kSgd: return config.optimizer.params.momentum > 0 ? 4 : 0;
    case OptimizerKind::kAdam:
    case OptimizerKind::kAdamW:
    case OptimizerKind::kLamb:
    case OptimizerKind::kOneBitAdam: return 8;
    case OptimizerKind::kZeroOneAdam:
    case OptimizerKind::kOneBitLamb: return 12;
  }
  return 0;
}

Json params_json(OptimizerKind kind, const OptimizerParams& p) {
  Json out = {{"lr", p.lr}, {"weight_decay", p.weight_decay}};
  if (kind == OptimizerKind::kSgd) {
    out["momentum"] = p.momentum;
    out["dampening"] = p.dampening;
    out["nesterov"] = p.nesterov;
    return out;
  }
  out["betas"] = {p.beta1, p.beta2};
  out["eps"] = p.eps;
  out["bias_correction"] = p.bias_correction;
  if (kind == OptimizerKind::kAdam || kind == OptimizerKind::kAdamW)
    out["adam_w_mode"] = p.adam_w_mode;
  if (kind == OptimizerKind::kLamb) out["eps_inside_sqrt"] = p.eps_inside_sqrt;
  if (kind == OptimizerKind::kLamb || kind == OptimizerKind::kOneBitLamb) {
    out["max_coeff"] = p.max_coeff;
    out["min_coeff"] = p.min_coeff;
  }
  if (kind == OptimizerKind::kOneBitAdam || kind == OptimizerKind::kOneBitLamb)
    out["freeze_step"] = p.freeze_step;
  if (p.non_freeze) out["non_freeze"] = true;
  if (kind == OptimizerKind::kOneBitLamb) {
    out["coeff_beta"] = p.coeff_beta;
    out["factor_max"] = p.factor_max;
    out["factor_min"] = p.factor_min;
    out["factor_threshold"] = p.factor_threshold;
  }
  if (kind == OptimizerKind::kZeroOneAdam) {
    out["var_freeze_step"] = p.var_freeze_step;
    out["var_update_scaler"] = p.var_update_scaler;
    out["local_step_scaler"] = p.local_step_scaler;
    out["local_step_clipper"] = p.local_step_clipper;
  }
  return out;
}

// Groups that the file itself speaks of; the program may have more, which then use
// optimizer.params.
uint64_t groups_named(const Config& config) {
  return std::max({config.scheduler.warmup_min_lr.size(), config.scheduler.warmup_max_lr.size(),
                   config.scheduler.lr_range_test_min_lr.size(), config.sotto.param_groups.size(),
                   size_t{1}});
}

Result<Json> optimizer_json(const Config& config) {
  const OptimizerKind kind = config.optimizer.kind;
  if (kind == OptimizerKind::kNone) return Json(nullptr);
  Json out = {{"type", optimizer_kind_name(kind)},
              {"params", params_json(kind, config.optimizer.params)}};
  SOTTO_ASSIGN(const auto groups, config.resolve_groups(config.sotto.param_groups.size()));
  Json list = Json::array();
  for (const OptimizerParams& group : groups) list.push_back(params_json(kind, group));
  out["param_groups"] = std::move(list);
  return out;
}

// Updates at which the report shows the rate: round numbers and the corners of the schedule and of
// the stages.
std::vector<uint64_t> sample_updates(const Config& config) {
  std::vector<uint64_t> updates = {1, 2, 3, 10, 100, 1000, 10000};
  const SchedulerConfig& s = config.scheduler;
  if (s.kind != SchedulerKind::kNone) updates.push_back(s.warmup_num_steps + 2);
  if (s.total_num_steps > 0) {
    updates.push_back(std::max<uint64_t>(s.total_num_steps / 2, 1));
    updates.push_back(s.total_num_steps);
    updates.push_back(s.total_num_steps + 2);
  }
  const uint64_t full = config.full_precision_updates();
  if (full != UINT64_MAX) updates.insert(updates.end(), {full, full + 1});
  std::sort(updates.begin(), updates.end());
  updates.erase(std::unique(updates.begin(), updates.end()), updates.end());
  return updates;
}

Result<Json> schedule_json(const Config& config) {
  Json out = {{"type", scheduler_kind_name(config.scheduler.kind)}, {"lr", nullptr}};
  const uint64_t n_groups = groups_named(config);
  SOTTO_ASSIGN(const auto groups, config.resolve_groups(n_groups));
  std::vector<double> base;
  for (const OptimizerParams& group : groups) base.push_back(group.lr);
  SOTTO_ASSIGN(const LrSchedule schedule,
               LrSchedule::create(config.scheduler, base, config.sotto.mode));
  Json samples = Json::array();
  for (const uint64_t k : sample_updates(config)) {
    Json rates = Json::array();
    for (uint64_t g = 0; g < n_groups; ++g) rates.push_back(schedule.lr_of_update(k, g));
    samples.push_back({{"update", k}, {"groups", std::move(rates)}});
  }
  out["lr"] = std::move(samples);
  return out;
}

struct Request {
  uint64_t world;     // 0: unknown
  uint64_t n_params;  // 0: unknown
  bool known() const { return world != 0 && n_params != 0; }
};

Json stage(std::string_view name, uint64_t first, Json last, Json bytes) {
  return {{"name", name},
          {"first_update", first},
          {"last_update", std::move(last)},
          {"payload_bytes_per_update", std::move(bytes)}};
}

Json stages_json(const Config& config, const Request& request) {
  const bool half = config.fp16.enabled || config.bf16_enabled;
  const Dtype dtype = config.communication_data_type.value_or(half ? Dtype::kF16 : Dtype::kF32);
  Json full = nullptr;
  Json one_bit = nullptr;
  if (request.known()) {
    full = full_precision_bytes(request.n_params, request.world, dtype_bytes(dtype));
    one_bit = one_bit_sizes(request.n_params, request.world, config.sotto.chunk_align).payload;
  }
  const OptimizerParams& p = config.optimizer.params;
  const uint64_t updates = config.full_precision_updates();
  switch (config.optimizer.kind) {
    case OptimizerKind::kNone: return Json::array();
    case OptimizerKind::kSgd:
    case OptimizerKind::kAdam:
    case OptimizerKind::kAdamW:
    case OptimizerKind::kLamb: return Json::array({stage("full_precision", 1, nullptr, full)});
    case OptimizerKind::kOneBitAdam:
    case OptimizerKind::kOneBitLamb:
      return Json::array({stage("full_precision", 1, updates, full),
                          stage("compressed", updates + 1, nullptr, one_bit)});
    case OptimizerKind::kZeroOneAdam: break;
  }
  // Phase A of 0/1 Adam mixes both kinds of steps; phase B sends every 1, 2, 4, ... updates.
  const uint64_t phase_a = std::max<uint64_t>(p.var_freeze_step + 1 - config.sotto.step_offset, 1);
  const Json mixed = {{"variance_update", full}, {"other_update", one_bit}};
  const Json local = {{"synchronisation", one_bit},
                      {"other_update", 0},
                      {"longest_interval", p.local_step_clipper}};
  return Json::array(
      {stage("variance", 1, phase_a, mixed), stage("local", phase_a + 1, nullptr, local)});
}

Json memory_json(const Config& config, const Request& request) {
  if (!request.known()) return nullptr;
  OneBitSizes one_bit;
  if (optimizer_is_one_bit(config.optimizer.kind)) {
    one_bit = one_bit_sizes(request.n_params, request.world, config.sotto.chunk_align);
  }
  const uint64_t moments = moment_bytes(config) * request.n_params;
  return {{"parameters", 4 * request.n_params},
          {"gradients", 4 * request.n_params},
          {"moments", moments},
          {"residuals", one_bit.errors},
          {"codec_scratch", one_bit.scratch},
          {"state", moments + one_bit.errors}};
}

Result<Json> batch_json(const Config& config, const Request& request) {
  if (request.world == 0) return Json(nullptr);
  SOTTO_ASSIGN(const auto batch, config.resolve_batch(request.world));
  if (!batch) return Json(nullptr);
  return Json{{"train_batch_size", batch->train},
              {"train_micro_batch_size_per_gpu", batch->micro},
              {"gradient_accumulation_steps", batch->gas},
              {"data_parallel_ranks", request.world}};
}

Json sotto_json(const SottoConfig& s) {
  return {{"mode", mode_name(s.mode)},
          {"transport", s.transport},
          {"scale", scale_name(s.scale)},
          {"granularity", granularity_name(s.granularity)},
          {"bucket_elements", s.bucket_elements},
          {"chunk_align", s.chunk_align},
          {"step_offset", s.step_offset},
          {"zero_variance_policy", zero_variance_policy_name(s.zero_variance_policy)},
          {"coeff_debias", s.coeff_debias},
          {"checkpoint", checkpoint_name(s.checkpoint)},
          {"timeout_ms", s.timeout_ms ? Json(*s.timeout_ms) : Json(nullptr)},
          {"max_consecutive_skips", s.max_consecutive_skips}};
}

bool is_about(const KeyNote& note, const Obstacle& obstacle) {
  return note.path == obstacle.path ||
         (obstacle.path == "bf16.enabled" && note.path == "bfloat16.enabled") ||
         (obstacle.path == "zero_optimization.stage" && note.path == "zero_optimization");
}

Json keys_json(const Config& config, const std::vector<Obstacle>& obstacles) {
  Json out = Json::array();
  for (KeyNote note : config.keys) {
    for (const Obstacle& obstacle : obstacles) {
      if (!is_about(note, obstacle)) continue;
      note.disposition = "unsupported";
      note.reason = obstacle.supported;
    }
    out.push_back({{"key", note.path},
                   {"value", note.value},
                   {"disposition", note.disposition},
                   {"reason", note.reason}});
  }
  return out;
}

Json notes_json(const Config& config, const Request& request) {
  Json notes = Json::array();
  notes.push_back(
      "payload bytes are what one rank sends for the parameters by closed formula; headers, scales "
      "and the small sum "
      "for clipping are counted apart");
  if (config.sotto.granularity != Granularity::kFlat &&
      optimizer_is_one_bit(config.optimizer.kind)) {
    notes.push_back(
        "sotto.granularity pads every tensor, so compressed updates send at least these bytes");
  }
  if (!config.train_batch_size && !config.train_micro_batch_size_per_gpu) {
    notes.push_back(
        "no batch size is given, which DeepSpeed demands and this library does not need");
  } else if (request.world == 0) {
    notes.push_back("the batch keys were not checked: the number of ranks is unknown");
  }
  return notes;
}

}  // namespace

Result<std::string> config_report(std::string_view text, uint64_t world_size, uint64_t n_params) {
  if (world_size > kMaxWorld) {
    return invalid_argument("world_size: found {}, allowed is at most {}", world_size, kMaxWorld);
  }
  if (n_params > kMaxParams) {
    return invalid_argument("n_params: found {}, allowed is at most {}", n_params, kMaxParams);
  }
  SOTTO_ASSIGN(const Config config, parse_config(text));
  const Request request{world_size, n_params};
  const std::vector<Obstacle> obstacles = find_obstacles(config);
  const Status supported = check_supported(config);
  Json out;
  out["can_run"] = supported.ok();
  out["reasons"] = unsupported_reasons(config);
  if (!supported.ok() && obstacles.empty()) out["reasons"].push_back(supported.text());
  out["world_size"] = world_size == 0 ? Json(nullptr) : Json(world_size);
  out["n_params"] = n_params == 0 ? Json(nullptr) : Json(n_params);
  SOTTO_ASSIGN(out["batch"], batch_json(config, request));
  SOTTO_ASSIGN(out["optimizer"], optimizer_json(config));
  SOTTO_ASSIGN(out["schedule"], schedule_json(config));
  out["gradient_clipping"] = config.gradient_clipping;
  out["sotto"] = sotto_json(config.sotto);
  out["stages"] = stages_json(config, request);
  out["memory_bytes"] = memory_json(config, request);
  out["keys"] = keys_json(config, obstacles);
  out["warnings"] = config.warnings;
  out["notes"] = notes_json(config, request);
  return out.dump(2, ' ', false, Json::error_handler_t::replace);
}

}  // namespace sotto
