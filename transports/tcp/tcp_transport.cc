#include "transports/tcp/tcp_transport.h"

#include "transports/tcp/caps.h"
#include "transports/tcp/control_plane.h"

namespace sotto::tcp {
namespace {

std::vector<framed::PeerCarriers> carriers_of(std::vector<MeshPeer>& peers) {
  std::vector<framed::PeerCarriers> out;
  for (MeshPeer& peer : peers) {
    framed::PeerCarriers& one = out.emplace_back();
    one.name = peer.name;
    for (auto& stream : peer.streams) one.carriers.push_back(std::move(stream));
  }
  return out;
}

}  // namespace

TcpTransport::TcpTransport(const std::shared_ptr<Reactor>& reactor, int32_t rank,
                           std::vector<MeshPeer> peers, TransferSink& sink,
                           framed::FlowLimits limits)
    : FramedTransport(kCaps, reactor, reactor->clock(), rank, carriers_of(peers), sink, limits) {
  for (const MeshPeer& peer : peers) control_bytes_.push_back(peer.control_bytes);
  if (peers.size() > 1) ticker_ = reactor->every(kTickMs, [this] { tick(); });
}

TcpTransport::~TcpTransport() {
  if (bridge_) bridge_->route = nullptr;
}

void TcpTransport::carry_failures(TcpControl& control) {
  bridge_ = control.failure_bridge();
  bridge_->route = this;
  FramedTransport::carry_failures(*this, control.describe_rank(control.rank()));
}

void TcpTransport::send_failure(int32_t peer, const std::string& payload) {
  if (framed::DataLink* c = link(peer)) c->send_failure(payload);
}

bool TcpTransport::failure_sent(int32_t peer) const {
  const framed::DataLink* c = link(peer);
  return c == nullptr || c->failure_sent();
}

bool TcpTransport::connected(int32_t peer) const {
  const framed::DataLink* c = link(peer);
  return c != nullptr && c->connected();
}

Status TcpTransport::on_failure_frame(int32_t peer, wire::Bytes payload) {
  return bridge_->agreement != nullptr ? bridge_->agreement->on_frame(peer, payload) : Status();
}

void TcpTransport::on_disconnected(int32_t peer) {
  if (bridge_->agreement != nullptr) bridge_->agreement->on_disconnected(peer);
}

TransferCounters TcpTransport::counters(uint64_t comm, int32_t peer) const {
  TransferCounters c = FramedTransport::counters(comm, peer);
  if (comm == 0 && peer >= 0 && static_cast<size_t>(peer) < control_bytes_.size()) {
    if (const auto& control = control_bytes_[static_cast<size_t>(peer)]) {
      c.service_bytes_sent += control->sent.load(std::memory_order_relaxed);
      c.service_bytes_received += control->received.load(std::memory_order_relaxed);
    }
  }
  return c;
}

}  // namespace sotto::tcp
