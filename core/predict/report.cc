#include "core/predict/report.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>
#include <vector>

#include "core/base/json_text.h"
#include "core/base/text.h"
#include "core/config/outer_presets.h"
#include "core/predict/costs.h"

namespace sotto {
namespace {

using Ordered = nlohmann::ordered_json;

constexpr const char* kOwn = "configuration";  // the method of the request's settings
constexpr uint64_t kUsualFragments = 4;
// An average of gradients at every step that costs no more than this share is not worth hiding.
constexpr double kCheap = 0.02;
// Share of the time that launches and updates may take in what is recommended.
constexpr double kBoundaryShare = 0.05;

double ms(double seconds) { return seconds * 1e3; }

std::string text_of(double seconds) {
  return seconds < 1 ? fmt::format("{:.3g} ms", ms(seconds)) : fmt::format("{:.3g} s", seconds);
}

// A method with a codec.
struct Row {
  std::string method;
  OuterConfig config;   // resolved
  std::string refused;  // why it cannot run here; the rest is not filled in then
  AverageCosts averages;
  PeriodTimes times;
  uint64_t tau_min = 1, period_min = 1;
  double outer = 0;
  uint64_t state_bytes = 0;
};

class Predictor {
 public:
  Predictor(const PredictRequest& request, std::shared_ptr<Device> device,
            const TransportCaps& transport)
      : request_(request), costs_(request, std::move(device), transport) {}

  Result<Ordered> report();

 private:
  Result<Row> row(const std::string& method, OuterConfig config);
  Status add_method(const OuterPreset& preset);
  Result<std::optional<Row>> method_row(const OuterPreset& preset, std::string_view codec);
  Result<OuterConfig> at_smallest_delay(const OuterPreset& preset, Ordered settings);
  uint64_t smallest(double comm) const { return smallest_delay(comm, request_.step_seconds); }
  // The link carries all fragments in a period, which their number divides.
  uint64_t shortest_period(const AverageCosts& averages, uint64_t fragments) const {
    const uint64_t steps = std::max(smallest(averages.largest()), smallest(averages.total()));
    return (steps + fragments - 1) / fragments * fragments;
  }

  uint64_t worthwhile_period(const Row& row) const;
  Ordered row_json(const Row& row) const;
  Ordered bandwidth_that_hides(const Row& row) const;
  Ordered link_json() const;
  Ordered rates_json() const;
  Ordered every_step_json() const;
  Ordered all_reduce_json() const;
  Ordered take_json() const;

  const PredictRequest& request_;
  CostModel costs_;
  std::vector<Row> rows_;
  std::optional<Row> own_;
};

Result<Row> Predictor::row(const std::string& method, OuterConfig config) {
  Row r{.method = method, .config = std::move(config), .refused = "", .averages = {}, .times = {}};
  if (const Status supported = check_supported(r.config); !supported.ok()) {
    r.refused = supported.text();
    return r;
  }
  SOTTO_ASSIGN(r.averages, costs_.averages(method, r.config));
  SOTTO_ASSIGN(r.outer, costs_.boundary(method, r.config));
  SOTTO_ASSIGN(r.state_bytes, costs_.state_bytes(r.config));
  r.tau_min = smallest(r.averages.largest());
  r.period_min = shortest_period(r.averages, r.config.fragments.count);
  r.times = period_times({.period = r.config.schedule.period,
                          .delay = r.config.schedule.delay,
                          .step = request_.step_seconds,
                          .averages = r.averages.seconds,
                          .outer = r.outer,
                          .contention = request_.contention});
  return r;
}

// Settings with the shortest delay that hides the average, where the preset has one at all.
Result<OuterConfig> Predictor::at_smallest_delay(const OuterPreset& preset, Ordered settings) {
  const auto parsed = [&]() -> Result<OuterConfig> {
    SOTTO_ASSIGN(const OuterConfig config, parse_outer(dump_text(settings)));
    return config.resolved(request_.ranks);
  };
  SOTTO_ASSIGN(OuterConfig config, parsed());
  if (config.schedule.delay == 0 || !check_supported(config).ok()) return config;
  SOTTO_ASSIGN(const AverageCosts averages, costs_.averages(std::string(preset.name), config));
  settings["period"] = shortest_period(averages, config.fragments.count);
  if (!preset.delayed) settings["delay"] = smallest(averages.largest());
  return parsed();
}

// Nothing if the method does not go with the codec.
Result<std::optional<Row>> Predictor::method_row(const OuterPreset& preset,
                                                 std::string_view codec) {
  const uint64_t fragments = std::min<uint64_t>(kUsualFragments, request_.params.size());
  const uint64_t usual = OuterSchedule().period / fragments * fragments;
  Ordered settings = {{"preset", preset.name},
                      {"period", preset.period == 0 ? usual : preset.period}};
  for (const std::string_view key : preset.required) {
    if (key == "fragments") settings["fragments"] = fragments;
    if (key == "delay") settings["delay"] = 1;
    if (key == "switch_step") settings["switch_step"] = settings["period"];
  }
  if (preset.rule.kind != OuterRule::kNone && std::isnan(preset.rule.alpha)) {
    settings["alpha"] = 1;
    settings["beta"] = 0.5;
  }
  if (!codec.empty()) settings["codec"] = codec;
  Result<OuterConfig> config = at_smallest_delay(preset, settings);
  if (!config.ok() && !codec.empty() && config.status().code() == Code::kInvalidArgument)
    return std::optional<Row>();
  SOTTO_TRY(config.status());
  SOTTO_ASSIGN(Row made, row(std::string(preset.name), config.take()));
  if (!codec.empty() && !made.refused.empty()) return std::optional<Row>();
  return std::optional<Row>(std::move(made));
}

Status Predictor::add_method(const OuterPreset& preset) {
  std::vector<std::string_view> codecs = {""};
  if (!preset.codec) {
    for (const CodecRow& row : kCodecs) codecs.push_back(row.name());
  }
  for (const std::string_view codec : codecs) {
    SOTTO_ASSIGN(std::optional<Row> made, method_row(preset, codec));
    if (made) rows_.push_back(std::move(*made));
  }
  return ok_status();
}

Ordered Predictor::row_json(const Row& r) const {
  const OuterSchedule& s = r.config.schedule;
  const bool refused = !r.refused.empty();
  Ordered out = {{"method", r.method},
                 {"codec", average_name(r.config)},
                 {"can_run", !refused},
                 {"reason", refused ? Ordered(r.refused) : Ordered(nullptr)}};
  if (refused) return out;
  out["period"] = s.period;
  out["delay"] = s.delay;
  out["fragments"] = r.config.fragments.count;
  out["tau_min"] = r.tau_min;
  out["period_min"] = r.period_min;
  out["average_ms"] = ms(r.averages.total());
  out["wire_ms"] = ms(r.averages.wire);
  out["kernels_ms"] = ms(r.averages.kernels);
  out["boundary_ms"] = ms(r.outer);
  out["exposed_ms_per_period"] = ms(r.times.exposed);
  out["exposed_share"] = r.times.exposed / r.times.seconds;
  out["hidden"] = r.times.hidden;
  out["period_ms"] = ms(r.times.seconds);
  out["efficiency"] = r.times.efficiency;
  out["bandwidth_mbit_needed"] =
      s.delay == 0 ? Ordered(nullptr)
                   : Ordered(needed_bandwidth(r.averages.largest_bits, request_.link.efficiency,
                                              s.delay, request_.step_seconds) *
                             1e-6);
  out["bandwidth_mbit_that_hides"] = bandwidth_that_hides(r);
  out["payload_bytes_per_launch"] = r.averages.launch;
  out["payload_bytes_per_dense_launch"] = r.averages.dense_launch;
  out["payload_bytes_per_period"] = r.averages.payload;
  out["header_bytes_per_period"] = r.averages.headers;
  out["payload_bytes_per_step"] =
      static_cast<double>(r.averages.payload) / static_cast<double>(s.period);
  out["memory_bytes"] = r.state_bytes;
  return out;
}

// Latency and kernels stay as they are. Null: no rate hides the averages, or several fragments
// share the link.
Ordered Predictor::bandwidth_that_hides(const Row& r) const {
  if (r.config.fragments.count != 1) return nullptr;
  const double rest = r.averages.largest() - request_.link.seconds_of(r.averages.largest_bits);
  const double room = static_cast<double>(r.config.schedule.delay) * request_.step_seconds - rest;
  if (room <= 0) return nullptr;
  return r.averages.largest_bits / (request_.link.efficiency * room) * 1e-6;
}

Ordered Predictor::link_json() const {
  const LinkModel& l = request_.link;
  return {{"bandwidth_mbit", l.bits_per_second * 1e-6},
          {"efficiency", l.efficiency},
          {"latency_ms", ms(l.latency)},
          {"message_us", l.per_message * 1e6}};
}

Ordered Predictor::rates_json() const {
  Ordered out = Ordered::object();
  for (const auto& [name, rate] : costs_.rates())
    out[name] = {{"ns_per_element", rate.ns}, {"measured", rate.measured}};
  return out;
}

// One average of everything per step, which waits for it. Those of the first preset with period 1.
Ordered Predictor::every_step_json() const {
  Ordered out = Ordered::array();
  for (const Row& r : rows_) {
    if (r.method != kOuterPresets[0].name) continue;
    const double average = r.averages.total();
    out.push_back({{"codec", average_name(r.config)},
                   {"average_ms", ms(average)},
                   {"step_ms", ms(request_.step_seconds + average)},
                   {"exposed_share", average / (request_.step_seconds + average)},
                   {"payload_bytes_per_step", r.averages.payload}});
  }
  return out;
}

// The wire alone, by the algorithms of others beside this library's direct exchange.
Ordered Predictor::all_reduce_json() const {
  Ordered out = Ordered::array();
  const auto elements = static_cast<double>(request_.elements());
  const uint64_t ranks = request_.ranks;
  for (const auto& [name, bits] : {std::pair{"fp32", 32.0}, std::pair{"bf16", 16.0}}) {
    const double sent = two_phase_bits(ranks, elements, bits, bits);
    out.push_back(
        {{"dtype", name},
         {"direct_ms", ms(exchange_seconds(request_.link, ranks, ranks > 1 ? 2 : 0, sent))},
         {"ring_ms", ms(ring_seconds(request_.link, ranks, bits * elements))},
         {"tree_ms", ms(tree_seconds(request_.link, ranks, bits * elements))}});
  }
  return out;
}

// The smallest period that hides the average, and in which launches and updates take a small share.
uint64_t Predictor::worthwhile_period(const Row& r) const {
  const double others = kBoundaryShare / (1 - kBoundaryShare) * request_.step_seconds;
  return std::max(r.config.schedule.period, static_cast<uint64_t>(std::ceil(r.outer / others)));
}

// A shorter period is a fresher average. Among equals the one with the most bits.
Ordered Predictor::take_json() const {
  const Row* dense = nullptr;
  const Row* best = nullptr;
  // Of the codec: what is sent for a small model is mostly padding.
  const auto bits = [this](const Row& r) {
    return r.config.codec ? r.config.codec->bits_per_element(request_.ranks) : 32.0;
  };
  const auto better = [&](const Row& a, const Row& b) {
    return std::pair(worthwhile_period(a), bits(b)) < std::pair(worthwhile_period(b), bits(a));
  };
  for (const Row& r : rows_) {
    if (r.method != kOuterPresets[0].name || !r.refused.empty()) continue;
    if (!r.config.codec) dense = &r;
    if (best == nullptr || better(r, *best)) best = &r;
  }
  const double each = dense->averages.total();
  const double share = each / (request_.step_seconds + each);
  if (share <= kCheap) {
    return {{"method", "every_step"},
            {"codec", "fp32"},
            {"outer", nullptr},
            {"why", fmt::format("an average of gradients in float32 at every step takes {}, "
                                "{:.2g} % of the time: nothing is gained by hiding it",
                                text_of(each), 100 * share)}};
  }
  const uint64_t period = worthwhile_period(*best), delay = best->config.schedule.period;
  Ordered outer = {{"preset", best->method}, {"period", period}};
  if (best->config.codec) outer["codec"] = average_name(best->config);
  std::string why = fmt::format("{} of {} {} its average of {}",
                                delay == 1 ? "a step" : fmt::format("{} steps", delay),
                                text_of(request_.step_seconds), delay == 1 ? "hides" : "hide",
                                text_of(best->averages.total()));
  if (best->config.codec && dense->config.schedule.period > delay)
    why += fmt::format(", where float32 needs {}", dense->config.schedule.period);
  if (period > delay) {
    why += fmt::format("; with {} launch and update take {:.0f} % of the time at most",
                       counted(period, "step"), 100 * kBoundaryShare);
  }
  return {{"method", best->method},
          {"codec", average_name(best->config)},
          {"outer", std::move(outer)},
          {"why", std::move(why)}};
}

Result<Ordered> Predictor::report() {
  if (request_.config) {
    OuterConfig config = *request_.config;
    if (OuterSchedule& schedule = config.schedule; schedule.automatic) {
      // What ranks would agree on.
      schedule.automatic = false;
      SOTTO_ASSIGN(const AverageCosts averages, costs_.averages(kOwn, config));
      schedule =
          schedule.with_period(automatic_period(config, averages.total(), request_.step_seconds));
    }
    SOTTO_ASSIGN(own_, row(kOwn, std::move(config)));
  }
  for (const OuterPreset& preset : kOuterPresets) SOTTO_TRY(add_method(preset));
  Ordered methods = Ordered::array();
  for (const Row& r : rows_) methods.push_back(row_json(r));
  Ordered out;
  out["ranks"] = request_.ranks;
  out["params"] = request_.elements();
  out["tensors"] = request_.params.size();
  out["step_ms"] = ms(request_.step_seconds);
  out["contention"] = request_.contention;
  out["link"] = link_json();
  out["rates"] = rates_json();
  out["all_reduce"] = all_reduce_json();
  out["every_step"] = every_step_json();
  out[kOwn] = own_ ? row_json(*own_) : Ordered(nullptr);
  out["methods"] = std::move(methods);
  out["take"] = take_json();
  return out;
}

}  // namespace

Result<std::string> predict_report(const PredictRequest& request, std::shared_ptr<Device> device,
                                   TransportCaps transport) {
  if (request.segment_bytes != 0) transport.segment_bytes = request.segment_bytes;
  Predictor predictor(request, std::move(device), transport);
  SOTTO_ASSIGN(const Ordered report, predictor.report());
  return dump_text(report, 2);
}

}  // namespace sotto
