#include "core/config/config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "core/config/filter.h"
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

std::string filtered(std::string_view text) {
  const Result<std::string> out = blank_comments(text);
  EXPECT_TRUE(out.ok());
  return out.ok() ? *out : "";
}

// ---- filter

TEST(ConfigFilter, BlanksCommentsAndTrailingCommas) {
  EXPECT_EQ(filtered("1 // x\n2"), "1     \n2");
  EXPECT_EQ(filtered("1 # x\r\n2"), "1    \r\n2");
  EXPECT_EQ(filtered("1/*x\ny*/2"), "1   \n   2");
  EXPECT_EQ(filtered("[1,]"), "[1 ]");
  EXPECT_EQ(filtered("{\"a\":1, /* , */ \n}"), "{\"a\":1          \n}");
}

TEST(ConfigFilter, LeavesStringsAlone) {
  for (const char* text : {R"(["a // b", "# c", "/* d */"])", R"(["\" // no", 1])",
                           R"(["\\", "#"])", R"(["x,]"])", R"({",}": "]"})"}) {
    EXPECT_EQ(filtered(text), text);
  }
}

TEST(ConfigFilter, OnlyACommaBehindAValueIsTrailing) {
  for (const char* text : {"[,]", "{,}", "[1,,2]", ",", "[1],"}) EXPECT_EQ(filtered(text), text);
  EXPECT_EQ(filtered("[1,,]"), "[1,,]");
  EXPECT_THAT(error_of("{\"betas\": [,]}"), HasSubstr("line 1, column 12"));
  EXPECT_THAT(error_of("{,}"), HasSubstr("line 1, column 2"));
}

TEST(ConfigFilter, DepthIsLimited) {
  EXPECT_TRUE(blank_comments(std::string(64, '[') + std::string(64, ']')).ok());
  EXPECT_EQ(blank_comments(std::string(65, '[')).status().text(),
            "configuration: line 1, column 65: nested more than 64 levels deep");
  EXPECT_TRUE(blank_comments("\"" + std::string(1000, '[') + "\"").ok());
  std::string flat = "[";
  for (int i = 0; i < 1000; ++i) flat += "[],";
  EXPECT_TRUE(blank_comments(flat + "]").ok());
}

TEST(ConfigFilter, PositionOfAPath) {
  const std::string text = "{\n \"a\": {\"b\": [1, {\"c\": \"x\"}]},\n \"d\": 2}";
  const auto at = [&](const char* path) {
    const TextPosition p = position_of_path(text, path, 0);
    return std::pair<size_t, size_t>(p.line, p.column);
  };
  EXPECT_EQ(at("a"), std::pair(size_t{2}, size_t{7}));
  EXPECT_EQ(at("a.b[0]"), std::pair(size_t{2}, size_t{14}));
  EXPECT_EQ(at("a.b[1].c"), std::pair(size_t{2}, size_t{23}));
  EXPECT_EQ(at("d"), std::pair(size_t{3}, size_t{7}));
  EXPECT_EQ(at("e"), std::pair(size_t{0}, size_t{0}));
  EXPECT_EQ(at(""), std::pair(size_t{0}, size_t{0}));
}

// ---- syntax

TEST(Config, SyntaxErrorsNameLineAndColumn) {
  EXPECT_THAT(error_of(""), HasSubstr("line 1, column 1"));
  EXPECT_THAT(error_of("# nothing\n\n"), HasSubstr("configuration: line 3, column 1"));
  EXPECT_THAT(error_of("{\n  // a comment\n  \"a\" 1\n}"),
              HasSubstr("configuration: line 3, column 7"));
  EXPECT_THAT(error_of("{} {}"), HasSubstr("line 1, column 4"));
  EXPECT_THAT(error_of("{\"gradient_clipping\": NaN}"), HasSubstr("line 1, column 23"));
  EXPECT_THAT(error_of("{\"gradient_clipping\": .5}"), HasSubstr("line 1, column 23"));
}

TEST(Config, ErrorsAreOnePlainLine) {
  for (const std::string& text :
       {std::string("{\"a\xff\": 1}"), std::string("{\"gradient_clippin\\u0000\": 1}"),
        std::string("{\"optimizer\": \0}", 16),
        std::string("{\"optimizer\": {\"type\": \"a\\nb\"}}")}) {
    for (const char c : error_of(text)) EXPECT_TRUE(c >= 0x20 && c < 0x7f) << static_cast<int>(c);
  }
}

TEST(Config, DuplicateKeysAtEveryLevel) {
  EXPECT_EQ(error_of("{\"fp16\": {},\n\"fp16\": {}}"),
            "configuration: line 2, column 9: the key fp16 is there twice; leave one of them out");
  EXPECT_THAT(error_of(R"({"wandb": {"x": {"y": 1, "y": 1}}})"),
              HasSubstr("the key wandb.x.y is there twice"));
  EXPECT_THAT(error_of(R"({"wandb": [{"y": 1}, {"y": 1, "y": 2}]})"),
              HasSubstr("the key wandb.y is there twice"));
  parse(R"({"wandb": [{"y": 1}, {"y": 1}], "comet": {"y": {"y": 1}}})");  // the same name elsewhere
                                                                          // is fine
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
      {R"({"gradient_predivide_factor": )", "}", {"1e-9"}, {"0", "-1"}},
      {R"({"optimizer": {"type": "Adam", "params": {"lr": )",
       "}}}",
       {"0", "1"},
       {"-1", "[1]", "false"}},
      {R"({"optimizer": {"type": "Adam", "params": {"betas": )",
       "}}}",
       {"[0, 0.5]"},
       {"0.9", "[0.9]", "[0.9, 0.9, 0.9]", "[0.9, 1]", "[-0.1, 0]", "[\"0.9\", 0.9]"}},
      {R"({"optimizer": {"type": "Lamb", "params": {"eps": )", "}}}", {"0"}, {"-1e-12"}},
      {R"({"optimizer": {"type": "SGD", "params": {"weight_decay": )", "}}}", {"0.1"}, {"-0.1"}},
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
       {"[]", "[1, -2]", "[[1]]", "-1"}},
      {R"({"zero_optimization": {"stage": )", "}}", {"0", "3"}, {"4", "-1", "true"}},
      {R"({"fp16": {"initial_scale_power": )", "}}", {"0", "16"}, {"-1", "128"}},
      {R"({"sotto": {"chunk_align": )", "}}", {"8", "512"}, {"0", "4", "12", "1073741832"}},
      {R"({"sotto": {"step_offset": )", "}}", {"0", "1"}, {"2", "true"}},
      {R"({"sotto": {"param_groups": )", "}}", {"[]", "[{}]"}, {"{}", "[1]", "1"}},
  };
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
}

TEST(ConfigKeys, KeysOfAnotherTypeAreUnknown) {
  EXPECT_THAT(error_of(R"({"optimizer": {"type": "Adam", "params": {"freeze_step": 5}}})"),
              HasSubstr("unknown key"));
  EXPECT_THAT(error_of(R"({"optimizer": {"type": "SGD", "params": {"eps": 5}}})"),
              HasSubstr("unknown key"));
  EXPECT_THAT(error_of(R"({"optimizer": {"type": "OneBitAdam", "params": {"max_coeff": 5}}})"),
              HasSubstr("unknown key"));
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
  EXPECT_EQ(
      std::vector<double>({p.lr, p.beta1, p.beta2, p.eps, p.weight_decay, p.max_coeff, p.min_coeff,
                           p.coeff_beta, p.factor_max, p.factor_min, p.factor_threshold}),
      std::vector<double>({0.25, 0.5, 0.75, 0.125, 0.0625, 3, 2, 0.375, 5, 4, 0.3}));
  EXPECT_EQ(p.freeze_step, 7u);
  EXPECT_FALSE(p.bias_correction);
  EXPECT_THAT(lamb.warnings, IsEmpty());

  const OptimizerParams z =
      parse(R"({"optimizer": {"type": "zerooneadam", "params": {"var_freeze_step": 2,
      "var_update_scaler": 3, "local_step_scaler": 4, "local_step_clipper": 5}}})")
          .optimizer.params;
  EXPECT_EQ(z.var_freeze_step, 2u);
  EXPECT_EQ(z.var_update_scaler, 3u);
  EXPECT_EQ(z.local_step_scaler, 4u);
  EXPECT_EQ(z.local_step_clipper, 5u);

  const OptimizerParams a = parse(R"({"optimizer": {"type": "Adam", "params": {"adam_w_mode": false,
      "bias_correction": false}}})")
                                .optimizer.params;
  EXPECT_FALSE(a.adam_w_mode);
  EXPECT_FALSE(a.bias_correction);
  const OptimizerParams s =
      parse(R"({"optimizer": {"type": "sgd", "params": {"momentum": 0.5, "dampening": 0.25}}})")
          .optimizer.params;
  EXPECT_EQ(s.momentum, 0.5);
  EXPECT_EQ(s.dampening, 0.25);
}

TEST(Config, AdamWStaysDecoupled) {
  const Config config =
      parse(R"({"optimizer": {"type": "AdamW", "params": {"adam_w_mode": false}}})");
  EXPECT_TRUE(config.optimizer.params.adam_w_mode);
  ASSERT_EQ(config.warnings.size(), 1u);
  EXPECT_THAT(config.warnings[0], HasSubstr("use type Adam"));
}

TEST(Config, EverySchedulerFieldIsRead) {
  const SchedulerConfig w =
      parse(R"({"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_min_lr": [0.1, 0.2],
      "warmup_max_lr": 0.5, "warmup_num_steps": 3, "warmup_type": "linear", "total_num_steps": 9}}})")
          .scheduler;
  EXPECT_EQ(w.kind, SchedulerKind::kWarmupDecayLR);
  EXPECT_THAT(w.warmup_min_lr, ElementsAre(0.1, 0.2));
  EXPECT_THAT(w.warmup_max_lr, ElementsAre(0.5));
  EXPECT_EQ(w.warmup_num_steps, 3u);
  EXPECT_EQ(w.warmup_type, WarmupType::kLinear);
  EXPECT_EQ(w.total_num_steps, 9u);

  const SchedulerConfig c =
      parse(R"({"scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 2000,
      "warmup_min_ratio": 0.25, "cos_min_ratio": 0.5}}})")
          .scheduler;
  EXPECT_EQ(c.warmup_min_ratio, 0.25);
  EXPECT_EQ(c.cos_min_ratio, 0.5);
  EXPECT_EQ(c.warmup_num_steps, 1000u);
  EXPECT_EQ(c.warmup_type, WarmupType::kLog);

  const Config cycle =
      parse(R"({"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 1, "cycle_max_lr": 2,
      "decay_lr_rate": 0.5, "cycle_first_step_size": 7, "cycle_second_step_size": null, "decay_step_size": 4,
      "cycle_min_mom": 0.25, "cycle_max_mom": 0.75, "decay_mom_rate": 0.125, "cycle_first_stair_count": 3}}})");
  const SchedulerConfig& o = cycle.scheduler;
  EXPECT_EQ(std::vector<double>({o.cycle_min_lr, o.cycle_max_lr, o.decay_lr_rate, o.cycle_min_mom,
                                 o.cycle_max_mom, o.decay_mom_rate}),
            std::vector<double>({1, 2, 0.5, 0.25, 0.75, 0.125}));
  EXPECT_EQ(o.cycle_first_step_size, 7u);
  EXPECT_EQ(o.cycle_second_step_size, 7u);
  EXPECT_EQ(o.decay_step_size, 4u);
  EXPECT_TRUE(o.cycle_momentum);
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
  EXPECT_THAT(r.lr_range_test_min_lr, ElementsAre(1, 2));
  EXPECT_EQ(r.lr_range_test_step_size, 3u);
  EXPECT_EQ(r.lr_range_test_step_rate, 4);
  EXPECT_TRUE(r.lr_range_test_staircase);
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

TEST(Config, RefusedByName) {
  EXPECT_THAT(error_of(R"({"fp16": {"fp16_master_weights_and_grads": true}})"),
              HasSubstr("ZeRO stage 2"));
  EXPECT_THAT(error_of(R"({"amp": {"enabled": true}})"), HasSubstr("apex AMP is not supported"));
  EXPECT_THAT(error_of(R"({"bf16": {}, "bfloat16": {}})"), HasSubstr("leave bfloat16 out"));
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
    EXPECT_EQ((*groups)[i].max_coeff, 10.0);
  }
  const OptimizerParams& p = (*groups)[1];
  EXPECT_EQ(std::vector<double>(
                {p.lr, p.beta1, p.beta2, p.eps, p.weight_decay, p.max_coeff, p.min_coeff}),
            std::vector<double>({0.125, 0.1, 0.2, 1, 0, 4, 3}));
  const auto too_few = config.resolve_groups(1);
  ASSERT_FALSE(too_few.ok());
  EXPECT_EQ(too_few.status().text(),
            "sotto.param_groups: 2 entries, but the parameters have 1 group(s) (0 to 0)");
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
    config.train_batch_size = c.train;
    config.train_micro_batch_size_per_gpu = c.micro;
    config.gradient_accumulation_steps = c.gas;
    const auto batch = config.resolve_batch(c.world);
    EXPECT_EQ(batch.ok(), c.expected.has_value())
        << c.train.value_or(0) << " " << c.micro.value_or(0);
    if (!batch.ok() || !c.expected) continue;
    ASSERT_TRUE(batch->has_value());
    EXPECT_EQ((*batch)->train, c.expected->train);
    EXPECT_EQ((*batch)->micro, c.expected->micro);
    EXPECT_EQ((*batch)->gas, c.expected->gas);
  }
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
  for (const char* type : {"Adam", "AdamW", "Lamb", "OneBitLamb"}) {
    for (const char* scheduler :
         {R"({"type": "WarmupLR"})",
          R"({"type": "WarmupDecayLR", "params": {"total_num_steps": 5000}})",
          R"({"type": "WarmupCosineLR", "params": {"total_num_steps": 5000}})",
          R"({"type": "OneCycle", "params": {"cycle_min_lr": 0, "cycle_max_lr": 1}})",
          R"({"type": "LRRangeTest"})", "null"}) {
      for (const char* granularity : {"flat", "tensor"}) {
        const std::string text = fmt::format(
            R"({{"optimizer": {{"type": "{}"}}, "scheduler": {}, "gradient_clipping": 1, "communication_data_type": "fp32",
                "sotto": {{"granularity": "{}"}}}})",
            type, scheduler, granularity);
        EXPECT_TRUE(check_supported(parse(text)).ok()) << text;
      }
    }
  }
}

TEST(Config, EachObstacleIsUnsupportedByItself) {
  for (const char* part :
       {R"("fp16": {"enabled": true})", R"("bf16": {"enabled": true})",
        R"("prescale_gradients": true)", R"("gradient_predivide_factor": 2)",
        R"("communication_data_type": "bf16")", R"("data_types": {"grad_accum_dtype": "fp16"})",
        R"("sparse_gradients": true)", R"("zero_optimization": {"stage": 1})",
        R"("sotto": {"mode": "compat"})", R"("sotto": {"granularity": "bucket"})"}) {
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
