// sotto_plan_report: the request as JSON to a plan, and the plan's figures to JSON.
#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "capi/src/convert.h"
#include "capi/src/handles.h"
#include "core/base/text.h"

using namespace sotto;        // NOLINT: the definition below is the border itself
using namespace sotto::capi;  // NOLINT

namespace {

using Json = nlohmann::json;
using OrderedJson = nlohmann::ordered_json;

constexpr std::string_view kKeys[] = {"kind", "dtype", "counts",   "reduce",
                                      "root", "peer",  "in_place", "codec"};
constexpr std::string_view kKinds[] = {"barrier",    "broadcast", "all_gather", "reduce_scatter",
                                       "all_reduce", "send",      "recv"};
constexpr OpKind kOpKinds[] = {OpKind::kBarrier,       OpKind::kBroadcast, OpKind::kAllGather,
                               OpKind::kReduceScatter, OpKind::kAllReduce, OpKind::kSendRecv,
                               OpKind::kSendRecv};
constexpr std::string_view kReductions[] = {"sum", "mean", "min", "max"};
constexpr ReduceOp kReduceOps[] = {ReduceOp::kSum, ReduceOp::kMean, ReduceOp::kMin, ReduceOp::kMax};
constexpr Dtype kDtypes[] = {Dtype::kI32, Dtype::kI64, Dtype::kU8,  Dtype::kF16,
                             Dtype::kF32, Dtype::kF64, Dtype::kBF16};
constexpr uint64_t kMaxElements = uint64_t{1}
                                  << 45;  // so that their bytes fit as those of a buffer do

struct Request {
  CollectiveRequest collective;
  std::string codec;  // JSON, empty: none
};

std::string list(std::span<const std::string_view> words) {
  std::string text;
  for (const std::string_view word : words)
    text += fmt::format("{}{}", text.empty() ? "" : ", ", word);
  return text;
}

// Index of the word under `key` in `words`; `fallback` if the key is absent.
Result<size_t> take_word(const Json& json, const char* key, std::span<const std::string_view> words,
                         size_t fallback) {
  const auto it = json.find(key);
  if (it == json.end()) return fallback;
  const std::string* word = it->get_ptr<const std::string*>();
  const auto found = word == nullptr ? words.end() : std::find(words.begin(), words.end(), *word);
  if (found == words.end())
    return invalid_argument("request.{} is {}; allowed: {}", key, it->dump(), list(words));
  return static_cast<size_t>(found - words.begin());
}

Result<int32_t> take_rank(const Json& json, const char* key, int32_t size, int32_t fallback) {
  const auto it = json.find(key);
  if (it == json.end()) return fallback;
  if (!it->is_number_integer() || it->get<int64_t>() < 0 || it->get<int64_t>() >= size) {
    return invalid_argument("request.{} is {}; allowed: a rank, 0 to {}", key, it->dump(),
                            size - 1);
  }
  return static_cast<int32_t>(it->get<int64_t>());
}

Status take_counts(const Json& json, CollectiveRequest* r) {
  const auto it = json.find("counts");
  if (it == json.end()) {
    if (r->kind == OpKind::kBarrier) return ok_status();
    return invalid_argument(
        "request.counts is missing: a list with the number of elements of every buffer");
  }
  if (!it->is_array())
    return invalid_argument("request.counts is {}; allowed: a list of numbers", it->dump());
  for (const Json& count : *it) {
    if (!count.is_number_unsigned() || count.get<uint64_t>() > kMaxElements) {
      return invalid_argument("request.counts has {}; allowed: whole numbers 0 to {}", count.dump(),
                              kMaxElements);
    }
    r->counts.push_back(count.get<uint64_t>());
  }
  if (r->kind == OpKind::kBarrier && !r->counts.empty()) {
    return invalid_argument("request.counts: a barrier has no buffers");
  }
  return ok_status();
}

// Counts in a request are those of `in`, as a caller of the collective states them; a
// reduce-scatter is planned by those of `out`.
Status settle_counts(CollectiveRequest* r) {
  if (r->kind != OpKind::kReduceScatter) return ok_status();
  const auto size = static_cast<uint64_t>(r->size);
  for (uint64_t& count : r->counts) {
    if (count % size != 0)
      return invalid_argument("request.counts has {}, no multiple of the {} ranks", count, size);
    count /= size;
  }
  return ok_status();
}

Status take_shape(const Json& json, Request* request) {
  CollectiveRequest& r = request->collective;
  std::vector<std::string_view> dtype_words;
  for (const Dtype dtype : kDtypes) dtype_words.push_back(dtype_name(dtype));
  SOTTO_TRY(take_counts(json, &r));
  SOTTO_TRY(settle_counts(&r));
  SOTTO_ASSIGN(const size_t dtype, take_word(json, "dtype", dtype_words, 4));
  SOTTO_ASSIGN(const size_t reduction,
               take_word(json, "reduce", kReductions, json.contains("codec") ? 1 : 0));
  r.reduce = kReduceOps[reduction];
  if (r.reduce == ReduceOp::kMean && !dtype_is_float(kDtypes[dtype])) {
    return invalid_argument(
        "request.reduce is \"mean\", which needs floating point, but request.dtype is \"{}\"",
        dtype_words[dtype]);
  }
  const auto in_place = json.find("in_place");
  if (in_place != json.end() && !in_place->is_boolean()) {
    return invalid_argument("request.in_place is {}; allowed: true, false", in_place->dump());
  }
  r.dtypes.assign(r.counts.size(), kDtypes[dtype]);
  r.in_place.assign(r.counts.size(), in_place != json.end() && in_place->get<bool>() ? 1 : 0);
  return ok_status();
}

Status take_codec(const Json& json, Request* request) {
  const auto it = json.find("codec");
  if (it == json.end()) return ok_status();
  const CollectiveRequest& r = request->collective;
  if (r.kind != OpKind::kAllReduce)
    return invalid_argument("request.codec is set, but only all_reduce takes a codec");
  if (r.reduce != ReduceOp::kMean)
    return invalid_argument("request.reduce must be \"mean\" with a codec");
  request->codec = it->dump();
  return ok_status();
}

Result<Request> parse(const Comm& comm, std::string_view text) {
  const Json json = Json::parse(text, nullptr, false);
  if (json.is_discarded() || !json.is_object()) {
    return invalid_argument("request is not a JSON object: {}", printable(text));
  }
  for (const auto& [key, value] : json.items()) {
    if (std::find(std::begin(kKeys), std::end(kKeys), key) != std::end(kKeys)) continue;
    return invalid_argument("request has the unknown key \"{}\"; did you mean \"{}\"?",
                            printable(key), nearest_word(key, kKeys));
  }
  Request request;
  CollectiveRequest& r = request.collective;
  if (!json.contains("kind"))
    return invalid_argument("request.kind is missing; allowed: {}", list(kKinds));
  SOTTO_ASSIGN(const size_t kind, take_word(json, "kind", kKinds, 0));
  r.kind = kOpKinds[kind];
  r.is_send = kKinds[kind] == "send";
  r.rank = comm.rank();
  r.size = comm.size();
  r.segment_bytes = comm.segment_bytes();
  SOTTO_ASSIGN(r.root, take_rank(json, "root", comm.size(), 0));
  SOTTO_ASSIGN(r.peer, take_rank(json, "peer", comm.size(), -1));
  if (r.kind == OpKind::kSendRecv && (r.peer < 0 || r.peer == comm.rank())) {
    return invalid_argument("request.peer is {}; needed: the other rank", r.peer);
  }
  SOTTO_TRY(take_shape(json, &request));
  SOTTO_TRY(take_codec(json, &request));
  return request;
}

Result<std::shared_ptr<PreparedPlan>> make_plan(const std::shared_ptr<Comm>& comm,
                                                const Request& request) {
  const CollectiveRequest& r = request.collective;
  if (request.codec.empty()) return comm->prepare({r});
  SOTTO_ASSIGN(const std::shared_ptr<OnebitCodec> codec,
               OnebitCodec::create(comm, request.codec, r.counts, r.dtypes));
  return codec->plan(r.in_place);
}

OrderedJson traffic_json(const PeerTraffic& t) {
  return {{"payload_bytes_sent", t.payload_bytes_sent},
          {"payload_bytes_received", t.payload_bytes_received},
          {"header_bytes_sent", t.header_bytes_sent + t.metadata_bytes_sent},
          {"header_bytes_received", t.header_bytes_received + t.metadata_bytes_received},
          {"messages_sent", t.messages_sent},
          {"messages_received", t.messages_received}};
}

Status report(const sotto_comm* comm, const char* request, char* buf, uint64_t cap,
              uint64_t* out_len) {
  SOTTO_TRY(check_handle(comm, "comm"));
  SOTTO_TRY(check_pointer(request, "request"));
  SOTTO_TRY(check_pointer(out_len, "out_len"));
  const std::shared_ptr<Comm>& core = comm->state->core;
  SOTTO_ASSIGN(const Request parsed, parse(*core, request));
  SOTTO_ASSIGN(const std::shared_ptr<PreparedPlan> prepared, make_plan(core, parsed));
  const Plan& plan = prepared->plan();
  OrderedJson json = traffic_json(plan.total);
  json["steps"] = plan.steps.size();
  json["scratch_bytes"] = plan.scratch_bytes + plan.host_bytes;
  OrderedJson peers = OrderedJson::array();
  for (size_t peer = 0; peer < plan.traffic.size(); ++peer) {
    if (static_cast<int32_t>(peer) == core->rank()) continue;
    OrderedJson entry{{"rank", peer}};
    entry.update(traffic_json(plan.traffic[peer]));
    peers.push_back(entry);
  }
  json["peers"] = peers;
  return write_text(json.dump(), buf, cap, out_len);
}

}  // namespace

extern "C" sotto_status sotto_plan_report(const sotto_comm* comm, const char* request, char* buf,
                                          uint64_t cap, uint64_t* out_len) {
  return guarded("sotto_plan_report", [&] { return report(comm, request, buf, cap, out_len); });
}
