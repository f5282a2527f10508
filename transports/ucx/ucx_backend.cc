#include "transports/ucx/ucx_backend.h"

#include <algorithm>
#include <optional>

#include "core/wire/bytes.h"
#include "transports/framed/framed_transport.h"
#include "transports/ucx/caps.h"
#include "transports/ucx/carrier.h"
#include "transports/ucx/mesh.h"

namespace sotto {
namespace ucx {
namespace {

constexpr uint64_t kMostEagerBytes = uint64_t{1} << 30;

class UcxTransport final : public framed::FramedTransport {
 public:
  UcxTransport(const std::shared_ptr<UcxPoller>& poller, int32_t rank,
               std::vector<framed::PeerCarriers> peers, TransferSink& sink,
               framed::FlowLimits limits, std::unique_ptr<Mesh> mesh)
      : FramedTransport(kCaps, poller, poller->clock(), rank, std::move(peers), sink, limits),
        mesh_(std::move(mesh)),
        ticker_(poller->ticks().add([this] {
          mesh_->tick();
          tick();
        })) {
    mesh_->listen();
  }

 private:
  const std::unique_ptr<Mesh> mesh_;
  const std::shared_ptr<void> ticker_;
};

// What all ranks know of one.
struct Member {
  std::string address;  // of its worker
  framed::FlowLimits flow;

  std::string encode() const {
    wire::ByteWriter out;
    out.text(address);
    out.number(flow.eager_bytes);
    out.number(flow.credit_bytes);
    return out.take();
  }
  static std::optional<Member> decode(const std::string& text) {
    wire::ByteReader in({reinterpret_cast<const uint8_t*>(text.data()), text.size()});
    Member member;
    member.address = in.text();
    member.flow.eager_bytes = in.number<uint64_t>();
    member.flow.credit_bytes = in.number<uint64_t>();
    if (!in.finished() || member.address.empty()) return {};
    return member;
  }
};

class UcxBackend final : public Backend {
 public:
  UcxBackend(std::shared_ptr<UcpContext> context, std::shared_ptr<UcxPoller> poller,
             framed::FlowLimits flow)
      : context_(std::move(context)), poller_(std::move(poller)), flow_(flow) {}

  const char* name() const override { return kCaps.name; }
  Poller& poller() override { return *poller_; }
  Result<std::unique_ptr<Transport>> connect(ControlPlane& control, const LinkPeers& peers,
                                             TransferSink& sink, Driver& driver,
                                             Deadline deadline) override {
    const int32_t rank = control.rank();
    SOTTO_ASSIGN(const std::shared_ptr<Worker> worker, Worker::make(context_, poller_));
    auto mesh = std::make_unique<Mesh>(worker, control, peers);
    SOTTO_ASSIGN(std::vector<std::string> all,
                 control.all_gather("UCX: addresses", Member{worker->address(), flow_}.encode(),
                                    driver, deadline));
    framed::FlowLimits flow = flow_;
    for (const int32_t peer : peers.all) {
      std::optional<Member> member = Member::decode(all[static_cast<size_t>(peer)]);
      if (!member) return error(Code::kProtocol, "rank {} sent no address of UCX", peer);
      flow.eager_bytes = std::min(flow.eager_bytes, member->flow.eager_bytes);
      flow.credit_bytes = std::min(flow.credit_bytes, member->flow.credit_bytes);
      all[static_cast<size_t>(peer)] = std::move(member->address);
    }
    SOTTO_TRY(mesh->connect(all, driver, deadline));
    std::vector<framed::PeerCarriers> links(all.size());
    for (const int32_t peer : peers.all) {
      if (peer == rank) continue;
      framed::PeerCarriers& link = links[static_cast<size_t>(peer)];
      link.name = fmt::format("rank {}", peer);
      const std::shared_ptr<Endpoint> endpoint = mesh->take(peer);
      for (uint64_t i = 0; i < kCarriers; ++i) {
        link.carriers.push_back(std::make_unique<MessageCarrier>(
            endpoint, link.name, number_for(peer, i), number_for(rank, i)));
      }
    }
    // Behind it every end is there, so that messages may be sent.
    SOTTO_TRY(control.all_gather("UCX: endpoints", "", driver, deadline).status());
    return std::unique_ptr<Transport>(std::make_unique<UcxTransport>(
        poller_, rank, std::move(links), sink, flow, std::move(mesh)));
  }

 private:
  const std::shared_ptr<UcpContext> context_;
  const std::shared_ptr<UcxPoller> poller_;
  const framed::FlowLimits flow_;
};

}  // namespace
}  // namespace ucx

UcxOptions ucx_options(const Params& common, const ucx::Params& own) {
  UcxOptions options;
  options.library = own.ucx_library;
  options.eager_bytes = static_cast<uint64_t>(common.eager_bytes);
  options.background_share = static_cast<uint32_t>(common.background_share);
  return options;
}

Result<std::unique_ptr<Backend>> make_ucx_backend(const UcxOptions& options) {
  framed::FlowLimits flow;
  flow.eager_bytes = std::min(options.eager_bytes, ucx::kMostEagerBytes);
  flow.credit_bytes = std::max({options.credit_bytes, 4 * flow.eager_bytes, uint64_t{1} << 20});
  flow.background_share = options.background_share;
  const Clock& clock = options.clock != nullptr ? *options.clock : Clock::monotonic();
  SOTTO_ASSIGN(std::shared_ptr<const ucx::Api> api, ucx::load(options.library));
  SOTTO_ASSIGN(std::shared_ptr<ucx::UcpContext> context, ucx::UcpContext::make(std::move(api)));
  SOTTO_ASSIGN(std::shared_ptr<ucx::UcxPoller> poller, ucx::UcxPoller::make(clock));
  return std::unique_ptr<Backend>(
      std::make_unique<ucx::UcxBackend>(std::move(context), std::move(poller), flow));
}

}  // namespace sotto
