#include "transports/tcp/tcp_transport.h"

#include <algorithm>

namespace sotto::tcp {
namespace {

constexpr int64_t kTickMs = 50;
constexpr int64_t kCloseSliceUs = 1000;

}  // namespace

TcpTransport::TcpTransport(std::shared_ptr<Reactor> reactor, int32_t rank,
                           std::vector<MeshPeer> peers, TransferSink& sink, FlowLimits limits)
    : reactor_(std::move(reactor)),
      core_(rank, static_cast<int32_t>(peers.size()), sink, limits, *reactor_) {
  core_.name = fmt::format("rank {}", rank);
  for (size_t r = 0; r < peers.size(); ++r) {
    MeshPeer& peer = peers[r];
    control_bytes_.push_back(peer.control_bytes);
    links_.push_back(peer.streams.empty()
                         ? nullptr
                         : std::make_unique<DataLink>(core_, static_cast<int32_t>(r),
                                                      std::move(peer.streams), peer.name));
  }
  if (peers.size() > 1) ticker_ = reactor_->every(kTickMs, [this] { tick(); });
}

TcpTransport::~TcpTransport() {
  if (bridge_) bridge_->route = nullptr;
}

void TcpTransport::carry_failures(TcpControl& control) {
  bridge_ = control.bridge();
  bridge_->route = this;
  core_.failures = this;
  core_.name = control.describe_rank(core_.rank);
}

void TcpTransport::send_failure(int32_t peer, const std::string& payload) {
  if (DataLink* c = link(peer)) c->send_failure(payload);
}

bool TcpTransport::failure_sent(int32_t peer) const {
  const DataLink* c = link(peer);
  return c == nullptr || c->failure_sent();
}

bool TcpTransport::connected(int32_t peer) const {
  const DataLink* c = link(peer);
  return c != nullptr && c->connected();
}

Status TcpTransport::on_failure_frame(int32_t peer, wire::Bytes payload) {
  return bridge_->control != nullptr ? bridge_->control->on_failure_frame(peer, payload) : Status();
}

void TcpTransport::on_disconnected(int32_t peer) {
  if (bridge_->control != nullptr) bridge_->control->on_disconnected(peer);
}

const TransportCaps& TcpTransport::caps() const {
  static const TransportCaps caps{.name = "tcp",
                                  // Above it the end of a collective waits for the slowest
                                  // connection, and urgent messages wait for bulk: 256 KiB take
                                  // 6 % longer for 4 MB at 1 Gbit/s. Below it calls cost:
                                  // 64 KiB take 20 % longer where links do not limit.
                                  .segment_bytes = 128 * 1024};
  return caps;
}

uint64_t TcpTransport::header_bytes(uint64_t message_bytes) const {
  return wire::frame_bytes(message_bytes) - message_bytes;
}

DataLink* TcpTransport::link(int32_t peer) const {
  return peer < 0 || static_cast<size_t>(peer) >= links_.size()
             ? nullptr
             : links_[static_cast<size_t>(peer)].get();
}

Status TcpTransport::post_op(const OpPosting& op) {
  const OpState* known = core_.ops.find_op(op.key);
  if (known != nullptr && known->posting != nullptr) {
    return error(Code::kInternal, "{} is posted twice on rank {}", wire::describe(op.key),
                 core_.rank);
  }
  OpState& state = core_.ops.post(op);
  for (Flow* f = state.flows; f != nullptr; f = f->next_of_op) link(f->peer)->check_posted(*f);
  return {};
}

void TcpTransport::ready(int32_t peer, const OpPosting& op, uint32_t last_round, uint64_t largest) {
  if (DataLink* c = link(peer)) c->ready(op, last_round, largest);
}

void TcpTransport::retire(const OpPosting& op) {
  OpState* state = core_.ops.find_op(op.key);
  if (state == nullptr || state->posting == nullptr) return;
  for (const Flow* f = state->flows; f != nullptr; f = f->next_of_op) {
    link(f->peer)->retire(*state);
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

void TcpTransport::cancel(const OpPosting& op) {
  OpState* state = core_.ops.find_op(op.key);
  if (state == nullptr || state->posting == nullptr) return;
  for (const auto& c : links_) {
    if (c) c->cancel(*state);
  }
  core_.ops.erase(*state, false);
}

void TcpTransport::send(Transfer& transfer) {
  if (DataLink* c = link(transfer.peer)) {
    c->send(transfer);
  } else {
    core_.sink.on_transfer(
        transfer,
        error(Code::kInternal, "message of {} from rank {} to rank {} of {}",
              wire::describe(transfer.op->key), core_.rank, transfer.peer, links_.size()));
  }
}

void TcpTransport::recv(Transfer& transfer) {
  if (DataLink* c = link(transfer.peer)) {
    c->recv(transfer);
  } else {
    core_.sink.on_transfer(
        transfer,
        error(Code::kInternal, "message of {} from rank {} of {} to rank {}",
              wire::describe(transfer.op->key), transfer.peer, links_.size(), core_.rank));
  }
}

std::string TcpTransport::route(int32_t peer) const {
  const DataLink* c = link(peer);
  return c != nullptr ? "tcp " + c->address() : "self";
}

TransferCounters TcpTransport::counters(uint64_t comm, int32_t peer) const {
  TransferCounters c = core_.counters.read(comm, peer);
  if (comm == 0 && peer >= 0 && static_cast<size_t>(peer) < control_bytes_.size()) {
    if (const auto& control = control_bytes_[static_cast<size_t>(peer)]) {
      c.service_bytes_sent += control->sent.load(std::memory_order_relaxed);
      c.service_bytes_received += control->received.load(std::memory_order_relaxed);
    }
  }
  return c;
}

void TcpTransport::tick() {
  const int64_t now = reactor_->now_ns();
  for (const auto& c : links_) {
    if (c) c->tick(now);
  }
}

void TcpTransport::close(Deadline deadline) {
  if (std::exchange(closed_, true)) return;
  const auto until = [&](bool (DataLink::*done)() const) {
    const auto all = [&] {
      return std::all_of(links_.begin(), links_.end(),
                         [&](const auto& c) { return !c || (c.get()->*done)(); });
    };
    while (!all() && !deadline.passed(reactor_->clock())) {
      reactor_->poll(std::min(kCloseSliceUs, deadline.left_us(reactor_->clock())));
    }
  };
  for (const auto& c : links_) {
    if (c) c->send_bye();
  }
  // Closing with data that the peer's kernel has not acknowledged could lose it.
  until(&DataLink::delivered);
  for (const auto& c : links_) {
    if (c) c->close();
  }
}

}  // namespace sotto::tcp
