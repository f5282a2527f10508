#include "core/iface/transport.h"

#include "core/base/dtype.h"
#include "core/iface/kernels.h"

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
bool is_service(OpKind kind) { return kind >= OpKind::kCommCreate && kind <= OpKind::kStateExport; }

}  // namespace

std::string name_of(const OpKey& key) {
  if ((key.number >> 63) == 0) return fmt::format("operation {}", key.number);
  return fmt::format("send/recv {} from rank {} to rank {}", key.number & 0x7fffffffu,
                     (key.number >> 47) & 0xffffu, (key.number >> 31) & 0xffffu);
}

std::string describe(const OpSignature& s) {
  if (is_service(s.kind)) return kind_name(s.kind);
  if (s.kind == OpKind::kBarrier) return fmt::format("barrier(tag {})", s.tag);
  const std::string_view dtype = s.dtype == 0 ? "mixed" : dtype_name(static_cast<Dtype>(s.dtype));
  const std::string root = s.root >= 0 ? fmt::format("root {}, ", s.root) : "";
  const std::string count =
      s.kind == OpKind::kAllToAllParts ? "" : fmt::format("{} elements, ", s.count);
  return fmt::format("{}({}{}{}, {}tag {}, layout {:08x})", kind_name(s.kind),
                     reduce_name(s.reduce), root, dtype, count, s.tag, s.detail);
}

std::string describe_mismatch(const OpKey& key, int32_t rank_a, const OpSignature& a,
                              int32_t rank_b, const OpSignature& b) {
  OpSignature unchained = a;
  unchained.chain = b.chain;
  const char* why = unchained == b ? "; the same call, so an operation before it differs" : "";
  return fmt::format(
      "ranks do not agree on {} of comm {:x}: rank {} called {}, rank {} called {}{}", name_of(key),
      key.comm, rank_a, describe(a), rank_b, describe(b), why);
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
