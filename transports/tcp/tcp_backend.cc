#include "transports/tcp/tcp_backend.h"

#include <unistd.h>

#include <algorithm>
#include <map>

#include "core/base/host.h"
#include "core/base/log.h"
#include "core/base/text.h"
#include "core/iface/unique_id.h"
#include "transports/tcp/control_plane.h"
#include "transports/tcp/mesh.h"
#include "transports/tcp/net.h"
#include "transports/tcp/rendezvous_server.h"

namespace sotto::tcp {
namespace {

constexpr int64_t kRefusalUs = 1'000'000;
constexpr int64_t kUserTimeoutBeats = 30;
constexpr int64_t kLeastUserTimeoutMs = 2000;
constexpr uint64_t kMostEagerBytes = uint64_t{1} << 30;
constexpr uint32_t kMostConnections = 64;
constexpr uint64_t kLeastCreditBytes = 4096;  // some empty messages

class TcpBackend final : public Backend {
 public:
  TcpBackend(const TcpOptions& options, std::shared_ptr<Reactor> reactor, ListenPlace place)
      : options_(options), reactor_(std::move(reactor)), place_(std::move(place)) {}

  const char* name() const override { return "tcp"; }
  Poller& poller() override { return *reactor_; }

  Result<UniqueId> make_unique_id(Reach reach) override {
    if (reach == Reach::kNetwork) SOTTO_TRY(leave_loopback());
    UniqueIdFields fields;
    fields.kind = IdKind::kTcp;
    fields.token = random_token();
    fields.process_token = process_token();
    SOTTO_ASSIGN(auto server,
                 RendezvousServer::open(*reactor_, fields.token, Endpoint(place_.bind, 0)));
    fields.port = server->port();
    for (const Address& a : place_.published) {
      const std::string text = a.to_string();
      if (fields.addresses.size() + text.size() + 1 > kUniqueIdTextBytes) break;
      fields.addresses += (fields.addresses.empty() ? "" : ",") + text;
    }
    servers_[fields.token] = std::move(server);
    return encode_unique_id(fields);
  }

  bool knows(const UniqueId& id) const override {
    const auto fields = decode_unique_id(id);
    return fields.ok() && fields->kind == IdKind::kTcp;
  }

  Result<std::unique_ptr<ControlPlane>> join(const JoinRequest& request, Driver& driver) override {
    if (request.size < 1 || request.rank < 0 || request.rank >= request.size)
      return refuse(request, driver);
    SOTTO_ASSIGN(Membership group, rendezvous(request, driver));
    return std::unique_ptr<ControlPlane>(
        std::make_unique<TcpControl>(reactor_, std::move(group), options_.heartbeat_ms));
  }

  Result<std::unique_ptr<Transport>> connect(ControlPlane& control, const LinkPeers& peers,
                                             TransferSink& sink, Driver& driver,
                                             Deadline deadline) override {
    auto* own = dynamic_cast<TcpControl*>(&control);
    if (own == nullptr)
      return invalid_argument("the control plane was not made by the tcp backend");
    const uint64_t eager = std::min(options_.eager_bytes, kMostEagerBytes);
    const uint64_t credit = std::max({options_.credit_bytes, 4 * eager, kLeastCreditBytes});
    const MeshLimits limits{{eager, credit, options_.background_share},
                            std::clamp(options_.connections, 1u, kMostConnections)};
    return connect_mesh(reactor_, place_, limits, *own, peers, sink, driver, deadline);
  }

 private:
  // Of a rank that is out of range: joins nevertheless, for a short time, so that the other ranks
  // fail with this cause.
  Status refuse(const JoinRequest& request, Driver& driver) {
    const Status status = invalid_argument("rank {} of {}; the rank has to be from 0 to size - 1",
                                           request.rank, counted(request.size, "rank"));
    const bool elsewhere = request.exchange == nullptr && (request.id || request.rank != 0);
    if (elsewhere && request.deadline.left_us(driver.clock()) > 0) {
      JoinRequest shown = request;
      shown.deadline = Deadline::in_us(
          driver.clock(), std::min(request.deadline.left_us(driver.clock()), kRefusalUs));
      log(LogLevel::kDebug, "{}", rendezvous(shown, driver).status().text());
    }
    return status;
  }

  Result<Membership> rendezvous(const JoinRequest& request, Driver& driver) {
    wire::Join own;
    own.rank = request.rank;
    own.size = request.size;
    own.pid = static_cast<uint32_t>(::getpid());
    own.host = host_name();
    if (request.exchange) return rendezvous_by_exchange(request, own, driver);
    if (request.id) return rendezvous_by_id(*request.id, own, driver, request);
    if (!request.address.empty()) return rendezvous_at_address(request, own, driver);
    return invalid_argument(
        "rank {}: nothing says where the ranks meet: no unique id, no rendezvous address",
        request.rank);
  }

  Result<Membership> rendezvous_by_id(const UniqueId& id, wire::Join own, Driver& driver,
                                      const JoinRequest& request) {
    SOTTO_ASSIGN(const UniqueIdFields fields, decode_unique_id(id));
    if (fields.kind != IdKind::kTcp)
      return invalid_argument("the unique id was not made by the tcp backend");
    own.token = fields.token;
    if (const auto made_here = servers_.find(fields.token); made_here != servers_.end()) {
      auto server = std::move(made_here->second);
      servers_.erase(made_here);
      return RendezvousServer::run(std::move(server), own, driver, request.deadline);
    }
    std::vector<Endpoint> endpoints;
    for (size_t at = 0; at < fields.addresses.size();) {
      const size_t end = std::min(fields.addresses.find(',', at), fields.addresses.size());
      error_code failed;
      const Address address = asio::ip::make_address(fields.addresses.substr(at, end - at), failed);
      if (!failed) endpoints.emplace_back(address, fields.port);
      at = end + 1;
    }
    if (endpoints.empty())
      return invalid_argument("the unique id has no address: \"{}\"", fields.addresses);
    SOTTO_TRY(choose_place(endpoints, request.reach));
    return join_rendezvous(*reactor_, std::move(endpoints), false, own, driver, request.deadline);
  }

  Result<Membership> rendezvous_at_address(const JoinRequest& request, const wire::Join& own,
                                           Driver& driver) {
    SOTTO_ASSIGN(std::vector<Endpoint> endpoints, resolve_url(request.address, *reactor_));
    if (own.rank != 0) {
      SOTTO_TRY(choose_place(endpoints, request.reach));
      return join_rendezvous(*reactor_, std::move(endpoints), true, own, driver, request.deadline);
    }
    SOTTO_ASSIGN(const Endpoint at, rendezvous_endpoint(request, endpoints));
    SOTTO_ASSIGN(auto server, RendezvousServer::open(*reactor_, 0, at));
    return RendezvousServer::run(std::move(server), own, driver, request.deadline);
  }

  // Without a setting a rank listens at its address on the route to the rendezvous.
  Status choose_place(const std::vector<Endpoint>& endpoints, Reach reach) {
    if (!options_.listen.empty()) return ok_status();
    move_to(place_towards(endpoints));
    return reach == Reach::kNetwork ? leave_loopback() : ok_status();
  }
  // Ranks on other hosts do not reach loopback, which is this machine's own name on some systems.
  Status leave_loopback() {
    if (!options_.listen.empty() || !place_.bind.is_loopback()) return ok_status();
    SOTTO_ASSIGN(ListenPlace any, listen_place("any"));
    move_to(std::move(any));
    return ok_status();
  }
  void move_to(ListenPlace place) {
    if (!options_.advertise.empty()) place.published = place_.published;
    place.published_port = place_.published_port;
    place.port = place_.port;
    place_ = std::move(place);
  }

  // Where rank 0 listens: at the rendezvous address, which is one of this machine.
  Result<Endpoint> rendezvous_endpoint(const JoinRequest& request,
                                       const std::vector<Endpoint>& found) {
    const Endpoint at = own_endpoint(found);
    const bool elsewhere = at.address().is_loopback() && request.reach == Reach::kNetwork;
    if (elsewhere) SOTTO_TRY(leave_loopback());
    if (options_.listen == "any" || (elsewhere && options_.listen.empty()))
      return Endpoint(place_.bind, at.port());
    if (at.address().is_loopback() || !options_.listen.empty()) return at;
    if (!is_own_address(at.address())) {
      return invalid_argument(
          "rank 0 listens at the rendezvous address, but {} is {}, which this machine does not "
          "have ({}); name one that it has, or set SOTTO_LISTEN to any where something forwards to "
          "it",
          request.address, endpoint_text(at), interface_list());
    }
    move_to({at.address(), {at.address()}, 0, 0});
    return at;
  }

  // The caller's all-gather carries the unique id of rank 0.
  Result<Membership> rendezvous_by_exchange(const JoinRequest& request, const wire::Join& own,
                                            Driver& driver) {
    UniqueId mine{};
    if (own.rank == 0) {
      SOTTO_ASSIGN(mine, make_unique_id(request.reach));
    }
    std::vector<UniqueId> all(static_cast<size_t>(own.size));
    if (Status status = request.exchange(mine.data(), sizeof mine, all.data()); !status.ok()) {
      return status.with_prefix(fmt::format("rank {}: the caller's all-gather", own.rank));
    }
    return rendezvous_by_id(all[0], own, driver, request);
  }

  TcpOptions options_;
  std::shared_ptr<Reactor> reactor_;
  ListenPlace place_;
  std::map<uint64_t, std::unique_ptr<RendezvousServer>>
      servers_;  // of ids made here and not used yet, by token
};

}  // namespace
}  // namespace sotto::tcp

namespace sotto {

TcpOptions tcp_options(const Params& common, const tcp::Params& own) {
  TcpOptions options;
  options.listen = own.listen;
  options.listen_port = static_cast<uint16_t>(own.listen_port);
  options.advertise = own.advertise;
  options.rate_limit_mbit = own.rate_limit_mbit;
  options.eager_bytes = static_cast<uint64_t>(common.eager_bytes);
  options.connections = static_cast<uint32_t>(own.connections);
  options.send_buffer_bytes = static_cast<uint64_t>(own.send_buffer_bytes);
  options.receive_buffer_bytes = static_cast<uint64_t>(own.receive_buffer_bytes);
  options.congestion_control = own.congestion_control;
  options.background_share = static_cast<uint32_t>(common.background_share);
  options.heartbeat_ms = common.heartbeat_ms;
  options.user_timeout_ms = own.tcp_user_timeout_ms;
  return options;
}

Result<std::unique_ptr<Backend>> make_tcp_backend(const TcpOptions& options) {
  SOTTO_ASSIGN(tcp::ListenPlace place, tcp::listen_place(options.listen));
  SOTTO_TRY(tcp::advertise(options.advertise, place));
  place.port = options.listen_port;
  tcp::SocketSettings sockets{options.send_buffer_bytes, options.receive_buffer_bytes,
                              options.congestion_control};
  sockets.user_timeout_ms =
      options.user_timeout_ms > 0
          ? options.user_timeout_ms
          : std::max(tcp::kUserTimeoutBeats * options.heartbeat_ms, tcp::kLeastUserTimeoutMs);
  SOTTO_TRY(sockets.check());
  SOTTO_ASSIGN(std::shared_ptr<tcp::Reactor> reactor,
               tcp::Reactor::make({options.rate_limit_mbit, options.clock, std::move(sockets)}));
  return std::unique_ptr<Backend>(
      std::make_unique<tcp::TcpBackend>(options, std::move(reactor), std::move(place)));
}

}  // namespace sotto
