#include "core/plan/native.h"

namespace sotto {
namespace {

// Message k of a rank to a peer is what the peer receives k-th from it.
void emit_messages(Section& s, const NativeStep& native) {
  const uint64_t bytes = native.call.count * s.element;
  const uint32_t in = native.in.slot, out = native.out.slot;
  const auto share = [&](int32_t k) {
    const Range r =
        share_of(native.call.count, s.ranks(), static_cast<uint32_t>(k), kDenseChunkAlign);
    return Range{r.begin * s.element, r.count * s.element};
  };
  const Range mine = share(s.request.rank);
  for (const int32_t peer : s.peers()) {
    const uint64_t part = static_cast<uint64_t>(peer) * bytes;
    switch (native.call.kind) {
      case OpKind::kAllGather:
        s.b.send(peer, {in, 0, bytes}, s.round);
        s.b.recv(peer, {out, part, bytes}, s.round);
        break;
      case OpKind::kReduceScatter:
        s.b.send(peer, {in, part, bytes}, s.round);
        s.b.recv(peer, {out, 0, bytes}, s.round);
        break;
      case OpKind::kAllReduce: {  // a share to its owner, and reduced from it to all
        const Range theirs = share(peer);
        s.b.send(peer, {in, theirs.begin, theirs.count}, s.round);
        s.b.send(peer, {in, mine.begin, mine.count}, s.round);
        s.b.recv(peer, {out, mine.begin, mine.count}, s.round);
        s.b.recv(peer, {out, theirs.begin, theirs.count}, s.round);
        break;
      }
      default:  // broadcast
        if (s.request.rank == s.request.root) s.b.send(peer, {in, 0, bytes}, s.round);
        if (peer == s.request.root) s.b.recv(peer, {out, 0, bytes}, s.round);
    }
  }
}

}  // namespace

// Sums of integers wrap around, so order is nothing to them. Their mean is left out: what NCCL
// rounds and when it overflows is not ours.
NativeCollectives native_needs(OpKind kind, ReduceOp reduce, Dtype dtype) {
  switch (kind) {
    case OpKind::kAllGather:
    case OpKind::kBroadcast: return kNativeMoves;
    case OpKind::kAllReduce:
    case OpKind::kReduceScatter:
      if (reduce == ReduceOp::kBitOr) return 0;
      if (dtype == Dtype::kI16 || dtype == Dtype::kU16) return 0;  // NCCL has none
      if (dtype_is_float(dtype)) return kNativeFloats;
      return reduce == ReduceOp::kMean ? 0 : kNativeIntegers;
    default: return 0;
  }
}

bool is_native(const Section& s, const std::vector<uint32_t>& tensors) {
  const CollectiveRequest& r = s.request;
  return (r.native & native_needs(r.kind, r.reduce, s.dtype)) != 0 && r.size > 1 &&
         tensors.size() <= kNativeTensors;
}

void emit_native(Section& s, const std::vector<uint32_t>& tensors) {
  const CollectiveRequest& r = s.request;
  for (const uint32_t t : tensors) {
    if (r.counts[t] == 0) continue;
    const uint64_t bytes = r.counts[t] * s.element;
    NativeStep native{{r.kind, r.reduce, s.dtype, r.counts[t], r.root},
                      {s.slots.in + t, 0, bytes},
                      {s.slots.out + t, 0, bytes}};
    if (r.kind == OpKind::kReduceScatter) native.in.bytes *= s.ranks();
    if (r.kind == OpKind::kAllGather) native.out.bytes *= s.ranks();
    if (r.kind == OpKind::kBroadcast && r.rank != r.root) native.in.bytes = 0;
    s.b.with(&native);
    emit_messages(s, native);
    s.b.with(nullptr);
  }
}

}  // namespace sotto
