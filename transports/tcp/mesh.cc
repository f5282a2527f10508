#include "transports/tcp/mesh.h"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/base/log.h"
#include "core/iface/service.h"
#include "transports/tcp/approach.h"
#include "transports/tcp/listener.h"
#include "transports/tcp/stream_carrier.h"

namespace sotto::tcp {
namespace {

// A rank that waits for a connection asks for it after this time, and again if it cannot.
constexpr int64_t kAskMs = 100;
// Longest time in which a peer's system answers, of connections that are made when they are used.
constexpr int64_t kAnswerMs = 10'000;

// The connections to one peer.
struct Pair {
  std::string name;  // of the peer, for errors
  bool lazy = false;
  bool used = false;                    // lazy: its connections are made, or being made
  std::vector<Endpoint> endpoints;      // lazy: where the peer listens
  uint32_t adopted = 0;                 // lazy: connections that the peer's system has answered
  std::vector<StreamCarrier*> streams;  // lazy: of the transport, by number
  Timers::Timer timer;                  // lazy: see kAskMs, kAnswerMs
  std::vector<std::unique_ptr<Handshake>> handshakes;  // by number; null: not begun, or this rank's
                                                       // own, which the peer has not answered
};

class Mesh final : public HandshakeOwner, private ServiceListener {
 public:
  // connections: to each of `peers`, as this rank wishes; the smallest number of all ranks counts.
  // Lower ranks connect to this one; any other connection is refused.
  Mesh(std::shared_ptr<Reactor> reactor, TcpControl& control, const LinkPeers& peers,
       uint32_t connections)
      : reactor_(std::move(reactor)),
        control_(control),
        control_alive_(control.alive()),
        own_{control.token(), control.rank(), control.size()},
        connections_(connections),
        pairs_(static_cast<size_t>(control.size())) {
    const bool coordinates = own_.rank == control.coordinator();
    for (const int32_t peer : peers.all) {
      if (peer == own_.rank) continue;
      linked_.push_back(peer);
      Pair& pair = at(peer);
      pair.name = control.describe_rank(peer);
      pair.lazy = !coordinates && peer != control.coordinator() &&
                  std::ranges::count(peers.lazy, peer) != 0;
    }
    set_connections(connections);
  }
  ~Mesh() override {
    if (listens_ && !control_alive_.expired())
      control_.set_service_listener(kConnectChannel, nullptr);
  }

  // A rank that is the lower one of all its pairs needs no listener, as rank 0.
  Status listen(const ListenPlace& place) {
    const auto lower =
        std::ranges::count_if(linked_, [&](int32_t peer) { return peer < own_.rank; });
    if (lower == 0) return {};
    const std::string here = fmt::format("rank {}: data connections", own_.rank);
    const size_t expected = connections_ * static_cast<size_t>(lower);
    auto opened = FrameListener::open(
        *reactor_, Endpoint(place.bind, place.port),
        {here, wire::FrameKind::kHello, kMaxHelloBytes, expected,
         [this](const Status& why) { full(why); }},
        [this](std::unique_ptr<FrameStream>& stream, const wire::FrameHeader& first,
               wire::Bytes payload) { return admit(stream, first, payload); });
    if (!opened.ok()) return opened.status().with_prefix(here);
    listener_ = opened.take();
    return {};
  }
  // The port in the address record.
  uint16_t port(const ListenPlace& place) const {
    if (!listener_) return 0;
    return place.published_port != 0 ? place.published_port : listener_->port();
  }

  Status connect(const std::vector<std::string>& records, MeshLimits& limits) {
    std::vector<AddressRecord> known;
    for (const std::string& text : records) {
      SOTTO_ASSIGN(AddressRecord record, AddressRecord::decode(text));
      // A receiver has to be ready for what a sender may send, so the smallest limit counts.
      limits.take_smaller(record.limits);
      known.push_back(std::move(record));
    }
    set_connections(limits.connections);
    for (const int32_t peer : linked_) {
      if (!known[static_cast<size_t>(std::max(peer, own_.rank))].stays) at(peer).lazy = false;
      if (peer < own_.rank) continue;
      at(peer).endpoints = endpoints_of(peer, known[static_cast<size_t>(peer)]);
      if (!at(peer).lazy) start_connecting(peer);
    }
    return {};
  }

  // All handshakes of the set-up are over, or it has failed.
  bool settled() const {
    return failure_.has_value() || control_.failure().has_value() || missing().empty();
  }
  // Peers that this rank needs now and is not connected with.
  std::vector<int32_t> missing() const {
    std::vector<int32_t> ranks;
    for (const int32_t peer : linked_) {
      const Pair& pair = pairs_[static_cast<size_t>(peer)];
      const auto open = [](const auto& one) { return one == nullptr || !one->over(); };
      if ((!pair.lazy || pair.used) && std::ranges::any_of(pair.handshakes, open))
        ranks.push_back(peer);
    }
    return ranks;
  }
  const std::optional<FailureCause>& failure() const { return failure_; }
  // Where the connections have come to that were not made in time.
  std::string progress() const {
    std::string text;
    for (const auto& one : approaches_) {
      const std::string found = one->progress();
      if (!found.empty() && text.find(found) == std::string::npos)
        text += fmt::format("{}rank {}: {}", text.empty() ? " (" : "; ", one->peer(), found);
    }
    return text.empty() ? text : text + ")";
  }

  // By rank. From now on lazy pairs connect when they are used.
  std::vector<MeshPeer> take() {
    std::vector<MeshPeer> out;
    for (int32_t r = 0; r < own_.size; ++r) {
      MeshPeer& peer = out.emplace_back();
      peer.name = control_.describe_rank(r);
      peer.control_bytes = control_.link_bytes(r);
      for (const auto& handshake : at(r).handshakes)
        peer.streams.push_back(at(r).lazy ? lazy_stream(r)
                                          : std::make_unique<StreamCarrier>(handshake->take()));
    }
    return out;
  }
  bool any_lazy() const {
    return std::ranges::any_of(pairs_, [](const Pair& pair) { return pair.lazy; });
  }
  // Behind take.
  void begin_lazy() {
    taken_ = true;
    approaches_.clear();
    const bool awaits = std::ranges::any_of(
        linked_, [&](int32_t peer) { return peer < own_.rank && at(peer).lazy; });
    if (!awaits) listener_.reset();
    for (const int32_t peer : linked_) {  // a rank that has got further may have used them
      Pair& pair = at(peer);
      if (!pair.lazy) continue;
      for (size_t i = 0; i < pair.streams.size(); ++i) {
        if (pair.used) pair.streams[i]->expect();
        if (pair.handshakes[i] && pair.handshakes[i]->over())
          pair.streams[i]->attach(pair.handshakes[i]->take());
      }
    }
    listens_ = true;
    control_.set_service_listener(kConnectChannel, this);
  }

 private:
  Pair& at(int32_t peer) { return pairs_[static_cast<size_t>(peer)]; }

  void set_connections(uint32_t number) {
    connections_ = number;
    for (const int32_t peer : linked_) at(peer).handshakes.resize(number);
  }

  Status check(const wire::Hello& hello, bool expected, const std::string& from) const {
    if (hello.token == own_.token && hello.size == own_.size && expected) return {};
    return error(Code::kProtocol, "{} greets as rank {} of {} with {} token", from, hello.rank,
                 hello.size, hello.token == own_.token ? "the right" : "another");
  }

  // A first hello, from a peer that has connected.
  std::optional<Refusal> admit(std::unique_ptr<FrameStream>& stream, const wire::FrameHeader& first,
                               wire::Bytes payload) {
    const auto refusal = [](std::string_view cause, std::string text) {
      return Refusal{cause, true, {Code::kProtocol, -1, std::move(text)}};
    };
    const auto hello = wire::Hello::decode(payload);
    if (!hello.ok())
      return refusal("hello", fmt::format("{} from {}", hello.status().text(), stream->name()));
    const bool expected = hello->rank >= 0 && hello->rank < own_.rank &&
                          std::ranges::count(linked_, hello->rank) != 0;
    if (Status status = check(*hello, expected, stream->name()); !status.ok())
      return refusal(hello->token == own_.token ? "rank" : "token", status.text());
    if (first.round != 0 && first.round != round_of(own_.rank)) {
      return refusal("elsewhere",
                     fmt::format("{}, rank {}, greets rank {}, and this is rank {}", stream->name(),
                                 hello->rank, first.round - 1, own_.rank));
    }
    auto& row = at(hello->rank).handshakes;
    if (first.segment >= row.size() || row[first.segment]) {
      return refusal(
          "taken",
          fmt::format("{} greets as connection {} of rank {}, which is connected already or has no "
                      "such connection",
                      stream->name(), first.segment, hello->rank));
    }
    if (at(hello->rank).lazy) note_use(at(hello->rank));
    row[first.segment] =
        std::make_unique<Handshake>(*this, own_, hello->rank, first.segment, false);
    row[first.segment]->start(std::move(stream));
    return {};
  }

  // Of ranks that this one has greeted first: see Approach.
  Status on_answer(Handshake& /*handshake*/, const wire::Hello& /*hello*/) override {
    return error(Code::kInternal, "a second hello");
  }

  void on_greeted(Handshake& handshake) override {
    const Pair& pair = at(handshake.peer());
    if (pair.lazy && taken_) pair.streams[handshake.number()]->attach(handshake.take());
  }

  void on_handshake_broken(Handshake& handshake, const Status& why) override {
    fail(handshake.peer(), why);
  }

  // Where the peer listens. The coordinator's address of the rendezvous is known to work.
  std::vector<Endpoint> endpoints_of(int32_t peer, const AddressRecord& record) const {
    std::vector<Endpoint> endpoints;
    if (peer == control_.coordinator() && record.addresses.size() > 1) {
      std::string host = control_.coordinator_address();
      host = host.substr(0, host.rfind(':'));
      if (host.size() > 2 && host.front() == '[') host = host.substr(1, host.size() - 2);
      error_code failed;
      const Address address = asio::ip::make_address(host, failed);
      if (!failed) endpoints.emplace_back(address, record.port);
    }
    for (const Address& a : record.addresses) endpoints.emplace_back(a, record.port);
    return endpoints;
  }

  void start_connecting(int32_t peer) {
    for (uint32_t i = 0; i < connections_; ++i) {
      approaches_.push_back(std::make_unique<Approach>(
          *reactor_, own_, peer, i, at(peer).endpoints,
          Approach::Events{[this, peer](const wire::Hello& hello, const std::string& from) {
                             return check(hello, hello.rank == peer, from);
                           },
                           [this, peer] { ++at(peer).adopted; },
                           [this, peer, i](std::unique_ptr<Handshake> handshake) {
                             at(peer).handshakes[i] = std::move(handshake);
                             on_greeted(*at(peer).handshakes[i]);
                           },
                           [this, peer](const Status& why) { fail(peer, why); }}));
    }
  }

  // No descriptors left: each connection takes one.
  void full(const Status& why) {
    const std::vector<int32_t> ranks = missing();
    if (ranks.empty()) return;
    const std::string text =
        fmt::format("data connections from rank(s) {} {}; there are {} to each other rank",
                    rank_list(ranks), why.text(), connections_);
    if (!taken_) {
      if (!failure_)
        failure_ = FailureCause{why.code(), own_.rank,
                                fmt::format("{}: {}", control_.describe_rank(own_.rank), text)};
      return;
    }
    for (const int32_t peer : ranks) fail(peer, error(Code::kPeerLost, "{}", text));
  }

  void fail(int32_t peer, const Status& why) {
    if (taken_) {
      // The peer may be gone: what the control plane hears of that counts first, as with any lost
      // connection.
      const Code code = why.code() == Code::kTransport ? Code::kPeerLost : why.code();
      std::string text = why.text();
      if (code != Code::kPeerLost)
        text = fmt::format("data connection to {}: {}", at(peer).name, text);
      for (StreamCarrier* stream : at(peer).streams) stream->fail(Status(code, text));
    } else if (!failure_) {
      failure_ = FailureCause{
          why.code(), peer,
          fmt::format("rank {}: data connection to {}: {}", own_.rank, at(peer).name, why.text())};
    }
  }

  // ---- connections that are made when they are used

  std::unique_ptr<StreamCarrier> lazy_stream(int32_t peer) {
    auto stream = std::make_unique<StreamCarrier>([this, peer] { use(peer); });
    at(peer).streams.push_back(stream.get());
    return stream;
  }

  void note_use(Pair& pair) {
    pair.used = true;
    for (StreamCarrier* stream : pair.streams) stream->expect();
  }

  void use(int32_t peer) {
    Pair& pair = at(peer);
    if (pair.used) return;
    note_use(pair);
    log(LogLevel::kDebug, "rank {}: connects with {}", own_.rank, pair.name);
    if (own_.rank > peer) {
      ask_later(peer);
      return;
    }
    pair.timer = reactor_->after(kAnswerMs, [this, peer] { late(peer); });
    start_connecting(peer);
  }

  void ask_later(int32_t peer) {
    at(peer).timer = reactor_->after(kAskMs, [this, peer] {
      const auto begun = [](const auto& handshake) { return handshake != nullptr; };
      if (std::ranges::any_of(at(peer).handshakes, begun) || control_alive_.expired()) return;
      if (!control_.send_service(peer, kConnectChannel, "").ok()) ask_later(peer);
    });
  }

  // A higher rank waits for this one.
  void on_service(int32_t from, std::string_view /*bytes*/) noexcept override {
    if (from > own_.rank && at(from).lazy) use(from);
  }

  // The peer's system has not answered.
  void late(int32_t peer) {
    const Pair& pair = at(peer);
    if (pair.adopted == connections_) return;
    std::string where;
    for (const Endpoint& e : pair.endpoints)
      where += (where.empty() ? "" : ", ") + endpoint_text(e);
    fail(peer, error(Code::kPeerLost, "no answer from {} within {} s", where, kAnswerMs / 1000));
  }

  std::shared_ptr<Reactor> reactor_;
  TcpControl& control_;
  const std::weak_ptr<const void> control_alive_;
  const wire::Hello own_;
  std::unique_ptr<FrameListener> listener_;
  std::vector<std::unique_ptr<Approach>> approaches_;
  uint32_t connections_;                 // to each peer
  std::vector<int32_t> linked_;          // ranks to connect with, ascending
  std::vector<Pair> pairs_;              // by rank
  std::optional<FailureCause> failure_;  // of the set-up
  bool taken_ = false;                   // the transport has the connections
  bool listens_ = false;                 // to kConnectChannel
};

Status tell_everyone(TcpControl& control, Driver& driver, FailureCause cause) {
  control.fail(cause);
  driver.run_until([&] { return control.failure().has_value(); },
                   Deadline::in_us(driver.clock(), 2 * kDecisionMs * 1000));
  if (control.failure()) cause = *control.failure();
  return Status(cause.code, cause.text);
}

}  // namespace

Result<std::unique_ptr<Transport>> connect_mesh(const std::shared_ptr<Reactor>& reactor,
                                                const ListenPlace& place, MeshLimits limits,
                                                TcpControl& control, const LinkPeers& peers,
                                                TransferSink& sink, Driver& driver,
                                                Deadline deadline) {
  const auto mesh = std::make_shared<Mesh>(reactor, control, peers, limits.connections);
  if (control.size() > 1) {
    if (Status status = mesh->listen(place); !status.ok()) {
      return tell_everyone(control, driver, {status.code(), control.rank(), status.text()});
    }
    // A port that was named is free for the next group when this one is set up.
    const AddressRecord own{mesh->port(place), place.port == 0, limits, place.published};
    SOTTO_ASSIGN(const auto records, control.all_gather("addresses of data connections",
                                                        own.encode(), driver, deadline));
    SOTTO_TRY(mesh->connect(records, limits));
    const bool in_time = driver.run_until([&] { return mesh->settled(); }, deadline);
    if (mesh->failure()) return tell_everyone(control, driver, *mesh->failure());
    if (control.failure()) return Status(control.failure()->code, control.failure()->text);
    if (!in_time) {
      return tell_everyone(
          control, driver,
          {Code::kTimeout, mesh->missing().front(),
           fmt::format("rank {}: data connections to rank(s) {} were not made in time{}",
                       control.rank(), rank_list(mesh->missing()), mesh->progress())});
    }
    // A barrier: all connections of all ranks are made.
    SOTTO_TRY(control.all_gather("data connections are made", "", driver, deadline).status());
  }
  auto transport =
      std::make_unique<TcpTransport>(reactor, control.rank(), mesh->take(), sink, limits.flow);
  transport->carry_failures(control);
  if (mesh->any_lazy()) {
    mesh->begin_lazy();
    transport->keep(mesh);
  }
  return std::unique_ptr<Transport>(std::move(transport));
}

}  // namespace sotto::tcp
