// "sotto.outer" in reports.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/config/keys.h"
#include "tests/unit/config_outer.h"

namespace sotto {
namespace {

using testing::HasSubstr;

TEST(ConfigOuterReport, HasResolvedNumbers) {
  const Json outer =
      report_of_outer(R"({"preset": "co2_paper", "fragments": 2})", 32, 1000)["outer"];
  const Json expected = Json::parse(R"({"preset": "co2_paper", "payload": "delta", "period": 48,
      "delay": 48, "rule": "heavy_ball", "form": "anchor_diff", "alpha": 1.0, "beta": 0.2,
      "lr_normalised": false, "freshness": 0.0, "penalty": "gap_inner", "lambda_const": null,
      "lambda_max": 2.0, "eps": 1e-12, "granularity": "global", "consensus_scalars": false,
      "auto_floor": false, "clip": "coord", "phi": 1.0, "clip_units": "param", "merge": "reset",
      "merge_a": null, "codec": null, "dense_rounds": null, "fragments": 2, "switch_step": 0,
      "warmup_steps": 0, "every_step": null, "measured": null, "nonfinite": "skip_rank",
      "gain_bound": 1, "gain_with_floor": null, "payload_bytes_per_launch": 3875,
      "payload_bytes_per_dense_launch": 3875, "payload_bytes_per_period": 7750,
      "events": [{"fragment": 0, "launch": 0, "consume": 48},
                 {"fragment": 1, "launch": 24, "consume": 72}]})");
  EXPECT_DOUBLE_EQ(outer["gain"].get<double>(), 1 / 1.8);
  for (const auto& [key, value] : expected.items()) EXPECT_EQ(outer[key], value) << key;
  EXPECT_EQ(outer.size(), expected.size() + 1);
  // All keys of the section are there.
  for (const KeySpec& key : key_table()) {
    if (key.section != ConfigSection::kOuter) continue;
    EXPECT_TRUE(outer.contains(std::string(key.key))) << key.key;
  }
}

TEST(ConfigOuterReport, WithoutRanks) {
  const Json outer = report_of_outer(R"({"preset": "eager_diloco"})")["outer"];
  EXPECT_EQ(outer["freshness"], "1 / ranks");
  EXPECT_EQ(outer["payload_bytes_per_launch"], nullptr);
  EXPECT_EQ(outer["gain"], nullptr);
  EXPECT_THAT(report_of_outer(R"({"preset": "co2_paper"})")["outer"]["beta"].get<std::string>(),
              HasSubstr("0.6 above"));
  EXPECT_EQ(report_of(R"({"optimizer": {"type": "SGD"}})")["outer"], nullptr);
}

TEST(ConfigOuterReport, GainAndFloor) {
  const Json co2 = report_of_outer("{}")["outer"];
  EXPECT_DOUBLE_EQ(co2["gain"].get<double>(), 1.25);
  EXPECT_EQ(co2["gain_bound"], 1);
  EXPECT_DOUBLE_EQ(co2["gain_with_floor"].get<double>(), 0.8);
  // A floor below 1 does nothing.
  EXPECT_DOUBLE_EQ(report_of_outer(R"({"alpha": 0.4})")["outer"]["gain_with_floor"].get<double>(),
                   0.5);
  const Json divided = report_of_outer(R"({"penalty": "const", "lambda_const": 2})")["outer"];
  EXPECT_DOUBLE_EQ(divided["gain_with_floor"].get<double>(), 0.625);
  const Json diloco = report_of_outer(R"({"preset": "diloco"})")["outer"];
  EXPECT_NEAR(diloco["gain"].get<double>(), 7, 1e-9);
  EXPECT_EQ(diloco["gain_bound"], nullptr);
  EXPECT_EQ(report_of_outer(R"({"preset": "delta_corrected"})")["outer"]["gain_bound"], nullptr);
}

TEST(ConfigOuterReport, BytesOfLaunches) {
  // 2 (W-1)/W n 4 = 6000000; 1 bit: 6 chunks of 31744 bytes.
  const Json dense = report_of_outer("{}", 4, 1000000);
  EXPECT_EQ(dense["outer"]["payload_bytes_per_launch"], 6000000);
  EXPECT_EQ(dense["outer"]["payload_bytes_per_period"], 6000000);
  const Json coded = report_of_outer(R"({"codec": "onebit", "fragments": 2})", 4, 1000000)["outer"];
  EXPECT_EQ(coded["codec"]["type"], "onebit");
  EXPECT_EQ(coded["dense_rounds"], 1);
  EXPECT_EQ(coded["payload_bytes_per_dense_launch"], 3000000);
  // Chunks of 500000 / 4 elements in multiples of 512: 125440, of which 6 are sent.
  EXPECT_EQ(coded["payload_bytes_per_launch"], 6 * 125440 / 8);
  EXPECT_EQ(coded["payload_bytes_per_period"], 2 * 6 * 125440 / 8);
  const Json lists = report_of_outer(R"({"fragments": [[0], [1]]})", 4, 1000000)["outer"];
  EXPECT_EQ(lists["fragments"], Json::parse("[[0],[1]]"));
  EXPECT_EQ(lists["payload_bytes_per_launch"], nullptr);
  EXPECT_EQ(lists["payload_bytes_per_period"], 6000000);
  const Json sparse = report_of_outer(R"({"preset": "sparse_loco"})", 4, 1000000)["outer"];
  // 244 blocks of 4096 and one of 576, of which 9 are sent: 9 * 6 + 9 + (576 - 1) / 64 bits of
  // indices, 18 of codes.
  EXPECT_EQ(sparse["payload_bytes_per_launch"], 3 * (244 * 84 + 7 + 3 + 3 + 4));
  EXPECT_EQ(sparse["payload_bytes_per_period"], sparse["payload_bytes_per_launch"]);
  EXPECT_EQ(sparse["dense_rounds"], 0);
  EXPECT_EQ(sparse["codec"],
            Json::parse(R"({"type": "topk", "block": 4096, "k": 64, "bits": 2, "index": "ef",
                            "average": "ranks", "error_decay": 0.95, "dense_below": 0,
                            "median_clip": false, "exchange": "gather", "k_server": 0})"));
  const Json served = report_of_outer(R"({"preset": "sparse_loco",
                          "codec": {"type": "topk", "exchange": "two_phase"}})",
                                      4, 1000000)["outer"];
  // The last rank serves 62 of 245 blocks, with 256 elements each and 36 of the shorter one.
  EXPECT_EQ(served["payload_bytes_per_launch"], 183 * 84 + 3 * (61 * 260 + 18 + 9 + 9 + 4));
  EXPECT_EQ(served["codec"]["exchange"], "two_phase");
}

TEST(ConfigOuterReport, StagesAreSharesOfLaunches) {
  const Json stages = report_of_outer("{}", 4, 1000000)["stages"];
  ASSERT_EQ(stages.size(), 1u);
  EXPECT_EQ(stages[0]["name"], "outer");
  EXPECT_EQ(stages[0]["first_update"], 1);
  EXPECT_EQ(stages[0]["payload_bytes_per_update"], 6000000 / 48);
  const Json warm = report_of_outer(R"({"warmup_steps": 100, "period": 7})", 4, 1000000)["stages"];
  ASSERT_EQ(warm.size(), 2u);
  EXPECT_EQ(warm[0]["name"], "every_step");
  EXPECT_EQ(warm[0]["last_update"], 100);
  EXPECT_EQ(warm[0]["payload_bytes_per_update"], 6000000);
  EXPECT_EQ(warm[1]["first_update"], 101);
  EXPECT_EQ(warm[1]["payload_bytes_per_update"], 857143);
  // Whatever the inner optimizer would send by itself.
  const Json one_bit =
      report_of(R"({"optimizer": {"type": "OneBitAdam"}, "sotto": {"outer": {}}})", 4, 1000000);
  EXPECT_EQ(one_bit["stages"].size(), 1u);
  // And no average: what one rank decodes.
  EXPECT_EQ(one_bit["memory_bytes"].value("scratch", 0), 4000000);
}

// How many ranks share a host makes no difference to one of them.
TEST(ConfigOuterReport, OneRankInTwoLevelsSendsNothing) {
  for (const std::string outer : {"", R"(, "outer": {"codec": "int8"})"}) {
    const std::string json =
        R"({"optimizer": {"type": "OneBitAdam"}, "sotto": {"hierarchy": "auto")" + outer + "}}";
    const Json several = report_of(json, 2, 1000), one = report_of(json, 1, 1000);
    for (const Json& stage : several["stages"])
      EXPECT_EQ(stage["payload_bytes_per_update"], nullptr) << json;
    for (const Json& stage : one["stages"])
      EXPECT_EQ(stage["payload_bytes_per_update"], 0) << json << stage;
    EXPECT_THAT(several["notes"].dump(), HasSubstr("how many ranks share a host"));
    EXPECT_THAT(one["notes"].dump(), testing::Not(HasSubstr("how many ranks share a host")));
  }
}

TEST(ConfigOuterReport, TheWholeRun) {
  const auto run_of = [](const std::string& outer) {
    return report_of(fmt::format(
        R"({{"optimizer": {{"type": "AdamW"}}, "scheduler": {{"type": "WarmupDecayLR",
            "params": {{"total_num_steps": 1000}}}}, "sotto": {{"outer": {}}}}})",
        outer));
  };
  const Json dense = run_of(R"({"warmup_steps": 40, "period": 48})");
  EXPECT_EQ(dense["run"]["full_precision_updates"], 60);
  EXPECT_EQ(dense["run"]["compressed_updates"], 0);
  EXPECT_EQ(dense["run"]["silent_updates"], 940);
  EXPECT_DOUBLE_EQ(dense["run"]["bits_per_parameter_and_update"].get<double>(), 32 * 0.06);
  EXPECT_DOUBLE_EQ(dense["run"]["part_of_full_precision"].get<double>(), 0.06);
  EXPECT_EQ(dense["stages"][1]["updates"]["launch"], 20);
  // 4 fragments take turns every 10 steps: 100 launches, 2 rounds of 4 in full precision.
  const Json coded =
      run_of(R"({"period": 40, "fragments": 4, "codec": "onebit", "dense_rounds": 2})");
  EXPECT_EQ(coded["run"]["full_precision_updates"], 8);
  EXPECT_EQ(coded["run"]["compressed_updates"], 92);
  EXPECT_EQ(coded["run"]["silent_updates"], 900);
  EXPECT_DOUBLE_EQ(coded["run"]["bits_per_parameter_and_update"].get<double>(),
                   (8 * 32 + 92 * 1) / 4.0 / 1000);
  // 33 launches of 84 bytes for 4096 elements.
  EXPECT_EQ(run_of(R"({"preset": "sparse_loco"})")["run"]["bits_per_parameter_and_update"],
            33 * 84 * 8 / 4096.0 / 1000);
  const Json late = run_of(R"({"period": 4096, "fragments": 4096, "codec": "int8",
      "dense_rounds": 9007199254740992})");
  EXPECT_EQ(late["run"]["full_precision_updates"], 1000);
}

TEST(ConfigOuterReport, AutomaticPeriods) {
  const Json late = report_of_outer(R"({"period": "auto", "fragments": 3})", 2, 100)["outer"];
  EXPECT_EQ(late["period"], "auto");
  EXPECT_EQ(late["delay"], "period");
  EXPECT_EQ(late["measured"], Json::parse(R"({"steps": 20, "period": 6})"));
  EXPECT_EQ(late["events"], nullptr);
  const Json between = report_of_outer(R"({"period": "auto", "delay": 7})", 2, 100)["outer"];
  EXPECT_EQ(between["delay"], 7);
  EXPECT_EQ(between["measured"]["period"], 8);
}

TEST(ConfigOuterReport, LargestSizesDoNotOverflow) {
  const Json outer = report_of_outer(
      R"({"period": 4096, "fragments": 4096, "codec": {"type": "fp16", "chunk_align": 1073741824},
          "dense_rounds": 9007199254740992, "switch_step": 9007199254740992})",
      1u << 20, uint64_t{1} << 53)["outer"];
  EXPECT_GE(outer["payload_bytes_per_period"].get<uint64_t>(),
            outer["payload_bytes_per_launch"].get<uint64_t>() / 2);
  EXPECT_EQ(outer["events"].size(), 4096u);
  report_of_outer(R"({"period": "auto", "fragments": 100})", 2, 100);
}

}  // namespace
}  // namespace sotto
