#include "core/config/config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <nlohmann/json.hpp>
#include <string>

#include "core/config/keys.h"

namespace sotto {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

Config parse(std::string_view text) {
  Result<Config> config = parse_config(text);
  EXPECT_TRUE(config.ok()) << config.status().text();
  return config.ok() ? config.take() : Config();
}

std::string error_of(std::string_view text) {
  const Result<Config> config = parse_config(text);
  EXPECT_FALSE(config.ok()) << text;
  if (config.ok()) return "";
  EXPECT_EQ(config.status().code(), Code::kInvalidArgument);
  return config.status().text();
}

// ---- the table of keys

TEST(ConfigKeys, EachKeyIsThereOncePerKind) {
  for (const KeySpec& a : key_table()) {
    for (const KeySpec& b : key_table()) {
      if (&a == &b || a.section != b.section || a.key != b.key) continue;
      EXPECT_EQ(a.kinds & b.kinds, 0u) << a.key;
    }
    EXPECT_FALSE(a.reason.empty()) << a.key;
  }
}

struct NumberRule {
  const char* before;  // text up to the number
  const char* after;
  std::vector<const char*> good;
  std::vector<const char*> bad;
};

TEST(ConfigKeys, Ranges) {
  const std::vector<NumberRule> rules = {
      {R"({"train_batch_size": )",
       "}",
       {"1", "9007199254740992"},
       {"0", "-1", "1.5", "1e16", "true", "[]"}},
      {R"({"gradient_clipping": )", "}", {"0", "0.5", "-0.0"}, {"-1e-9", "\"1\"", "null", "{}"}},
      {R"({"gradient_predivide_factor": )", "}", {"1e-9"}, {"0", "-1", "1e-40", "1e300"}},
      {R"({"optimizer": {"type": "Adam", "params": {"lr": )",
       "}}}",
       {"0", "1", "3e38", "1e-45"},
       {"-1", "[1]", "false", "1e300", "1e-60"}},
      {R"({"optimizer": {"type": "Adam", "params": {"betas": )",
       "}}}",
       {"[0, 0.5]"},
       {"0.9", "[0.9]", "[0.9, 0.9, 0.9]", "[0.9, 1]", "[-0.1, 0]", "[\"0.9\", 0.9]",
        "[0.9, 0.99999999]"}},
      {R"({"optimizer": {"type": "Lamb", "params": {"eps": )", "}}}", {"0"}, {"-1e-12", "1e-50"}},
      {R"({"optimizer": {"type": "SGD", "params": {"weight_decay": )",
       "}}}",
       {"0.1"},
       {"-0.1", "1e39"}},
      {R"({"optimizer": {"type": "OneBitLamb", "params": {"freeze_step": )",
       "}}}",
       {"1", "1e3"},
       {"0", "0.5", "-1"}},
      {R"({"optimizer": {"type": "OneBitLamb", "params": {"coeff_beta": )",
       "}}}",
       {"0", "0.99"},
       {"1", "-0.1"}},
      {R"({"optimizer": {"type": "OneBitLamb", "params": {"factor_threshold": )",
       "}}}",
       {"0.5"},
       {"0", "1"}},
      {R"({"optimizer": {"type": "OneBitLamb", "params": {"min_coeff": )", "}}}", {"10"}, {"10.5"}},
      {R"({"optimizer": {"type": "ZeroOneAdam", "params": {"var_update_scaler": )",
       "}}}",
       {"1"},
       {"0"}},
      {R"({"optimizer": {"type": "ZeroOneAdam", "params": {"local_step_scaler": )",
       "}}}",
       {"1"},
       {"0"}},
      {R"({"optimizer": {"type": "ZeroOneAdam", "params": {"local_step_clipper": )",
       "}}}",
       {"1"},
       {"0"}},
      {R"({"optimizer": {"type": "ZeroOneAdam", "params": {"var_freeze_step": )",
       "}}}",
       {"1"},
       {"0"}},
      {R"({"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": )",
       "}}}",
       {"1", "[1, 2]"},
       {"[]", "[1, -2]", "[1, 1e300]", "[[1]]", "-1"}},
      {R"({"zero_optimization": {"stage": )", "}}", {"0", "3"}, {"4", "-1", "true"}},
      {R"({"fp16": {"initial_scale_power": )", "}}", {"0", "16"}, {"-1", "128"}},
      {R"({"fp16": {"loss_scale": )", "}}", {"0", "1e38"}, {"-1", "1e39", "1e-40", "\"1\""}},
      {R"({"fp16": {"min_loss_scale": )", "}}", {"1e-3", "1"}, {"0", "-1", "1e-40"}},
      {R"({"sotto": {"bucket_elements": )",
       "}}",
       {"8192", "4194304"},
       {"4096", "8200", "0", "1e14"}},
      {R"({"sotto": {"timeout_ms": )", "}}", {"1", "86400000"}, {"0", "86400001", "0.5"}},
      {R"({"sotto": {"max_consecutive_skips": )", "}}", {"1"}, {"0", "-1"}},
      {R"({"sotto": {"chunk_align": )", "}}", {"8", "512"}, {"0", "4", "12", "1073741832"}},
      {R"({"sotto": {"step_offset": )", "}}", {"0", "1"}, {"2", "true"}},
      {R"({"sotto": {"param_groups": )", "}}", {"[]", "[{}]"}, {"{}", "[1]", "1"}},
  };
  EXPECT_THAT(
      error_of(R"({"optimizer": {"type": "Adam", "params": {"betas": [0.9, 0.99999999]}}})"),
      HasSubstr("optimizer.params.betas: found [0.9,0.99999999], where 0.99999999 is 1 in float32, "
                "allowed is a list of two numbers in [0, 1)"));
  for (const NumberRule& rule : rules) {
    for (const char* value : rule.good) parse(std::string(rule.before) + value + rule.after);
    for (const char* value : rule.bad) {
      const std::string text = error_of(std::string(rule.before) + value + rule.after);
      EXPECT_THAT(text, HasSubstr("line 1, column ")) << rule.before << value;
    }
  }
}

TEST(ConfigKeys, NearMissesAreErrorsAndStrangersAreWarnings) {
  EXPECT_THAT(error_of(R"({"gradient_cliping": 1})"), HasSubstr("is gradient_clipping meant?"));
  EXPECT_THAT(error_of(R"({"optimiser": {}})"), HasSubstr("is optimizer meant?"));
  EXPECT_THAT(error_of(R"({"fp16": {"enable": true}})"),
              HasSubstr("fp16.enable: unknown key; is enabled meant?"));
  EXPECT_THAT(error_of(R"({"optimizer": {"type": "Adam", "param": {}}})"),
              HasSubstr("is params meant?"));
  EXPECT_THAT(parse(R"({"quite_something_else": 1})").warnings,
              ElementsAre("quite_something_else: unknown key; it has no effect"));
  EXPECT_THAT(parse(R"({"fp16": {"quite_something_else": 1}})").warnings,
              ElementsAre("fp16.quite_something_else: unknown key; it has no effect"));
  for (const std::string key : {"ema", "name", "ppo", "dp", "fp8", "fp32"}) {
    EXPECT_THAT(parse("{\"" + key + "\": {\"decay\": 0.99}}").warnings,
                ElementsAre(key + ": unknown key; it has no effect"));
  }
  EXPECT_THAT(error_of(R"({"bf6": {}})"), HasSubstr("is bf16 meant?"));
}

TEST(ConfigKeys, KeysOfAnotherTypeAreNamedAsTheirs) {
  EXPECT_THAT(error_of(R"({"optimizer": {"type": "Adam", "params": {"freeze_step": 5}}})"),
              HasSubstr("freeze_step: a key of OneBitAdam, OneBitLamb; allowed here are lr, "));
  EXPECT_THAT(error_of(R"({"optimizer": {"type": "SGD", "params": {"eps": 5}}})"),
              HasSubstr("a key of Adam, AdamW, Lamb, OneBitAdam, ZeroOneAdam, OneBitLamb;"));
  EXPECT_THAT(error_of(R"({"optimizer": {"type": "OneBitAdam", "params": {"max_coeff": 5}}})"),
              HasSubstr("a key of Lamb, OneBitLamb;"));
  EXPECT_THAT(error_of(R"({"scheduler": {"type": "WarmupLR", "params": {"total_num_steps": 5}}})"),
              HasSubstr("a key of WarmupDecayLR, WarmupCosineLR;"));
}

// ---- values

TEST(Config, EveryOptimizerFieldIsRead) {
  const Config lamb =
      parse(R"({"optimizer": {"type": "ONEBITLAMB", "params": {"lr": 0.25, "betas": [0.5, 0.75],
      "eps": 0.125, "weight_decay": 0.0625, "max_coeff": 3, "min_coeff": 2, "freeze_step": 7, "coeff_beta": 0.375,
      "factor_max": 5, "factor_min": 4, "factor_threshold": 0.3, "comm_backend_name": "compressed"}}})");
  const OptimizerParams& p = lamb.optimizer.params;
  EXPECT_EQ(lamb.optimizer.kind, OptimizerKind::kOneBitLamb);
  EXPECT_EQ(lamb.optimizer.comm_backend_name, "compressed");
  EXPECT_EQ(std::vector<double>({p.lr, p.beta1, p.beta2, p.eps, p.weight_decay, p.lamb.max_coeff,
                                 p.lamb.min_coeff, p.factor.coeff_beta, p.factor.factor_max,
                                 p.factor.factor_min, p.factor.factor_threshold}),
            std::vector<double>({0.25, 0.5, 0.75, 0.125, 0.0625, 3, 2, 0.375, 5, 4, 0.3}));
  EXPECT_EQ(p.freeze.freeze_step, 7u);
  EXPECT_FALSE(p.bias_correction);
  EXPECT_THAT(lamb.warnings, IsEmpty());

  const OptimizerParams z =
      parse(R"({"optimizer": {"type": "zerooneadam", "params": {"var_freeze_step": 2,
      "var_update_scaler": 3, "local_step_scaler": 4, "local_step_clipper": 5}}})")
          .optimizer.params;
  EXPECT_EQ(z.intervals.var_freeze_step, 2u);
  EXPECT_EQ(z.intervals.var_update_scaler, 3u);
  EXPECT_EQ(z.intervals.local_step_scaler, 4u);
  EXPECT_EQ(z.intervals.local_step_clipper, 5u);

  const OptimizerParams a = parse(R"({"optimizer": {"type": "Adam", "params": {"adam_w_mode": false,
      "bias_correction": false}}})")
                                .optimizer.params;
  EXPECT_FALSE(a.adam.w_mode);
  EXPECT_FALSE(a.bias_correction);
  const OptimizerParams s =
      parse(R"({"optimizer": {"type": "sgd", "params": {"momentum": 0.5, "dampening": 0.25}}})")
          .optimizer.params;
  EXPECT_EQ(s.sgd.momentum, 0.5);
  EXPECT_EQ(s.sgd.dampening, 0.25);
}

TEST(Config, AdamWStaysDecoupled) {
  const Config config =
      parse(R"({"optimizer": {"type": "AdamW", "params": {"adam_w_mode": false}}})");
  EXPECT_TRUE(config.optimizer.params.adam.w_mode);
  ASSERT_EQ(config.warnings.size(), 1u);
  EXPECT_THAT(config.warnings[0], HasSubstr("use type Adam"));
}

TEST(Config, EverySchedulerFieldIsRead) {
  const SchedulerConfig w =
      parse(R"({"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_min_lr": [0.1, 0.2],
      "warmup_max_lr": 0.5, "warmup_num_steps": 3, "warmup_type": "linear", "total_num_steps": 9}}})")
          .scheduler;
  EXPECT_EQ(w.kind, SchedulerKind::kWarmupDecayLR);
  EXPECT_THAT(w.warmup.min_lr, ElementsAre(0.1, 0.2));
  EXPECT_THAT(w.warmup.max_lr, ElementsAre(0.5));
  EXPECT_EQ(w.warmup.num_steps, 3u);
  EXPECT_EQ(w.warmup.type, WarmupType::kLinear);
  EXPECT_EQ(w.warmup.total_num_steps, 9u);
  for (const char* given : {"", R"("warmup_max_lr": null)"}) {
    const auto peak = [&](const char* type) {
      return parse(
                 fmt::format(R"({{"scheduler": {{"type": "{}", "params": {{{}}}}}}})", type, given))
          .scheduler.warmup.max_lr;
    };
    EXPECT_THAT(peak("WarmupLR"), IsEmpty());
  }
  EXPECT_THAT(parse(R"({"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 9}}})")
                  .scheduler.warmup.max_lr,
              ElementsAre(1e-3));

  const SchedulerConfig c =
      parse(R"({"scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 2000,
      "warmup_min_ratio": 0.25, "cos_min_ratio": 0.5}}})")
          .scheduler;
  EXPECT_EQ(c.warmup.min_ratio, 0.25);
  EXPECT_EQ(c.warmup.cos_min_ratio, 0.5);
  EXPECT_EQ(c.warmup.num_steps, 1000u);
  EXPECT_EQ(c.warmup.type, WarmupType::kLog);

  const Config cycle =
      parse(R"({"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 1, "cycle_max_lr": 2,
      "decay_lr_rate": 0.5, "cycle_first_step_size": 7, "cycle_second_step_size": null, "decay_step_size": 4,
      "cycle_min_mom": 0.25, "cycle_max_mom": 0.75, "decay_mom_rate": 0.125, "cycle_first_stair_count": 3}}})");
  const SchedulerConfig& o = cycle.scheduler;
  EXPECT_EQ(std::vector<double>({o.cycle.min_lr, o.cycle.max_lr, o.cycle.decay_lr_rate,
                                 o.cycle.min_mom, o.cycle.max_mom, o.cycle.decay_mom_rate}),
            std::vector<double>({1, 2, 0.5, 0.25, 0.75, 0.125}));
  EXPECT_EQ(o.cycle.first_step_size, 7u);
  EXPECT_EQ(o.cycle.second_step_size, 7u);
  EXPECT_EQ(o.cycle.decay_step_size, 4u);
  EXPECT_TRUE(o.cycle.momentum);
  ASSERT_EQ(cycle.warnings.size(), 2u);
  EXPECT_THAT(cycle.warnings[0], HasSubstr("beta2 becomes 0.99"));
  EXPECT_THAT(cycle.warnings[1], HasSubstr("decay_mom_rate: beta1 grows after the cycle and stays "
                                           "at 0.999"));
  EXPECT_THAT(parse(R"({"optimizer": {"type": "SGD"}, "scheduler": {"type": "OneCycle", "params":
      {"cycle_min_lr": 1, "cycle_max_lr": 2}}})")
                  .warnings,
              ElementsAre(HasSubstr("no effect: SGD has no betas")));

  const SchedulerConfig r =
      parse(R"({"scheduler": {"type": "LRRangeTest", "params": {"lr_range_test_min_lr": [1, 2],
      "lr_range_test_step_size": 3, "lr_range_test_step_rate": 4, "lr_range_test_staircase": true}}})")
          .scheduler;
  EXPECT_THAT(r.range_test.min_lr, ElementsAre(1, 2));
  EXPECT_EQ(r.range_test.step_size, 3u);
  EXPECT_EQ(r.range_test.step_rate, 4);
  EXPECT_TRUE(r.range_test.staircase);
}

TEST(Config, RequiredSchedulerKeysAndListLengths) {
  EXPECT_THAT(error_of(R"({"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 1}}})"),
              HasSubstr("scheduler.params.cycle_max_lr: missing"));
  EXPECT_THAT(error_of(R"({"scheduler": {"type": "WarmupCosineLR"}})"),
              HasSubstr("total_num_steps: missing"));
  EXPECT_THAT(error_of(R"({"scheduler": {"params": {}}})"), HasSubstr("scheduler.type: missing"));
  EXPECT_THAT(
      error_of(
          R"({"scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": [0, 0], "warmup_max_lr": [1, 2, 3]}}})"),
      HasSubstr("a list of 3, but warmup_min_lr has 2"));
  EXPECT_EQ(parse(R"({"scheduler": {"type": null}})").scheduler.kind, SchedulerKind::kNone);
  EXPECT_EQ(parse(R"({"scheduler": null})").scheduler.kind, SchedulerKind::kNone);
}

TEST(Config, Fp16FieldsAreRead) {
  const Fp16Config f =
      parse(R"({"fp16": {"enabled": true, "loss_scale": 128, "initial_scale_power": 8,
      "loss_scale_window": 5, "hysteresis": 4, "consecutive_hysteresis": true, "min_loss_scale": 0.5, "auto_cast": true}})")
          .fp16;
  EXPECT_TRUE(f.enabled && f.consecutive_hysteresis && f.auto_cast);
  EXPECT_EQ(f.loss_scale, 128);
  EXPECT_EQ(f.initial_scale_power, 8u);
  EXPECT_EQ(f.loss_scale_window, 5u);
  EXPECT_EQ(f.hysteresis, 4u);
  EXPECT_EQ(f.min_loss_scale, 0.5);
}

std::string disposition_of(const Config& config, std::string_view path) {
  for (const KeyNote& note : config.keys) {
    if (note.path == path) return note.disposition;
  }
  return "absent";
}

TEST(Config, LossScalingActsOnlyWhereItIsUsed) {
  const char* keys = R"("loss_scale_window": 5, "min_loss_scale": 2, "hysteresis": 3)";
  const Config dynamic = parse(fmt::format(R"({{"fp16": {{"enabled": true, {}}}}})", keys));
  EXPECT_EQ(disposition_of(dynamic, "fp16.loss_scale_window"), "acts");
  EXPECT_EQ(disposition_of(dynamic, "fp16.hysteresis"), "ignored");
  const Config fixed =
      parse(fmt::format(R"({{"fp16": {{"enabled": true, "loss_scale": 8, {}}}}})", keys));
  EXPECT_EQ(disposition_of(fixed, "fp16.loss_scale"), "acts");
  EXPECT_EQ(disposition_of(fixed, "fp16.loss_scale_window"), "ignored");
  const Config off = parse(fmt::format(R"({{"fp16": {{"loss_scale": 8, {}}}}})", keys));
  EXPECT_EQ(disposition_of(off, "fp16.loss_scale"), "ignored");
  EXPECT_EQ(disposition_of(off, "fp16.min_loss_scale"), "ignored");
}

TEST(Config, SottoPoliciesAreRead) {
  const SottoConfig defaults = parse("{}").sotto;
  EXPECT_EQ(defaults.bucket_elements, uint64_t{1} << 22);
  EXPECT_EQ(defaults.checkpoint, CheckpointErrors::kMean);
  EXPECT_FALSE(defaults.timeout_ms);
  EXPECT_EQ(defaults.max_consecutive_skips, 100u);
  const Config config = parse(R"({"optimizer": {"type": "OneBitAdam"}, "fp16": {"enabled": true},
      "sotto": {"granularity": "bucket", "bucket_elements": 8704, "checkpoint": "exact",
      "timeout_ms": 2500, "max_consecutive_skips": 7, "param_groups": [{}, {"non_freeze": true}]}})");
  EXPECT_EQ(config.sotto.bucket_elements, 8704u);
  EXPECT_EQ(config.sotto.checkpoint, CheckpointErrors::kExact);
  EXPECT_EQ(config.sotto.timeout_ms, 2500u);
  EXPECT_EQ(config.sotto.max_consecutive_skips, 7u);
  EXPECT_THAT(config.warnings, IsEmpty());
  const auto groups = config.resolve_groups(2);
  ASSERT_TRUE(groups.ok());
  EXPECT_FALSE((*groups)[0].freeze.non_freeze);
  EXPECT_TRUE((*groups)[1].freeze.non_freeze);
  EXPECT_THAT(error_of(R"({"sotto": {"bucket_elements": 10000}})"), HasSubstr("10240 would fit"));
  EXPECT_THAT(error_of(R"({"optimizer": {"type": "OneBitLamb"}, "sotto": {"param_groups":
      [{"non_freeze": true}]}})"),
              HasSubstr("sotto.param_groups[0].non_freeze: unknown key"));
}

// One line, however many groups it concerns.
TEST(Config, RatesOfGroupsThatTheSchedulerOverridesAreOneWarning) {
  const Config config = parse(R"({"optimizer": {"type": "AdamW"}, "scheduler": {"type": "WarmupLR"},
      "sotto": {"param_groups": [{}, {"lr": 1}, {"eps": 1}, {"lr": 2}, {"lr": 3}]}})");
  EXPECT_THAT(
      config.warnings,
      ElementsAre("sotto.param_groups[1].lr: here and in 2 other groups no effect: "
                  "scheduler WarmupLR sets the rate of every group; give it a list instead"));
}

TEST(Config, SottoKeysWithoutEffectAreNamed) {
  const Config config = parse(R"({"optimizer": {"type": "AdamW"}, "sotto": {"mode": "compat",
      "bucket_elements": 8192, "coeff_debias": true, "max_consecutive_skips": 3}})");
  EXPECT_THAT(
      config.warnings,
      ElementsAre(
          "sotto.bucket_elements: no effect: it acts with sotto.granularity \"bucket\" alone",
          "sotto.max_consecutive_skips: no effect: steps are skipped by loss scaling alone, "
          "and fp16 is off",
          "sotto.mode: no effect: AdamW compresses nothing",
          "sotto.coeff_debias: no effect: AdamW has no average trust ratio"));
  for (const char* key : {"mode", "bucket_elements", "coeff_debias", "max_consecutive_skips"})
    EXPECT_EQ(disposition_of(config, fmt::format("sotto.{}", key)), "ignored") << key;
  // States beside outer steps have what each rank's parameters are.
  EXPECT_THAT(parse(R"({"optimizer": {"type": "AdamW"}, "sotto": {"checkpoint": "exact",
      "outer": {"preset": "diloco"}}})")
                  .warnings,
              IsEmpty());
  // The cosine's end is what the mode of an uncompressed optimizer still decides.
  EXPECT_THAT(parse(R"({"optimizer": {"type": "AdamW"}, "sotto": {"mode": "compat"}, "scheduler":
      {"type": "WarmupCosineLR", "params": {"total_num_steps": 5000}}})")
                  .warnings,
              IsEmpty());
}

TEST(Config, WhatIsLeftToTheHostIsWarnedOfWhenItIsOn) {
  EXPECT_THAT(parse(R"({"compression_training": {"weight_quantization": {}}})").warnings,
              ElementsAre(HasSubstr("compression_training: left to the host framework: compression "
                                    "of the model's weights")));
  EXPECT_THAT(parse(R"({"compression_training": {}, "elasticity": {"enabled": false, "x": 1},
      "pipeline": null, "dataloader_drop_last": false, "steps_per_print": 5})")
                  .warnings,
              IsEmpty());
  EXPECT_THAT(
      parse(R"({"zero_optimization": {"stage": 0, "offload_optimizer": {"device": "cpu"},
      "offload_param": {"device": "none"}, "cpu_offload": true}})")
          .warnings,
      ElementsAre(HasSubstr("zero_optimization.offload_optimizer: no effect at ZeRO stage 0"),
                  HasSubstr("zero_optimization.cpu_offload: no effect")));
}

TEST(Config, ASchedulerBeginsAtItsStart) {
  const auto with = [](const std::string& type, const std::string& params) {
    return R"({"optimizer": {"type": "Adam"}, "scheduler": {"type": ")" + type +
           R"(", "params": {)" + params + "}}}";
  };
  const std::string cycle = R"("cycle_min_lr": 0.1, "cycle_max_lr": 1, )";
  for (const auto& [type, before] : std::map<std::string, std::string>{
           {"WarmupLR", ""}, {"OneCycle", cycle}, {"LRRangeTest", ""}}) {
    parse(with(type, before + R"("last_batch_iteration": -1)"));
    EXPECT_THAT(error_of(with(type, before + R"("last_batch_iteration": 7)")),
                HasSubstr("last_batch_iteration: found 7, allowed is a whole number -1"));
  }
}

TEST(Config, PlaceholdersInTextsAreNamed) {
  for (const char* text :
       {R"({"train_batch_size": "${BATCH}"})", R"({"optimizer": {"type": "{{ opt }}"}})",
        R"({"scheduler": {"type": "<%= s %>"}})", R"({"communication_data_type": "${TYPE}"})"}) {
    EXPECT_THAT(error_of(text), HasSubstr("looks like a template's placeholder")) << text;
  }
}

TEST(Config, RefusedByName) {
  EXPECT_THAT(error_of(R"({"fp16": {"fp16_master_weights_and_grads": true}})"),
              HasSubstr("ZeRO stage 2"));
  EXPECT_THAT(error_of(R"({"amp": {"enabled": true}})"), HasSubstr("apex AMP is not supported"));
  EXPECT_THAT(error_of(R"({"bf16": {}, "bfloat16": {}})"), HasSubstr("leave bfloat16 out"));
  for (const char* key : {"bf16_master_weights_and_grads", "bf16_optimizer_states"}) {
    EXPECT_THAT(error_of(std::string(R"({"bf16": {")") + key + R"(": true}})"),
                HasSubstr(std::string(key) + ": found true, allowed is false"));
  }
  EXPECT_THAT(parse(R"({"bf16": {"enabled": true, "check_grad_overflow": false,
      "bf16_master_weights_and_grads": false, "bf16_optimizer_states": false}})")
                  .warnings,
              IsEmpty());
  EXPECT_THAT(parse(R"({"bf16": {"check_grad_overflow": true}})").warnings,
              ElementsAre(HasSubstr("check_grad_overflow: NaN or Inf in a gradient is an error")));
  EXPECT_THAT(
      error_of(R"({"optimizer": {"type": "OneBitAdam", "params": {"comm_backend_name": "hccl"}}})"),
      HasSubstr("found \"hccl\", allowed is one of nccl, mpi, compressed"));
  EXPECT_THAT(error_of(R"({"optimizer": {"type": "OneBitAdam"}, "zero_optimization": true})"),
              HasSubstr("zero_optimization: stage 1 cannot be combined with OneBitAdam"));
  EXPECT_THAT(error_of(R"({"optimizer": {"type": "SGD", "params": {"nesterov": true}}})"),
              HasSubstr("needs a momentum"));
  EXPECT_THAT(error_of(R"({"optimizer": {}})"), HasSubstr("optimizer.type: missing"));
  EXPECT_THAT(error_of(R"({"optimizer": {"type": "auto"}})"),
              HasSubstr("the training program has to replace"));
}

// ---- groups, batch, stages

TEST(Config, GroupsInheritAndOverride) {
  const Config config =
      parse(R"({"optimizer": {"type": "Lamb", "params": {"lr": 0.5, "weight_decay": 0.25}},
      "sotto": {"param_groups": [{}, {"lr": 0.125, "betas": [0.1, 0.2], "eps": 1, "weight_decay": 0, "max_coeff": 4, "min_coeff": 3}]}})");
  const auto groups = config.resolve_groups(3);
  ASSERT_TRUE(groups.ok());
  ASSERT_EQ(groups->size(), 3u);
  for (const size_t i : {0u, 2u}) {
    EXPECT_EQ((*groups)[i].lr, 0.5);
    EXPECT_EQ((*groups)[i].weight_decay, 0.25);
    EXPECT_EQ((*groups)[i].lamb.max_coeff, 10.0);
  }
  const OptimizerParams& p = (*groups)[1];
  EXPECT_EQ(std::vector<double>({p.lr, p.beta1, p.beta2, p.eps, p.weight_decay, p.lamb.max_coeff,
                                 p.lamb.min_coeff}),
            std::vector<double>({0.125, 0.1, 0.2, 1, 0, 4, 3}));
  const auto too_few = config.resolve_groups(1);
  ASSERT_FALSE(too_few.ok());
  EXPECT_EQ(too_few.status().text(),
            "sotto.param_groups describes 2 groups, but the parameters have 1 group (0 to 0)");
}

struct BatchCase {
  std::optional<uint64_t> train, micro, gas;
  uint64_t world;
  std::optional<BatchNumbers> expected;  // nothing: an error
};

TEST(Config, BatchArithmetic) {
  const std::vector<BatchCase> cases = {
      {64, 4, 2, 8, BatchNumbers{64, 4, 2}},
      {64, 4, 3, 8, std::nullopt},
      {64, 4, {}, 8, BatchNumbers{64, 4, 2}},
      {65, 4, {}, 8, std::nullopt},
      {64, {}, 2, 8, BatchNumbers{64, 4, 2}},
      {64, {}, 3, 8, std::nullopt},
      {{}, 4, 2, 8, BatchNumbers{64, 4, 2}},
      {64, {}, {}, 8, BatchNumbers{64, 8, 1}},
      {63, {}, {}, 8, std::nullopt},
      {{}, 4, {}, 8, BatchNumbers{32, 4, 1}},
      {{}, {}, 4, 8, std::nullopt},
      {4, {}, {}, 8, std::nullopt},
      {{}, uint64_t{1} << 53, uint64_t{1} << 53, 8, std::nullopt},
  };
  for (const BatchCase& c : cases) {
    Config config;
    config.batch.train_batch_size = c.train;
    config.batch.train_micro_batch_size_per_gpu = c.micro;
    config.batch.gradient_accumulation_steps = c.gas;
    const auto batch = config.resolve_batch(c.world);
    EXPECT_EQ(batch.ok(), c.expected.has_value())
        << c.train.value_or(0) << " " << c.micro.value_or(0);
    if (!batch.ok() || !c.expected) continue;
    ASSERT_TRUE(batch->has_value());
    EXPECT_EQ((*batch)->train, c.expected->train);
    EXPECT_EQ((*batch)->micro, c.expected->micro);
    EXPECT_EQ((*batch)->gas, c.expected->gas);
  }
  const auto remedy = [](const char* text) { return parse(text).resolve_batch(8).status().text(); };
  EXPECT_THAT(remedy(R"({"train_batch_size": 65})"), HasSubstr("train_batch_size 64 would fit"));
  EXPECT_THAT(remedy(R"({"train_batch_size": 3})"), HasSubstr("train_batch_size 8 would fit"));
  EXPECT_THAT(remedy(R"({"train_batch_size": 90, "gradient_accumulation_steps": 3})"),
              HasSubstr("train_batch_size 96 would fit"));
  EXPECT_THAT(remedy(R"({"train_batch_size": 1, "train_micro_batch_size_per_gpu": 4,
                        "gradient_accumulation_steps": 3})"),
              HasSubstr("found train_batch_size 1, train_micro_batch_size_per_gpu 4, "
                        "gradient_accumulation_steps 3, which gives 1 against 4 * 3 * 8; "
                        "train_batch_size 96 would fit"));
  EXPECT_FALSE(Config().resolve_batch(1)->has_value());
  EXPECT_FALSE(Config().resolve_batch(0).ok());
}

TEST(Config, FullPrecisionUpdates) {
  const auto updates = [](std::string_view text) { return parse(text).full_precision_updates(); };
  EXPECT_EQ(updates(R"({"optimizer": {"type": "Lamb"}})"), UINT64_MAX);
  EXPECT_EQ(updates(R"({"optimizer": {"type": "OneBitLamb", "params": {"freeze_step": 4}}})"), 3u);
  EXPECT_EQ(
      updates(
          R"({"optimizer": {"type": "OneBitLamb", "params": {"freeze_step": 4}}, "sotto": {"step_offset": 0}})"),
      4u);
  EXPECT_EQ(updates(R"({"optimizer": {"type": "OneBitLamb", "params": {"freeze_step": 1}}})"), 1u);
  // State steps 2, 3, 4 are in full precision, 5 is the first compressed one.
  EXPECT_EQ(
      updates(
          R"({"optimizer": {"type": "ZeroOneAdam", "params": {"var_freeze_step": 6, "var_update_scaler": 2}}})"),
      3u);
}

// ---- what can be run

TEST(Config, WhatIsBuiltIsSupported) {
  for (const char* type :
       {"SGD", "Adam", "AdamW", "Lamb", "OneBitAdam", "ZeroOneAdam", "OneBitLamb"}) {
    for (const char* scheduler :
         {R"({"type": "WarmupLR"})",
          R"({"type": "WarmupDecayLR", "params": {"total_num_steps": 5000}})",
          R"({"type": "WarmupCosineLR", "params": {"total_num_steps": 5000}})",
          R"({"type": "OneCycle", "params": {"cycle_min_lr": 0, "cycle_max_lr": 1}})",
          R"({"type": "LRRangeTest"})", "null"}) {
      for (const char* granularity : {"flat", "tensor", "bucket"}) {
        const std::string text = fmt::format(
            R"({{"optimizer": {{"type": "{}"}}, "scheduler": {}, "gradient_clipping": 1, "communication_data_type": "fp32",
                "sotto": {{"granularity": "{}"}}}})",
            type, scheduler, granularity);
        EXPECT_TRUE(check_supported(parse(text)).ok()) << text;
      }
    }
  }
}

TEST(Config, SixteenBitsAndScalingsAreSupported) {
  for (const char* part :
       {R"("fp16": {"enabled": true})", R"("bf16": {"enabled": true})",
        R"("fp16": {"enabled": true, "loss_scale": 128})", R"("prescale_gradients": true)",
        R"("gradient_predivide_factor": 2)", R"("communication_data_type": "bf16")",
        R"("data_types": {"grad_accum_dtype": "fp16"})"}) {
    const Config config = parse(fmt::format(R"({{"optimizer": {{"type": "Lamb"}}, {}}})", part));
    EXPECT_TRUE(check_supported(config).ok()) << check_supported(config).text();
  }
}

TEST(Config, EachObstacleIsUnsupportedByItself) {
  for (const char* part :
       {R"("sparse_gradients": true)", R"("zero_optimization": {"stage": 1})",
        R"("zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}})"}) {
    const Config config = parse(fmt::format(R"({{"optimizer": {{"type": "Lamb"}}, {}}})", part));
    EXPECT_EQ(check_supported(config).code(), Code::kUnsupported) << part;
    EXPECT_EQ(unsupported_reasons(config).size(), 1u) << part;
  }
  EXPECT_EQ(check_supported(Config()).code(), Code::kInvalidArgument);
}

TEST(Config, ReportRefusesImpossibleSizes) {
  EXPECT_EQ(config_report("{}", (1u << 20) + 1, 0).status().code(), Code::kInvalidArgument);
  EXPECT_EQ(config_report("{}", 1, (uint64_t{1} << 53) + 1).status().code(),
            Code::kInvalidArgument);
}

TEST(Config, ReportOfLargestSizesDoesNotOverflow) {
  const auto report =
      config_report(R"({"optimizer": {"type": "Adam"}})", 1u << 20, uint64_t{1} << 53);
  ASSERT_TRUE(report.ok());
  const auto json = nlohmann::json::parse(*report);
  // 2 (W-1)/W * 4n with W = 2^20 and n = 2^53: 2^56 - 2^36.
  EXPECT_EQ(json["stages"][0]["payload_bytes_per_update"],
            (uint64_t{1} << 56) - (uint64_t{1} << 36));
}

}  // namespace
}  // namespace sotto
