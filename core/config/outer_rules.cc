// "sotto.outer": what belongs together, what cannot be combined, and what has no effect.
#include <cmath>
#include <utility>

#include "core/config/optimizer_types.h"
#include "core/config/outer_section.h"
#include "core/config/sections.h"

namespace sotto {
namespace {

constexpr double kLambdaMaxDelta = 16;
constexpr double kLambdaMaxAnchorDiff = 2;
constexpr double kLargestOneBitBeta = 0.5;

bool is_gap(const OuterConfig& c) {
  return c.penalty.kind != OuterPenalty::kNone && c.penalty.kind != OuterPenalty::kConst;
}
bool is_fresh(const OuterConfig& c) { return c.rule.freshness > 0 || c.rule.freshness_by_world; }
bool is_all_fresh(const OuterConfig& c) { return c.rule.freshness == 1; }
bool compresses(const OuterConfig& c) { return c.codec.has_value(); }
bool is_sparse(const OuterConfig& c) { return c.codec && c.codec->row().sparse; }
bool weighs(const OuterConfig& c) {
  return c.merge.kind == OuterMerge::kLerp || c.merge.kind == OuterMerge::kPull;
}

// For every number of ranks.
OuterConfig with_largest_beta(const OuterConfig& c) { return c.resolved(UINT64_MAX); }

std::string freshness_text(const OuterConfig& c) {
  return c.rule.freshness_by_world ? "1/W" : fmt::format("{}", c.rule.freshness);
}
std::string period_text(const OuterSchedule& s) {
  return s.automatic ? "auto" : fmt::format("{}", s.period);
}
// How delay becomes the period, or something else what goes with the delay.
std::string delay_remedy(const OuterSchedule& s, std::string_view otherwise) {
  return s.automatic ? fmt::format("leave delay out or set {}", otherwise)
                     : fmt::format("set delay to {} or {}", s.period, otherwise);
}
std::string codec_text(const OuterConfig& c) { return std::string(codec_name(c.codec->kind)); }

// A key without effect under a condition. reset gives it its neutral value, and says whether it had
// another one.
struct IdleKey {
  std::string_view key;
  bool (*idle)(const OuterConfig&);
  std::string_view why;
  bool (*reset)(OuterConfig&);
};

constexpr std::string_view kMean = "rule none makes the mean of parameters the anchor";
constexpr std::string_view kNoMomentum = "rule none has no momentum";
constexpr std::string_view kNotLate =
    "no anchor moves between launch and use unless delay is period and merge is reset or lerp";

template <class T>
bool change(T& field, T value) {
  return std::exchange(field, value) != value;
}
bool has_no_momentum(const OuterConfig& c) { return c.rule.kind == OuterRule::kNone; }
bool has_no_gap(const OuterConfig& c) { return !is_gap(c); }

// In an order in which every condition looks at what is settled.
constexpr IdleKey kIdleKeys[] = {
    {"every_step", [](const OuterConfig& c) { return c.schedule.synchronous_steps() == 0; },
     "it acts before outer steps begin, with switch_step or warmup_steps",
     [](OuterConfig& c) { return change(c.schedule.every_step, OuterEveryStep::kParameters); }},
    {"alpha", [](const OuterConfig& c) { return c.averages_parameters(); }, kMean,
     [](OuterConfig& c) { return change(c.rule.alpha, 1.0); }},
    {"beta", has_no_momentum, kNoMomentum,
     [](OuterConfig& c) {
       c.rule.beta_by_world = false;
       return change(c.rule.beta, 0.0);
     }},
    {"lr_normalised", has_no_momentum, kNoMomentum,
     [](OuterConfig& c) { return change(c.rule.lr_normalised, false); }},
    {"clip", has_no_momentum, kNoMomentum,
     [](OuterConfig& c) { return change(c.clip.kind, OuterClip::kNone); }},
    {"phi", [](const OuterConfig& c) { return c.clip.kind == OuterClip::kNone; },
     "it is the limit of a clip, and clip is none",
     [](OuterConfig& c) { return change(c.clip.phi, 0.0); }},
    {"clip_units",
     [](const OuterConfig& c) {
       return c.rule.lr_normalised || c.clip.kind == OuterClip::kNone ||
              c.clip.kind == OuterClip::kRms;
     },
     "it acts with clip coord and norm, without lr_normalised",
     [](OuterConfig& c) { return change(c.clip.units, OuterClipUnits::kParam); }},
    {"form", [](const OuterConfig& c) { return c.averages_parameters(); }, kMean,
     [](OuterConfig& c) { return change(c.rule.form, OuterForm::kDelta); }},
    {"form", [](const OuterConfig& c) { return !c.late(); }, kNotLate,
     [](OuterConfig& c) { return change(c.rule.form, OuterForm::kDelta); }},
    {"penalty", [](const OuterConfig& c) { return c.averages_parameters(); }, kMean,
     [](OuterConfig& c) { return change(c.penalty.kind, OuterPenalty::kNone); }},
    {"penalty", [](const OuterConfig& c) { return is_gap(c) && !c.late(); }, kNotLate,
     [](OuterConfig& c) { return change(c.penalty.kind, OuterPenalty::kNone); }},
    {"penalty", is_all_fresh, "freshness 1 leaves nothing that is late",
     [](OuterConfig& c) { return change(c.penalty.kind, OuterPenalty::kNone); }},
    {"lambda_const", [](const OuterConfig& c) { return c.penalty.kind != OuterPenalty::kConst; },
     "it acts with penalty const",
     [](OuterConfig& c) { return change(c.penalty.lambda_const, 1.0); }},
    {"lambda_max", has_no_gap, "it bounds the penalties gap_rel, gap_ema and gap_inner",
     [](OuterConfig& c) { return change(c.penalty.lambda_max, kLambdaMaxDelta); }},
    {"eps", has_no_gap, "it acts with the penalties gap_rel, gap_ema and gap_inner",
     [](OuterConfig& c) { return change(c.penalty.eps, OuterPenaltyConfig().eps); }},
    {"granularity", has_no_gap, "it acts with the penalties gap_rel, gap_ema and gap_inner",
     [](OuterConfig& c) { return change(c.penalty.granularity, OuterGranularity::kGlobal); }},
    {"consensus_scalars", has_no_gap, "it acts with the penalties gap_rel, gap_ema and gap_inner",
     [](OuterConfig& c) { return change(c.penalty.consensus_scalars, false); }},
    {"merge_a", [](const OuterConfig& c) { return !weighs(c); }, "it acts with merge lerp and pull",
     [](OuterConfig& c) { return change(c.merge.a, 0.0); }},
    {"dense_rounds", [](const OuterConfig& c) { return !compresses(c); }, "there is no codec",
     [](OuterConfig& c) { return change(c.dense_rounds, uint64_t{0}); }},
};

// One setting beside another that does not go with it.
struct Clash {
  std::string_view key;  // what has to change
  std::string_view found;
  std::string_view other;  // beside what
  std::string with;
  std::string allowed;
  std::string remedy;
};

Status refuse(const OuterReading& r, const Clash& clash) {
  return r.findings.fail(
      r.path_of({clash.key, clash.other}),
      fmt::format("found {} {} with {} {}, allowed is {}; {}", clash.key, clash.found, clash.other,
                  clash.with, clash.allowed, clash.remedy));
}

Status check_required(const OuterReading& r) {
  const auto missing = [&](std::string_view key, std::string_view what) {
    return r.findings.fail(r.reader.path_of(key),
                           fmt::format("missing; preset {} needs {}", r.preset.name, what));
  };
  const OuterSchedule& s = r.outer.schedule;
  if (s.period == 0) return missing("period", "a number of inner steps, >= 1");
  for (const std::string_view key : r.preset.required) {
    const bool otherwise = key == "switch_step" && r.reader.has("warmup_steps");
    if (!key.empty() && !r.reader.has(key) && !otherwise)
      return missing(
          key, key == "fragments" ? "their number or a list of them" : "a number of inner steps");
  }
  if (s.switch_step == 0 || s.warmup_steps == 0) return ok_status();
  return r.findings.fail(r.reader.path_of("warmup_steps"),
                         fmt::format("found {} beside switch_step {}, which says the same; leave "
                                     "one of them out",
                                     s.warmup_steps, s.switch_step));
}

Status check_delay(const OuterReading& r) {
  const OuterSchedule& s = r.outer.schedule;
  if (s.delay > s.period) {
    return r.findings.fail(r.path_of({"delay", "period"}),
                           fmt::format("found delay {} with period {}, allowed is 0 to the period; "
                                       "an average is used before its fragment is sent again",
                                       s.delay, s.period));
  }
  const OuterMerge merge = r.outer.merge.kind;
  const bool pull = merge == OuterMerge::kPull;
  const bool fits = pull                                ? s.delay == s.period
                    : merge == OuterMerge::kAddProgress ? s.delay > 0
                                                        : true;
  if (fits) return ok_status();
  return refuse(r, {.key = "delay",
                    .found = fmt::format("{}", s.delay),
                    .other = "merge",
                    .with = std::string(outer_word("merge", merge)),
                    .allowed = fmt::format("{}the period, {}", pull ? "" : "1 to ", period_text(s)),
                    .remedy = delay_remedy(s, "merge to reset")});
}

Status check_fragments(const OuterReading& r) {
  const OuterSchedule& s = r.outer.schedule;
  const uint64_t count = r.outer.fragments.count;
  if (s.automatic || s.period % count == 0) return ok_status();
  uint64_t fits = count;
  while (s.period % fits != 0) --fits;
  return r.findings.fail(
      r.reader.path_of("fragments"),
      fmt::format("found {} fragments with period {}, allowed is a number that divides the period: "
                  "launches are evenly spaced; {} would fit",
                  count, s.period, fits));
}

Status check_payload(const OuterReading& r) {
  const OuterConfig& c = r.outer;
  if (!compresses(c)) return ok_status();
  if (c.payload == OuterPayload::kParams) {
    return refuse(r, {.key = "codec",
                      .found = codec_text(c),
                      .other = "payload",
                      .with = "params",
                      .allowed = "none",
                      .remedy = "set payload to delta: what a codec loses is made up for in the "
                                "next delta"});
  }
  if (!is_sparse(c) || c.merge.kind == OuterMerge::kReset || c.merge.kind == OuterMerge::kLerp)
    return ok_status();
  return refuse(r, {.key = "merge",
                    .found = outer_word("merge", c.merge.kind),
                    .other = "codec",
                    .with = codec_text(c),
                    .allowed = "reset, lerp",
                    .remedy = "set merge to reset"});
}

Status check_freshness(const OuterReading& r) {
  const OuterConfig& c = r.outer;
  if (!is_fresh(c)) return ok_status();
  const auto clash = [&](std::string_view key, std::string_view found, std::string_view allowed) {
    return refuse(r, {.key = key,
                      .found = found,
                      .other = "freshness",
                      .with = freshness_text(c),
                      .allowed = std::string(allowed),
                      .remedy = fmt::format("set {} to {} or freshness to 0", key, allowed)});
  };
  if (c.payload != OuterPayload::kDelta) return clash("payload", "params", "delta");
  if (c.merge.kind != OuterMerge::kReset)
    return clash("merge", outer_word("merge", c.merge.kind), "reset");
  if (!c.schedule.follows()) {
    return refuse(r, {.key = "delay",
                      .found = fmt::format("{}", c.schedule.delay),
                      .other = "freshness",
                      .with = freshness_text(c),
                      .allowed = fmt::format("the period, {}", period_text(c.schedule)),
                      .remedy = delay_remedy(c.schedule, "freshness to 0")});
  }
  if (c.rule.form != OuterForm::kDelta) return clash("form", "anchor_diff", "delta");
  if (c.rule.lr_normalised) return clash("lr_normalised", "true", "false");
  return ok_status();
}

// Why the floor has nothing to limit; empty: it has.
std::string floor_without_use(const OuterConfig& c) {
  if (c.averages_parameters()) return "rule none and payload params";
  if (!c.schedule.follows())
    return fmt::format("delay {} and period {}", c.schedule.delay, period_text(c.schedule));
  if (!c.late()) return fmt::format("merge {}", outer_word("merge", c.merge.kind));
  if (c.rule.form != OuterForm::kDelta) return "form anchor_diff";
  return is_all_fresh(c) ? "freshness 1" : "";
}

// GAIN_TOO_HIGH of the specification.
void warn_of_gain(const OuterReading& r) {
  const OuterConfig c = with_largest_beta(r.outer);
  if (!floor_without_use(r.outer).empty() || c.penalty.auto_floor) return;
  const double gain = *c.gain();
  if (gain <= 1) return;
  const bool divided = c.penalty.kind == OuterPenalty::kConst;
  r.findings.warn(
      r.path_of({"alpha", "beta", "delay", "preset"}),
      fmt::format(
          "GAIN_TOO_HIGH: alpha {} and beta {} are a gain alpha / {}(1 - beta){} of {:.4g}; "
          "averages that come a whole period late, as with delay {}, are stable up to a "
          "gain of 1/h_max, at most 1 to be sure; set alpha to at most {:.4g}, or "
          "auto_floor to true",
          c.rule.alpha, c.rule.beta, divided ? "(lambda_const " : "", divided ? ")" : "", gain,
          period_text(c.schedule), c.rule.alpha / gain));
}

void warn_of_codec(const OuterReading& r) {
  const OuterConfig c = with_largest_beta(r.outer);
  if (is_sparse(c) && c.rule.kind != OuterRule::kNone) {
    r.findings.warn(r.path_of({"rule", "codec", "preset"}),
                    fmt::format("MOMENTUM_AND_ERROR_FEEDBACK: found {} with codec {}, whose error "
                                "feedback takes the place of momentum; set rule to none",
                                outer_word("rule", c.rule.kind), codec_text(c)));
  }
  if (!c.codec || c.codec->kind != CodecKind::kOnebit) return;
  if (c.schedule.delay == 0 || c.rule.beta <= kLargestOneBitBeta) return;
  r.findings.warn(r.path_of({"codec"}),
                  fmt::format("onebit with beta {} and delay {}: error feedback delays small "
                              "elements further; set beta to at most {}, or compare the loss with "
                              "a run without codec",
                              c.rule.beta,
                              c.schedule.follows() ? period_text(c.schedule)
                                                   : fmt::format("{}", c.schedule.delay),
                              kLargestOneBitBeta));
}

}  // namespace

Status check_outer_schedule(const OuterReading& r) {
  SOTTO_TRY(check_required(r));
  SOTTO_TRY(check_delay(r));
  return check_fragments(r);
}

void settle_idle_outer(OuterReading& r) {
  for (const IdleKey& row : kIdleKeys) {
    if (!row.idle(r.outer)) continue;
    const bool acted = row.reset(r.outer);
    if (!r.reader.has(row.key)) continue;
    const std::string path = r.reader.path_of(row.key);
    if (acted) r.findings.warn(path, fmt::format("no effect: {}", row.why));
    r.findings.idle(path, row.why);
  }
}

Status check_outer_numbers(const OuterReading& r) {
  const OuterConfig& c = r.outer;
  const std::string_view rule = outer_word("rule", c.rule.kind);
  struct Number {
    std::string_view key;
    double value;
    std::string_view of, word;
  };
  const Number numbers[] = {
      {"alpha", c.rule.alpha, "rule", rule},
      {"beta", c.rule.beta, "rule", rule},
      {"lambda_const", c.penalty.lambda_const, "penalty", "const"},
      {"phi", c.clip.phi, "clip", outer_word("clip", c.clip.kind)},
      {"merge_a", c.merge.a, "merge", outer_word("merge", c.merge.kind)},
  };
  for (const Number& n : numbers) {
    if (!std::isnan(n.value)) continue;
    const KeySpec* spec = find_key(ConfigSection::kOuter, n.key, ~0u);
    return r.findings.fail(r.reader.path_of(n.key), fmt::format("missing; {} {} needs a number {}",
                                                                n.of, n.word, spec->range.text()));
  }
  return ok_status();
}

Status check_outer_choices(const OuterReading& r) {
  const OuterConfig& c = r.outer;
  SOTTO_TRY(check_payload(r));
  SOTTO_TRY(check_freshness(r));
  const OuterPenalty penalty = c.penalty.kind;
  if (c.penalty.granularity == OuterGranularity::kElement && is_gap(c) &&
      penalty != OuterPenalty::kGapRel) {
    return refuse(r, {.key = "granularity",
                      .found = "element",
                      .other = "penalty",
                      .with = std::string(outer_word("penalty", penalty)),
                      .allowed = penalty == OuterPenalty::kGapInner ? "global" : "global, tensor",
                      .remedy = "set penalty to gap_rel for a gap of each element"});
  }
  if (c.penalty.granularity == OuterGranularity::kTensor && penalty == OuterPenalty::kGapInner) {
    return refuse(r, {.key = "granularity",
                      .found = "tensor",
                      .other = "penalty",
                      .with = "gap_inner",
                      .allowed = "global",
                      .remedy = "set penalty to gap_rel or gap_ema for a gap of each tensor"});
  }
  if (c.penalty.consensus_scalars && c.penalty.granularity != OuterGranularity::kGlobal) {
    return refuse(r, {.key = "granularity",
                      .found = outer_word("granularity", c.penalty.granularity),
                      .other = "consensus_scalars",
                      .with = "true",
                      .allowed = "global",
                      .remedy = "set consensus_scalars to false or granularity to global: ranks "
                                "share one gap"});
  }
  return ok_status();
}

Status settle_outer_penalty(OuterReading& r) {
  OuterPenaltyConfig& penalty = r.outer.penalty;
  if (std::isnan(penalty.lambda_max)) {
    penalty.lambda_max =
        r.outer.rule.form == OuterForm::kAnchorDiff ? kLambdaMaxAnchorDiff : kLambdaMaxDelta;
  }
  const std::string no_use = floor_without_use(r.outer);
  if (penalty.auto_floor && !no_use.empty()) {
    if (r.reader.has("auto_floor")) {
      return r.findings.fail(
          r.reader.path_of("auto_floor"),
          fmt::format("found true with {}, allowed is false; the floor limits the gain of form "
                      "delta with delay = period, merge reset or lerp and freshness below 1",
                      no_use));
    }
    penalty.auto_floor = false;
  }
  if (!is_gap(r.outer) || !is_fresh(r.outer) || is_all_fresh(r.outer)) return ok_status();
  // Anchors differ between ranks, so their gaps do.
  if (penalty.granularity != OuterGranularity::kGlobal) {
    return refuse(r, {.key = "granularity",
                      .found = outer_word("granularity", penalty.granularity),
                      .other = "freshness",
                      .with = freshness_text(r.outer),
                      .allowed = "global",
                      .remedy = "set granularity to global: all ranks use the gap of rank 0"});
  }
  if (r.reader.has("consensus_scalars") && !penalty.consensus_scalars) {
    const std::string path = r.reader.path_of("consensus_scalars");
    const std::string why =
        fmt::format("with penalty {} and freshness {} all ranks use the gap of rank 0",
                    outer_word("penalty", penalty.kind), freshness_text(r.outer));
    r.findings.warn(path, fmt::format("no effect: {}", why));
    r.findings.idle(path, why);
  }
  penalty.consensus_scalars = true;
  return ok_status();
}

void warn_of_outer(const OuterReading& r) {
  warn_of_gain(r);
  warn_of_codec(r);
}

Status check_outer_in_file(const Config& config, Findings& findings) {
  const OptimizerKind kind = config.optimizer.kind;
  if (kind == OptimizerKind::kZeroOneAdam) {
    return findings.fail(
        "optimizer.type",
        fmt::format("found {} with sotto.outer, allowed is {}; its own local steps are outer steps "
                    "already, so leave sotto.outer out or take another type",
                    optimizer_kind_name(kind), optimizer_names([](const OptimizerType& t) {
                      return t.kind != OptimizerKind::kZeroOneAdam;
                    })));
  }
  if (config.sotto.mode == Mode::kCompat) {
    return findings.fail("sotto.mode",
                         "found compat with sotto.outer, allowed is strict; the published "
                         "arithmetic has no outer steps");
  }
  const bool gradients = config.sotto.outer->schedule.averages_gradients();
  if (config.sotto.gradient_codec) {
    return findings.fail(
        "sotto.gradient_codec",
        fmt::format("found with sotto.outer, {}; write it as sotto.outer.codec or leave it out",
                    gradients ? "whose steps before outer steps average gradients in full precision"
                              : "whose inner steps send no gradients"));
  }
  if (!gradients || !optimizer_is_one_bit(kind)) return ok_status();
  return findings.fail(
      "sotto.outer.every_step",
      fmt::format(
          "found gradients with optimizer.type {}, whose compressed stage averages momentum "
          "in their place, allowed is parameters; or take one of {}",
          optimizer_kind_name(kind),
          optimizer_names([](const OptimizerType& t) { return !optimizer_is_one_bit(t.kind); })));
}

void warn_outer_in_file(const Config& config, Findings& findings) {
  const std::string_view why = "inner steps send no gradients while sotto.outer is there";
  const auto idle = [&](std::string_view path) {
    if (!findings.noted(path)) return;
    findings.warn(path, fmt::format("no effect: {}", why));
    findings.idle(path, why);
  };
  for (const char* key :
       {"communication_data_type", "prescale_gradients", "gradient_predivide_factor"}) {
    if (!config.sotto.outer->schedule.averages_gradients()) idle(key);
  }
  if (!optimizer_is_one_bit(config.optimizer.kind)) return;
  for (const char* key : {"scale", "granularity", "chunk_align"})
    idle(fmt::format("sotto.{}", key));
}

}  // namespace sotto
