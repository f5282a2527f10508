// The part of a report that is about outer steps: the keys with their resolved values, events of a
// period, bytes, gain.
#include "core/config/outer_period.h"
#include "core/config/sections.h"
#include "core/config/volume.h"

namespace sotto {
namespace {

Json schedule_json(const OuterConfig& c) {
  const OuterSchedule& s = c.schedule;
  Json measured = nullptr;
  if (s.automatic) measured = {{"steps", kMeasuredSteps}, {"period", measuring_period(c)}};
  return {{"period", s.automatic ? Json("auto") : Json(s.period)},
          {"delay", s.automatic && s.follows() ? Json("period") : Json(s.delay)},
          {"measured", measured},
          {"switch_step", s.switch_step},
          {"warmup_steps", s.warmup_steps},
          {"every_step", s.synchronous_steps() > 0 ? Json(outer_word("every_step", s.every_step))
                                                   : Json(nullptr)}};
}

Json rule_json(const OuterConfig& c) {
  const OuterRuleConfig& r = c.rule;
  const bool momentum = r.kind != OuterRule::kNone;
  Json out = {{"rule", outer_word("rule", r.kind)},
              {"form", c.late() && !c.averages_parameters() ? Json(outer_word("form", r.form))
                                                            : Json(nullptr)},
              {"alpha", c.averages_parameters() ? Json(nullptr) : Json(r.alpha)},
              {"beta", momentum ? Json(r.beta) : Json(nullptr)},
              {"lr_normalised", r.lr_normalised},
              {"freshness", r.freshness}};
  if (r.beta_by_world) {
    out["beta"] = "0 up to 16 ranks, 0.2 up to 32, 0.5 up to 64, 0.6 above";
  }
  if (r.freshness_by_world) out["freshness"] = "1 / ranks";
  return out;
}

Json penalty_json(const OuterConfig& c) {
  const OuterPenaltyConfig& p = c.penalty;
  Json out = {{"penalty", outer_word("penalty", p.kind)},
              {"lambda_const", nullptr},
              {"lambda_max", nullptr},
              {"eps", nullptr},
              {"granularity", nullptr},
              {"consensus_scalars", nullptr},
              {"auto_floor", p.auto_floor}};
  if (p.kind == OuterPenalty::kNone) return out;
  if (p.kind == OuterPenalty::kConst) {
    out["lambda_const"] = p.lambda_const;
    return out;
  }
  out["lambda_max"] = p.lambda_max;
  out["eps"] = p.eps;
  out["granularity"] = outer_word("granularity", p.granularity);
  out["consensus_scalars"] = p.consensus_scalars;
  return out;
}

Json clip_and_merge_json(const OuterConfig& c) {
  const bool clips = c.clip.kind != OuterClip::kNone;
  const bool weighs = c.merge.kind == OuterMerge::kLerp || c.merge.kind == OuterMerge::kPull;
  const bool units = clips && c.clip.kind != OuterClip::kRms && !c.rule.lr_normalised;
  return {{"clip", outer_word("clip", c.clip.kind)},
          {"phi", clips ? Json(c.clip.phi) : Json(nullptr)},
          {"clip_units", units ? Json(outer_word("clip_units", c.clip.units)) : Json(nullptr)},
          {"merge", outer_word("merge", c.merge.kind)},
          {"merge_a", weighs ? Json(c.merge.a) : Json(nullptr)}};
}

Json payload_json(const OuterConfig& c) {
  const Json lists = c.fragments.lists;
  return {{"preset", c.preset},
          {"payload", outer_word("payload", c.payload)},
          {"codec", c.codec ? codec_json(*c.codec) : Json(nullptr)},
          {"dense_rounds", c.codec ? Json(c.dense_rounds) : Json(nullptr)},
          {"fragments", lists.empty() ? Json(c.fragments.count) : lists},
          {"nonfinite", outer_word("nonfinite", c.nonfinite)}};
}

// Steps of a period, from its start: the use of a fragment's average may be in the next one.
Json events_json(const OuterConfig& c) {
  if (c.schedule.automatic) return nullptr;
  Json out = Json::array();
  for (uint64_t f = 0; f < c.fragments.count; ++f) {
    out.push_back(
        {{"fragment", f}, {"launch", c.offset(f)}, {"consume", c.offset(f) + c.schedule.delay}});
  }
  return out;
}

// The bound is that of averages that come a whole period late (specification, section 4.2).
Json gain_json(const OuterConfig& c) {
  const std::optional<double> gain = c.gain();
  const bool known = gain && !c.rule.beta_by_world && !c.rule.freshness_by_world;
  if (!known) return {{"gain", nullptr}, {"gain_bound", nullptr}, {"gain_with_floor", nullptr}};
  const bool bounded = c.late() && c.rule.freshness < 1;
  // Without the floor the penalty only shrinks the gain; a constant one has done so already.
  const double already = c.penalty.lambda_const;
  const double floor = c.floor() / already;
  return {{"gain", *gain},
          {"gain_bound", bounded ? Json(1) : Json(nullptr)},
          {"gain_with_floor",
           c.penalty.auto_floor ? Json(floor > 1 ? *gain / floor : *gain) : Json(nullptr)}};
}

Json bytes_json(const OuterConfig& c, uint64_t world, uint64_t n_params) {
  OuterBytes bytes;
  if (world != 0 && n_params != 0) bytes = outer_bytes(c, n_params, world);
  const auto number = [](const std::optional<uint64_t>& value) {
    return value ? Json(*value) : Json(nullptr);
  };
  return {{"payload_bytes_per_launch", number(bytes.launch)},
          {"payload_bytes_per_dense_launch", number(bytes.dense_launch)},
          {"payload_bytes_per_period", number(bytes.period)}};
}

}  // namespace

Json outer_json(const OuterConfig& outer, uint64_t world, uint64_t n_params) {
  const OuterConfig c = world == 0 ? outer : outer.resolved(world);
  Json out = payload_json(c);
  for (const Json& part : {schedule_json(c), rule_json(c), penalty_json(c), clip_and_merge_json(c),
                           gain_json(c), bytes_json(c, world, n_params)})
    out.update(part);
  out["events"] = events_json(c);
  return out;
}

}  // namespace sotto
