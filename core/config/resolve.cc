// What follows from a configuration: batch numbers, lengths of stages, and what stands in its way.
#include <fmt/format.h>

#include <algorithm>
#include <iterator>

#include "core/base/text.h"
#include "core/config/optimizer_types.h"
#include "core/config/sections.h"

namespace sotto {
namespace {

// micro * gas * world, or nothing if it does not fit.
std::optional<uint64_t> batch_product(uint64_t micro, uint64_t gas, uint64_t world) {
  uint64_t product = 0;
  if (__builtin_mul_overflow(micro, gas, &product) ||
      __builtin_mul_overflow(product, world, &product)) {
    return std::nullopt;
  }
  return product;
}

// The batch numbers with the missing one derived by integer division.
BatchNumbers complete(const Config& c, uint64_t world) {
  BatchNumbers b;
  b.train = c.batch.train_batch_size.value_or(0);
  b.micro = c.batch.train_micro_batch_size_per_gpu.value_or(0);
  b.gas = c.batch.gradient_accumulation_steps.value_or(0);
  if (b.gas == 0) b.gas = b.train != 0 && b.micro != 0 ? b.train / b.micro / world : 1;
  if (b.micro == 0) b.micro = b.train / world / b.gas;
  if (b.train == 0) b.train = batch_product(b.micro, b.gas, world).value_or(0);
  return b;
}

// Which keys were written and with what value, for messages.
std::string given(const Config& c) {
  std::string out;
  const auto add = [&](std::string_view key, const std::optional<uint64_t>& value) {
    if (value) out += fmt::format("{}{} {}", out.empty() ? "" : ", ", key, *value);
  };
  add("train_batch_size", c.batch.train_batch_size);
  add("train_micro_batch_size_per_gpu", c.batch.train_micro_batch_size_per_gpu);
  add("gradient_accumulation_steps", c.batch.gradient_accumulation_steps);
  return out;
}

// The train_batch_size nearest to what was written that the other keys divide; 0 if there is none.
uint64_t fitting_batch(const Config& c, uint64_t world) {
  const auto& micro = c.batch.train_micro_batch_size_per_gpu;
  const auto& gas = c.batch.gradient_accumulation_steps;
  const uint64_t unit = batch_product(micro.value_or(1), gas.value_or(1), world).value_or(0);
  if (unit == 0 || (micro && gas)) return unit;
  const uint64_t train = c.batch.train_batch_size.value_or(0);
  const uint64_t below = train / unit * unit;
  return below == 0 || train - below > below + unit - train ? below + unit : below;
}

void add_gradient_obstacles(const Config& c, std::vector<Obstacle>& out) {
  if (c.sparse_gradients) {
    out.push_back({"sparse_gradients", "true", "supported is false: gradients are dense buffers"});
  }
  if (c.zero_stage != 0) {
    out.push_back({"zero_optimization.stage", fmt::format("{}", c.zero_stage),
                   "supported is 0: every rank holds the whole optimizer state; sharding it is "
                   "the host framework's"});
  }
}

Status status_of(const std::vector<std::string>& reasons) {
  if (reasons.empty()) return ok_status();
  return unsupported("configuration: not supported in this release: {}", fmt::join(reasons, "; "));
}

}  // namespace

Result<std::optional<BatchNumbers>> Config::resolve_batch(uint64_t dp_world) const {
  if (dp_world == 0)
    return invalid_argument("batch arithmetic needs at least one data-parallel rank");
  if (!batch.train_batch_size && !batch.train_micro_batch_size_per_gpu) {
    if (!batch.gradient_accumulation_steps) return std::optional<BatchNumbers>();
    return invalid_argument(
        "gradient_accumulation_steps {} alone does not give the batch; add train_batch_size or "
        "train_micro_batch_size_per_gpu",
        *batch.gradient_accumulation_steps);
  }
  const BatchNumbers b = complete(*this, dp_world);
  if (b.train == 0 || b.micro == 0 || b.gas == 0 ||
      batch_product(b.micro, b.gas, dp_world) != b.train) {
    const uint64_t fits = fitting_batch(*this, dp_world);
    return invalid_argument(
        "train_batch_size has to equal train_micro_batch_size_per_gpu * "
        "gradient_accumulation_steps * {}; found {}, which gives {} against {} * {} * {}; {}",
        counted(dp_world, "data-parallel rank"), given(*this), b.train, b.micro, b.gas, dp_world,
        fits == 0 ? "make them smaller" : fmt::format("train_batch_size {} would fit", fits));
  }
  return std::optional<BatchNumbers>(b);
}

bool Config::half_gradients() const {
  return fp16.enabled || bf16_enabled || grad_accum_dtype.value_or(Dtype::kF32) != Dtype::kF32;
}

Granularity published_granularity(OptimizerKind kind, bool half) {
  return optimizer_type(kind).scales_all || half ? Granularity::kFlat : Granularity::kTensor;
}

Granularity Config::granularity(bool half) const {
  if (sotto.granularity) return *sotto.granularity;
  const bool published = sotto.mode == Mode::kCompat && optimizer_is_one_bit(optimizer.kind);
  return published ? published_granularity(optimizer.kind, half) : Granularity::kFlat;
}

std::optional<CodecSettings> Config::compression(uint64_t world, bool half) const {
  if (!optimizer_is_one_bit(optimizer.kind)) return sotto.gradient_codec;
  CodecSettings s;
  s.scale = sotto.scale;
  s.granularity = granularity(half);
  // "flat" is a parameter group for the Adams, everything for 1-bit LAMB (specification 1.10).
  if (s.granularity == Granularity::kFlat && !optimizer_type(optimizer.kind).scales_all)
    s.granularity = Granularity::kGroup;
  if (s.granularity == Granularity::kBucket) s.bucket_elements = sotto.bucket_elements;
  s.compat = sotto.mode == Mode::kCompat;
  s.chunk_align = s.compat ? compat_chunk_align(world) : sotto.chunk_align;
  s.hierarchy = sotto.hierarchy;
  return s;
}

uint64_t Config::full_precision_updates() const {
  if (sotto.gradient_codec) return 0;
  return optimizer_type(optimizer.kind).stages().full_precision_updates(*this);
}

std::string Obstacle::text() const { return fmt::format("{} {} ({})", path, value, supported); }

std::vector<Obstacle> find_obstacles(const Config& config) {
  std::vector<Obstacle> out;
  add_gradient_obstacles(config, out);
  if (config.sotto.outer)
    std::ranges::move(find_obstacles(*config.sotto.outer, "sotto.outer"), std::back_inserter(out));
  return out;
}

std::vector<Obstacle> find_obstacles(const OuterConfig& outer, std::string_view path) {
  std::vector<Obstacle> out;
  const auto add = [&](std::string_view key, std::string_view value, std::string_view supported) {
    out.push_back({fmt::format("{}.{}", path, key), std::string(value), std::string(supported)});
  };
  const OuterRuleConfig& rule = outer.rule;
  // What this rank has sent is then of all ranks of its host.
  const bool levels =
      outer.hierarchy == Hierarchy::kSharded || outer.hierarchy == Hierarchy::kLeader;
  if (outer.codec && levels && (rule.freshness > 0 || rule.freshness_by_world)) {
    add("freshness", rule.freshness_by_world ? "1/W" : fmt::format("{}", rule.freshness),
        "supported with a codec in two levels is 0");
  }
  return out;
}

std::vector<std::string> unsupported_reasons(const Config& config) {
  std::vector<std::string> texts;
  for (const Obstacle& obstacle : find_obstacles(config)) texts.push_back(obstacle.text());
  return texts;
}

Status check_supported(const OuterConfig& outer) {
  std::vector<std::string> reasons;
  for (const Obstacle& obstacle : find_obstacles(outer, "outer"))
    reasons.push_back(obstacle.text());
  return status_of(reasons);
}

Status check_supported(const Config& config) {
  SOTTO_TRY(status_of(unsupported_reasons(config)));
  if (config.optimizer.kind == OptimizerKind::kNone) {
    return invalid_argument(
        "configuration: the key optimizer is missing; add {{\"optimizer\": {{\"type\": "
        "\"Adam\"}}}} or another type");
  }
  return ok_status();
}

}  // namespace sotto
