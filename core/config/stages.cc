#include "core/config/stages.h"

#include <algorithm>
#include <nlohmann/json.hpp>

namespace sotto {
namespace {

using Json = nlohmann::json;

Json bytes_json(const std::optional<uint64_t>& bytes) {
  return bytes ? Json(*bytes) : Json(nullptr);
}

// A row of a report.
Json stage_json(std::string_view name, uint64_t first, Json last, Json bytes) {
  return {{"name", name},
          {"first_update", first},
          {"last_update", std::move(last)},
          {"payload_bytes_per_update", std::move(bytes)}};
}

class OneStage final : public Stages {
 public:
  uint64_t full_precision_updates(const Config&) const override { return UINT64_MAX; }
  Json report(const Config& config, uint64_t, const UpdateBytes& bytes) const override {
    return Json::array(
        {config.sotto.gradient_codec
             ? stage_json("compressed_gradients", 1, nullptr, bytes_json(bytes.compressed))
             : stage_json("full_precision", 1, nullptr, bytes_json(bytes.full))});
  }
};

class FreezeStages final : public Stages {
 public:
  uint64_t full_precision_updates(const Config& config) const override {
    const uint64_t freeze_step = config.optimizer.params.freeze.freeze_step;
    const uint64_t offset = config.sotto.step_offset;
    return freeze_step > offset ? freeze_step - offset : 1;
  }
  Json report(const Config& config, uint64_t, const UpdateBytes& bytes) const override {
    const uint64_t updates = full_precision_updates(config);
    return Json::array(
        {stage_json("full_precision", 1, updates, bytes_json(bytes.full)),
         stage_json("compressed", updates + 1, nullptr, bytes_json(bytes.compressed))});
  }
};

// Multiples of `step` in (after, last].
uint64_t multiples(uint64_t after, uint64_t last, uint64_t step) {
  return last / step - after / step;
}

// Variance updates among the state steps first .. last: var_update_scaler at multiples of 1, then
// as many at multiples of 2, of 4, ...
uint64_t variance_updates(const IntervalParams& p, uint64_t first, uint64_t last) {
  uint64_t found = 0;
  uint64_t after = first - 1;
  for (uint64_t interval = 1; after < last; interval *= 2) {
    const uint64_t here = multiples(after, last, interval);
    if (here < p.var_update_scaler) return found + here;
    found += p.var_update_scaler;
    after = (after / interval + p.var_update_scaler) * interval;
  }
  return found;
}

// Synchronisations among the state steps after + 1 .. last, all behind the switch.
uint64_t synchronisations(const IntervalParams& p, uint64_t after, uint64_t last) {
  uint64_t found = 0;
  for (uint64_t interval = 1; after < last;
       interval = std::min(p.local_step_clipper, 2 * interval)) {
    const bool longest = interval == p.local_step_clipper;
    const uint64_t end = longest ? last : std::min(last, after + p.local_step_scaler);
    found += multiples(after, end, interval);
    after = end;
  }
  return found;
}

class IntervalStages final : public Stages {
 public:
  uint64_t full_precision_updates(const Config& config) const override {
    // Interval 1 lasts var_update_scaler updates; then every even state step is one in full
    // precision.
    const uint64_t all = before_freeze(config);
    const uint64_t n = std::min(config.optimizer.params.intervals.var_update_scaler, all);
    return n < all && (n + 1 + config.sotto.step_offset) % 2 == 0 ? n + 1 : n;
  }
  UpdateCounts count(const Config& config, uint64_t updates) const override {
    const IntervalParams& p = config.optimizer.params.intervals;
    const uint64_t offset = config.sotto.step_offset;
    const uint64_t before = std::min(updates, before_freeze(config));
    UpdateCounts c;
    c.full_precision = variance_updates(p, offset + 1, offset + before);
    c.compressed = before - c.full_precision;
    c.sync = synchronisations(p, offset + before, offset + updates);
    c.local = updates - before - c.sync;
    return c;
  }
  Json report(const Config& config, uint64_t updates, const UpdateBytes& bytes) const override {
    const uint64_t before = before_freeze(config);
    const UpdateCounts a = count(config, before);
    Json variance = stage_json("variance", 1, before,
                               {{"variance_update", bytes_json(bytes.full)},
                                {"other_update", bytes_json(bytes.compressed)}});
    variance["updates"] = {{"variance", a.full_precision}, {"other", a.compressed}};
    Json local =
        stage_json("local", before + 1, nullptr,
                   {{"synchronisation", bytes_json(bytes.compressed)}, {"other_update", 0}});
    local["longest_interval"] = config.optimizer.params.intervals.local_step_clipper;
    if (updates > before) {
      const UpdateCounts all = count(config, updates);
      local["updates"] = {{"synchronisation", all.sync}, {"other", all.local}};
    }
    return Json::array({std::move(variance), std::move(local)});
  }

 private:
  // Updates before the variance is frozen.
  static uint64_t before_freeze(const Config& config) {
    const uint64_t freeze_step = config.optimizer.params.intervals.var_freeze_step;
    return std::max<uint64_t>(freeze_step + 1 - config.sotto.step_offset, 1);
  }
};

class OuterStages final : public Stages {
 public:
  uint64_t full_precision_updates(const Config& config) const override {
    return config.sotto.outer->schedule.synchronous_steps();
  }
  UpdateCounts count(const Config& config, uint64_t updates) const override {
    const OuterLaunches launches = outer_launches(*config.sotto.outer, updates);
    UpdateCounts c;
    c.full_precision = std::min(updates, full_precision_updates(config)) + launches.dense;
    c.sync = launches.compressed;
    c.local = updates - c.full_precision - c.sync;
    return c;
  }
  Json report(const Config& config, uint64_t updates, const UpdateBytes& bytes) const override {
    const uint64_t before = full_precision_updates(config);
    Json rows = Json::array();
    if (before > 0) rows.push_back(stage_json("every_step", 1, before, bytes_json(bytes.full)));
    Json outer = stage_json("outer", before + 1, nullptr, bytes_json(bytes.share));
    if (updates > before) {
      const UpdateCounts all = count(config, updates);
      outer["updates"] = {{"launch", all.total() - all.local - before}, {"silent", all.local}};
    }
    rows.push_back(std::move(outer));
    return rows;
  }
};

}  // namespace

UpdateCounts Stages::count(const Config& config, uint64_t updates) const {
  UpdateCounts c;
  c.full_precision = std::min(updates, config.full_precision_updates());
  c.compressed = updates - c.full_precision;
  return c;
}

const Stages& one_stage() {
  static const OneStage stages;
  return stages;
}

const Stages& freeze_stages() {
  static const FreezeStages stages;
  return stages;
}

const Stages& interval_stages() {
  static const IntervalStages stages;
  return stages;
}

const Stages& outer_stages() {
  static const OuterStages stages;
  return stages;
}

OuterLaunches outer_launches(const OuterConfig& outer, uint64_t updates) {
  const uint64_t local = updates - std::min(updates, outer.schedule.synchronous_steps());
  const uint64_t launches = local / outer.spacing();
  OuterLaunches out;
  out.dense = launches;
  if (!outer.codec) return out;
  uint64_t rounds = 0;
  if (__builtin_mul_overflow(outer.dense_rounds, outer.fragments.count, &rounds)) return out;
  out.dense = std::min(launches, rounds);
  out.compressed = launches - out.dense;
  return out;
}

}  // namespace sotto
