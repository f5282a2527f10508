#include "transports/tcp/mesh.h"

#include <algorithm>
#include <optional>

#include "core/wire/bytes.h"
#include "transports/tcp/listener.h"

namespace sotto::tcp {
namespace {

constexpr uint64_t kMaxHelloBytes = 64;
constexpr uint64_t kMaxRefusalBytes = wire::kMaxTextBytes + 64;
constexpr uint32_t kMaxAddresses = 64;
constexpr uint32_t kMaxConnections = 64;

// What the other ranks need to connect to one.
struct AddressRecord {
  uint16_t port = 0;
  MeshLimits limits;
  std::vector<Address> addresses;

  std::string encode() const {
    wire::ByteWriter out;
    out.number(port);
    out.number(limits.flow.eager_bytes);
    out.number(limits.flow.credit_bytes);
    out.number(limits.connections);
    out.number(static_cast<uint32_t>(addresses.size()));
    for (const Address& a : addresses) out.text(a.to_string());
    return out.take();
  }
  static Result<AddressRecord> decode(const std::string& text) {
    wire::ByteReader in({reinterpret_cast<const uint8_t*>(text.data()), text.size()});
    AddressRecord record;
    record.port = in.number<uint16_t>();
    record.limits.flow.eager_bytes = in.number<uint64_t>();
    record.limits.flow.credit_bytes = in.number<uint64_t>();
    record.limits.connections = std::clamp(in.number<uint32_t>(), 1u, kMaxConnections);
    const uint32_t count = std::min(in.number<uint32_t>(), kMaxAddresses);
    for (uint32_t i = 0; i < count && in.ok(); ++i) {
      error_code failed;
      const Address address = asio::ip::make_address(std::string(in.text()), failed);
      if (failed) return error(Code::kProtocol, "malformed address of a data connection");
      record.addresses.push_back(address);
    }
    if (!in.finished() || record.addresses.empty())
      return error(Code::kProtocol, "malformed addresses of data connections");
    return record;
  }
};

class Mesh;

// The handshake of one connection, which it keeps until the transport takes it. The hello's segment
// is the number of the connection among those to the peer.
class Handshake final : public StreamOwner {
 public:
  Handshake(Mesh& mesh, int32_t peer, uint32_t number)
      : mesh_(mesh), peer_(peer), number_(number) {}
  std::unique_ptr<FrameStream> stream;
  int32_t peer() const { return peer_; }
  uint32_t number() const { return number_; }
  // Of a peer that has connected and sent its hello: answers it.
  void take(std::unique_ptr<FrameStream> connection) {
    stream = std::move(connection);
    stream->set_owner(*this, stream->name());
    hello_received_ = true;
    send_hello();
  }
  void send_hello() {
    to_send_ = true;
    stream->flush();
  }

 private:
  Result<PayloadPlace> on_header(FrameStream& s, const wire::FrameHeader& header) override {
    const bool refusal = header.kind == wire::FrameKind::kFailure;
    if ((header.kind != wire::FrameKind::kHello && !refusal) ||
        header.payload_bytes > (refusal ? kMaxRefusalBytes : kMaxHelloBytes) || hello_received_) {
      return error(Code::kProtocol, "{} from {} instead of a hello", describe(header), s.name());
    }
    inbox_.resize(header.payload_bytes);
    return PayloadPlace{reinterpret_cast<uint8_t*>(inbox_.data()), inbox_.size()};
  }
  Status on_frame(FrameStream& s, const wire::FrameHeader& header) override;
  bool next_frame(FrameStream& s, OutFrame& out) override;
  void on_sent(FrameStream&, const OutFrame&) override {}
  void on_broken(FrameStream& s, Status why) override;

  Mesh& mesh_;
  int32_t peer_;
  uint32_t number_;
  bool hello_received_ = false, to_send_ = false;
  std::string inbox_, outbox_;
};

class Mesh {
  using Handshakes = std::vector<std::unique_ptr<Handshake>>;  // connections to one peer

 public:
  // connections: to each of `peers`, as this rank wishes; the smallest number of all ranks counts.
  // Lower ranks connect to this one; any other connection is refused.
  Mesh(std::shared_ptr<Reactor> reactor, TcpControl& control, std::span<const int32_t> peers,
       uint32_t connections)
      : reactor_(std::move(reactor)), control_(control), connections_(connections) {
    peers_.resize(static_cast<size_t>(control.size()));
    for (const int32_t peer : peers) {
      if (peer != control.rank()) linked_.push_back(peer);
    }
    set_connections(connections);
  }

  // A rank that is the lower one of all its pairs needs no listener, as rank 0.
  Status listen(const ListenPlace& place) {
    const auto lower =
        std::ranges::count_if(linked_, [&](int32_t peer) { return peer < control_.rank(); });
    if (lower == 0) return {};
    const std::string here = fmt::format("rank {}: data connections", control_.rank());
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
    for (int32_t r = 0; r < control_.size(); ++r) {
      SOTTO_ASSIGN(const AddressRecord record,
                   AddressRecord::decode(records[static_cast<size_t>(r)]));
      // A receiver has to be ready for what a sender may send, so the smallest limit counts.
      limits.flow.eager_bytes = std::min(limits.flow.eager_bytes, record.limits.flow.eager_bytes);
      limits.flow.credit_bytes =
          std::min(limits.flow.credit_bytes, record.limits.flow.credit_bytes);
      limits.connections = std::min(limits.connections, record.limits.connections);
      known.push_back(record);
    }
    set_connections(limits.connections);
    for (const int32_t r : linked_) {
      if (r < control_.rank()) continue;
      for (uint32_t i = 0; i < limits.connections; ++i)
        start_connecting(r, i, known[static_cast<size_t>(r)]);
    }
    return {};
  }

  // All handshakes are over, or the set-up has failed.
  bool settled() const {
    return failure_.has_value() || control_.failure().has_value() || missing().empty();
  }
  std::vector<int32_t> missing() const {
    std::vector<int32_t> ranks;
    for (const int32_t r : linked_) {
      const auto open = [](const auto& handshake) { return handshake == nullptr; };
      if (std::ranges::any_of(peers_[static_cast<size_t>(r)], open)) ranks.push_back(r);
    }
    return ranks;
  }
  const std::optional<FailureCause>& failure() const { return failure_; }

  std::vector<MeshPeer> take() {
    std::vector<MeshPeer> out;
    for (int32_t r = 0; r < control_.size(); ++r) {
      MeshPeer peer;
      for (auto& handshake : peers_[static_cast<size_t>(r)]) {
        if (handshake) peer.streams.push_back(std::move(handshake->stream));
      }
      peer.name = control_.describe_rank(r);
      peer.control_bytes = control_.link_bytes(r);
      out.push_back(std::move(peer));
    }
    return out;
  }

  wire::Hello own_hello() const { return {control_.token(), control_.rank(), control_.size()}; }

  // The answer of a peer to which this rank has connected. Called inside the stream of `h`, which
  // is therefore not destroyed here.
  Status answered(Handshake& h, const wire::Hello& hello) {
    SOTTO_TRY(check(hello, hello.rank == h.peer(), h.stream->name()));
    auto& place = peers_[static_cast<size_t>(h.peer())][h.number()];
    const auto found = std::find_if(pending_.begin(), pending_.end(),
                                    [&](const auto& p) { return p.get() == &h; });
    place = std::move(*found);
    pending_.erase(found);
    // A peer may complete its set-up first and send messages before the transport is made here.
    h.stream->pause();
    return {};
  }

  void broken(const Handshake& h, const Status& why) { fail(h.peer(), why); }

 private:
  void set_connections(uint32_t number) {
    connections_ = number;
    for (const int32_t peer : linked_) peers_[static_cast<size_t>(peer)].resize(number);
  }

  Status check(const wire::Hello& hello, bool expected, const std::string& from) const {
    if (hello.token == control_.token() && hello.size == control_.size() && expected) return {};
    return error(Code::kProtocol, "{} greets as rank {} of {} with {} token", from, hello.rank,
                 hello.size, hello.token == control_.token() ? "the right" : "another");
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
    const bool expected = hello->rank >= 0 && hello->rank < control_.rank() &&
                          std::ranges::count(linked_, hello->rank) != 0;
    if (Status status = check(*hello, expected, stream->name()); !status.ok())
      return refusal(hello->token == control_.token() ? "rank" : "token", status.text());
    Handshakes& row = peers_[static_cast<size_t>(hello->rank)];
    if (first.segment >= row.size() || row[first.segment]) {
      return refusal(
          "taken",
          fmt::format("{} greets as connection {} of rank {}, which is connected already or has no "
                      "such connection",
                      stream->name(), first.segment, hello->rank));
    }
    auto& place = row[first.segment];
    place = std::make_unique<Handshake>(*this, hello->rank, first.segment);
    place->take(std::move(stream));
    place->stream->pause();  // as in answered()
    return {};
  }

  void start_connecting(int32_t peer, uint32_t number, const AddressRecord& record) {
    std::vector<Endpoint> endpoints;
    // The coordinator's address of the rendezvous is known to work.
    if (peer == control_.coordinator()) {
      if (const auto known = coordinator_address(record))
        endpoints.emplace_back(*known, record.port);
    }
    for (const Address& a : record.addresses) endpoints.emplace_back(a, record.port);
    connectors_.push_back(std::make_unique<Connector>(
        *reactor_, std::move(endpoints), false,
        [this, peer, number](int fd, std::string name) {
          adopt(fd, std::move(name), peer, number);
        },
        [this, peer](const Status& why) { fail(peer, why); }));
  }

  std::optional<Address> coordinator_address(const AddressRecord& record) const {
    if (record.addresses.size() < 2) return {};
    const std::string name = control_.coordinator_address();
    error_code failed;
    std::string host = name.substr(0, name.rfind(':'));
    if (host.size() > 2 && host.front() == '[') host = host.substr(1, host.size() - 2);
    const Address address = asio::ip::make_address(host, failed);
    if (failed) return {};
    return address;
  }

  void adopt(int fd, std::string name, int32_t peer, uint32_t number) {
    auto handshake = std::make_unique<Handshake>(*this, peer, number);
    auto stream = FrameStream::make(*reactor_, fd, std::move(name), *handshake);
    if (!stream.ok()) {
      fail(peer, stream.status());
      return;
    }
    handshake->stream = stream.take();
    pending_.push_back(std::move(handshake));
    pending_.back()->send_hello();
  }

  // No descriptors left: each connection takes one.
  void full(const Status& why) {
    if (failure_ || missing().empty()) return;
    failure_ = FailureCause{
        why.code(), control_.rank(),
        fmt::format("{}: data connections from rank(s) {} {}; there are {} to each other rank",
                    control_.describe_rank(control_.rank()), rank_list(missing()), why.text(),
                    connections_)};
  }

  void fail(int32_t peer, const Status& why) {
    if (failure_) return;
    failure_ = FailureCause{why.code(), peer,
                            fmt::format("rank {}: data connection to {}: {}", control_.rank(),
                                        control_.describe_rank(peer), why.text())};
  }

  std::shared_ptr<Reactor> reactor_;
  TcpControl& control_;
  std::unique_ptr<FrameListener> listener_;
  std::vector<std::unique_ptr<Connector>> connectors_;
  std::vector<std::unique_ptr<Handshake>> pending_;  // wait for the peer's hello
  uint32_t connections_;                             // to each peer
  std::vector<int32_t> linked_;                      // ranks to connect with, ascending
  std::vector<Handshakes> peers_;                    // by rank; empty: not linked
  std::optional<FailureCause> failure_;
};

Status Handshake::on_frame(FrameStream& /*s*/, const wire::FrameHeader& header) {
  const wire::Bytes payload(reinterpret_cast<const uint8_t*>(inbox_.data()), inbox_.size());
  if (header.kind == wire::FrameKind::kFailure) {
    SOTTO_ASSIGN(const wire::Failure refusal, wire::Failure::decode(payload));
    return error(static_cast<Code>(refusal.code), "the peer refuses it: {}",
                 printable(refusal.text, 1000));
  }
  SOTTO_ASSIGN(const wire::Hello hello, wire::Hello::decode(payload));
  hello_received_ = true;
  return mesh_.answered(*this, hello);
}

bool Handshake::next_frame(FrameStream& /*s*/, OutFrame& out) {
  if (!to_send_) return false;
  to_send_ = false;
  outbox_ = mesh_.own_hello().encode();
  out = OutFrame{};
  out.header.kind = wire::FrameKind::kHello;
  out.header.segment = number_;
  out.header.payload_bytes = outbox_.size();
  out.payload = reinterpret_cast<const uint8_t*>(outbox_.data());
  return true;
}

void Handshake::on_broken(FrameStream& /*s*/, Status why) { mesh_.broken(*this, why); }

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
                                                TcpControl& control, std::span<const int32_t> peers,
                                                TransferSink& sink, Driver& driver,
                                                Deadline deadline) {
  Mesh mesh(reactor, control, peers, limits.connections);
  if (control.size() > 1) {
    if (Status status = mesh.listen(place); !status.ok()) {
      return tell_everyone(control, driver, {status.code(), control.rank(), status.text()});
    }
    const AddressRecord own{mesh.port(place), limits, place.published};
    SOTTO_ASSIGN(const auto records, control.all_gather("addresses of data connections",
                                                        own.encode(), driver, deadline));
    SOTTO_TRY(mesh.connect(records, limits));
    const bool in_time = driver.run_until([&] { return mesh.settled(); }, deadline);
    if (mesh.failure()) return tell_everyone(control, driver, *mesh.failure());
    if (control.failure()) return Status(control.failure()->code, control.failure()->text);
    if (!in_time) {
      return tell_everyone(
          control, driver,
          {Code::kTimeout, mesh.missing().front(),
           fmt::format("rank {}: data connections to rank(s) {} were not made in time",
                       control.rank(), rank_list(mesh.missing()))});
    }
    // A barrier: all connections of all ranks are made.
    SOTTO_TRY(control.all_gather("data connections are made", "", driver, deadline).status());
  }
  auto transport =
      std::make_unique<TcpTransport>(reactor, control.rank(), mesh.take(), sink, limits.flow);
  transport->carry_failures(control);
  return std::unique_ptr<Transport>(std::move(transport));
}

}  // namespace sotto::tcp
