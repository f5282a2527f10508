#include "transports/shm/shm_backend.h"

#include <algorithm>
#include <bit>

#include "core/base/log.h"
#include "transports/framed/framed_transport.h"
#include "transports/shm/caps.h"
#include "transports/shm/poller.h"

namespace sotto {
namespace shm {
namespace {

constexpr uint64_t kMostEagerBytes = uint64_t{1} << 30;
constexpr uint64_t kLeastCreditBytes = uint64_t{1} << 20;

class ShmTransport final : public framed::FramedTransport {
 public:
  ShmTransport(const std::shared_ptr<ShmPoller>& poller, int32_t rank,
               std::vector<framed::PeerCarriers> peers, TransferSink& sink,
               framed::FlowLimits limits)
      : FramedTransport(kCaps, poller, poller->clock(), rank, std::move(peers), sink, limits),
        rank_(rank),
        ticker_(poller->ticks().add([this] { tick(); })) {}
  bool reaches(int32_t peer) const override { return peer == rank_ || link(peer) != nullptr; }

 private:
  const int32_t rank_;
  const std::shared_ptr<void> ticker_;
};

class ShmBackend final : public Backend {
 public:
  ShmBackend(HandoverOptions options, bool named, std::shared_ptr<ShmPoller> poller)
      : options_(std::move(options)), named_(named), poller_(std::move(poller)) {}

  const char* name() const override { return kCaps.name; }
  Poller& poller() override { return *poller_; }
  Result<std::unique_ptr<Transport>> connect(ControlPlane& control, const LinkPeers& peers,
                                             TransferSink& sink, Driver& driver,
                                             Deadline deadline) override {
    Handover made;
    made.flow = options_.flow;
    if (control.size() > 1) {
      SOTTO_ASSIGN(made,
                   hand_over(control, peers.all, options_, poller_->bell(), driver, deadline));
    }
    report(control.rank(), made);
    std::vector<framed::PeerCarriers> links(static_cast<size_t>(control.size()));
    for (auto& [peer, rings] : made.linked) {
      framed::PeerCarriers& link = links[static_cast<size_t>(peer)];
      link.name = fmt::format("rank {} (pid {})", peer, rings.pid);
      link.carriers.push_back(std::make_unique<RingCarrier>(poller_, std::move(rings)));
    }
    return std::unique_ptr<Transport>(
        std::make_unique<ShmTransport>(poller_, control.rank(), std::move(links), sink, made.flow));
  }

 private:
  // Of each pair the lower rank does.
  void report(int32_t rank, const Handover& made) const {
    for (const auto& [peer, why] : made.unlinked) {
      if (peer < rank) continue;
      log(named_ ? LogLevel::kWarn : LogLevel::kInfo,
          "ranks {} and {} of one host have no shared memory and use the network: {}", rank, peer,
          why);
    }
  }

  const HandoverOptions options_;
  const bool named_;
  const std::shared_ptr<ShmPoller> poller_;
};

}  // namespace
}  // namespace shm

ShmOptions shm_options(const Params& common, const shm::Params& own) {
  ShmOptions options;
  options.named = common.transport == shm::kCaps.name;
  options.handover.ring_bytes = static_cast<uint64_t>(own.shm_ring_bytes);
  options.handover.flow.eager_bytes = static_cast<uint64_t>(common.eager_bytes);
  options.handover.flow.background_share = static_cast<uint32_t>(common.background_share);
  return options;
}

Result<std::unique_ptr<Backend>> make_shm_backend(const ShmOptions& options) {
  shm::HandoverOptions handover = options.handover;
  handover.ring_bytes =
      std::bit_ceil(std::clamp(handover.ring_bytes, shm::kLeastRingBytes, shm::kMostRingBytes));
  framed::FlowLimits& flow = handover.flow;
  flow.eager_bytes = std::min(flow.eager_bytes, shm::kMostEagerBytes);
  flow.credit_bytes = std::max({flow.credit_bytes, 4 * flow.eager_bytes, shm::kLeastCreditBytes});
  SOTTO_ASSIGN(shm::Bell bell, shm::Bell::make());
  const Clock& clock = options.clock != nullptr ? *options.clock : Clock::monotonic();
  return std::unique_ptr<Backend>(
      std::make_unique<shm::ShmBackend>(std::move(handover), options.named,
                                        std::make_shared<shm::ShmPoller>(clock, std::move(bell))));
}

}  // namespace sotto
