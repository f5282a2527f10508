#include "transports/nccl/group_calls.h"

#include "core/kernels/call.h"

namespace sotto::nccl {
namespace {

ncclDataType_t type_of(Dtype dtype) {
  switch (dtype) {
    case Dtype::kI8: return ncclInt8;
    case Dtype::kI32: return ncclInt32;
    case Dtype::kI64: return ncclInt64;
    case Dtype::kU8: return ncclUint8;
    case Dtype::kU32: return ncclUint32;
    case Dtype::kU64: return ncclUint64;
    // NCCL has no 16-bit integers; what is only moved is 16 bits of anything.
    case Dtype::kI16:
    case Dtype::kU16:
    case Dtype::kF16: return ncclFloat16;
    case Dtype::kF32: return ncclFloat32;
    case Dtype::kF64: return ncclFloat64;
    case Dtype::kBF16: return ncclBfloat16;
  }
  return ncclNumTypes;  // refused by NCCL
}

ncclRedOp_t op_of(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum: return ncclSum;
    case ReduceOp::kMean: return ncclAvg;
    case ReduceOp::kMin: return ncclMin;
    case ReduceOp::kMax: return ncclMax;
    case ReduceOp::kProd: return ncclProd;
    case ReduceOp::kBitOr: break;  // NCCL has none
  }
  return ncclNumOps;  // refused by NCCL
}

}  // namespace

void GroupCalls::clear() {
  messages_.clear();
  natives_.clear();
  natives_on_ = nullptr;
  stage_ = Stage::kNew;
}

Status GroupCalls::add(const Transfer& t, Staging& staging, bool captured) {
  if (t.native == nullptr) {
    SOTTO_ASSIGN(void* const memory, staging.reachable(t.data, t.bytes, !t.is_send, captured));
    messages_.push_back({&t, memory});
  } else if (natives_.empty() || natives_.back().call != t.native) {
    natives_on_ = &communicators_.of(t.op->key.comm);
    SOTTO_ASSIGN(const Native added, native(t, staging, captured));
    natives_.push_back(added);
  }
  return ok_status();
}

Result<GroupCalls::Native> GroupCalls::native(const Transfer& t, Staging& staging,
                                              bool captured) const {
  const NativeCall& call = *t.native;
  const uint64_t bytes = call.count * dtype_bytes(call.dtype);
  const auto ranks = static_cast<uint64_t>(natives_on_->size());
  const uint64_t in_bytes = call.kind == OpKind::kReduceScatter ? bytes * ranks : bytes;
  const uint64_t out_bytes = call.kind == OpKind::kAllGather ? bytes * ranks : bytes;
  SOTTO_ASSIGN(void* const out, staging.reachable(t.native_out, out_bytes, true, captured));
  if (call.kind == OpKind::kBroadcast && call.root != natives_on_->rank())
    return Native{&call, out, out};  // it has no input
  SOTTO_ASSIGN(const void* const in,
               staging.reachable(const_cast<void*>(t.native_in), in_bytes, false, captured));
  return Native{&call, in, out};
}

Status GroupCalls::stay_in_graph(std::span<const PeerHeader> headers, cudaStream_t captured) const {
  const Communicator& all = communicators_.all();
  if (!headers.empty() || !messages_.empty() || natives_on_ == &all)
    SOTTO_TRY(all.graphs().add(captured));
  if (natives_on_ == nullptr || natives_on_ == &all) return ok_status();
  return natives_on_->graphs().add(captured);
}

Status GroupCalls::queue(std::span<const PeerHeader> headers, cudaStream_t stream) {
  constexpr char kCall[] = "ncclGroupEnd";
  const Communicator& all = communicators_.all();
  if (stage_ == Stage::kNew) {
    if (!headers.empty() || !messages_.empty())
      SOTTO_TRY(together(all, [&] { return queue_messages(headers, stream); }));
    stage_ = Stage::kMessages;
  }
  if (stage_ == Stage::kMessages) {
    SOTTO_TRY(all.state(kCall));
    if (natives_on_ != nullptr) {
      SOTTO_TRY(together(*natives_on_, [&] { return queue_natives(stream); }));
    }
    stage_ = Stage::kNatives;
  }
  return natives_on_ == nullptr ? ok_status() : natives_on_->state(kCall);
}

template <class Queue>
Status GroupCalls::together(const Communicator& on, Queue&& queue) const {
  const Api& api = on.api();
  SOTTO_TRY(api.status(api.GroupStart(), "ncclGroupStart", nullptr));
  const Status status = queue();
  const ncclResult_t ended = api.GroupEnd();  // also after an error: groups are balanced
  SOTTO_TRY(status);
  return on.queued(ended, "ncclGroupEnd");
}

// Of two ranks' calls that belong together the i-th send meets the i-th receive, so both have their
// headers first, then the messages in the order of the plan.
Status GroupCalls::queue_messages(std::span<const PeerHeader> headers, cudaStream_t stream) const {
  const Communicator& on = communicators_.all();
  const Api& api = on.api();
  const ncclComm_t comm = on.handle();
  for (const PeerHeader& h : headers) {
    SOTTO_TRY(on.queued(api.Send(h.out, sizeof(GroupHeader), ncclUint8, h.peer, comm, stream),
                        "ncclSend"));
    SOTTO_TRY(on.queued(api.Recv(h.in, sizeof(GroupHeader), ncclUint8, h.peer, comm, stream),
                        "ncclRecv"));
  }
  for (const auto& [transfer, memory] : messages_) {
    const Transfer& t = *transfer;
    if (t.bytes == 0) continue;
    SOTTO_TRY(
        t.is_send
            ? on.queued(api.Send(memory, t.bytes, ncclUint8, t.peer, comm, stream), "ncclSend")
            : on.queued(api.Recv(memory, t.bytes, ncclUint8, t.peer, comm, stream), "ncclRecv"));
  }
  return ok_status();
}

Status GroupCalls::queue_natives(cudaStream_t stream) const {
  const Communicator& on = *natives_on_;
  const Api& api = on.api();
  const ncclComm_t comm = on.handle();
  for (const auto& [call, in, out] : natives_) {
    const NativeCall& c = *call;
    const ncclDataType_t type = type_of(c.dtype);
    switch (c.kind) {
      case OpKind::kAllGather:
        SOTTO_TRY(on.queued(api.AllGather(in, out, c.count, type, comm, stream), "ncclAllGather"));
        break;
      case OpKind::kBroadcast:
        SOTTO_TRY(on.queued(api.Broadcast(in, out, c.count, type, c.root, comm, stream),
                            "ncclBroadcast"));
        break;
      case OpKind::kReduceScatter:
        SOTTO_TRY(
            on.queued(api.ReduceScatter(in, out, c.count, type, op_of(c.reduce), comm, stream),
                      "ncclReduceScatter"));
        break;
      case OpKind::kAllReduce:
        SOTTO_TRY(on.queued(api.AllReduce(in, out, c.count, type, op_of(c.reduce), comm, stream),
                            "ncclAllReduce"));
        break;
      default: return error(Code::kInternal, "nccl has no collective of this kind");
    }
  }
  return ok_status();
}

}  // namespace sotto::nccl
