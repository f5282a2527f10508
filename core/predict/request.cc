#include "core/predict/request.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "core/base/codec.h"
#include "core/base/text.h"
#include "core/config/document.h"

namespace sotto {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
// An Ethernet link whose frames have 1500 bytes, 1448 of them of TCP's stream.
constexpr double kUsualEfficiency = 0.956;

// A number of the request.
struct NumberKey {
  std::string_view key;
  double low, high;  // both allowed, unless low_open
  bool low_open;
  bool whole;
  bool required;
  std::string_view what;

  std::string range() const {
    const std::string_view kind = whole ? "a whole number " : "a number ";
    if (high == kInfinity) return fmt::format("{}{} {}", kind, low_open ? ">" : ">=", low);
    return fmt::format("{}{} {} and <= {}", kind, low_open ? ">" : ">=", low, high);
  }
  bool allows(double value) const {
    return std::isfinite(value) && (low_open ? value > low : value >= low) && value <= high &&
           (!whole || std::trunc(value) == value);
  }
};

constexpr NumberKey kRanks = {
    "ranks", 1, static_cast<double>(kMaxPredictedRanks), false, true, true, "ranks that average"};
constexpr NumberKey kBandwidth = {
    "bandwidth_mbit", 0, kInfinity, true, false, true, "10^6 bits per second and direction"};
constexpr NumberKey kLatency = {
    "latency_ms", 0, kInfinity, false, false, false, "one way, in milliseconds"};
constexpr NumberKey kStep = {
    "step_ms", 0, kInfinity, true, false, true, "an inner step, in milliseconds"};
constexpr NumberKey kEfficiency = {
    "efficiency", 0, 1, true, false, false, "share of the bandwidth that is left for messages"};
constexpr NumberKey kMessage = {
    "message_us", 0, kInfinity, false, false, false, "time of every message, in microseconds"};
constexpr NumberKey kContention = {"contention",
                                   0,
                                   kInfinity,
                                   false,
                                   false,
                                   false,
                                   "how much longer a step takes beside averages"};
constexpr NumberKey kThreads = {
    "threads", 1, 4096, false, true, false, "threads for the kernels that are measured"};
constexpr NumberKey kSegment = {
    "segment_bytes", 8192, 16777216, false, true, false, "largest message, as SOTTO_SEGMENT_BYTES"};
constexpr NumberKey kRate = {"rates", 0, kInfinity, false, false, false, "nanoseconds per element"};
constexpr NumberKey kParams = {
    "params", 1, static_cast<double>(kMaxPredictedParams), false, true, true, "elements"};
constexpr NumberKey kTensor = {
    "params", 0, static_cast<double>(kMaxPredictedParams), false, true, true, "elements"};
constexpr std::string_view kKeys[] = {"config",     "params",  "ranks",      "bandwidth_mbit",
                                      "latency_ms", "step_ms", "efficiency", "message_us",
                                      "contention", "threads", "rates",      "segment_bytes"};

Status not_allowed(std::string_view place, const Json& found, const NumberKey& key) {
  return invalid_argument("{}: found {}, allowed is {} ({})", place, json_text(found), key.range(),
                          key.what);
}

Status read_number(const Json& value, std::string_view place, const NumberKey& key, double& out) {
  if (!value.is_number() || !key.allows(value.get<double>())) return not_allowed(place, value, key);
  out = value.get<double>();
  return ok_status();
}

Status read(const Json& object, const NumberKey& key, double& out) {
  const auto found = object.find(key.key);
  if (found != object.end()) return read_number(*found, key.key, key, out);
  if (!key.required) return ok_status();
  return invalid_argument("{}: missing, allowed is {} ({})", key.key, key.range(), key.what);
}

Status read(const Json& object, const NumberKey& key, uint64_t& out) {
  auto value = static_cast<double>(out);
  SOTTO_TRY(read(object, key, value));
  out = static_cast<uint64_t>(value);
  return ok_status();
}

Status read_params(const Json& object, std::vector<uint64_t>& out) {
  const auto found = object.find("params");
  if (found == object.end() || !found->is_array()) {
    uint64_t count = 0;
    SOTTO_TRY(read(object, kParams, count));
    out = {count};
    return ok_status();
  }
  double sum = 0;
  for (size_t i = 0; i < found->size(); ++i) {
    double count = 0;
    SOTTO_TRY(read_number((*found)[i], fmt::format("params[{}]", i), kTensor, count));
    sum += count;
    out.push_back(static_cast<uint64_t>(count));
  }
  if (kParams.allows(sum)) return ok_status();
  return invalid_argument("params: found {} in {}, allowed are 1 to {}", counted(sum, "element"),
                          counted(found->size(), "tensor"), kMaxPredictedParams);
}

Status read_config(const Json& object, std::optional<OuterConfig>& out) {
  const auto found = object.find("config");
  if (found == object.end() || found->is_null()) return ok_status();
  if (!found->is_object() && !found->is_string()) {
    return invalid_argument(
        "config: found {}, allowed is the text of a configuration file, or its JSON object",
        json_text(*found));
  }
  const std::string text = found->is_string() ? found->get<std::string>() : found->dump();
  Result<OuterConfig> config = parse_outer(text);
  if (!config.ok()) return config.status().with_prefix("config");
  if (config->hierarchy != Hierarchy::kFlat) {
    return invalid_argument(
        "config: sotto.hierarchy: found {}, predictions are of one level; allowed is flat",
        hierarchy_name(config->hierarchy));
  }
  out = config.take();
  return ok_status();
}

std::vector<std::string_view> names_of_rates() {
  std::vector<std::string_view> names = {"fp32", "outer"};
  for (const CodecRow& row : kCodecs) names.push_back(row.name());
  return names;
}

Status read_rates(const Json& object, GivenRates& out) {
  const auto found = object.find("rates");
  if (found == object.end()) return ok_status();
  if (!found->is_object()) {
    return invalid_argument("rates: found {}, allowed is an object from {} to {}",
                            json_text(*found), word_list(names_of_rates()), kRate.what);
  }
  const std::vector<std::string_view> names = names_of_rates();
  for (const auto& [name, value] : found->items()) {
    if (std::ranges::find(names, name) == names.end()) {
      return invalid_argument("rates.{}: unknown; the nearest one is {}, allowed are {}",
                              printable(name), nearest_word(name, names), word_list(names));
    }
    SOTTO_TRY(read_number(value, "rates." + name, kRate, out[name]));
  }
  return ok_status();
}

Status check_keys(const Json& object) {
  for (const auto& [key, unused] : object.items()) {
    if (std::ranges::find(kKeys, key) != std::end(kKeys)) continue;
    return invalid_argument("{}: unknown key; the nearest one is {}, allowed are {}",
                            printable(key), nearest_word(key, kKeys),
                            word_list({std::begin(kKeys), std::end(kKeys)}));
  }
  return ok_status();
}

}  // namespace

uint64_t PredictRequest::elements() const {
  uint64_t sum = 0;
  for (const uint64_t count : params) sum += count;
  return sum;
}

Result<PredictRequest> parse_predict_request(std::string_view json) {
  std::string twice;
  SOTTO_ASSIGN(const Json object, parse_plain(json, "json", &twice));
  if (!twice.empty())
    return invalid_argument("{}: the key is there twice; leave one of them out", twice);
  if (!object.is_object()) {
    return invalid_argument("json: found {}, allowed is an object such as {}",
                            object.is_discarded() ? "no JSON" : json_text(object),
                            R"({"params": 25000000, "ranks": 4, "bandwidth_mbit": 1000, )"
                            R"("step_ms": 100})");
  }
  SOTTO_TRY(check_keys(object));
  PredictRequest r;
  r.link.efficiency = kUsualEfficiency;
  SOTTO_TRY(read_params(object, r.params));
  SOTTO_TRY(read(object, kRanks, r.ranks));
  double mbit = 0, latency_ms = 0, message_us = 0, step_ms = 0;
  SOTTO_TRY(read(object, kBandwidth, mbit));
  SOTTO_TRY(read(object, kLatency, latency_ms));
  SOTTO_TRY(read(object, kStep, step_ms));
  SOTTO_TRY(read(object, kEfficiency, r.link.efficiency));
  SOTTO_TRY(read(object, kMessage, message_us));
  SOTTO_TRY(read(object, kContention, r.contention));
  SOTTO_TRY(read(object, kThreads, r.threads));
  SOTTO_TRY(read(object, kSegment, r.segment_bytes));
  SOTTO_TRY(read_rates(object, r.rates));
  SOTTO_TRY(read_config(object, r.config));
  r.link.bits_per_second = mbit * 1e6;
  r.link.latency = latency_ms * 1e-3;
  r.link.per_message = message_us * 1e-6;
  r.step_seconds = step_ms * 1e-3;
  if (r.config) *r.config = r.config->resolved(r.ranks);
  return r;
}

}  // namespace sotto
