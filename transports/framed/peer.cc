#include "transports/framed/peer.h"

namespace sotto::framed {

Flow& Peer::flow(const OpKey& op) {
  Flow& f = core_.ops.flow(op, rank_);
  if (f.counters == nullptr) f.counters = &core_.counters.at(op.comm, rank_);
  return f;
}

Status Peer::agree(const OpKey& op, const OpSignature& own, const OpSignature& theirs) const {
  if (own == theirs) return {};
  return Status(Code::kProtocol, describe_mismatch(op, core_.rank, own, rank_, theirs));
}

void Peer::check_posted(const Flow& f) {
  if (!f.peer_signature) return;
  if (Status status = agree(f.op->key, f.op->descriptor->signature, *f.peer_signature);
      !status.ok())
    fail(std::move(status));
}

Result<Flow*> Peer::flow_of_frame(const wire::FrameHeader& h) {
  Flow* known = core_.ops.find(h.key, rank_);
  OpState* op = known != nullptr ? known->op : core_.ops.find_op(h.key);
  if (op == nullptr) {
    if (core_.ops.done(h.key)) {
      if (const auto own = core_.ops.recent(h.key)) SOTTO_TRY(agree(h.key, *own, h.signature));
      return nullptr;
    }
    if (core_.ops.unposted() >= OpTable::kMaxUnposted) {
      return error(Code::kProtocol, "{} is ahead of rank {} by more than {} operations", name_,
                   core_.rank, OpTable::kMaxUnposted);
    }
  }
  if (op != nullptr && op->descriptor != nullptr)
    SOTTO_TRY(agree(h.key, op->descriptor->signature, h.signature));
  Flow& f = known != nullptr ? *known : flow(h.key);
  if (f.peer_signature && !(*f.peer_signature == h.signature)) {
    return error(Code::kProtocol, "{} calls {} both {} and {}", name_, wire::describe(h.key),
                 describe(*f.peer_signature), describe(h.signature));
  }
  f.peer_signature = h.signature;
  return &f;
}

void Peer::fail(Status why) {
  if (std::exchange(failed_, true)) return;
  core_.sink.on_failure(rank_, std::move(why));
}

}  // namespace sotto::framed
