#include "transports/framed/framed_transport.h"

#include <algorithm>

namespace sotto::framed {
namespace {

constexpr int64_t kCloseSliceUs = 1000;

}  // namespace

FramedTransport::FramedTransport(const TransportCaps& caps, std::shared_ptr<Poller> poller,
                                 const Clock& clock, int32_t rank, std::vector<PeerCarriers> peers,
                                 TransferSink& sink, FlowLimits limits)
    : caps_(caps),
      poller_(std::move(poller)),
      core_(rank, static_cast<int32_t>(peers.size()), sink, limits, clock) {
  for (size_t r = 0; r < peers.size(); ++r) {
    links_.push_back(
        peers[r].carriers.empty()
            ? nullptr
            : std::make_unique<DataLink>(core_, static_cast<int32_t>(r), std::move(peers[r])));
  }
}

void FramedTransport::carry_failures(FailureListener& listener, std::string own_name) {
  core_.failures = &listener;
  core_.name = std::move(own_name);
}

uint64_t FramedTransport::header_bytes(uint64_t message_bytes) const {
  return wire::frame_bytes(message_bytes) - message_bytes;
}

DataLink* FramedTransport::link(int32_t peer) const {
  return peer < 0 || static_cast<size_t>(peer) >= links_.size()
             ? nullptr
             : links_[static_cast<size_t>(peer)].get();
}

Status FramedTransport::post_op(const OpDescriptor& op) {
  const OpState* known = core_.ops.find_op(op.key);
  if (known != nullptr && known->descriptor != nullptr) {
    return error(Code::kInternal, "{} is posted twice on rank {}", wire::describe(op.key),
                 core_.rank);
  }
  OpState& state = core_.ops.post(op);
  for (Flow* f = state.flows; f != nullptr; f = f->next_of_op) link(f->peer)->check_posted(*f);
  return {};
}

void FramedTransport::ready(int32_t peer, const OpDescriptor& op, uint32_t last_round,
                            uint64_t largest) {
  if (DataLink* c = link(peer)) c->ready(op, last_round, largest);
}

void FramedTransport::complete(const OpDescriptor& op) {
  OpState* state = core_.ops.find_op(op.key);
  if (state == nullptr || state->descriptor == nullptr) return;
  for (const Flow* f = state->flows; f != nullptr; f = f->next_of_op) {
    link(f->peer)->complete(*state);
    if (f->unexpected == nullptr) continue;
    core_.sink.on_failure(f->peer,
                          error(Code::kProtocol,
                                "rank {} sent a message for round {}, segment {} of {}, {}, that "
                                "rank {} did not expect",
                                f->peer, f->unexpected->round, f->unexpected->segment,
                                wire::describe(op.key), describe(op.signature), core_.rank));
  }
  core_.ops.erase(*state, true);
}

void FramedTransport::cancel(const OpDescriptor& op) {
  OpState* state = core_.ops.find_op(op.key);
  if (state == nullptr || state->descriptor == nullptr) return;
  for (const auto& c : links_) {
    if (c) c->cancel(*state);
  }
  core_.ops.erase(*state, false);
}

void FramedTransport::send(Transfer& transfer) {
  if (DataLink* c = link(transfer.peer)) {
    c->send(transfer);
  } else {
    core_.sink.on_transfer(
        transfer,
        error(Code::kInternal, "message of {} from rank {} to rank {} of {}",
              wire::describe(transfer.op->key), core_.rank, transfer.peer, links_.size()));
  }
}

void FramedTransport::recv(Transfer& transfer) {
  if (DataLink* c = link(transfer.peer)) {
    c->recv(transfer);
  } else {
    core_.sink.on_transfer(
        transfer,
        error(Code::kInternal, "message of {} from rank {} of {} to rank {}",
              wire::describe(transfer.op->key), transfer.peer, links_.size(), core_.rank));
  }
}

std::string FramedTransport::route(int32_t peer) const {
  const DataLink* c = link(peer);
  return c != nullptr ? fmt::format("{} {}", caps_.name, c->address()) : "self";
}

TransferCounters FramedTransport::counters(uint64_t comm, int32_t peer) const {
  return core_.counters.read(comm, peer);
}

void FramedTransport::leave(uint64_t comm) {
  // Operations that only peers have begun keep their counters.
  if (core_.ops.leave(comm)) core_.counters.drop(comm);
}

void FramedTransport::tick() {
  const int64_t now = core_.clock.now_ns();
  for (const auto& c : links_) {
    if (c) c->tick(now);
  }
}

void FramedTransport::close(Deadline deadline) {
  if (std::exchange(closed_, true)) return;
  for (const auto& c : links_) {
    if (c) c->send_bye();
  }
  // Closing with data that the peer's end does not have could lose it.
  const auto delivered = [&] {
    return std::ranges::all_of(links_, [](const auto& c) { return !c || c->delivered(); });
  };
  while (!delivered() && !deadline.passed(core_.clock))
    poller_->poll(std::min(kCloseSliceUs, deadline.left_us(core_.clock)));
  for (const auto& c : links_) {
    if (c) c->close();
  }
}

}  // namespace sotto::framed
