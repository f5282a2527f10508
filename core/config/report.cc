// config_report: what a file will do, as JSON.
#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>

#include "core/base/json_text.h"
#include "core/config/optimizer_types.h"
#include "core/config/schedule.h"
#include "core/config/sections.h"
#include "core/config/volume.h"

namespace sotto {
namespace {

constexpr uint64_t kMaxWorld = uint64_t{1} << 20;
constexpr uint64_t kMaxParams = uint64_t{1} << 53;

// Of the type's keys those that act. The 1-bit types never correct bias, whatever theirs says.
Json params_json(OptimizerKind kind, const OptimizerParams& p) {
  Json values = Json::object();
  OptimizerParams::each(p, [&](const char* key, const auto& value) { values[key] = value; });
  values["betas"] = {p.beta1, p.beta2};
  Json out = Json::object();
  for (const KeySpec& key : key_table()) {
    if (key.section != ConfigSection::kOptimizerParams || (key.kinds & kind_bit(kind)) == 0)
      continue;
    if (key.disposition == Disposition::kActs || key.key == "bias_correction")
      out[key.key] = values.at(key.key);
  }
  if (p.freeze.non_freeze) out["non_freeze"] = true;
  return out;
}

// Groups that the file itself speaks of; the program may have more, which then use
// optimizer.params.
uint64_t groups_named(const Config& config) {
  return std::max({config.scheduler.warmup.min_lr.size(), config.scheduler.warmup.max_lr.size(),
                   config.scheduler.range_test.min_lr.size(), config.sotto.param_groups.size(),
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

// Length of the run as far as the file says; 0: it does not.
uint64_t run_updates(const Config& config) { return config.scheduler.warmup.total_num_steps; }

// The update with the highest rate; nothing if there is none.
std::optional<uint64_t> peak_update(const SchedulerConfig& s) {
  switch (s.kind) {
    case SchedulerKind::kNone:
    case SchedulerKind::kLRRangeTest: return std::nullopt;  // constant; growing for ever
    case SchedulerKind::kWarmupLR:
    case SchedulerKind::kWarmupDecayLR:
    case SchedulerKind::kWarmupCosineLR:
      // The logarithm is 1 in the last iteration of the warm-up, the straight line behind it.
      return s.warmup.num_steps + (s.warmup.type == WarmupType::kLog ? 1 : 2);
    case SchedulerKind::kOneCycle: return s.cycle.first_step_size + 1;
  }
  return std::nullopt;
}

// Updates at which the report shows the rate: round numbers and the corners of the schedule and of
// the stages.
std::vector<uint64_t> sample_updates(const Config& config) {
  std::vector<uint64_t> updates = {1, 2, 3, 10, 100, 1000, 10000};
  const SchedulerConfig& s = config.scheduler;
  if (const std::optional<uint64_t> peak = peak_update(s)) updates.push_back(*peak);
  if (s.kind == SchedulerKind::kOneCycle) updates.push_back(s.cycle.steps() + 1);
  if (s.kind == SchedulerKind::kLRRangeTest) updates.push_back(s.range_test.step_size + 1);
  if (s.warmup.total_num_steps > 0) {
    updates.push_back(std::max<uint64_t>(s.warmup.total_num_steps / 2, 1));
    updates.push_back(s.warmup.total_num_steps);
    updates.push_back(s.warmup.total_num_steps + 2);
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
    Json sample = {{"update", k}, {"groups", std::move(rates)}};
    if (const auto betas = schedule.betas_of_update(k)) {
      sample["betas"] = {betas->beta1, betas->beta2};
    }
    samples.push_back(std::move(sample));
  }
  out["lr"] = std::move(samples);
  const auto peak = peak_update(config.scheduler);
  out["peak_update"] = peak ? Json(*peak) : Json(nullptr);
  out["end_update"] = run_updates(config) == 0 ? Json(nullptr) : Json(run_updates(config));
  return out;
}

struct Request {
  uint64_t world;     // 0: unknown
  uint64_t n_params;  // 0: unknown
  bool known() const { return world != 0 && n_params != 0; }
};

// Some parameters are never compressed, and how many is not known.
bool partly_compressed(const Config& config) {
  const auto& groups = config.sotto.param_groups;
  return std::any_of(groups.begin(), groups.end(),
                     [](const GroupOverride& g) { return g.non_freeze.value_or(false); });
}

Json stages_json(const Config& config, const Request& request) {
  UpdateBytes bytes;
  const bool flat = !depends_on_hosts(config.sotto.hierarchy, request.world);
  if (const auto& outer = config.sotto.outer; outer && request.known()) {
    const OuterBytes sent = outer_bytes(*outer, request.n_params, request.world);
    if (flat)
      bytes.full = full_precision_bytes(
          request.n_params, request.world,
          outer->schedule.averages_gradients() ? communication_bytes(config) : 4);
    const uint64_t steps = outer->schedule.period;
    if (sent.period) bytes.share = *sent.period / steps + (*sent.period % steps == 0 ? 0 : 1);
  } else if (request.known()) {
    if (flat)
      bytes.full =
          full_precision_bytes(request.n_params, request.world, communication_bytes(config));
    const std::optional<CodecSettings> codec = config.compression(request.world);
    if (codec && flat && !partly_compressed(config))
      bytes.compressed = compressed_sizes(*codec, request.n_params, request.world).payload;
  }
  if (config.optimizer.kind == OptimizerKind::kNone && !config.sotto.outer) return Json::array();
  return stages_of(config).report(config, run_updates(config), bytes);
}

// Of a parameter in the whole run. A launch has one fragment. world: 0: unknown.
double outer_bits(const OuterConfig& outer, double gradient_bits, uint64_t updates,
                  uint64_t world) {
  constexpr double kDenseBits = 32;
  const OuterSchedule& s = outer.schedule;
  const uint64_t before = std::min(updates, s.synchronous_steps());
  const OuterLaunches launches = outer_launches(outer, updates);
  const double coded = outer.codec ? outer.codec->bits_per_element(world) : 0;
  return static_cast<double>(before) * (s.averages_gradients() ? gradient_bits : kDenseBits) +
         (static_cast<double>(launches.dense) * kDenseBits +
          static_cast<double>(launches.compressed) * coded) /
             static_cast<double>(outer.fragments.count);
}

// The whole run, where the schedule tells how long it is. Bits are those of one round per
// parameter: a rank sends 2 (W-1)/W times as many, with a sparse codec without servers W-1 times.
Json run_json(const Config& config, uint64_t world) {
  const uint64_t updates = run_updates(config);
  const std::optional<OuterConfig>& outer = config.sotto.outer;
  if (updates == 0 || config.optimizer.kind == OptimizerKind::kNone) return nullptr;
  if (!outer && partly_compressed(config)) return nullptr;
  const UpdateCounts c = count_updates(config, updates);
  const double full_bits = 8.0 * static_cast<double>(communication_bytes(config));
  const CodecSettings codec = config.compression(1).value_or(CodecSettings{});
  const double bits =
      outer ? outer_bits(*outer, full_bits, updates, world)
            : full_bits * static_cast<double>(c.full_precision) +
                  codec.bits_per_element(world) * static_cast<double>(c.compressed + c.sync);
  return {{"updates", updates},
          {"full_precision_updates", c.full_precision},
          {"compressed_updates", c.compressed + c.sync},
          {"silent_updates", c.local},
          {"bits_per_parameter_and_update", bits / static_cast<double>(updates)},
          {"part_of_full_precision", bits / static_cast<double>(updates) / full_bits}};
}

Json memory_json(const Config& config, const Request& request) {
  if (!request.known()) return nullptr;
  // Inner optimizers work as if they were alone.
  const uint64_t world = config.sotto.outer ? 1 : request.world;
  const MemoryBytes b = memory_bytes(config, world, request.n_params);
  Json out = Json::object();
  const std::pair<const char*, uint64_t> items[] = {{"parameters", b.parameters},
                                                    {"model_copy", b.model_copy},
                                                    {"gradients", b.gradients},
                                                    {"m", b.m},
                                                    {"v", b.v},
                                                    {"residuals", b.residuals},
                                                    {"bits", b.bits},
                                                    {"scratch", b.scratch}};
  for (const auto& [name, bytes] : items) {
    if (bytes != 0) out[name] = bytes;
  }
  for (const auto& [name, bytes] : b.arrays) out[std::string(name)] = bytes;
  out["state"] = b.state();
  return out;
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

Json loss_scale_json(const Config& config) {
  const Fp16Config& f = config.fp16;
  if (!f.enabled) return nullptr;
  if (f.loss_scale > 0) return {{"kind", "static"}, {"scale", f.loss_scale}};
  return {{"kind", "dynamic"},
          {"first_scale", std::ldexp(1.0, static_cast<int>(f.initial_scale_power))},
          {"window", f.loss_scale_window},
          {"smallest_scale", f.min_loss_scale}};
}

Json sotto_json(const Config& config) {
  const SottoConfig& s = config.sotto;
  return {{"mode", mode_name(s.mode)},
          {"transport", s.transport},
          {"hierarchy", hierarchy_name(s.hierarchy)},
          {"scale", scale_name(s.scale)},
          {"granularity", granularity_name(config.granularity(config.half_gradients()))},
          {"bucket_elements", s.bucket_elements},
          {"chunk_align", s.mode == Mode::kCompat ? Json("lcm(ranks, 8)") : Json(s.chunk_align)},
          {"step_offset", s.step_offset},
          {"zero_variance_policy", zero_variance_policy_name(s.zero_variance_policy)},
          {"coeff_debias", s.coeff_debias},
          {"checkpoint", checkpoint_name(s.checkpoint)},
          {"initial_parameters", initial_parameters_name(s.initial_parameters)},
          {"timeout_ms", s.timeout_ms ? Json(*s.timeout_ms) : Json(nullptr)},
          {"max_consecutive_skips", s.max_consecutive_skips},
          {"state_dtype", state_type_name(s.state_dtype)},
          {"gradient_codec", s.gradient_codec ? codec_json(*s.gradient_codec) : Json(nullptr)}};
}

bool is_about(const KeyNote& note, const Obstacle& obstacle) {
  return note.path == obstacle.path ||
         (obstacle.path == "bf16.enabled" && note.path == "bfloat16.enabled") ||
         (obstacle.path == "zero_optimization.stage" && note.path == "zero_optimization") ||
         (obstacle.path == "sotto.outer.codec" && note.path == "sotto.outer.codec.type");
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

// What the batch keys say as long as the number of ranks is unknown.
std::string batch_note(const Config& c) {
  const uint64_t train = c.batch.train_batch_size.value_or(0);
  const uint64_t micro = c.batch.train_micro_batch_size_per_gpu.value_or(0);
  const uint64_t gas = c.batch.gradient_accumulation_steps.value_or(0);
  std::string text = "the batch keys were not checked: the number of ranks is unknown";
  if (train == 0 || micro == 0 || gas == 0) return text;
  const bool fits = train % micro == 0 && train / micro % gas == 0;
  return fits ? fmt::format("{}; they fit {} data-parallel ranks", text, train / micro / gas)
              : text + "; they fit no number of ranks";
}

Json notes_json(const Config& config, const Request& request) {
  Json notes = Json::array();
  notes.push_back(
      "payload bytes are what one rank sends for the parameters by closed formula; headers, scales "
      "and the small sum "
      "for clipping are counted apart");
  if (config.granularity(config.half_gradients()) == Granularity::kTensor &&
      optimizer_is_one_bit(config.optimizer.kind)) {
    notes.push_back(
        "sotto.granularity tensor pads every tensor, so compressed updates send at least these "
        "bytes");
  }
  if (config.sotto.outer) {
    notes.push_back(
        "stage outer has the share of an update in the launches of a period; fragments count as "
        "equal, and memory_bytes has the inner optimizer alone");
  }
  if (partly_compressed(config) && !config.sotto.outer) {
    notes.push_back(
        "compressed updates send the parameters of groups with non_freeze in full precision; how "
        "many bytes that is depends on how many they are");
  }
  if (request.known() && depends_on_hosts(config.sotto.hierarchy, request.world)) {
    notes.push_back(
        "payload bytes are not known: they depend on how many ranks share a host "
        "(sotto.hierarchy); sotto_plan_report has them");
  }
  if (!config.batch.train_batch_size && !config.batch.train_micro_batch_size_per_gpu) {
    notes.push_back(
        "no batch size is given, which DeepSpeed demands and this library does not need");
  } else if (request.world == 0) {
    notes.push_back(batch_note(config));
  }
  return notes;
}

}  // namespace

Json codec_json(const CodecSettings& s) {
  Json out = {{"type", codec_name(s.kind)}};
  if (s.row().sparse) {
    for_each_setting(s.sparse, [&](const char* key, const auto& value) { out[key] = value; });
    return out;
  }
  out["chunk_align"] = s.chunk_align;
  if (s.row().scales) {
    out["scale"] = scale_name(s.scale);
    out["granularity"] = granularity_name(s.granularity);
    if (s.granularity == Granularity::kBucket) out["bucket_elements"] = s.bucket_elements;
    return out;
  }
  if (s.row().block != 0) out["block"] = s.block;
  out["residual"] = s.residual;
  return out;
}

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
  out["loss_scale"] = loss_scale_json(config);
  out["sotto"] = sotto_json(config);
  out["outer"] =
      config.sotto.outer ? outer_json(*config.sotto.outer, world_size, n_params) : Json(nullptr);
  out["overlap"] = config.sotto.overlap ? overlap_json(*config.sotto.overlap) : Json(nullptr);
  out["stages"] = stages_json(config, request);
  out["run"] = run_json(config, world_size);
  out["memory_bytes"] = memory_json(config, request);
  out["keys"] = keys_json(config, obstacles);
  out["warnings"] = config.warnings;
  out["notes"] = notes_json(config, request);
  return dump_text(out, 2);
}

}  // namespace sotto
