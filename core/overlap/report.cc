// Reports of an overlap.
#include <nlohmann/json.hpp>

#include "core/base/json_text.h"
#include "core/base/text.h"
#include "core/overlap/overlap.h"

namespace sotto {
namespace {

using Json = nlohmann::ordered_json;

Json buckets_json(const std::vector<OverlapBucket>& buckets) {
  Json out = Json::array();
  for (const OverlapBucket& bucket : buckets)
    out.push_back({{"bytes", bucket.bytes}, {"gradients", bucket.tensors}});
  return out;
}

Json order_json(const OverlapConfig& config, const std::vector<OverlapBucket>& buckets) {
  Json launches = Json::array();
  for (const OverlapBucket& bucket : buckets) {
    for (const uint32_t t : bucket.tensors) launches.push_back(t);
  }
  return {{"order", overlap_order_name(config.order)}, {"gradients", launches}};
}

// null: there was no round yet.
Json time_json(int64_t ns) { return ns < 0 ? Json(nullptr) : Json(ns); }

}  // namespace

Result<std::string> Overlap::report(std::string_view kind) const {
  if (kind == "buckets") return dump_text(buckets_json(buckets_));
  if (kind == "order") return dump_text(order_json(config_, buckets_));
  if (kind != "all") {
    return invalid_argument("kind is \"{}\"; known: all, buckets, order", printable(kind));
  }
  const OverlapInfo i = info();
  const Json settings = {
      {"first_bucket_bytes", config_.first_bucket_bytes},
      {"bucket_bytes", config_.bucket_bytes},
      {"order", overlap_order_name(config_.order)},
      {"unused", overlap_unused_name(config_.unused)},
      {"wire", config_.wire ? Json(dtype_name(*config_.wire)) : Json(nullptr)},
      {"codec", config_.codec ? Json(codec_name(config_.codec->kind)) : Json(nullptr)}};
  const Json out = {
      {"settings", settings},
      {"hidden", i.early_payload_bytes_per_round != 0},
      {"why", i.early_payload_bytes_per_round != 0 ? Json(nullptr) : Json(work_->why_not_hidden())},
      {"early_payload_bytes_per_round", i.early_payload_bytes_per_round},
      {"rounds", i.rounds},
      {"layout", i.layout},
      {"begin_to_last_ready_ns", time_json(i.begin_to_last_ready_ns)},
      {"network_ns", time_json(i.network_ns)},
      {"exposed_ns", time_json(i.exposed_ns)},
      {"payload_bytes_per_round", i.payload_bytes_per_round},
      {"header_bytes_per_round", i.header_bytes_per_round},
      {"state_bytes", i.state_bytes},
      {"missing", i.missing},
      {"buckets", buckets_json(buckets_)},
      {"order", order_json(config_, buckets_)}};
  return dump_text(out);
}

}  // namespace sotto
