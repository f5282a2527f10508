#include "core/iface/transport.h"

#include "core/base/dtype.h"
#include "core/base/hash.h"
#include "core/base/text.h"
#include "core/kernels/call.h"

namespace sotto {
namespace {

const char* kind_name(OpKind kind) {
  switch (kind) {
    case OpKind::kBarrier: return "barrier";
    case OpKind::kBroadcast: return "broadcast";
    case OpKind::kAllGather: return "all_gather";
    case OpKind::kReduceScatter: return "reduce_scatter";
    case OpKind::kAllReduce: return "all_reduce";
    case OpKind::kSendRecv: return "send/recv";
    case OpKind::kGroup: return "group";
    case OpKind::kOptimStep: return "optimizer step";
    case OpKind::kSetup: return "set-up exchange";
    case OpKind::kAllToAll: return "all_to_all";
    case OpKind::kAllToAllParts: return "all_to_all with parts";
    case OpKind::kGather: return "gather";
    case OpKind::kScatter: return "scatter";
    case OpKind::kReduce: return "reduce";
    case OpKind::kAllGatherParts: return "all_gather_v";
    case OpKind::kReduceScatterParts: return "reduce_scatter_v";
    case OpKind::kCommCreate: return "sotto_comm_create";
    case OpKind::kCommSplit: return "sotto_comm_split";
    case OpKind::kOptimCreate: return "sotto_optim_create";
    case OpKind::kOptimImport: return "sotto_optim_state_import_arrays";
    case OpKind::kStateExport: return "export of a state";
    case OpKind::kOuterCreate: return "sotto_outer_create";
    case OpKind::kOuterImport: return "sotto_outer_state_import";
    case OpKind::kOuterStep: return "outer step";
  }
  return "unknown operation";
}

const char* reduce_name(uint16_t reduce) {
  switch (static_cast<ReduceOp>(reduce)) {
    case ReduceOp::kSum: return "sum, ";
    case ReduceOp::kMean: return "mean, ";
    case ReduceOp::kMin: return "min, ";
    case ReduceOp::kMax: return "max, ";
    case ReduceOp::kProd: return "prod, ";
    case ReduceOp::kBitOr: return "bit-or, ";
  }
  return "";
}

// Their own exchange says nothing that the caller knows of.
bool is_service(OpKind kind) { return kind >= OpKind::kCommCreate && kind <= OpKind::kOuterImport; }

constexpr uint32_t kGroupBits = 28;

// What two steps differ in that have the same elements and tag.
std::string step_differences(const OpSignature& a, const OpSignature& b) {
  std::string out;
  const auto add = [&](const std::string& text) { out += (out.empty() ? "" : ", and ") + text; };
  const auto x = static_cast<uint32_t>(a.root), y = static_cast<uint32_t>(b.root);
  const uint32_t groups = x >> kGroupBits;
  if (groups == 0 && x != y) add("learning rate, weight decay or betas of a group differ");
  for (uint32_t g = 0; groups == y >> kGroupBits && g < groups; ++g) {
    const uint32_t bits = kGroupBits / groups;
    if (((x ^ y) >> (g * bits) & ((1u << bits) - 1)) == 0) continue;
    add(fmt::format("learning rate, weight decay or betas of group {} differ", g));
  }
  if (a.reduce != b.reduce)
    add("the state that was imported since the last step differs, or only one of them has imported "
        "any");
  if (out.empty() && a.detail != b.detail)
    out =
        "step number, stage, micro-batches, loss scale, frozen parameters or settings of groups "
        "differ";
  return out.empty() ? out : "; " + out;
}

}  // namespace

MessageSizes common_sizes(std::span<const TransportCaps* const> transports) {
  MessageSizes sizes;
  for (const TransportCaps* caps : transports) {
    const bool first = caps == transports.front();
    const uint64_t segment = caps->segment_bytes;
    if (segment != 0 && (sizes.segment_bytes == 0 || segment < sizes.segment_bytes))
      sizes.segment_bytes = segment;
    if (first || caps->held.bytes < sizes.held.bytes) sizes.held = caps->held;
  }
  return sizes;
}

std::string name_of(const OpKey& key) {
  if ((key.number >> 63) == 0) return fmt::format("operation {}", key.number);
  return fmt::format("send/recv {} from rank {} to rank {}", key.number & 0x7fffffffu,
                     (key.number >> 47) & 0xffffu, (key.number >> 31) & 0xffffu);
}

int32_t pack_group_hashes(std::span<const uint64_t> groups) {
  const auto n = static_cast<uint32_t>(groups.size());
  uint32_t packed = 0;
  if (n == 0 || n > 7) {
    constexpr uint32_t kMask = (1u << kGroupBits) - 1;
    packed = static_cast<uint32_t>(hash64(groups.data(), groups.size_bytes())) & kMask;
    return static_cast<int32_t>(packed);
  }
  const uint32_t bits = kGroupBits / n;
  for (uint32_t g = 0; g < n; ++g)
    packed |= (static_cast<uint32_t>(groups[g]) & ((1u << bits) - 1)) << (g * bits);
  return static_cast<int32_t>(packed | n << kGroupBits);
}

std::string describe(const OpSignature& s) {
  if (is_service(s.kind)) return kind_name(s.kind);
  if (s.kind == OpKind::kBarrier) return fmt::format("barrier(tag {})", s.tag);
  const std::string_view dtype = s.dtype == 0 ? "mixed" : dtype_name(static_cast<Dtype>(s.dtype));
  const bool step = s.kind == OpKind::kOptimStep;
  const std::string root = s.root >= 0 && !step ? fmt::format("root {}, ", s.root) : "";
  const std::string count =
      s.kind == OpKind::kAllToAllParts ? "" : counted(s.count, "element") + ", ";
  return fmt::format("{}({}{}{}, {}tag {}, layout {:08x})", kind_name(s.kind),
                     step ? "" : reduce_name(s.reduce), root, dtype, count, s.tag, s.detail);
}

std::string describe_mismatch(const OpKey& key, int32_t rank_a, const OpSignature& a,
                              int32_t rank_b, const OpSignature& b) {
  OpSignature unchained = a;
  unchained.chain = b.chain;
  std::string why = unchained == b ? "; the same call, so an operation before it differs" : "";
  if (a.kind == OpKind::kOptimStep && b.kind == a.kind && a.count == b.count && a.tag == b.tag)
    why += step_differences(a, b);
  return fmt::format(
      "ranks do not agree on {} of comm {:x}: rank {} called {}, rank {} called {}{}", name_of(key),
      key.comm, rank_a, describe(a), rank_b, describe(b), why);
}

void TransferCounters::add(const Transfer& transfer) {
  const bool payload = transfer.message_class == MessageClass::kPayload;
  if (transfer.is_send) {
    (payload ? payload_bytes_sent : header_bytes_sent) += transfer.bytes;
    ++messages_sent;
  } else {
    (payload ? payload_bytes_received : header_bytes_received) += transfer.bytes;
    ++messages_received;
  }
}

TransferCounters& TransferCounters::operator+=(const TransferCounters& o) {
  payload_bytes_sent += o.payload_bytes_sent;
  payload_bytes_received += o.payload_bytes_received;
  header_bytes_sent += o.header_bytes_sent;
  header_bytes_received += o.header_bytes_received;
  service_bytes_sent += o.service_bytes_sent;
  service_bytes_received += o.service_bytes_received;
  messages_sent += o.messages_sent;
  messages_received += o.messages_received;
  return *this;
}

}  // namespace sotto
