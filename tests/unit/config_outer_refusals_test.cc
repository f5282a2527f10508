// "sotto.outer": what is refused, with which words.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/config/config.h"
#include "tests/unit/config_outer.h"

namespace sotto {
namespace {

using testing::HasSubstr;

struct Refusal {
  const char* json;
  const char* text;
};

void expect_refused(const std::vector<Refusal>& refusals) {
  for (const Refusal& r : refusals) EXPECT_EQ(error_of(r.json), r.text) << r.json;
}

TEST(ConfigOuterRefuses, Numbers) {
  expect_refused({
      {R"({"period": 0})", "outer.period: found 0, allowed is a whole number >= 1, or \"auto\""},
      {R"({"period": "soon"})",
       "outer.period: found \"soon\", allowed is a whole number >= 1, or \"auto\""},
      {R"({"delay": "auto"})",
       "outer.delay: found \"auto\", which the training program has to replace before; put a "
       "whole number >= 0 there"},
      {R"({"alpha": 0})", "outer.alpha: found 0, allowed is a number in (0, 1e+38]"},
      {R"({"beta": 1})", "outer.beta: found 1, allowed is a number in [0, 1)"},
      {R"({"beta": -0.1})", "outer.beta: found -0.1, allowed is a number in [0, 1)"},
      {R"({"phi": -1})", "outer.phi: found -1, allowed is a number in [0, 1e+38]"},
      {R"({"freshness": 1.5})", "outer.freshness: found 1.5, allowed is a number in [0, 1]"},
      {R"({"merge_a": -1})", "outer.merge_a: found -1, allowed is a number in [0, 1]"},
      {R"({"lambda_const": 0.5})", "outer.lambda_const: found 0.5, allowed is a number >= 1"},
      {R"({"lambda_max": 0.5})", "outer.lambda_max: found 0.5, allowed is a number >= 1"},
      {R"({"eps": -1})", "outer.eps: found -1, allowed is a number >= 0"},
      {R"({"dense_rounds": 1.5})", "outer.dense_rounds: found 1.5, allowed is a whole number >= 0"},
  });
  EXPECT_THAT(parse_outer(R"({"beta": NaN})").status().text(), HasSubstr("NaN is no number"));
}

TEST(ConfigOuterRefuses, Keys) {
  EXPECT_THAT(error_of(R"({"perio": 5})"),
              HasSubstr("outer.perio: unknown key; the nearest one is period, allowed are preset"));
  EXPECT_EQ(error_of(R"({"merge": "blend"})"),
            "outer.merge: found \"blend\", allowed is one of reset|lerp|add_progress|pull");
  EXPECT_THAT(error_of(R"({"preset": "co3"})"),
              HasSubstr("found \"co3\", allowed is one of co2|co2_paper|delta_corrected|"));
  EXPECT_EQ(error_of(R"({"chunk_align": 8})"),
            "outer.chunk_align: a key of the codec; write it there: \"codec\": {\"type\": ..., "
            "\"chunk_align\": ...}");
}

TEST(ConfigOuterRefuses, WhatAPresetNeeds) {
  expect_refused({
      {R"({"preset": "local_sgd"})",
       "outer.period: missing; preset local_sgd needs a number of inner steps, >= 1"},
      {R"({"preset": "bmuf", "beta": 0.5, "alpha": 1})",
       "outer.period: missing; preset bmuf needs a number of inner steps, >= 1"},
      {R"({"preset": "bmuf", "period": 8, "beta": 0.5})",
       "outer.alpha: missing; rule heavy_ball needs a number in (0, 1e+38]"},
      {R"({"preset": "bmuf", "period": 8, "alpha": 1, "rule": "nesterov"})",
       "outer.beta: missing; rule nesterov needs a number in [0, 1)"},
      {R"({"preset": "streaming_diloco", "fragments": 2, "delay": 1})",
       "outer.period: missing; preset streaming_diloco needs a number of inner steps, >= 1"},
      {R"({"preset": "streaming_diloco", "period": 8, "fragments": 2})",
       "outer.delay: missing; preset streaming_diloco needs a number of inner steps"},
      {R"({"preset": "streaming_diloco", "period": 8, "delay": 1})",
       "outer.fragments: missing; preset streaming_diloco needs their number or a list of them"},
      {R"({"preset": "post_local_sgd", "period": 8})",
       "outer.switch_step: missing; preset post_local_sgd needs a number of inner steps"},
      {R"({"preset": "local_sgd", "period": 8, "rule": "heavy_ball", "alpha": 1})",
       "outer.beta: missing; rule heavy_ball needs a number in [0, 1)"},
      {R"({"penalty": "const"})", "outer.lambda_const: missing; penalty const needs a number >= 1"},
      {R"({"merge": "lerp"})", "outer.merge_a: missing; merge lerp needs a number in [0, 1]"},
      {R"({"preset": "overlap_local_sgd", "merge": "lerp"})",
       "outer.merge_a: missing; merge lerp needs a number in [0, 1]"},
      {R"({"clip": "coord"})", "outer.phi: missing; clip coord needs a number in [0, 1e+38]"},
      {R"({"switch_step": 5, "warmup_steps": 6})",
       "outer.warmup_steps: found 6 beside switch_step 5, which says the same; leave one of them "
       "out"},
  });
}

TEST(ConfigOuterRefuses, Delays) {
  expect_refused({
      {R"({"delay": 49})",
       "outer.delay: found delay 49 with period 48, allowed is 0 to the period; an average is used "
       "before its fragment is sent again"},
      {R"({"preset": "diloco", "merge": "add_progress"})",
       "outer.merge: found delay 0 with merge add_progress, allowed is 1 to the period, 500; set "
       "delay to 500 or merge to reset"},
      {R"({"preset": "overlap_local_sgd", "delay": 47})",
       "outer.delay: found delay 47 with merge pull, allowed is the period, 48; set delay to 48 or "
       "merge to reset"},
      {R"({"preset": "cocod", "delay": 0})",
       "outer.delay: found delay 0 with merge add_progress, allowed is 1 to the period, 48; set "
       "delay to 48 or merge to reset"},
      {R"({"preset": "overlap_local_sgd", "period": "auto", "delay": 48})",
       "outer.delay: found delay 48 with merge pull, allowed is the period, auto; leave delay out "
       "or set merge to reset"},
      {R"({"preset": "cocod", "period": "auto", "delay": 0})",
       "outer.delay: found delay 0 with merge add_progress, allowed is 1 to the period, auto; "
       "leave delay out or set merge to reset"},
  });
  for (const char* delay : {"1", "47", "48"})
    parse(fmt::format(R"({{"preset": "cocod", "delay": {}}})", delay));
  for (const char* delay : {"0", "1", "48"}) parse(fmt::format(R"({{"delay": {}}})", delay));
}

TEST(ConfigOuterRefuses, Freshness) {
  expect_refused({
      {R"({"freshness": 0.5, "form": "anchor_diff"})",
       "outer.form: found form anchor_diff with freshness 0.5, allowed is delta; set form to delta "
       "or freshness to 0"},
      {R"({"freshness": 0.5, "delay": 3})",
       "outer.delay: found delay 3 with freshness 0.5, allowed is the period, 48; set delay to 48 "
       "or freshness to 0"},
      {R"({"freshness": 0.5, "merge": "lerp", "merge_a": 0.5})",
       "outer.merge: found merge lerp with freshness 0.5, allowed is reset; set merge to reset or "
       "freshness to 0"},
      {R"({"freshness": 0.5, "payload": "params"})",
       "outer.payload: found payload params with freshness 0.5, allowed is delta; set payload to "
       "delta or freshness to 0"},
      {R"({"freshness": 0.5, "lr_normalised": true})",
       "outer.lr_normalised: found lr_normalised true with freshness 0.5, allowed is false; set "
       "lr_normalised to false or freshness to 0"},
      {R"({"preset": "slowmo", "delay": 48, "payload": "delta", "freshness": 0.5})",
       "outer.freshness: found lr_normalised true with freshness 0.5, allowed is false; set "
       "lr_normalised to false or freshness to 0"},
      {R"({"preset": "eager_diloco", "delay": 0})",
       "outer.delay: found delay 0 with freshness 1/W, allowed is the period, 30; set delay to 30 "
       "or freshness to 0"},
      {R"({"freshness": 1, "period": "auto", "delay": 48})",
       "outer.delay: found delay 48 with freshness 1, allowed is the period, auto; leave delay out "
       "or set freshness to 0"},
  });
}

TEST(ConfigOuterRefuses, Penalties) {
  expect_refused({
      {R"({"granularity": "element"})",
       "outer.granularity: found granularity element with penalty gap_ema, allowed is global, "
       "tensor; set penalty to gap_rel for a gap of each element"},
      {R"({"granularity": "element", "penalty": "gap_inner"})",
       "outer.granularity: found granularity element with penalty gap_inner, allowed is global; "
       "set penalty to gap_rel for a gap of each element"},
      {R"({"granularity": "tensor", "penalty": "gap_inner"})",
       "outer.granularity: found granularity tensor with penalty gap_inner, allowed is global; set "
       "penalty to gap_rel or gap_ema for a gap of each tensor"},
      {R"({"granularity": "tensor", "consensus_scalars": true})",
       "outer.granularity: found granularity tensor with consensus_scalars true, allowed is "
       "global; set consensus_scalars to false or granularity to global: ranks share one gap"},
      {R"({"granularity": "element", "penalty": "gap_rel", "consensus_scalars": true})",
       "outer.granularity: found granularity element with consensus_scalars true, allowed is "
       "global; set consensus_scalars to false or granularity to global: ranks share one gap"},
      {R"({"granularity": "tensor", "freshness": 0.5})",
       "outer.granularity: found granularity tensor with freshness 0.5, allowed is global; set "
       "granularity to global: all ranks use the gap of rank 0"},
      {R"({"auto_floor": true, "form": "anchor_diff"})",
       "outer.auto_floor: found true with form anchor_diff, allowed is false; the floor limits the "
       "gain of form delta with delay = period, merge reset or lerp and freshness below 1"},
      {R"({"auto_floor": true, "delay": 3})",
       "outer.auto_floor: found true with delay 3 and period 48, allowed is false; the floor "
       "limits the gain of form delta with delay = period, merge reset or lerp and freshness below "
       "1"},
      {R"({"auto_floor": true, "preset": "overlap_local_sgd"})",
       "outer.auto_floor: found true with merge pull, allowed is false; the floor limits the gain "
       "of form delta with delay = period, merge reset or lerp and freshness below 1"},
      {R"({"auto_floor": true, "freshness": 1})",
       "outer.auto_floor: found true with freshness 1, allowed is false; the floor limits the gain "
       "of form delta with delay = period, merge reset or lerp and freshness below 1"},
      {R"({"auto_floor": true, "preset": "cocod"})",
       "outer.auto_floor: found true with rule none and payload params, allowed is false; the "
       "floor limits the gain of form delta with delay = period, merge reset or lerp and freshness "
       "below 1"},
  });
  parse(R"({"granularity": "element", "penalty": "gap_rel"})");
  parse(R"({"granularity": "element", "penalty": "const", "lambda_const": 2})");
}

TEST(ConfigOuterRefuses, Codecs) {
  expect_refused({
      {R"({"preset": "slowmo", "codec": "int8"})",
       "outer.codec: found codec int8 with payload params, allowed is none; set payload to delta: "
       "what a codec loses is made up for in the next delta"},
      {R"({"preset": "sparse_loco", "payload": "params"})",
       "outer.payload: found codec topk with payload params, allowed is none; set payload to "
       "delta: what a codec loses is made up for in the next delta"},
      {R"({"preset": "sparse_loco", "delay": 30, "merge": "pull", "merge_a": 0.5})",
       "outer.merge: found merge pull with codec topk, allowed is reset, lerp; set merge to reset"},
      {R"({"codec": "int9"})",
       "outer.codec: found \"int9\", allowed is one of none|onebit|1bit|bf16|fp16|int8|int4|topk, "
       "or an object"},
      {R"({"codec": 8})", "outer.codec: found 8, allowed is an object or a text"},
      {R"({"codec": {"type": "int8", "block": 7}})",
       "outer.codec.block: found 7, allowed is a whole number in [32, 512]"},
      {R"({"codec": {"type": "topk", "k": 0}})",
       "outer.codec.k: found 0, allowed is a whole number in [1, 4096]"},
      {R"({"codec": {"type": "topk", "block": 512, "k": 513}})",
       "outer.codec.k: found k 513 with block 512, allowed is k from 1 to block"},
      {R"({"codec": {"type": "topk", "block": 32}})",
       "outer.codec.block: found k 64 with block 32, allowed is k from 1 to block"},
      {R"({"codec": {"type": "topk", "error_decya": 0.9}})",
       "outer.codec.error_decya: unknown key; the nearest one is error_decay, allowed are type, "
       "block, k, bits, index, error_decay, exchange, k_server, median_clip, average, dense_below, "
       "alone, shape, levels"},
      {R"({"codec": {"type": "onebit", "mode": "compat"}})",
       "outer.codec.mode: found compat, which is the 1-bit optimizers' published arithmetic; "
       "allowed here is strict"},
  });
}

TEST(ConfigOuterRefuses, Fragments) {
  expect_refused({
      {R"({"fragments": 0})", "outer.fragments: found 0, allowed are 1 to 4096 fragments"},
      {R"({"fragments": 4097})", "outer.fragments: found 4097, allowed are 1 to 4096 fragments"},
      {R"({"fragments": []})",
       "outer.fragments: found a list of 0, allowed are 1 to 4096 fragments"},
      {R"({"fragments": [1, 2]})",
       "outer.fragments: found [1,2], allowed is a whole number, or a list of lists of tensor "
       "indices"},
      {R"({"fragments": [[0], []]})",
       "outer.fragments[1]: found [], allowed is a list of at least one tensor"},
      {R"({"fragments": [[0], [-1]]})",
       "outer.fragments[1][0]: found -1, allowed is the index of a tensor, a whole number >= 0"},
      {R"({"fragments": [[0], ["w"]]})",
       "outer.fragments[1][0]: found \"w\", allowed is the index of a tensor, a whole number >= 0"},
      {R"({"fragments": [[0, 3], [1, 3]]})",
       "outer.fragments[1][1]: found tensor 3, which is in fragment 0 already; a tensor belongs to "
       "one fragment"},
      {R"({"fragments": [[2, 2]]})",
       "outer.fragments[0][1]: found tensor 2, which is in fragment 0 already; a tensor belongs to "
       "one fragment"},
      {R"({"fragments": 5})",
       "outer.fragments: found 5 fragments with period 48, allowed is a number that divides the "
       "period: launches are evenly spaced; 4 would fit"},
  });
  EXPECT_THAT(parse_outer(R"({"fragments": [[0], [-1]]})").status().text(),
              HasSubstr("line 1, column 22"));
}

TEST(ConfigOuterRefuses, OtherPartsOfTheFile) {
  const auto error_of_file = [](std::string_view text) {
    const Result<Config> config = parse_config(text);
    EXPECT_FALSE(config.ok()) << text;
    const std::string error = config.status().text();
    return error.substr(std::min(error.size(), error.find(": ", 15) + 2));
  };
  EXPECT_EQ(
      error_of_file(R"({"optimizer": {"type": "ZeroOneAdam"}, "sotto": {"outer": {}}})"),
      "optimizer.type: found ZeroOneAdam with sotto.outer, allowed is SGD, Adam, AdamW, Lamb, "
      "Lion, OneBitAdam, OneBitLamb; its own local steps are outer steps already, so leave "
      "sotto.outer out or take another type");
  EXPECT_EQ(
      error_of_file(
          R"({"optimizer": {"type": "OneBitAdam"}, "sotto": {"mode": "compat", "outer": {}}})"),
      "sotto.mode: found compat with sotto.outer, allowed is strict; the published arithmetic "
      "has no outer steps");
  EXPECT_EQ(error_of_file(R"({"optimizer": {"type": "SGD"}, "sotto": {"outer": {},
                "gradient_codec": {"type": "int8"}}})"),
            "sotto.gradient_codec: found with sotto.outer, whose inner steps send no gradients; "
            "write it as sotto.outer.codec or leave it out");
  EXPECT_EQ(
      error_of_file(R"({"optimizer": {"type": "SGD"}, "sotto": {"gradient_codec": {"type": "int8"},
                "outer": {"warmup_steps": 3, "every_step": "gradients"}}})"),
      "sotto.gradient_codec: found with sotto.outer, whose steps before outer steps average "
      "gradients in full precision; write it as sotto.outer.codec or leave it out");
  EXPECT_EQ(error_of_file(R"({"optimizer": {"type": "OneBitAdam"}, "sotto": {
                "outer": {"warmup_steps": 3, "every_step": "gradients"}}})"),
            "sotto.outer.every_step: found gradients with optimizer.type OneBitAdam, whose "
            "compressed stage averages momentum in their place, allowed is parameters; or take one "
            "of SGD, Adam, AdamW, Lamb, Lion");
}

}  // namespace
}  // namespace sotto
