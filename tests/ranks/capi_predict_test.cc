// sotto_predict_report against outer optimizers that run: bytes and memory are theirs.
#include <nlohmann/json.hpp>
#include <string>

#include "tests/ranks/capi_outer_model.h"

namespace sotto::test {
namespace {

using Json = nlohmann::json;

constexpr const char* kRates =
    R"({"fp32": 1, "onebit": 1, "bf16": 1, "fp16": 1, "int8": 1, "int4": 1, "outer": 1})";

// frames: the transport is TCP, as in predictions; in-process messages are larger, without headers.
std::string request(const std::string& config, const std::vector<size_t>& counts, int ranks,
                    bool frames) {
  Json json = {{"config", config},       {"params", counts}, {"ranks", ranks},
               {"bandwidth_mbit", 1000}, {"step_ms", 10},    {"rates", Json::parse(kRates)}};
  if (!frames) json["segment_bytes"] = 256 * 1024;
  return json.dump();
}

Json predict(const std::string& json) {
  return Json::parse(read_all([&](char* buf, uint64_t cap, uint64_t* length) {
    return sotto_predict_report(json.c_str(), buf, cap, length);
  }));
}

// Two boundaries with what every launch from then on has.
constexpr int kPeriods = 4;

void compare(const Member& self, const std::string& config, const std::vector<size_t>& counts,
             bool frames) {
  OuterModel model(1, 0, counts);
  const Json row = predict(request(config, counts, self.size, frames)).at("configuration");
  sotto_outer* outer = new_outer(self, config, model);
  const bool codes_first = config.find("\"dense_rounds\": 0") != std::string::npos;
  const uint64_t first = info_of(outer).payload_bytes_next_launch;
  const auto steps = kPeriods * row.at("period").get<int>();
  for (int n = 0; n < steps; ++n) {
    model.add(0.01f * static_cast<float>(1 + self.rank));
    step(outer);
  }
  const sotto_outer_info info = info_of(outer);
  barrier(self);
  same(info.state_bytes, row.at("memory_bytes").get<uint64_t>(), "state_bytes");
  // Other ranks send a few bytes less where their parts are smaller.
  const uint64_t launch = row.at("payload_bytes_per_launch").get<uint64_t>();
  const uint64_t dense = row.at("payload_bytes_per_dense_launch").get<uint64_t>();
  require(info.payload_bytes_next_launch <= launch, "another rank sends more");
  if (self.rank == 0) {
    same(first, codes_first ? launch : dense, "the first launch");
    same(info.payload_bytes_next_launch, launch, "payload_bytes_next_launch");
    if (info.fragments == 1 && frames)
      same(info.header_bytes_next_launch, row.at("header_bytes_per_period").get<uint64_t>(),
           "header_bytes_next_launch");
  }
  OK(sotto_outer_destroy(outer));
}

class CapiPredict : public testing::TestWithParam<const char*> {};

TEST_P(CapiPredict, BytesAndMemoryOfWhatRuns) {
  const bool frames = std::string(GetParam()) == "tcp";
  const std::vector<size_t> counts[] = {{20'000, 37}, {70'001, 90'000}};
  for (
      const char* config : {
          R"({"preset": "co2", "period": 2})",
          R"({"preset": "co2", "period": 2, "codec": "onebit"})",
          R"({"preset": "co2", "period": 1, "codec": "int8", "dense_rounds": 0})",
          R"({"preset": "co2", "period": 2, "delay": 1, "codec": {"type": "int4", "residual": false}})",
          R"({"preset": "co2_paper", "period": 2, "codec": "bf16"})",
          R"({"preset": "co2", "period": 2, "penalty": "gap_rel", "granularity": "tensor"})",
          R"({"preset": "eager_diloco", "period": 2})",
          R"({"preset": "eager_diloco", "period": 2, "codec": "onebit"})",
          R"({"preset": "eager_diloco", "period": 2, "codec": "topk", "dense_rounds": 0})",
          R"({"preset": "delta_corrected", "period": 2, "codec": "int8", "dense_rounds": 2})",
          R"({"preset": "slowmo", "period": 2})",
          R"({"preset": "diloco", "period": 2, "codec": "fp16"})",
          R"({"preset": "local_sgd", "period": 2})",
          R"({"preset": "post_local_sgd", "period": 2, "switch_step": 2})",
          R"({"preset": "streaming_diloco", "period": 2, "delay": 1, "fragments": 2})",
          R"({"preset": "streaming_diloco", "period": 2, "delay": 2, "fragments": 2, "codec": "onebit"})",
          R"({"preset": "overlap_local_sgd", "period": 2})",
          R"({"preset": "cocod", "period": 2})",
      }) {
    for (const std::vector<size_t>& sizes : counts) {
      for (const int size : {1, 2, 3}) {
        SCOPED_TRACE(testing::Message() << config << ", " << sizes[0] << ", W = " << size);
        EXPECT_EQ(run_world(size, {.transport = GetParam()},
                            [&](Member& self) { compare(self, config, sizes, frames); }),
                  "");
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Transports, CapiPredict, testing::Values("inproc", "tcp"),
                         [](const auto& tested) { return std::string(tested.param); });

// Of a real file, and the length that is asked for first is that of the text.
TEST(CapiPredictReport, LengthAndText) {
  const std::string json =
      R"({"params": 50000, "ranks": 4, "bandwidth_mbit": 100, "step_ms": 1, "threads": 1})";
  uint64_t length = 0, again = 0;
  OK(sotto_predict_report(json.c_str(), nullptr, 0, &length));
  std::string text(length + 1, 'x');
  OK(sotto_predict_report(json.c_str(), text.data(), text.size(), &again));
  EXPECT_EQ(again, length);
  EXPECT_EQ(text[length], '\0');
  EXPECT_TRUE(Json::parse(text.substr(0, length)).at("methods").is_array());
}

TEST(CapiPredictReport, Errors) {
  uint64_t length = 7;
  FAILS(sotto_predict_report(nullptr, nullptr, 0, &length), SOTTO_E_INVALID_ARGUMENT,
        "json is NULL");
  FAILS(sotto_predict_report("{}", nullptr, 0, nullptr), SOTTO_E_INVALID_ARGUMENT,
        "out_len is NULL");
  FAILS(sotto_predict_report("{}", nullptr, 0, &length), SOTTO_E_INVALID_ARGUMENT,
        "params: missing, allowed is a whole number >= 1");
  FAILS(sotto_predict_report(R"({"params": 1, "ranks": 4, "bandwidth_mbit": 100, "step_ms": 1,
                                 "config": {"preset": "co2", "fragments": 2}})",
                             nullptr, 0, &length),
        SOTTO_E_INVALID_ARGUMENT,
        "sotto.outer.fragments: found 2 fragments, allowed is at most the number of tensors, 1");
  EXPECT_EQ(length, 7u);
}

}  // namespace
}  // namespace sotto::test
