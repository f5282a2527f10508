#include "core/predict/costs.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "core/wire/frame.h"

namespace sotto {
namespace {

constexpr uint64_t kSampleElements = uint64_t{1} << 22;
constexpr double kNanoseconds = 1e-9;
constexpr std::string_view kDense = "fp32";

// Beside the payload.
uint64_t header_bytes(const PeerTraffic& traffic) {
  return traffic.messages_sent * (wire::frame_bytes(1) - 1) + traffic.metadata_bytes_sent;
}

// What plans of averages look at, beside the layout.
std::string average_key(const OuterConfig& config, bool compressed) {
  if (!compressed) return std::string(kDense);
  std::string key;
  for (const uint64_t term : config.codec->terms()) key += fmt::format("{} ", term);
  return key;
}

}  // namespace

double AverageCosts::total() const { return std::accumulate(seconds.begin(), seconds.end(), 0.0); }

double AverageCosts::largest() const {
  return seconds.empty() ? 0 : *std::ranges::max_element(seconds);
}

std::string average_name(const OuterConfig& config) {
  return std::string(config.codec ? codec_name(config.codec->kind) : kDense);
}

CostModel::CostModel(const PredictRequest& request, std::shared_ptr<Device> device,
                     const TransportCaps& transport)
    : request_(request),
      target_(*device, request.ranks, transport),
      kernels_(std::move(device), target_, std::min(request.elements(), kSampleElements)) {
  for (const auto& [name, ns] : request.rates) rates_[name] = {ns, false};
}

Result<CostModel::Fragments> CostModel::cut(const OuterConfig& config) const {
  SOTTO_ASSIGN(const std::vector<std::vector<uint64_t>> lists, config.cut(request_.params));
  Fragments out;
  for (const std::vector<uint64_t>& list : lists) {
    std::vector<LayoutTensor> tensors;
    for (const uint64_t t : list) tensors.push_back({request_.params[t], 0});
    out.push_back(std::make_unique<Fragment>(Fragment{
        config, outer_layout(config, std::move(tensors), static_cast<uint32_t>(request_.ranks))}));
  }
  return out;
}

Result<OuterAverage> CostModel::average(const OuterShape& shape, bool compressed) {
  std::string key = average_key(*shape.config, compressed);
  for (const LayoutTensor& tensor : shape.layout->tensors())
    key += fmt::format(" {}", tensor.count);
  if (const auto known = averages_.find(key); known != averages_.end()) return known->second;
  SOTTO_ASSIGN(const OuterAverage made, outer_average(shape, target_.target(), compressed));
  averages_[key] = made;
  return made;
}

Result<double> CostModel::average_rate(const std::string& method, const OuterConfig& config) {
  const bool compressed = codes(config);
  std::string name = compressed ? average_name(config) : std::string(kDense);
  if (const auto given = request_.rates.find(name); given != request_.rates.end())
    return given->second;
  const std::string key = average_key(config, compressed);
  if (const auto known = measured_.find(key); known != measured_.end()) return known->second;
  SOTTO_ASSIGN(const double ns, kernels_.average(config, compressed));
  if (rates_.contains(name)) name += " " + method;
  rates_[name] = {ns, true};
  measured_[key] = ns;
  return ns;
}

Result<AverageCosts> CostModel::averages(const std::string& method, const OuterConfig& config) {
  SOTTO_ASSIGN(const Fragments fragments, cut(config));
  SOTTO_ASSIGN(const double rate, average_rate(method, config));
  AverageCosts costs;
  for (const std::unique_ptr<Fragment>& fragment : fragments) {
    const OuterShape shape = target_.shape(fragment->config, fragment->layout);
    SOTTO_ASSIGN(const OuterAverage average, this->average(shape, codes(config)));
    const PeerTraffic& traffic = average.traffic;
    if (costs.seconds.empty()) {
      SOTTO_ASSIGN(const OuterAverage dense, this->average(shape, false));
      costs.dense_launch = dense.traffic.payload_bytes_sent;
      costs.launch = traffic.payload_bytes_sent;
    }
    const uint64_t headers = header_bytes(traffic);
    costs.payload += traffic.payload_bytes_sent;
    costs.headers += headers;
    const double bits = 8 * static_cast<double>(traffic.payload_bytes_sent + headers);
    const double wire = exchange_seconds(request_.link, request_.ranks, average.hops, bits);
    const double kernels = rate * kNanoseconds * static_cast<double>(fragment->layout.elements());
    costs.seconds.push_back(wire + kernels);
    costs.wire += wire;
    costs.kernels += kernels;
    costs.largest_bits = std::max(costs.largest_bits, bits);
  }
  return costs;
}

Result<uint64_t> CostModel::state_bytes(const OuterConfig& config) {
  SOTTO_ASSIGN(const Fragments fragments, cut(config));
  uint64_t sum = 0;
  for (const std::unique_ptr<Fragment>& fragment : fragments) {
    const OuterShape shape = target_.shape(fragment->config, fragment->layout);
    OuterAverages both;
    SOTTO_ASSIGN(both.dense, average(shape, false));
    if (codes(config)) {
      SOTTO_ASSIGN(both.coded, average(shape, true));
    }
    SOTTO_ASSIGN(const uint64_t bytes, outer_state_bytes(shape, target_.target(), both));
    sum += bytes;
  }
  return sum;
}

Result<double> CostModel::boundary(const std::string& method, const OuterConfig& config) {
  const auto given = request_.rates.find("outer");
  const std::string key = given != request_.rates.end() ? "outer" : "outer " + method;
  if (!rates_.contains(key)) {
    SOTTO_ASSIGN(const double ns, kernels_.boundary(config, codes(config)));
    rates_[key] = {ns, true};
  }
  return rates_[key].ns * kNanoseconds * static_cast<double>(request_.elements());
}

}  // namespace sotto
