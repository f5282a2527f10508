// Predictions: the specification's formulas and numbers, what is refused, and a report's
// arithmetic.
#include <fmt/core.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <string>

#include "core/cpu/cpu_device.h"
#include "core/predict/formulas.h"
#include "core/predict/rates.h"
#include "core/predict/report.h"

namespace sotto {
namespace {

using Json = nlohmann::json;

// ---- Formulas (specification co2-overlap, section 12) ----

// The table of section 12.3: n = 1.3e9, W = 16, eta = 0.8, inner steps of 0.5 s.
TEST(PredictFormulas, WorkedTable) {
  struct Cell {
    double bits, gbit, seconds;
    int steps;
  };
  for (const Cell& c : {Cell{32, 1, 97.5, 195},
                        {32, 10, 9.75, 20},
                        {32, 80, 1.22, 3},
                        {32, 400, 0.24, 1},
                        {16, 1, 48.8, 98},
                        {16, 10, 4.9, 10},
                        {16, 80, 0.61, 2},
                        {16, 400, 0.12, 1},
                        {4, 1, 12.2, 25},
                        {4, 10, 1.2, 3},
                        {4, 80, 0.15, 1},
                        {1, 1, 3.05, 7},
                        {1, 10, 0.31, 1},
                        {1, 80, 0.04, 1},
                        {1, 400, 0.01, 1}}) {
    SCOPED_TRACE(testing::Message() << c.bits << " bits, " << c.gbit << " Gbit/s");
    const LinkModel link{.bits_per_second = c.gbit * 1e9, .efficiency = 0.8};
    const double seconds = exchange_seconds(link, 16, 2, two_phase_bits(16, 1.3e9, c.bits, c.bits));
    // As many digits as the table has.
    EXPECT_NEAR(seconds, c.seconds, c.seconds >= 1 ? 0.05 : 0.006);
    EXPECT_EQ(std::ceil(seconds / 0.5), c.steps);
    EXPECT_DOUBLE_EQ(ring_seconds(link, 16, 1.3e9 * c.bits), seconds);
  }
}

// Over a path of 50 ms latency is most of a ring with 16 ranks.
TEST(PredictFormulas, Latency) {
  const LinkModel link{.bits_per_second = 1e9, .efficiency = 1, .latency = 0.05};
  EXPECT_DOUBLE_EQ(ring_seconds(link, 16, 0), 1.5);
  EXPECT_DOUBLE_EQ(exchange_seconds(link, 16, 2, 0), 0.1);
  EXPECT_DOUBLE_EQ(tree_seconds(link, 16, 0), 0.4);
  EXPECT_DOUBLE_EQ(tree_seconds(link, 17, 0), 0.5);
  EXPECT_DOUBLE_EQ(tree_seconds(link, 16, 1e9), 0.4 + 2);
  const LinkModel messages{.bits_per_second = 1e9, .per_message = 0.001};
  EXPECT_DOUBLE_EQ(exchange_seconds(messages, 5, 2, 0), 0.008);
  EXPECT_DOUBLE_EQ(ring_seconds(messages, 5, 0), 0.008);
}

TEST(PredictFormulas, OneRank) {
  const LinkModel link{.bits_per_second = 1, .latency = 1, .per_message = 1};
  EXPECT_EQ(ring_seconds(link, 1, 1e9), 0);
  EXPECT_EQ(tree_seconds(link, 1, 1e9), 0);
  EXPECT_EQ(exchange_seconds(link, 1, 0, two_phase_bits(1, 1e9, 32, 32)), 0);
}

// The paper's 128 GPUs over 80 Gbit/s: communication takes 11.9 steps.
TEST(PredictFormulas, SmallestDelay) {
  EXPECT_EQ(smallest_delay(11.9, 1), 14u);
  EXPECT_EQ(smallest_delay(10, 1), 11u);
  EXPECT_EQ(smallest_delay(20, 2), 11u);
  EXPECT_EQ(smallest_delay(0, 1), 1u);
  EXPECT_EQ(smallest_delay(0.9, 1), 1u);
  EXPECT_EQ(smallest_delay(0.92, 1), 2u);
  EXPECT_EQ(smallest_delay(1e300, 1e-300), uint64_t{1} << 53);
}

PeriodModel model_of(uint64_t period, uint64_t delay, std::vector<double> averages) {
  return {.period = period,
          .delay = delay,
          .step = 0.5,
          .averages = std::move(averages),
          .outer = 0.25,
          .contention = 0};
}

// t_round of section 12.4, with and without contention.
TEST(PredictFormulas, PeriodAtFullOverlap) {
  PeriodModel m = model_of(8, 8, {3});
  PeriodTimes t = period_times(m);
  EXPECT_DOUBLE_EQ(t.exposed, 0);
  EXPECT_DOUBLE_EQ(t.seconds, 4 + 0.25);
  EXPECT_DOUBLE_EQ(t.efficiency, 4 / 4.25);
  EXPECT_DOUBLE_EQ(t.hidden, 1);
  m.contention = 1;  // rho = 1/2
  t = period_times(m);
  EXPECT_DOUBLE_EQ(t.exposed, 0);
  EXPECT_DOUBLE_EQ(t.seconds, 4 + 0.5 * 3 + 0.25);
}

TEST(PredictFormulas, PeriodThatIsTooShort) {
  PeriodModel m = model_of(4, 4, {8});
  PeriodTimes t = period_times(m);
  EXPECT_DOUBLE_EQ(t.exposed, 8 - 2);
  EXPECT_DOUBLE_EQ(t.seconds, 8 + 0.25);
  EXPECT_DOUBLE_EQ(t.hidden, 0.25);
  m.contention = 1;
  t = period_times(m);
  EXPECT_DOUBLE_EQ(t.exposed, 8 - 4);
  EXPECT_DOUBLE_EQ(t.seconds, 8 + 0.25);
}

TEST(PredictFormulas, PeriodWithoutDelay) {
  const PeriodTimes t = period_times(model_of(4, 0, {1, 2}));
  EXPECT_DOUBLE_EQ(t.exposed, 3);
  EXPECT_DOUBLE_EQ(t.seconds, 2 + 3 + 0.25);
  EXPECT_DOUBLE_EQ(t.hidden, 0);
}

// A fragment has `delay` steps, the link a period for all of them.
TEST(PredictFormulas, Fragments) {
  EXPECT_DOUBLE_EQ(period_times(model_of(8, 2, {1, 1, 0.5})).exposed, 0);
  EXPECT_DOUBLE_EQ(period_times(model_of(8, 2, {1.5, 1, 1.25})).exposed, 0.75);
  EXPECT_DOUBLE_EQ(period_times(model_of(4, 2, {1, 1, 1})).exposed, 1);
}

TEST(PredictFormulas, Bandwidth) {
  // B >= 2 (W-1)/W n b / (eta tau t_step)
  const double bits = two_phase_bits(4, 25e6, 32, 32);
  EXPECT_DOUBLE_EQ(needed_bandwidth(bits, 0.8, 10, 0.5), 2 * 0.75 * 25e6 * 32 / (0.8 * 10 * 0.5));
  const LinkModel link{.bits_per_second = needed_bandwidth(bits, 0.8, 10, 0.5), .efficiency = 0.8};
  EXPECT_DOUBLE_EQ(exchange_seconds(link, 4, 2, bits), 5);
}

// ---- Requests ----

constexpr const char* kLink = R"("ranks": 4, "bandwidth_mbit": 100, "step_ms": 50)";

std::string error_of_request(const std::string& json) {
  const Result<PredictRequest> request = parse_predict_request(json);
  if (request.ok()) return "OK";
  EXPECT_EQ(request.status().code(), Code::kInvalidArgument) << json;
  return request.status().text();
}

std::string with(const std::string& more) {
  return std::string("{\"params\": 1000, ") + kLink + ", " + more + "}";
}

TEST(PredictRequests, Defaults) {
  const PredictRequest r = *parse_predict_request(std::string("{\"params\": 1000, ") + kLink + "}");
  EXPECT_EQ(r.params, std::vector<uint64_t>{1000});
  EXPECT_EQ(r.ranks, 4u);
  EXPECT_DOUBLE_EQ(r.link.bits_per_second, 1e8);
  EXPECT_DOUBLE_EQ(r.link.efficiency, 0.956);
  EXPECT_EQ(r.link.latency, 0);
  EXPECT_EQ(r.link.per_message, 0);
  EXPECT_DOUBLE_EQ(r.step_seconds, 0.05);
  EXPECT_EQ(r.contention, 0);
  EXPECT_EQ(r.threads, 0u);
  EXPECT_FALSE(r.config);
}

TEST(PredictRequests, Everything) {
  const PredictRequest r = *parse_predict_request(
      R"({"params": [3, 0, 4], "ranks": 2, "bandwidth_mbit": 2.5, "step_ms": 1, "latency_ms": 3,
          "message_us": 4, "efficiency": 0.5, "contention": 0.25, "threads": 2,
          "segment_bytes": 65536, "rates": {"int8": 1.5, "outer": 0},
          "config": "{\"preset\": \"eager_diloco\" /* comment */}"})");
  EXPECT_EQ(r.elements(), 7u);
  EXPECT_DOUBLE_EQ(r.link.latency, 0.003);
  EXPECT_DOUBLE_EQ(r.link.per_message, 4e-6);
  EXPECT_DOUBLE_EQ(r.link.efficiency, 0.5);
  EXPECT_DOUBLE_EQ(r.contention, 0.25);
  EXPECT_EQ(r.threads, 2u);
  EXPECT_EQ(r.segment_bytes, 65536u);
  EXPECT_EQ(r.rates, (GivenRates{{"int8", 1.5}, {"outer", 0}}));
  EXPECT_DOUBLE_EQ(r.config->rule.freshness, 0.5);  // 1 / ranks
}

TEST(PredictRequests, Refused) {
  struct Refusal {
    std::string json, text;
  };
  const std::string no_ranks = R"({"params": 1000, "bandwidth_mbit": 100, "step_ms": 50})";
  for (const Refusal& r : std::vector<Refusal>{
           {"",
            "json: found no JSON, allowed is an object such as {\"params\": 25000000, \"ranks\": "
            "4, \"bandwidth_mbit\": 1000, \"step_ms\": 100}"},
           {"[1]",
            "json: found [1], allowed is an object such as {\"params\": 25000000, \"ranks\": "
            "4, \"bandwidth_mbit\": 1000, \"step_ms\": 100}"},
           {R"({"ranks": 1, "ranks": 2})", "ranks: the key is there twice; leave one of them out"},
           {with(R"("bandwidth": 1)"),
            "bandwidth: unknown key; the nearest one is bandwidth_mbit, allowed are config, "
            "params, "
            "ranks, bandwidth_mbit, latency_ms, step_ms, efficiency, message_us, contention, "
            "threads, rates, segment_bytes"},
           {no_ranks,
            "ranks: missing, allowed is a whole number >= 1 and <= 1024 (ranks that average)"},
           {R"({"ranks": 4})",
            "params: missing, allowed is a whole number >= 1 and <= 17179869184 (elements)"},
           {R"({"params": [1, -1]})",
            "params[1]: found -1, allowed is a whole number >= 0 and <= 17179869184 (elements)"},
           {R"({"params": [0, 0]})",
            "params: found 0 elements in 2 tensors, allowed are 1 to 17179869184"},
           {R"({"params": 1, "ranks": 2000})",
            "ranks: found 2000, allowed is a whole number >= 1 and <= 1024 (ranks that average)"},
           {R"({"params": 1, "ranks": 2, "bandwidth_mbit": 0})",
            "bandwidth_mbit: found 0, allowed is a number > 0 (10^6 bits per second and "
            "direction)"},
           {R"({"params": 1, "ranks": 2, "bandwidth_mbit": 1, "step_ms": "1s"})",
            "step_ms: found \"1s\", allowed is a number > 0 (an inner step, in milliseconds)"},
           {with(R"("efficiency": 1.5)"),
            "efficiency: found 1.5, allowed is a number > 0 and <= 1 (share of the bandwidth that "
            "is left for messages)"},
           {with(R"("latency_ms": -1)"),
            "latency_ms: found -1, allowed is a number >= 0 (one way, in milliseconds)"},
           {with(R"("threads": 1.5)"),
            "threads: found 1.5, allowed is a whole number >= 1 and <= 4096 (threads for the "
            "kernels that are measured)"},
           {with(R"("rates": {"onebits": 1})"),
            "rates.onebits: unknown; the nearest one is onebit, allowed are fp32, outer, onebit, "
            "bf16, fp16, int8, int4, topk"},
           {with(R"("rates": {"int8": -1})"),
            "rates.int8: found -1, allowed is a number >= 0 (nanoseconds per element)"},
           {with(R"("config": 7)"),
            "config: found 7, allowed is the text of a configuration file, or its JSON object"},
           {with(R"("config": {"preset": "co3"})"),
            "config: configuration: line 1, column 11: outer.preset: found \"co3\", allowed is one "
            "of co2|co2_paper|delta_corrected|slowmo|local_sgd|post_local_sgd|bmuf|diloco|"
            "delayed_diloco|eager_diloco|streaming_diloco|overlap_local_sgd|cocod|sparse_loco"},
           {with(R"("config": {"optimizer": {"type": "Lamb", "params": {"lr": 1}}})"),
            "config: configuration: sotto.outer: missing; add \"sotto\": {\"outer\": {\"preset\": "
            "\"co2\"}} or hand over such an object itself"}}) {
    EXPECT_EQ(error_of_request(r.json), r.text);
  }
}

// ---- Reports ----

std::shared_ptr<Device> device() {
  return std::shared_ptr<Device>(make_cpu_device(1, SimdLevel::kAuto).take());
}

Json report_of(const std::string& json) {
  const Result<PredictRequest> request = parse_predict_request(json);
  EXPECT_TRUE(request.ok()) << request.status().text();
  const Result<std::string> text = predict_report(*request, device(), TransportCaps{});
  EXPECT_TRUE(text.ok()) << text.status().text();
  return Json::parse(*text);
}

const Json& method(const Json& report, const std::string& name, const std::string& codec) {
  for (const Json& row : report.at("methods")) {
    if (row.at("method") == name && row.at("codec") == codec) return row;
  }
  ADD_FAILURE() << name << " with " << codec << " is missing";
  static const Json none;
  return none;
}

constexpr const char* kRates =
    R"("rates": {"fp32": 1, "onebit": 2, "bf16": 3, "fp16": 3, "int8": 4, "int4": 5, "topk": 7, "outer": 6})";

std::string request_of(const std::string& more) {
  return std::string(R"({"params": [400000, 600000], "ranks": 4, "bandwidth_mbit": 100, )"
                     R"("step_ms": 20, "latency_ms": 1, "efficiency": 0.8, )") +
         kRates + more + "}";
}

TEST(PredictReport, Arithmetic) {
  const Json report = report_of(request_of(""));
  const Json& row = method(report, "co2", "fp32");
  const double sent = row.at("payload_bytes_per_period").get<double>() +
                      row.at("header_bytes_per_period").get<double>();
  EXPECT_EQ(row.at("payload_bytes_per_launch"), 2 * 3 * 1000000);
  const double wire = 2 + sent * 8 / (0.8 * 100e6) * 1e3;
  EXPECT_NEAR(row.at("wire_ms"), wire, 1e-6 * wire);
  EXPECT_NEAR(row.at("kernels_ms"), 1, 1e-9);
  EXPECT_NEAR(row.at("average_ms"), wire + 1, 1e-6 * wire);
  EXPECT_NEAR(row.at("boundary_ms"), 6, 1e-9);
  const auto tau = static_cast<uint64_t>(std::ceil(1.1 * (wire + 1) / 20));
  EXPECT_EQ(row.at("tau_min"), tau);
  EXPECT_EQ(row.at("period"), tau);
  EXPECT_EQ(row.at("delay"), tau);
  EXPECT_EQ(row.at("exposed_ms_per_period"), 0);
  EXPECT_NEAR(row.at("period_ms"), 20.0 * static_cast<double>(tau) + 6, 1e-6);
  EXPECT_EQ(row.at("hidden"), 1);
  const Json& blocking = method(report, "slowmo", "fp32");
  EXPECT_EQ(blocking.at("delay"), 0);
  EXPECT_EQ(blocking.at("period"), 48);
  EXPECT_NEAR(blocking.at("exposed_ms_per_period"), wire + 1, 1e-6 * wire);
  EXPECT_NEAR(blocking.at("period_ms"), 48 * 20 + wire + 1 + 6, 1e-6 * wire);
  EXPECT_EQ(blocking.at("hidden"), 0);
  EXPECT_TRUE(blocking.at("bandwidth_mbit_needed").is_null());
}

// Which rate hides a late average: latency and kernels are not shorter then.
TEST(PredictReport, TheRateThatHides) {
  const auto own = [](const std::string& params, double step_ms, const std::string& config) {
    return report_of(fmt::format(R"({{"params": {}, "ranks": 4, "bandwidth_mbit": 10000,
                                      "latency_ms": 0.1, "step_ms": {}, "config": {{{}}},
                                      "rates": {{"fp32": 1, "onebit": 1, "outer": 0}}}})",
                                 params, step_ms, config))
        .at("configuration");
  };
  const std::string co2 = R"("preset": "co2", "codec": "onebit", "period": )";
  const Json one = own("25000000", 9, co2 + "3");
  EXPECT_GT(one.at("exposed_ms_per_period"), 0);
  EXPECT_EQ(one.at("period_min"), one.at("tau_min"));
  EXPECT_GT(one.at("period_min"), one.at("period"));
  const double rate = one.at("bandwidth_mbit_that_hides"), needed = one.at("bandwidth_mbit_needed");
  EXPECT_GT(rate, needed);
  const double sent = needed * 27, rest = one.at("average_ms").get<double>() - sent / 10000;
  EXPECT_NEAR(sent / rate + rest, 27, 1e-6);
  // The kernels alone take 25 ms.
  EXPECT_TRUE(own("25000000", 9, co2 + "1").at("bandwidth_mbit_that_hides").is_null());
  const Json four = own("[9000000, 8000000, 5000000, 3000000]", 10,
                        R"("preset": "streaming_diloco", "period": 8, "delay": 1, "fragments": 4)");
  EXPECT_TRUE(four.at("bandwidth_mbit_that_hides").is_null());
  EXPECT_EQ(four.at("period_min").get<uint64_t>() % 4, 0u);
  EXPECT_GE(four.at("period_min").get<double>() * 10, 1.1 * four.at("average_ms").get<double>());
}

// Given rates are used and nothing is measured: the report is the same every time.
TEST(PredictReport, GivenRates) {
  const Json report = report_of(request_of(""));
  for (const auto& [name, rate] : report.at("rates").items())
    EXPECT_FALSE(rate.at("measured").get<bool>()) << name;
  EXPECT_EQ(report, report_of(request_of("")));
  const Json measured = report_of(
      R"({"params": 300000, "ranks": 3, "bandwidth_mbit": 1000, "step_ms": 5, "threads": 1})");
  for (const char* name : {"fp32", "onebit", "bf16", "int8", "int4", "outer co2", "outer bmuf"}) {
    const Json& rate = measured.at("rates").at(name);
    EXPECT_TRUE(rate.at("measured").get<bool>()) << name;
    EXPECT_GT(rate.at("ns_per_element"), 0) << name;
  }
  EXPECT_GT(method(measured, "co2", "int8").at("kernels_ms"), 0);
}

// Every preset is there, with all codecs that it can have.
TEST(PredictReport, Methods) {
  const Json report = report_of(request_of(""));
  for (const char* name : {"co2", "co2_paper", "diloco", "delayed_diloco", "streaming_diloco"}) {
    for (const char* codec : {"fp32", "onebit", "bf16", "fp16", "int8", "int4"})
      EXPECT_TRUE(method(report, name, codec).at("can_run").get<bool>()) << name << " " << codec;
  }
  for (const char* name : {"delta_corrected", "slowmo", "local_sgd", "post_local_sgd", "bmuf",
                           "eager_diloco", "overlap_local_sgd", "cocod"})
    EXPECT_TRUE(method(report, name, "fp32").at("can_run").get<bool>()) << name;
  for (const Json& row : report.at("methods")) {
    if (row.at("can_run") == false) {
      EXPECT_NE(row.at("reason"), "");
      continue;
    }
    SCOPED_TRACE(row.dump());
    EXPECT_GT(row.at("memory_bytes"), 3 * 4 * 1000000);
    if (row.at("delay") == 0) continue;
    EXPECT_EQ(row.at("exposed_ms_per_period"), 0);
    EXPECT_LE(row.at("bandwidth_mbit_needed"), 100);
    EXPECT_GE(row.at("delay"), row.at("tau_min"));
  }
  const Json& streaming = method(report, "streaming_diloco", "fp32");
  EXPECT_EQ(streaming.at("fragments"), 2);
  EXPECT_EQ(streaming.at("period").get<uint64_t>() % 2, 0u);
  EXPECT_LT(streaming.at("delay"), streaming.at("period"));
}

// At half of the delay half of the average is exposed, as the formula says.
TEST(PredictReport, Configuration) {
  const Json at_tau_min = report_of(request_of(""));
  const Json& row = method(at_tau_min, "co2", "int4");
  const double average = row.at("average_ms");
  const auto half = static_cast<uint64_t>(average / 20 / 2);
  ASSERT_GE(half, 1u);
  const Json report = report_of(request_of(
      fmt::format(R"(, "config": {{"preset": "co2", "codec": "int4", "period": {}}})", half)));
  const Json& own = report.at("configuration");
  EXPECT_EQ(own.at("codec"), "int4");
  EXPECT_EQ(own.at("period"), half);
  EXPECT_EQ(own.at("tau_min"), row.at("tau_min"));
  EXPECT_NEAR(own.at("exposed_ms_per_period"), average - 20.0 * static_cast<double>(half), 1e-9);
  EXPECT_NEAR(own.at("period_ms"), average + 6, 1e-9);
  EXPECT_EQ(own.at("memory_bytes"), row.at("memory_bytes"));
  const Json automatic = report_of(
      request_of(R"(, "config": {"sotto": {"outer": {"codec": "int4", "period": "auto"}}})"));
  EXPECT_EQ(automatic.at("configuration").at("period"), row.at("tau_min"));
  EXPECT_EQ(at_tau_min.at("configuration"), Json(nullptr));
}

// Codecs of one kind whose other settings differ send different bytes.
TEST(PredictReport, SettingsOfASparseCodec) {
  const auto launch = [](const char* codec) {
    const Json report = report_of(
        request_of(fmt::format(R"(, "config": {{"preset": "sparse_loco", "codec": {}}})", codec)));
    return report.at("configuration").at("payload_bytes_per_launch").get<uint64_t>();
  };
  // 97 and 146 blocks of 4096, and 2688 and 1984 elements of which 42 and 31 are sent.
  EXPECT_EQ(launch(R"({"type": "topk"})"), 3u * (243 * 84 + (32 + 11 + 11 + 4) + (24 + 8 + 8 + 4)));
  // Without indices and levels.
  EXPECT_EQ(launch(R"({"type": "topk", "k": 4096, "bits": 32})"), 3u * 4 * 1000000);
  EXPECT_LT(launch(R"({"type": "topk", "exchange": "two_phase", "k_server": 128})"),
            launch(R"({"type": "topk", "exchange": "two_phase"})"));
}

// Rates are of settings too: those of the configuration are not the presets'.
TEST(PredictReport, MeasuredRatesOfASparseCodec) {
  const Json report = report_of(
      R"({"params": 300000, "ranks": 3, "bandwidth_mbit": 100, "step_ms": 5, "threads": 1, )"
      R"("config": {"preset": "sparse_loco", "codec": {"type": "topk", "k": 4096, "bits": 32}}})");
  const auto kernels = [&](const Json& row) { return row.at("kernels_ms").get<double>(); };
  const auto rate = [&](const char* name) {
    const Json& at = report.at("rates").at(name);
    EXPECT_TRUE(at.at("measured").get<bool>()) << name;
    return at.at("ns_per_element").get<double>() * 1e-6 * 300000;
  };
  EXPECT_DOUBLE_EQ(kernels(report.at("configuration")), rate("topk"));
  EXPECT_DOUBLE_EQ(kernels(method(report, "co2", "topk")), rate("topk co2"));
  EXPECT_DOUBLE_EQ(kernels(method(report, "diloco", "topk")), rate("topk co2"));
  EXPECT_NE(rate("topk"), rate("topk co2"));
}

TEST(PredictReport, Take) {
  const auto take = [](double mbit, double step_ms) {
    return report_of(fmt::format(R"({{"params": 1000000, "ranks": 4, "bandwidth_mbit": {}, )"
                                 R"("step_ms": {}, {}}})",
                                 mbit, step_ms, kRates))
        .at("take");
  };
  // At 100 Mbit/s float32 takes 503 ms, int8 132, int4 72, 1 bit 18; launch and update take 6 ms.
  const Json slow = take(100, 100);
  EXPECT_EQ(slow.at("method"), "co2");
  EXPECT_EQ(slow.at("codec"), "int8");  // with 1 bit launch and update ask for two steps, too
  EXPECT_EQ(slow.at("outer"), (Json{{"preset", "co2"}, {"period", 2}, {"codec", "int8"}}));
  EXPECT_EQ(slow.at("why"), "2 steps of 100 ms hide its average of 132 ms, where float32 needs 6");
  const Json slower = take(10, 100);
  EXPECT_EQ(slower.at("outer"), (Json{{"preset", "co2"}, {"period", 2}, {"codec", "onebit"}}));
  const Json quick = take(100, 20);
  EXPECT_EQ(quick.at("outer"), (Json{{"preset", "co2"}, {"period", 6}, {"codec", "int4"}}));
  EXPECT_THAT(quick.at("why").get<std::string>(),
              testing::HasSubstr("; with 6 steps launch and update take 5 % of the time at most"));
  // Everything fits behind one step: no codec is needed.
  EXPECT_EQ(take(100, 1000).at("outer"), (Json{{"preset", "co2"}, {"period", 1}}));
  // Of a small model codecs send padding: float32, whose average is hidden too, has more bits.
  const Json tiny = report_of(R"({"params": 1000, "ranks": 64, "bandwidth_mbit": 1000,
                                  "latency_ms": 1, "step_ms": 100,
                                  "rates": {"fp32": 1, "bf16": 1, "fp16": 1, "int8": 1, "int4": 1,
                                            "onebit": 1, "topk": 1, "outer": 0}})")
                        .at("take");
  EXPECT_EQ(tiny.at("outer"), (Json{{"preset", "co2"}, {"period", 1}}));
  EXPECT_THAT(tiny.at("why").get<std::string>(),
              testing::StartsWith("a step of 100 ms hides its average of "));
  const Json fast = take(100000, 1000);
  EXPECT_EQ(fast.at("method"), "every_step");
  EXPECT_EQ(fast.at("outer"), Json(nullptr));
}

TEST(PredictReport, OneRankSendsNothing) {
  const Json report = report_of(
      R"({"params": 1000, "ranks": 1, "bandwidth_mbit": 100, "step_ms": 20, "rates": {"outer": 1}})");
  const Json& row = method(report, "co2", "onebit");
  EXPECT_EQ(row.at("payload_bytes_per_period"), 0);
  EXPECT_EQ(row.at("header_bytes_per_period"), 0);
  EXPECT_EQ(row.at("average_ms"), 0);
  EXPECT_EQ(row.at("tau_min"), 1);
  EXPECT_EQ(report.at("take").at("method"), "every_step");
}

}  // namespace
}  // namespace sotto
