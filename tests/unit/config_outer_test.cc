// "sotto.outer": presets, keys, warnings, keys without effect, and what follows from the settings.
#include "core/config/outer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "core/config/config.h"
#include "core/config/keys.h"
#include "core/config/outer_presets.h"
#include "tests/unit/config_outer.h"

namespace sotto {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

// ---- presets

struct Row {
  const char* json;
  const char* words;  // payload, rule, form, penalty, clip, merge
  uint64_t period, delay;
  double alpha, beta;  // of 32 ranks
  bool floor;
  double phi, freshness, a;
};

// The table of the specification, section 4.5.
const std::vector<Row> kTable = {
    {R"({"preset": "co2"})", "delta heavy_ball delta gap_ema rms reset", 48, 48, 1, 0.2, true, 10,
     0, 0},
    {R"({"preset": "co2_paper"})", "delta heavy_ball anchor_diff gap_inner coord reset", 48, 48, 1,
     0.2, false, 1, 0, 0},
    {R"({"preset": "delta_corrected"})", "delta heavy_ball delta none none reset", 48, 48, 1, 0.2,
     false, 0, 1, 0},
    {R"({"preset": "slowmo"})", "params heavy_ball delta none none reset", 48, 0, 1, 0.5, false, 0,
     0, 0},
    {R"({"preset": "local_sgd", "period": 8})", "params none delta none none reset", 8, 0, 1, 0,
     false, 0, 0, 0},
    {R"({"preset": "post_local_sgd", "period": 8, "switch_step": 100})",
     "params none delta none none reset", 8, 0, 1, 0, false, 0, 0, 0},
    {R"({"preset": "bmuf", "period": 8, "alpha": 1.5, "beta": 0.75})",
     "params heavy_ball delta none none reset", 8, 0, 1.5, 0.75, false, 0, 0, 0},
    {R"({"preset": "diloco"})", "delta nesterov delta none none reset", 500, 0, 0.7, 0.9, false, 0,
     0, 0},
    {R"({"preset": "delayed_diloco"})", "delta nesterov delta none none reset", 30, 30, 0.4, 0.9,
     false, 0, 0, 0},
    {R"({"preset": "eager_diloco"})", "delta nesterov delta none none reset", 30, 30, 0.4, 0.9,
     false, 0, 1.0 / 32, 0},
    {R"({"preset": "streaming_diloco", "period": 40, "delay": 5, "fragments": 4})",
     "delta nesterov delta none none lerp", 40, 5, 0.4, 0.9, false, 0, 0, 0.5},
    {R"({"preset": "overlap_local_sgd"})", "params heavy_ball delta none none pull", 48, 48, 1, 0.7,
     false, 0, 0, 0.6},
    {R"({"preset": "cocod"})", "params none delta none none add_progress", 48, 48, 1, 0, false, 0,
     0, 0},
    {R"({"preset": "sparse_loco"})", "delta none delta none none reset", 30, 0, 1, 0, false, 0, 0,
     0},
};

TEST(ConfigOuter, PresetsAreTheTable) {
  std::set<std::string_view> seen;
  for (const Row& row : kTable) {
    const OuterConfig c = parse(row.json).resolved(32);
    SCOPED_TRACE(row.json);
    seen.insert(c.preset);
    EXPECT_EQ(fmt::format("{} {} {} {} {} {}", outer_word("payload", c.payload),
                          outer_word("rule", c.rule.kind), outer_word("form", c.rule.form),
                          outer_word("penalty", c.penalty.kind), outer_word("clip", c.clip.kind),
                          outer_word("merge", c.merge.kind)),
              row.words);
    EXPECT_EQ(c.schedule.period, row.period);
    EXPECT_EQ(c.schedule.delay, row.delay);
    EXPECT_EQ(c.rule.alpha, row.alpha);
    EXPECT_EQ(c.rule.beta, row.beta);
    EXPECT_EQ(c.penalty.auto_floor, row.floor);
    EXPECT_EQ(c.clip.phi, row.phi);
    EXPECT_EQ(c.rule.freshness, row.freshness);
    EXPECT_EQ(c.merge.a, row.a);
    const bool slowmo = c.preset == "slowmo", sparse = c.preset == "sparse_loco";
    EXPECT_EQ(c.rule.lr_normalised, slowmo);
    EXPECT_EQ(c.fragments.count, c.preset == "streaming_diloco" ? 4u : 1u);
    EXPECT_EQ(c.schedule.synchronous_steps(), c.preset == "post_local_sgd" ? 100u : 0u);
    EXPECT_EQ(c.penalty.lambda_max, c.preset == "co2_paper" ? 2 : 16);
    EXPECT_EQ(c.penalty.eps, 1e-12);
    EXPECT_EQ(c.penalty.granularity, OuterGranularity::kGlobal);
    EXPECT_FALSE(c.penalty.consensus_scalars);
    EXPECT_EQ(c.clip.units, OuterClipUnits::kParam);
    ASSERT_EQ(c.codec.has_value(), sparse);
    if (sparse) {
      EXPECT_EQ(c.codec->kind, CodecKind::kTopk);
      EXPECT_EQ(c.codec->sparse.error_decay, 0.95);
      EXPECT_EQ(c.codec->sparse.block, 4096u);
      EXPECT_EQ(c.codec->sparse.k, 64u);
      EXPECT_EQ(c.codec->sparse.bits, 2u);
    }
    EXPECT_EQ(c.nonfinite, OuterNonfinite::kSkipRank);
    EXPECT_EQ(c.schedule.every_step, OuterEveryStep::kParameters);
  }
  EXPECT_EQ(seen.size(), std::size(kOuterPresets));
}

TEST(ConfigOuter, ThePresetIsCo2) { EXPECT_EQ(parse("{}").preset, "co2"); }

TEST(ConfigOuter, NumbersByWorld) {
  const OuterConfig paper = parse(R"({"preset": "co2_paper"})");
  EXPECT_TRUE(paper.rule.beta_by_world);
  const std::vector<std::pair<uint64_t, double>> betas = {
      {1, 0}, {16, 0}, {17, 0.2}, {32, 0.2}, {33, 0.5}, {64, 0.5}, {65, 0.6}, {4096, 0.6}};
  for (const auto& [world, beta] : betas) EXPECT_EQ(paper.resolved(world).rule.beta, beta) << world;
  EXPECT_FALSE(paper.resolved(2).rule.beta_by_world);
  EXPECT_EQ(parse(R"({"preset": "co2_paper", "beta": 0.25})").resolved(64).rule.beta, 0.25);

  const OuterConfig eager = parse(R"({"preset": "eager_diloco"})");
  EXPECT_TRUE(eager.rule.freshness_by_world);
  EXPECT_EQ(eager.resolved(1).rule.freshness, 1);
  EXPECT_EQ(eager.resolved(8).rule.freshness, 0.125);
  EXPECT_EQ(parse(R"({"preset": "eager_diloco", "freshness": 0.5})").resolved(8).rule.freshness,
            0.5);
}

// A key that is changed takes what depends on it along.
TEST(ConfigOuter, OverridesOfPresets) {
  EXPECT_EQ(parse(R"({"preset": "co2", "period": 12})").schedule.delay, 12u);
  EXPECT_EQ(parse(R"({"preset": "diloco", "period": 12})").schedule.delay, 0u);
  const OuterConfig blocking = parse(R"({"preset": "co2", "delay": 0})");
  EXPECT_FALSE(blocking.penalty.auto_floor);
  EXPECT_EQ(blocking.penalty.kind, OuterPenalty::kNone);
  EXPECT_THAT(blocking.warnings, IsEmpty());
  EXPECT_EQ(parse(R"({"preset": "co2_paper", "delay": 0})").rule.form, OuterForm::kDelta);
  EXPECT_EQ(parse(R"({"preset": "co2_paper", "clip": "rms"})").clip.phi, 10);
  EXPECT_EQ(parse(R"({"preset": "co2", "clip": "none"})").clip.phi, 0);
  EXPECT_EQ(parse(R"({"form": "anchor_diff"})").penalty.lambda_max, 2);
  EXPECT_EQ(parse(R"({"form": "anchor_diff", "lambda_max": 5})").penalty.lambda_max, 5);
  EXPECT_FALSE(parse(R"({"form": "anchor_diff"})").penalty.auto_floor);
  EXPECT_FALSE(parse(R"({"preset": "slowmo", "rule": "none"})").rule.lr_normalised);
  EXPECT_EQ(parse(R"({"preset": "co2_paper", "rule": "none"})").resolved(64).rule.beta, 0);
  const OuterConfig warm = parse(
      R"({"preset": "local_sgd", "period": 4, "warmup_steps": 20, "every_step": "parameters"})");
  EXPECT_EQ(warm.schedule.synchronous_steps(), 20u);
  EXPECT_FALSE(warm.schedule.averages_gradients());
  EXPECT_EQ(parse(R"({"preset": "post_local_sgd", "period": 4, "warmup_steps": 20})")
                .schedule.synchronous_steps(),
            20u);
}

TEST(ConfigOuter, EveryKeyIsRead) {
  const OuterConfig c = parse(R"({"preset": "diloco", "payload": "delta", "period": 12, "delay": 12,
      "rule": "heavy_ball", "form": "delta", "alpha": 0.25, "beta": 0.125, "penalty": "gap_rel",
      "lambda_max": 3, "granularity": "tensor", "auto_floor": true, "eps": 0, "clip": "norm",
      "phi": 2.5, "clip_units": "grad", "merge": "lerp", "merge_a": 0.75,
      "codec": {"type": "int8", "block": 64}, "dense_rounds": 3, "fragments": [[0, 2], [1]],
      "switch_step": 7, "nonfinite": "error"})");
  EXPECT_EQ(c.rule.kind, OuterRule::kHeavyBall);
  EXPECT_EQ(c.rule.alpha, 0.25);
  EXPECT_EQ(c.rule.beta, 0.125);
  EXPECT_EQ(c.penalty.kind, OuterPenalty::kGapRel);
  EXPECT_EQ(c.penalty.lambda_max, 3);
  EXPECT_EQ(c.penalty.granularity, OuterGranularity::kTensor);
  EXPECT_TRUE(c.penalty.auto_floor);
  EXPECT_EQ(c.penalty.eps, 0);
  EXPECT_EQ(c.clip.kind, OuterClip::kNorm);
  EXPECT_EQ(c.clip.phi, 2.5);
  EXPECT_EQ(c.clip.units, OuterClipUnits::kGrad);
  EXPECT_EQ(c.merge.kind, OuterMerge::kLerp);
  EXPECT_EQ(c.merge.a, 0.75);
  ASSERT_TRUE(c.codec);
  EXPECT_EQ(c.codec->kind, CodecKind::kInt8);
  EXPECT_EQ(c.codec->block, 64u);
  EXPECT_EQ(c.dense_rounds, 3u);
  EXPECT_THAT(c.fragments.lists, ElementsAre(ElementsAre(0, 2), ElementsAre(1)));
  EXPECT_EQ(c.fragments.count, 2u);
  EXPECT_EQ(c.schedule.switch_step, 7u);
  EXPECT_EQ(c.nonfinite, OuterNonfinite::kError);
  EXPECT_THAT(c.warnings, IsEmpty());
  EXPECT_EQ(parse(R"({"penalty": "const", "lambda_const": 4})").penalty.lambda_const, 4);
  EXPECT_TRUE(parse(R"({"consensus_scalars": true})").penalty.consensus_scalars);
  EXPECT_TRUE(parse(R"({"lr_normalised": true, "delay": 0})").rule.lr_normalised);
}

TEST(ConfigOuter, WordsInAnyCase) {
  const OuterConfig c = parse(R"({"preset": "DiLoCo", "payload": "DELTA", "rule": "Heavy_Ball",
      "delay": 500, "penalty": "GAP_EMA", "auto_floor": true, "clip": "COORD", "phi": 1,
      "merge": "LERP", "merge_a": 0, "codec": "INT8", "nonfinite": "PASS"})");
  EXPECT_EQ(c.preset, "diloco");
  EXPECT_EQ(c.rule.kind, OuterRule::kHeavyBall);
  EXPECT_EQ(c.penalty.kind, OuterPenalty::kGapEma);
  EXPECT_EQ(c.clip.kind, OuterClip::kCoordinate);
  EXPECT_EQ(c.merge.kind, OuterMerge::kLerp);
  EXPECT_EQ(c.codec->kind, CodecKind::kInt8);
  EXPECT_EQ(c.nonfinite, OuterNonfinite::kPass);
  EXPECT_TRUE(parse(R"({"period": "AUTO"})").schedule.automatic);
}

// Delay is the period if the preset's is, and stays what the file says.
TEST(ConfigOuter, AutomaticPeriods) {
  const OuterConfig late = parse(R"({"period": "auto"})");
  EXPECT_TRUE(late.schedule.follows() && late.late());
  EXPECT_TRUE(check_supported(late).ok());
  for (const uint64_t delay : {0, 5, 48, 500}) {
    const OuterConfig c = parse(fmt::format(R"({{"period": "auto", "delay": {}}})", delay));
    EXPECT_FALSE(c.schedule.follows()) << delay;
    EXPECT_EQ(c.schedule.with_period(1000).delay, delay);
    EXPECT_FALSE(c.late());
  }
  const OuterSchedule longer = late.schedule.with_period(7);
  EXPECT_EQ(longer.period, 7u);
  EXPECT_EQ(longer.delay, 7u);
  EXPECT_EQ(parse(R"({"preset": "diloco", "period": "auto"})").schedule.delay, 0u);
  EXPECT_TRUE(parse(R"({"preset": "local_sgd", "period": "auto"})").schedule.automatic);
  EXPECT_EQ(parse(R"({"period": "auto", "fragments": 7})").fragments.count, 7u);
}

TEST(ConfigOuter, CodecAsAWord) {
  const OuterConfig word = parse(R"({"codec": "1bit"})");
  const OuterConfig object = parse(R"({"codec": {"type": "onebit"}})");
  ASSERT_TRUE(word.codec && object.codec);
  EXPECT_EQ(word.codec->kind, CodecKind::kOnebit);
  EXPECT_EQ(word.codec->chunk_align, object.codec->chunk_align);
  EXPECT_EQ(word.codec->residual, object.codec->residual);
  EXPECT_EQ(word.dense_rounds, 1u);
  EXPECT_FALSE(parse(R"({"codec": "none"})").codec);
  const OuterConfig dense = parse(R"({"preset": "sparse_loco", "codec": "none"})");
  EXPECT_FALSE(dense.codec);
  // A codec that is given replaces the preset's as a whole.
  const OuterConfig other =
      parse(R"({"preset": "sparse_loco", "codec": {"type": "TopK", "k": 32}})");
  EXPECT_EQ(other.codec->sparse.k, 32u);
  EXPECT_EQ(other.codec->sparse.error_decay, 1);
  EXPECT_TRUE(check_supported(dense).ok());
  const Config file = parse_file(R"({"codec": "int4"})");
  EXPECT_EQ(note_of(file, "sotto.outer.codec").disposition, "acts");
  EXPECT_EQ(note_of(parse_file(R"({"codec": {"type": "int4"}})"), "sotto.outer.codec.type").value,
            "\"int4\"");
}

// ---- where the text comes from

TEST(ConfigOuter, AnObjectOrAWholeFile) {
  EXPECT_EQ(parse("{\"preset\": \"diloco\", // as published\n}").preset, "diloco");
  EXPECT_EQ(parse("eyJwcmVzZXQiOiAiZGlsb2NvIn0").preset, "diloco");
  EXPECT_EQ(
      parse(R"({"optimizer": {"type": "SGD"}, "sotto": {"outer": {"period": 7}}})").schedule.period,
      7u);
  EXPECT_THAT(parse(R"({"sotto": {"outer": {"preset": "delayed_diloco"}}})").warnings,
              ElementsAre(HasSubstr("sotto.outer.preset: GAIN_TOO_HIGH")));
  EXPECT_EQ(parse_outer("{\n \"beta\": 1}").status().text(),
            "configuration: line 2, column 10: outer.beta: found 1, allowed is a number in [0, 1)");
  EXPECT_EQ(parse_outer(R"({"sotto": {"outer": {"beta": 1}}})").status().text(),
            "configuration: line 1, column 30: sotto.outer.beta: found 1, allowed is a number in "
            "[0, 1)");
  EXPECT_EQ(parse_outer(R"({"optimizer": {"type": "SGD"}})").status().text(),
            "configuration: sotto.outer: missing; add \"sotto\": {\"outer\": {\"preset\": "
            "\"co2\"}} or hand over such an object itself");
  EXPECT_EQ(parse_outer("[1]").status().text(),
            "configuration: found [1], expected an object {...}");
  // A key tells a file from an object.
  for (const KeySpec& key : key_table()) {
    if (key.section != ConfigSection::kOuter) continue;
    EXPECT_EQ(find_key(ConfigSection::kTop, key.key, ~0u), nullptr) << key.key;
  }
}

TEST(ConfigOuter, AFileWithoutTheKeyHasNone) {
  const Result<Config> config = parse_config(R"({"sotto": {"outer": null}})");
  ASSERT_TRUE(config.ok());
  EXPECT_FALSE(config->sotto.outer);
}

// ---- what this release cannot run

TEST(ConfigOuter, UnsupportedByName) {
  const std::string prefix = "configuration: not supported in this release: ";
  const std::vector<std::pair<const char*, const char*>> cases = {
      {R"({"freshness": 0.5, "codec": "int8"})",
       "outer.freshness 0.5 (supported with a codec in two levels is 0)"},
      {R"({"preset": "eager_diloco", "codec": "int8"})",
       "outer.freshness 1/W (supported with a codec in two levels is 0)"},
  };
  for (const auto& [json, text] : cases) {
    EXPECT_TRUE(check_supported(parse(json)).ok()) << json;
    EXPECT_TRUE(check_supported(parse_file(json)).ok()) << json;
    OuterConfig alone = parse(json);
    alone.hierarchy = Hierarchy::kLeader;
    const Status status = check_supported(alone);
    EXPECT_EQ(status.code(), Code::kUnsupported) << json;
    EXPECT_EQ(status.text(), prefix + text) << json;
    Config file = parse_file(json);
    file.sotto.outer->hierarchy = Hierarchy::kSharded;
    const Status of_file = check_supported(file);
    EXPECT_EQ(of_file.code(), Code::kUnsupported) << json;
    EXPECT_EQ(of_file.text(), prefix + "sotto." + text) << json;
  }
  for (const Row& row : kTable) {
    const OuterConfig c = parse(row.json);
    EXPECT_TRUE(check_supported(c).ok()) << row.json;
  }
  const Json report = report_of(
      R"({"optimizer": {"type": "AdamW"}, "sotto": {"hierarchy": "sharded", "outer":
          {"codec": "int8", "freshness": 1}}})",
      0, 0);
  EXPECT_EQ(report["can_run"], false);
  std::set<std::string> unsupported;
  for (const Json& key : report["keys"]) {
    if (key["disposition"] == "unsupported") unsupported.insert(key["key"].get<std::string>());
  }
  EXPECT_THAT(unsupported, ElementsAre("sotto.outer.freshness"));
}

TEST(ConfigOuter, GradientsOfStepsBeforeOuterSteps) {
  constexpr char kJson[] = R"({"warmup_steps": 3, "every_step": "gradients"})";
  EXPECT_TRUE(parse(kJson).schedule.averages_gradients());
  EXPECT_TRUE(check_supported(parse_file(kJson)).ok());
  // Without such steps there is nothing to average.
  const OuterConfig none = parse(R"({"every_step": "gradients"})");
  EXPECT_FALSE(none.schedule.averages_gradients());
  EXPECT_TRUE(check_supported(none).ok());
  EXPECT_THAT(none.warnings, ElementsAre(HasSubstr("outer.every_step: no effect: it acts before")));
}

// ---- warnings

TEST(ConfigOuterWarns, OfAGainAboveOne) {
  EXPECT_THAT(parse(R"({"preset": "delayed_diloco"})").warnings,
              ElementsAre("outer.preset: GAIN_TOO_HIGH: alpha 0.4 and beta 0.9 are a gain alpha / "
                          "(1 - beta) of 4; averages that come a whole period late, as with delay "
                          "30, are stable up to a gain of 1/h_max, at most 1 to be sure; set alpha "
                          "to at most 0.1, or auto_floor to true"));
  EXPECT_THAT(parse(R"({"preset": "eager_diloco"})").warnings,
              ElementsAre(HasSubstr("of 4; averages")));
  EXPECT_THAT(
      parse(R"({"auto_floor": false, "alpha": 1.5, "penalty": "const", "lambda_const": 1.5})")
          .warnings,
      ElementsAre("outer.alpha: GAIN_TOO_HIGH: alpha 1.5 and beta 0.2 are a gain alpha / "
                  "(lambda_const (1 - beta)) of 1.25; averages that come a whole period "
                  "late, as with delay 48, are stable up to a gain of 1/h_max, at most 1 "
                  "to be sure; set alpha to at most 1.2, or auto_floor to true"));
  // By-world momentum counts with its largest value.
  EXPECT_THAT(parse(R"({"preset": "co2_paper", "form": "delta"})").warnings,
              ElementsAre(HasSubstr("alpha 1 and beta 0.6 are a gain alpha / (1 - beta) of 2.5")));
  EXPECT_THAT(
      parse(R"({"preset": "slowmo", "delay": 48, "merge": "lerp", "merge_a": 0.5})").warnings,
      ElementsAre(HasSubstr("of 2; averages")));
  for (const char* quiet :
       {R"({})", R"({"preset": "co2_paper"})", R"({"preset": "delta_corrected"})",
        R"({"preset": "diloco"})", R"({"preset": "delayed_diloco", "auto_floor": true})",
        R"({"preset": "delayed_diloco", "alpha": 0.09})", R"({"preset": "overlap_local_sgd"})",
        R"({"preset": "delayed_diloco", "delay": 29})", R"({"preset": "cocod"})",
        R"({"preset": "delayed_diloco", "freshness": 1})",
        R"({"auto_floor": false, "penalty": "const", "lambda_const": 1.25})"}) {
    EXPECT_THAT(parse(quiet).warnings, IsEmpty()) << quiet;
  }
}

TEST(ConfigOuterWarns, OfCodecsThatDelayOrRemember) {
  EXPECT_THAT(parse(R"({"codec": "onebit", "beta": 0.6, "alpha": 0.4})").warnings,
              ElementsAre("outer.codec: onebit with beta 0.6 and delay 48: error feedback delays "
                          "small elements further; set beta to at most 0.5, or compare the loss "
                          "with a run without codec"));
  EXPECT_THAT(parse(R"({"codec": "onebit", "beta": 0.5, "alpha": 0.4})").warnings, IsEmpty());
  EXPECT_THAT(parse(R"({"codec": "int8", "beta": 0.6, "alpha": 0.4})").warnings, IsEmpty());
  EXPECT_THAT(parse(R"({"preset": "diloco", "codec": "onebit"})").warnings, IsEmpty());
  EXPECT_THAT(parse(R"({"preset": "diloco", "codec": "topk"})").warnings,
              ElementsAre("outer.codec: MOMENTUM_AND_ERROR_FEEDBACK: found nesterov with codec "
                          "topk, whose error feedback takes the place of momentum; set rule to "
                          "none"));
}

// ---- keys without effect

struct Idle {
  const char* json;
  const char* key;
  const char* why;
  bool warned = true;
};

TEST(ConfigOuterIdle, KeysAreNamed) {
  const char* no_momentum = "rule none has no momentum";
  const char* mean = "rule none makes the mean of parameters the anchor";
  const char* not_late =
      "no anchor moves between launch and use unless delay is period and merge is reset or lerp";
  const char* gaps = "it acts with the penalties gap_rel, gap_ema and gap_inner";
  const std::vector<Idle> cases = {
      {R"({"preset": "local_sgd", "period": 8, "alpha": 0.5})", "alpha", mean},
      {R"({"preset": "local_sgd", "period": 8, "beta": 0.5})", "beta", no_momentum},
      {R"({"preset": "local_sgd", "period": 8, "beta": 0})", "beta", no_momentum, false},
      {R"({"preset": "slowmo", "rule": "none", "lr_normalised": true})", "lr_normalised",
       no_momentum},
      {R"({"rule": "none", "clip": "rms", "alpha": 0.5})", "clip", no_momentum},
      {R"({"preset": "diloco", "phi": 3})", "phi", "it is the limit of a clip, and clip is none"},
      {R"({"clip_units": "grad"})", "clip_units",
       "it acts with clip coord and norm, without lr_normalised"},
      {R"({"preset": "slowmo", "clip": "coord", "phi": 1, "clip_units": "grad"})", "clip_units",
       "it acts with clip coord and norm, without lr_normalised"},
      {R"({"preset": "diloco", "form": "anchor_diff"})", "form", not_late},
      {R"({"preset": "overlap_local_sgd", "form": "anchor_diff"})", "form", not_late},
      {R"({"preset": "local_sgd", "period": 8, "delay": 8, "form": "anchor_diff"})", "form", mean},
      {R"({"preset": "diloco", "penalty": "gap_ema"})", "penalty", not_late},
      {R"({"preset": "cocod", "penalty": "const", "lambda_const": 2})", "penalty", mean},
      {R"({"freshness": 1, "penalty": "gap_rel"})", "penalty",
       "freshness 1 leaves nothing that is late"},
      {R"({"lambda_const": 2})", "lambda_const", "it acts with penalty const"},
      {R"({"preset": "diloco", "lambda_max": 2})", "lambda_max",
       "it bounds the penalties gap_rel, gap_ema and gap_inner"},
      {R"({"preset": "diloco", "eps": 0})", "eps", gaps},
      {R"({"penalty": "const", "lambda_const": 2, "granularity": "element"})", "granularity", gaps},
      {R"({"preset": "diloco", "consensus_scalars": true})", "consensus_scalars", gaps},
      {R"({"merge_a": 0.5})", "merge_a", "it acts with merge lerp and pull"},
      {R"({"dense_rounds": 2})", "dense_rounds", "there is no codec"},
      {R"({"freshness": 0.5, "consensus_scalars": false})", "consensus_scalars",
       "with penalty gap_ema and freshness 0.5 all ranks use the gap of rank 0"},
  };
  for (const Idle& idle : cases) {
    SCOPED_TRACE(idle.json);
    const Config config = parse_file(idle.json);
    const std::string path = fmt::format("sotto.outer.{}", idle.key);
    EXPECT_EQ(note_of(config, path).disposition, "ignored");
    EXPECT_EQ(note_of(config, path).reason, idle.why);
    const std::string warning = fmt::format("{}: no effect: {}", path, idle.why);
    EXPECT_EQ(std::ranges::count(config.warnings, warning), idle.warned ? 1 : 0);
  }
}

TEST(ConfigOuterIdle, ValuesAreNeutral) {
  const OuterConfig c = parse(R"({"preset": "cocod", "beta": 0.5, "alpha": 2, "clip": "coord",
      "penalty": "const", "lambda_const": 3, "form": "anchor_diff", "merge_a": 0.5})");
  EXPECT_EQ(c.rule.beta, 0);
  EXPECT_EQ(c.rule.alpha, 1);
  EXPECT_EQ(c.clip.kind, OuterClip::kNone);
  EXPECT_EQ(c.clip.phi, 0);
  EXPECT_EQ(c.penalty.kind, OuterPenalty::kNone);
  EXPECT_EQ(c.penalty.lambda_const, 1);
  EXPECT_EQ(c.rule.form, OuterForm::kDelta);
  EXPECT_EQ(c.merge.a, 0);
  EXPECT_EQ(c.dense_rounds, 0u);
  EXPECT_TRUE(parse(R"({"freshness": 0.5})").penalty.consensus_scalars);
  EXPECT_TRUE(
      parse(R"({"preset": "eager_diloco", "penalty": "gap_rel"})").penalty.consensus_scalars);
  EXPECT_FALSE(parse(R"({"freshness": 1})").penalty.consensus_scalars);
}

TEST(ConfigOuterIdle, KeysOfTheRestOfTheFile) {
  const Config config = parse_file(R"({})", R"("communication_data_type": "fp16",
      "prescale_gradients": true, )");
  const std::string why = "no effect: inner steps send no gradients while sotto.outer is there";
  EXPECT_THAT(config.warnings,
              ElementsAre("communication_data_type: " + why, "prescale_gradients: " + why));
  EXPECT_EQ(note_of(config, "prescale_gradients").disposition, "ignored");
  const Result<Config> one_bit = parse_config(
      R"({"optimizer": {"type": "OneBitLamb"}, "sotto": {"scale": "l1", "outer": {}}})");
  ASSERT_TRUE(one_bit.ok()) << one_bit.status().text();
  EXPECT_THAT(one_bit->warnings, ElementsAre("sotto.scale: " + why));
  EXPECT_THAT(parse_file(R"({"codec": {"type": "int8", "residual": false}})").warnings, IsEmpty());
}

TEST(ConfigOuterIdle, StatesThatDoNotHoldErrorFeedback) {
  const auto warnings = [](const char* outer, const char* checkpoint) {
    const Result<Config> config = parse_config(fmt::format(
        R"({{"optimizer": {{"type": "AdamW"}}, "sotto": {{{} "outer": {}}}}})", checkpoint, outer));
    EXPECT_TRUE(config.ok()) << config.status().text();
    return config->warnings;
  };
  const std::string rest =
      " does not hold the error feedback of sotto.outer.codec: on several ranks exports as "
      "configured are refused; set exact or reset";
  EXPECT_THAT(warnings(R"({"codec": "onebit"})", ""),
              ElementsAre("sotto.checkpoint: mean, the default," + rest));
  EXPECT_THAT(warnings(R"({"preset": "sparse_loco"})", R"("checkpoint": "mean",)"),
              ElementsAre("sotto.checkpoint: mean" + rest));
  for (const char* mode : {R"("checkpoint": "exact",)", R"("checkpoint": "reset",)"})
    EXPECT_THAT(warnings(R"({"codec": "onebit"})", mode), IsEmpty());
  EXPECT_THAT(warnings(R"({"codec": {"type": "int4", "residual": false}})", ""), IsEmpty());
  EXPECT_THAT(warnings("{}", ""), IsEmpty());
  // Exports of an outer optimizer of its own are told their mode.
  EXPECT_THAT(parse(R"({"sotto": {"outer": {"codec": "onebit"}}})").warnings, IsEmpty());
  EXPECT_THAT(parse(R"({"sotto": {"checkpoint": "mean", "outer": {"codec": "onebit"}}})").warnings,
              IsEmpty());
}

// ---- what follows from the settings

TEST(ConfigOuter, FloorAndGain) {
  const OuterConfig co2 = parse("{}");
  EXPECT_DOUBLE_EQ(co2.floor(), 1.25 / 0.8);
  EXPECT_DOUBLE_EQ(*co2.gain(), 1.25);
  EXPECT_TRUE(co2.late());
  EXPECT_EQ(parse(R"({"auto_floor": false, "alpha": 0.5})").floor(), 0);
  EXPECT_DOUBLE_EQ(*parse(R"({"preset": "co2_paper"})").resolved(64).gain(), 1 / 1.5);
  EXPECT_DOUBLE_EQ(*parse(R"({"penalty": "const", "lambda_const": 2})").gain(), 0.625);
  EXPECT_FALSE(parse(R"({"preset": "cocod"})").gain());
  EXPECT_DOUBLE_EQ(*parse(R"({"preset": "sparse_loco", "alpha": 0.5})").gain(), 0.5);
  EXPECT_FALSE(parse(R"({"preset": "overlap_local_sgd"})").late());
}

TEST(ConfigOuter, Offsets) {
  const OuterConfig c = parse(R"({"fragments": 4})");
  EXPECT_EQ(c.spacing(), 12u);
  EXPECT_EQ(c.offset(0), 0u);
  EXPECT_EQ(c.offset(3), 36u);
}

TEST(ConfigOuter, FragmentsAreCutEvenly) {
  const auto cut = [](const char* json, const std::vector<uint64_t>& elements) {
    return parse(json).cut(elements).take();
  };
  EXPECT_THAT(cut(R"({"fragments": 2})", {10, 10, 10, 10}),
              ElementsAre(ElementsAre(0, 1), ElementsAre(2, 3)));
  EXPECT_THAT(cut(R"({"fragments": 2})", {100, 1, 1, 1}),
              ElementsAre(ElementsAre(0), ElementsAre(1, 2, 3)));
  EXPECT_THAT(cut(R"({"fragments": 3})", {1, 1, 100}),
              ElementsAre(ElementsAre(0), ElementsAre(1), ElementsAre(2)));
  EXPECT_THAT(cut(R"({"fragments": 3})", {100, 1, 1}),
              ElementsAre(ElementsAre(0), ElementsAre(1), ElementsAre(2)));
  EXPECT_THAT(cut(R"({"fragments": 2})", {0, 0, 0}),
              ElementsAre(ElementsAre(0), ElementsAre(1, 2)));
  EXPECT_THAT(cut(R"({"fragments": 3})", {1, 1, 1, 1, 1}),
              ElementsAre(ElementsAre(0), ElementsAre(1, 2), ElementsAre(3, 4)));
  EXPECT_THAT(cut("{}", {5, 6}), ElementsAre(ElementsAre(0, 1)));
  EXPECT_THAT(cut(R"({"fragments": [[2, 0], [1]]})", {1, 1, 1}),
              ElementsAre(ElementsAre(0, 2), ElementsAre(1)));
  // Large sums stay in 64 bits.
  EXPECT_EQ(cut(R"({"period": 4096, "fragments": 4096})", std::vector<uint64_t>(8192, 1ull << 50))
                .back()
                .size(),
            2u);
  const auto error = [](const char* json, const std::vector<uint64_t>& elements) {
    return parse(json).cut(elements).status().text();
  };
  EXPECT_EQ(
      error(R"({"fragments": 4})", {1, 1}),
      "sotto.outer.fragments: found 4 fragments, allowed is at most the number of tensors, 2");
  EXPECT_EQ(error(R"({"fragments": [[0], [2]]})", {1, 1}),
            "sotto.outer.fragments[1]: found tensor 2, allowed is 0 to 1, the last one");
  EXPECT_EQ(error(R"({"fragments": [[0], [2]]})", {1, 1, 1}),
            "sotto.outer.fragments: tensor 1 is in no fragment; one that is never averaged would "
            "differ between ranks, so add it to a list");
}

}  // namespace
}  // namespace sotto
