// sotto_plan_report: the request as JSON to a plan, and the plan's figures to JSON.
#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "capi/src/convert.h"
#include "capi/src/handles.h"
#include "core/base/json_text.h"
#include "core/base/text.h"
#include "core/config/document.h"

using namespace sotto;        // NOLINT: the definition below is the border itself
using namespace sotto::capi;  // NOLINT

namespace {

using OrderedJson = nlohmann::ordered_json;

constexpr std::string_view kKeys[] = {"kind", "dtype",    "counts", "in_counts", "out_counts",
                                      "root", "in_place", "reduce", "peer",      "codec"};
constexpr std::string_view kKinds[] = {
    "barrier", "broadcast",    "all_gather",      "reduce_scatter", "all_reduce",
    "send",    "recv",         "gather",          "scatter",        "all_to_all",
    "reduce",  "all_gather_v", "reduce_scatter_v"};
constexpr OpKind kOpKinds[] = {
    OpKind::kBarrier,           OpKind::kBroadcast, OpKind::kAllGather, OpKind::kReduceScatter,
    OpKind::kAllReduce,         OpKind::kSendRecv,  OpKind::kSendRecv,  OpKind::kGather,
    OpKind::kScatter,           OpKind::kAllToAll,  OpKind::kReduce,    OpKind::kAllGatherParts,
    OpKind::kReduceScatterParts};
constexpr std::string_view kReductions[] = {"sum", "mean", "min", "max", "prod", "bit_or"};
constexpr ReduceOp kReduceOps[] = {ReduceOp::kSum, ReduceOp::kMean, ReduceOp::kMin,
                                   ReduceOp::kMax, ReduceOp::kProd, ReduceOp::kBitOr};
constexpr Dtype kDtypes[] = {Dtype::kI32, Dtype::kI64, Dtype::kU8,   Dtype::kF16,
                             Dtype::kF32, Dtype::kF64, Dtype::kBF16, Dtype::kI8,
                             Dtype::kU32, Dtype::kU64, Dtype::kI16,  Dtype::kU16};
// A plan is made of as many messages as the elements need, in seconds for this many.
constexpr uint64_t kMaxElements = uint64_t{1} << 34;

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
    return invalid_argument("request.{} is {}; allowed: {}", key, json_text(*it), list(words));
  return static_cast<size_t>(found - words.begin());
}

Result<int32_t> take_rank(const Json& json, const char* key, int32_t size, int32_t fallback) {
  const auto it = json.find(key);
  if (it == json.end()) return fallback;
  if (!it->is_number_integer() || it->get<int64_t>() < 0 || it->get<int64_t>() >= size) {
    return invalid_argument("request.{} is {}; allowed: a rank, 0 to {}", key, json_text(*it),
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
    return invalid_argument("request.counts is {}; allowed: a list of numbers", json_text(*it));
  for (const Json& count : *it) {
    if (!count.is_number_unsigned() || count.get<uint64_t>() > kMaxElements) {
      return invalid_argument("request.counts has {}; allowed: whole numbers 0 to {}",
                              json_text(count), kMaxElements);
    }
    r->counts.push_back(count.get<uint64_t>());
  }
  if (r->kind == OpKind::kBarrier && !r->counts.empty()) {
    return invalid_argument("request.counts: a barrier has no buffers");
  }
  return ok_status();
}

// Counts in a request are those of `in`, as a caller of the collective states them; a
// reduce-scatter and a scatter (root's `in`) are planned by those of `out`, an all-to-all by those
// of a part.
Status settle_counts(CollectiveRequest* r) {
  if (r->kind != OpKind::kReduceScatter && r->kind != OpKind::kScatter &&
      r->kind != OpKind::kAllToAll) {
    return ok_status();
  }
  const auto size = static_cast<uint64_t>(r->size);
  for (uint64_t& count : r->counts) {
    if (count % size != 0)
      return invalid_argument("request.counts has {}, no multiple of the {} ranks", count, size);
    count /= size;
  }
  return ok_status();
}

// Elements of every buffer for or from every rank, one list per buffer: parts one behind the other,
// which does not matter to the messages.
Status take_part_counts(const Json& json, const char* key, const CollectiveRequest& r,
                        std::vector<Range>* parts) {
  const Json lists = json.value(key, Json());
  if (!lists.is_array())
    return invalid_argument("request.{} is {}; needed: a list of {} counts for every buffer", key,
                            json_text(lists), r.size);
  for (const Json& counts : lists) {
    if (!counts.is_array() || counts.size() != static_cast<size_t>(r.size)) {
      return invalid_argument("request.{} has {}; needed: a list of {} counts, one for every rank",
                              key, json_text(counts), r.size);
    }
    uint64_t at = 0;
    for (const Json& count : counts) {
      if (!count.is_number_unsigned() || count.get<uint64_t>() > kMaxElements - at) {
        return invalid_argument("request.{} has {}; allowed: whole numbers, together 0 to {}", key,
                                json_text(count), kMaxElements);
      }
      parts->push_back({at, count.get<uint64_t>()});
      at += count.get<uint64_t>();
    }
  }
  return ok_status();
}

// The side of the whole of an all-gather or a reduce-scatter with unequal counts.
Status take_one_side(const Json& json, CollectiveRequest* r) {
  const bool gathers = r->kind == OpKind::kAllGatherParts;
  const char* key = gathers ? "out_counts" : "in_counts";
  const char* other = gathers ? "in_counts" : "out_counts";
  if (json.contains(other)) {
    return invalid_argument("request has {}, but {} takes {} alone", other,
                            gathers ? "all_gather_v" : "reduce_scatter_v", key);
  }
  SOTTO_TRY(take_part_counts(json, key, *r, gathers ? &r->out_parts : &r->in_parts));
  const std::vector<Range>& parts = gathers ? r->out_parts : r->in_parts;
  r->counts.assign(parts.size() / static_cast<size_t>(r->size), 0);
  for (size_t i = 0; i < parts.size(); ++i)
    r->counts[i / static_cast<size_t>(r->size)] += parts[i].count;
  return ok_status();
}

// A collective with parts.
Status take_uneven(const Json& json, CollectiveRequest* r) {
  if (json.contains("counts"))
    return invalid_argument("request has counts beside in_counts or out_counts: leave it out");
  if (r->kind == OpKind::kAllGatherParts || r->kind == OpKind::kReduceScatterParts)
    return take_one_side(json, r);
  if (r->kind != OpKind::kAllToAll) {
    return invalid_argument(
        "request has in_counts or out_counts, but only all_to_all, all_gather_v and "
        "reduce_scatter_v take them");
  }
  r->kind = OpKind::kAllToAllParts;
  SOTTO_TRY(take_part_counts(json, "in_counts", *r, &r->in_parts));
  SOTTO_TRY(take_part_counts(json, "out_counts", *r, &r->out_parts));
  const auto size = static_cast<size_t>(r->size);
  if (r->in_parts.size() != r->out_parts.size()) {
    return invalid_argument("request.in_counts has {} and request.out_counts has {}",
                            counted(r->in_parts.size() / size, "buffer"),
                            r->out_parts.size() / size);
  }
  for (size_t at = static_cast<size_t>(r->rank); at < r->in_parts.size(); at += size) {
    if (r->in_parts[at].count == r->out_parts[at].count) continue;
    return invalid_argument(
        "request.in_counts has {} for this rank, {}, itself, but request.out_counts has {}",
        r->in_parts[at].count, r->rank, r->out_parts[at].count);
  }
  r->counts.assign(r->in_parts.size() / size, 0);
  return ok_status();
}

// Elements of all buffers, each with the parts of all ranks.
Status check_sum(const CollectiveRequest& r) {
  const bool of_parts = r.kind == OpKind::kAllGather || r.kind == OpKind::kReduceScatter ||
                        r.kind == OpKind::kGather || r.kind == OpKind::kScatter ||
                        r.kind == OpKind::kAllToAll;
  const double ranks = of_parts ? r.size : 1;
  double sum = 0;
  for (const uint64_t count : r.counts) sum += static_cast<double>(count) * ranks;
  if (r.kind == OpKind::kAllToAllParts) {
    for (const std::vector<Range>* parts : {&r.in_parts, &r.out_parts})
      for (const Range& part : *parts) sum += static_cast<double>(part.count);
  }
  if (sum <= static_cast<double>(kMaxElements)) return ok_status();
  return invalid_argument(
      "request is of {:.0f} elements, all buffers and the parts of all ranks together; allowed: 0 "
      "to {}",
      sum, kMaxElements);
}

// How many elements of what every buffer has.
Status take_sizes(const Json& json, CollectiveRequest* r) {
  const bool uneven = r->kind == OpKind::kAllGatherParts || r->kind == OpKind::kReduceScatterParts;
  if (uneven || json.contains("in_counts") || json.contains("out_counts"))
    return take_uneven(json, r);
  SOTTO_TRY(take_counts(json, r));
  return settle_counts(r);
}

Status check_in_place(const CollectiveRequest& r, bool in_place) {
  if (!in_place || r.kind != OpKind::kAllToAllParts || r.in_parts == r.out_parts)
    return ok_status();
  return invalid_argument("request.in_place needs in_counts and out_counts that are equal");
}

Status take_shape(const Json& json, Request* request) {
  CollectiveRequest& r = request->collective;
  std::vector<std::string_view> dtype_words;
  for (const Dtype dtype : kDtypes) dtype_words.push_back(dtype_name(dtype));
  SOTTO_TRY(take_sizes(json, &r));
  SOTTO_TRY(check_sum(r));
  SOTTO_ASSIGN(const size_t dtype, take_word(json, "dtype", dtype_words, 4));
  SOTTO_ASSIGN(const size_t reduction,
               take_word(json, "reduce", kReductions, json.contains("codec") ? 1 : 0));
  r.reduce = kReduceOps[reduction];
  if (r.reduce == ReduceOp::kBitOr && dtype_is_float(kDtypes[dtype])) {
    return invalid_argument(
        "request.reduce is \"bit_or\", which needs integers, but request.dtype is \"{}\"",
        dtype_words[dtype]);
  }
  const auto in_place = json.find("in_place");
  if (in_place != json.end() && !in_place->is_boolean()) {
    return invalid_argument("request.in_place is {}; allowed: true, false", json_text(*in_place));
  }
  r.dtypes.assign(r.counts.size(), kDtypes[dtype]);
  SOTTO_TRY(check_in_place(r, in_place != json.end() && in_place->get<bool>()));
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
  std::string twice;
  SOTTO_ASSIGN(const Json json, parse_plain(text, "request", &twice));
  if (!twice.empty())
    return invalid_argument("request.{} is there twice; leave one of them out", twice);
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
  if (request.codec.empty()) {
    Call call;
    call.request = r;
    return comm->prepare({&call, 1});
  }
  SOTTO_ASSIGN(const std::shared_ptr<Codec> codec,
               Codec::create(comm, request.codec, {r.counts.begin(), r.counts.end()},
                             {r.dtypes.begin(), r.dtypes.end()}));
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

Status plan_report(const sotto_comm* comm, const char* request, char* buf, uint64_t cap,
                   uint64_t* out_len) {
  SOTTO_TRY(check_pointer(request, "request"));
  SOTTO_TRY(check_pointer(out_len, "out_len"));
  const std::shared_ptr<Comm>& core = comm->state->core;
  SOTTO_ASSIGN(const Request parsed, parse(*core, request));
  SOTTO_ASSIGN(const std::shared_ptr<PreparedPlan> prepared, make_plan(core, parsed));
  const Plan& plan = prepared->plan();
  OrderedJson json = traffic_json(plan.traffic.total);
  json["steps"] = plan.steps.size();
  json["scratch_bytes"] = plan.arenas.scratch + plan.arenas.host;
  OrderedJson peers = OrderedJson::array();
  for (size_t peer = 0; peer < plan.traffic.peers.size(); ++peer) {
    if (static_cast<int32_t>(peer) == core->rank()) continue;
    OrderedJson entry{{"rank", peer}};
    entry.update(traffic_json(plan.traffic.peers[peer]));
    peers.push_back(entry);
  }
  json["peers"] = peers;
  return write_text(dump_text(json), buf, cap, out_len);
}

}  // namespace

extern "C" sotto_status sotto_plan_report(const sotto_comm* comm, const char* request, char* buf,
                                          uint64_t cap, uint64_t* out_len) {
  return guarded_on("sotto_plan_report", comm,
                    [&](auto* object) { return plan_report(object, request, buf, cap, out_len); });
}
