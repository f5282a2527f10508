#include "transports/tcp/rendezvous_server.h"

#include <algorithm>

#include "core/base/log.h"
#include "core/base/text.h"
#include "core/iface/unique_id.h"

namespace sotto::tcp {
namespace {

constexpr uint64_t kMaxJoinBytes = 4096;
// Of a client after its join: a failure frame, when it aborts.
constexpr uint64_t kMaxClientBytes = wire::kMaxTextBytes + 64;
constexpr size_t kMaxDepartures = 4096;
constexpr size_t kAbortedTexts = 4;
constexpr int64_t kReportTickMs = 50;
constexpr int64_t kLateComersUs = 1'000'000;
constexpr int64_t kReturnUs = 2'000'000;
constexpr int64_t kComeBackUs = 20'000;  // pause after a connection that closed
// A coordinator at an address waits for joins, and answers one within some kReportTickMs. What is
// silent for so long is none, or not there: the next address may be.
constexpr int64_t kSilentMs = 5000;

// Longest payload from the coordinator of so many ranks: the members, or a text.
uint64_t max_answer_bytes(int32_t size) {
  const auto members = static_cast<uint64_t>(std::max(size, 1));
  return 4 * wire::kMaxTextBytes + members * (12 + 2 * wire::kMaxHostBytes);
}

std::string client_text(int32_t rank, const wire::Join& join, const std::string& address) {
  return member_text(rank, {join.pid, join.host, address});
}

std::string out_of_range(const std::string& who, int32_t size) {
  return fmt::format("{} is out of range: the group has {}", who, counted(size, "rank"));
}

}  // namespace

RendezvousServer::RendezvousServer(Reactor& reactor, uint64_t token)
    : reactor_(reactor), token_(token) {}
RendezvousServer::~RendezvousServer() = default;

Result<std::unique_ptr<RendezvousServer>> RendezvousServer::open(Reactor& reactor, uint64_t token,
                                                                 const Endpoint& at) {
  std::unique_ptr<RendezvousServer> server(new RendezvousServer(reactor, token));
  SOTTO_ASSIGN(server->listener_,
               FrameListener::open(
                   reactor, at, {"rendezvous", wire::FrameKind::kJoin, kMaxJoinBytes, 0},
                   [self = server.get()](std::unique_ptr<FrameStream>& stream,
                                         const wire::FrameHeader& first, wire::Bytes payload) {
                     return self->admit(stream, first, payload);
                   }));
  return server;
}

// ---- joins

std::optional<Refusal> RendezvousServer::admit(std::unique_ptr<FrameStream>& stream,
                                               const wire::FrameHeader& first,
                                               wire::Bytes payload) {
  auto join = wire::Join::decode(payload);
  if (!join.ok()) {
    return Refusal{
        "join",
        false,
        {Code::kProtocol, -1, fmt::format("{} from {}", join.status().text(), stream->name())}};
  }
  join->host = printable(join->host, wire::kMaxHostBytes);
  if (join->token != token_) {
    return Refusal{"token",
                   true,
                   {Code::kProtocol, -1,
                    fmt::format("rank {} came with the token of another group: its unique id is "
                                "not the one of the rank "
                                "that listens at this port",
                                join->rank)}};
  }
  // No callback of a client's link is running.
  std::erase_if(clients_, [](const auto& c) { return c->gone; });
  if (own_) {
    if (auto refusal = check(*join, stream->name())) return refusal;
  }
  auto client = std::make_unique<Client>();
  client->join = join.take();
  client->link = ControlLink::adopt(std::move(stream), first, *this, kMaxClientBytes);
  if (own_) place_of(client->join.rank) = client.get();
  reported_missing_.clear();
  clients_.push_back(std::move(client));
  return {};
}

// Nothing if the place is free.
std::optional<Refusal> RendezvousServer::check(const wire::Join& join, const std::string& address) {
  const std::string who = client_text(join.rank, join, address);
  if (complete_) return refuse_late(join, who);
  if (failure_) {
    if (in_range(join.rank)) told_[static_cast<size_t>(join.rank)] = true;
    return Refusal{"failed", true, *failure_};
  }
  // The holder of the place may be gone without its end having been read.
  if (in_range(join.rank) && place_of(join.rank) != nullptr) place_of(join.rank)->link->look();
  return check_open(join, who);
}

std::optional<Refusal> RendezvousServer::check_open(const wire::Join& join,
                                                    const std::string& who) const {
  const std::string coordinator = member_text(own_->rank, {own_->pid, own_->host, ""});
  const auto refusal = [&](std::string_view cause, std::string text) {
    return Refusal{cause, true, {Code::kInvalidArgument, join.rank, std::move(text)}};
  };
  if (join.size != own_->size) {
    return refusal("size", fmt::format("sizes differ: {} says {}, {} says {}", coordinator,
                                       counted(own_->size, "rank"), who, join.size));
  }
  if (!in_range(join.rank)) {
    return refusal("range", out_of_range(who, own_->size));
  }
  const Client* other = by_rank_[static_cast<size_t>(join.rank)];
  if (other == nullptr && join.rank != own_->rank) return {};
  const wire::Join& holder = other != nullptr ? other->join : *own_;
  return refusal("taken", fmt::format("rank {} is already taken by pid {} on {}: {} is refused",
                                      join.rank, holder.pid, holder.host, who));
}

Refusal RendezvousServer::refuse_late(const wire::Join& join, const std::string& who) const {
  const std::string there =
      in_range(join.rank)
          ? fmt::format("; its number belongs to {}",
                        member_text(join.rank, members_[static_cast<size_t>(join.rank)]))
          : "";
  return {"late",
          true,
          {Code::kInvalidArgument, join.rank,
           fmt::format("{} came when the group of {} was complete{}", who,
                       counted(own_->size, "rank"), there)}};
}

// Clients that joined with the id before the server ran.
void RendezvousServer::check_early() {
  for (const auto& client : clients_) {
    if (client->gone) continue;
    if (auto refusal = check(client->join, client->link->name())) {
      client->gone = true;
      listener_->refuse(client->link->release(), *refusal);
    } else {
      place_of(client->join.rank) = client.get();
    }
  }
  std::erase_if(clients_, [](const auto& c) { return c->gone; });
  for (Departure& d : departures_) d.at_ns = reactor_.now_ns();
}

// ---- messages of clients

RendezvousServer::Client* RendezvousServer::find(const ControlLink& link) {
  for (const auto& client : clients_) {
    if (client->link.get() == &link) return client.get();
  }
  return nullptr;
}

Status RendezvousServer::on_message(ControlLink& link, wire::FrameKind kind, wire::Bytes payload) {
  Client* client = find(link);
  if (client == nullptr || client->gone) return {};
  if (kind != wire::FrameKind::kFailure) {
    return error(Code::kProtocol, "{} frame from {} during the rendezvous", wire::kind_name(kind),
                 link.name());
  }
  auto failure = wire::Failure::decode(payload);
  if (!failure.ok()) return failure.status();
  const std::string who = client_text(client->join.rank, client->join, link.name());
  log(LogLevel::kDebug, "{} has left the rendezvous: {}", who, printable(failure->text, 400));
  depart(*client, true, {Code::kTimeout, client->join.rank, who + " gave up waiting"});
  return {};
}

void RendezvousServer::on_lost(ControlLink& link, const Status& why) {
  Client* client = find(link);
  if (client == nullptr || client->gone) return;
  const std::string who = client_text(client->join.rank, client->join, link.name());
  depart(*client, false,
         {Code::kPeerLost, client->join.rank,
          fmt::format("{} was lost during the rendezvous: {}", who, why.text())});
}

void RendezvousServer::depart(Client& client, bool aborted, FailureCause cause) {
  client.gone = true;
  const int32_t rank = client.join.rank;
  if (in_range(rank)) {
    if (place_of(rank) == &client) place_of(rank) = nullptr;
    told_[static_cast<size_t>(rank)] = true;
  }
  std::erase_if(departures_, [&](const Departure& d) { return d.rank == rank; });
  if (departures_.size() < kMaxDepartures)
    departures_.push_back({rank, reactor_.now_ns(), aborted, std::move(cause)});
}

const RendezvousServer::Departure* RendezvousServer::departed(int32_t rank) const {
  const auto found = std::find_if(departures_.begin(), departures_.end(),
                                  [&](const Departure& d) { return d.rank == rank; });
  return found == departures_.end() ? nullptr : &*found;
}

const RendezvousServer::Departure* RendezvousServer::lost(bool due) const {
  const int64_t before_ns = reactor_.now_ns() - (due ? kReturnUs * 1000 : 0);
  for (const Departure& d : departures_) {
    const bool missing = in_range(d.rank) && by_rank_[static_cast<size_t>(d.rank)] == nullptr;
    if (missing && !d.aborted && d.at_ns <= before_ns) return &d;
  }
  return nullptr;
}

void RendezvousServer::tick() {
  std::erase_if(clients_, [](const auto& c) { return c->gone; });
  if (complete_ || failure_) return;
  if (const Departure* gone = lost(true)) {
    fail(gone->cause);
  } else {
    report_missing();
  }
}

void RendezvousServer::fail(FailureCause cause) {
  if (failure_) return;
  failure_ = std::move(cause);
  const std::string text =
      wire::Failure{static_cast<int32_t>(failure_->code), failure_->rank, failure_->text}.encode();
  for (const auto& client : clients_) {
    if (client->gone) continue;
    if (in_range(client->join.rank)) told_[static_cast<size_t>(client->join.rank)] = true;
    client->link->send(wire::FrameKind::kFailure, text);
  }
}

FailureCause RendezvousServer::too_late() const {
  if (const Departure* gone = lost(false)) return gone->cause;
  return {Code::kTimeout, -1,
          fmt::format("rendezvous of {} ranks is not complete in time: {}", own_->size,
                      did_not_come(waiting_text()))};
}

bool RendezvousServer::all_there() const {
  for (int32_t r = 0; r < own_->size; ++r) {
    if (r != own_->rank && by_rank_[static_cast<size_t>(r)] == nullptr) return false;
  }
  return true;
}

// "ranks 2, 4 (gave up waiting: rank 1 (pid 3 on host); turned away: ...)".
std::string RendezvousServer::waiting_text() const {
  std::vector<int32_t> missing, aborted;
  std::string texts;
  for (int32_t r = 0; r < own_->size; ++r) {
    if (r == own_->rank || by_rank_[static_cast<size_t>(r)] != nullptr) continue;
    const Departure* gone = departed(r);
    (gone != nullptr && gone->aborted ? aborted : missing).push_back(r);
    if (gone != nullptr && gone->aborted && aborted.size() <= kAbortedTexts)
      texts += (texts.empty() ? "" : "; ") + gone->cause.text;
  }
  if (missing.empty()) missing = aborted;
  if (missing.empty()) return "";
  if (const std::string refused = listener_->refusals().summary(); !refused.empty())
    texts += (texts.empty() ? "" : "; ") + ("turned away: " + refused);
  return fmt::format("rank{} {}{}", missing.size() == 1 ? "" : "s", rank_list(missing),
                     texts.empty() ? "" : " (" + texts + ")");
}

// Sends the clients the missing ranks, so that their own time-outs can name them.
void RendezvousServer::report_missing() {
  const std::string text = waiting_text();
  if (text == reported_missing_) return;
  reported_missing_ = text;
  const std::string beat = wire::Heartbeat{text, {}}.encode();
  for (Client* client : by_rank_) {
    if (client != nullptr && client->link->flushed())
      client->link->send(wire::FrameKind::kHeartbeat, beat);
  }
}

Membership RendezvousServer::finish() {
  complete_ = true;
  Membership out;
  out.rank = out.coordinator = own_->rank;
  out.token = random_token();
  for (int32_t r = 0; r < own_->size; ++r) {
    Client* client = by_rank_[static_cast<size_t>(r)];
    if (client == nullptr) {
      out.members.push_back({own_->pid, own_->host, ""});
      out.links.push_back(nullptr);
    } else {
      out.members.push_back({client->join.pid, client->join.host, client->link->name()});
      client->link->rank = r;
      out.links.push_back(std::move(client->link));
    }
  }
  clients_.clear();
  by_rank_.clear();
  listener_->expect_no_rank();
  members_ = out.members;
  const std::string text = wire::Members{out.coordinator, out.token, out.members}.encode();
  for (const auto& link : out.links) {
    if (link) link->send(wire::FrameKind::kMembers, text);
  }
  ticker_.reset();
  return out;
}

// Clients get a moment to read the failure, and ranks that have yet to connect a little more. After
// a time-out none is expected any more.
void RendezvousServer::drain(Driver& driver) {
  const bool late = failure_->code == Code::kTimeout || own_->size < 1;
  const auto done = [&] {
    return (late || std::all_of(told_.begin(), told_.end(), [](bool told) { return told; })) &&
           listener_->delivered() &&
           std::all_of(clients_.begin(), clients_.end(),
                       [](const auto& c) { return c->gone || c->link->delivered(); });
  };
  driver.run_until(done, Deadline::in_us(driver.clock(), late ? kLastWordsUs : kLateComersUs));
}

Result<Membership> RendezvousServer::run(std::unique_ptr<RendezvousServer> server,
                                         const wire::Join& own, Driver& driver, Deadline deadline) {
  RendezvousServer& self = *server;
  self.own_ = own;
  self.by_rank_.assign(static_cast<size_t>(std::max(own.size, 0)), nullptr);
  self.told_.assign(self.by_rank_.size(), false);
  if (self.in_range(own.rank)) {
    self.told_[static_cast<size_t>(own.rank)] = true;
  } else {
    self.fail({Code::kInvalidArgument, own.rank,
               out_of_range(member_text(own.rank, {own.pid, own.host, ""}), own.size)});
  }
  self.ticker_ = self.reactor_.every(kReportTickMs, [&self] { self.tick(); });
  if (!self.failure_) self.check_early();
  const auto done = [&self] { return self.failure_.has_value() || self.all_there(); };
  if (!driver.run_until(done, deadline)) self.fail(self.too_late());
  if (self.failure_) {
    self.drain(driver);
    return Status(self.failure_->code, self.failure_->text);
  }
  Membership out = self.finish();
  if (self.token_ != 0) out.server = std::move(server);
  return out;
}

// ---- the other ranks

namespace {

class RendezvousClient final : public ControlLinkOwner {
 public:
  RendezvousClient(Reactor& reactor, std::vector<Endpoint> endpoints, bool at_address,
                   const wire::Join& own)
      : reactor_(reactor), endpoints_(std::move(endpoints)), at_address_(at_address), own_(own) {
    connect();
  }

  Result<Membership> run(Driver& driver, Deadline deadline) {
    for (;;) {
      const bool in_time = driver.run_until(
          [this] { return again_ || result_ || failure_ || is_silent(); }, deadline);
      if (!in_time) {
        abort_join(driver);
        return late();
      }
      if (failure_) return *failure_;
      if (result_) return take();
      if (!again_) leave_silent(driver);
      // The coordinator closed before it answered. It may have ended, may start again, may have
      // been that of another group at the address, or had no place. Connecting again finds out.
      again_ = false;
      link_.reset();
      driver.run_until([] { return false; }, Deadline::in_us(driver.clock(), kComeBackUs));
      connect();
    }
  }

 private:
  void connect() {
    answered_ = false;
    connector_ = std::make_unique<Connector>(
        reactor_, endpoints_, at_address_,
        [this](int fd, std::string name) { connected(fd, std::move(name)); },
        [this](const Status& why) {
          if (lost_ && lost_->code() == Code::kPeerLost) {
            failure_ = lost_;
          } else {
            failure_ = why.with_prefix(
                lost_ ? lost_->text()
                      : fmt::format("rank {}: the rank that made the unique id is not reachable",
                                    own_.rank));
          }
        });
  }

  void connected(int fd, std::string name) {
    auto link =
        ControlLink::make(reactor_, fd, std::move(name), *this, max_answer_bytes(own_.size));
    if (!link.ok()) {
      failure_ = link.status();
      return;
    }
    link_ = link.take();
    joined_ns_ = reactor_.now_ns();
    link_->send(wire::FrameKind::kJoin, own_.encode());
    try_others_first();
  }

  // Should this connection end, the other addresses come before its own.
  void try_others_first() {
    const auto here = std::ranges::find_if(
        endpoints_, [this](const Endpoint& e) { return endpoint_text(e) == link_->name(); });
    if (here != endpoints_.end()) std::rotate(endpoints_.begin(), here + 1, endpoints_.end());
  }

  bool is_silent() const {
    return at_address_ && endpoints_.size() > 1 && link_ && !answered_ &&
           reactor_.now_ns() - joined_ns_ >= kSilentMs * 1'000'000;
  }
  void leave_silent(Driver& driver) {
    abort_join(driver);
    lost_ = error(Code::kTransport, "rank {}: rendezvous with {}: no answer within {} s", own_.rank,
                  link_->name(), kSilentMs / 1000);
    log(LogLevel::kInfo, "{}; the next address is tried", lost_->text());
  }

  Status on_message(ControlLink& link, wire::FrameKind kind, wire::Bytes payload) override {
    answered_ = true;
    if (kind == wire::FrameKind::kHeartbeat) {
      auto beat = wire::Heartbeat::decode(payload);
      if (beat.ok()) missing_ = beat->waiting;
      return beat.status();
    }
    if (kind == wire::FrameKind::kFailure) {
      auto failure = wire::Failure::decode(payload);
      if (failure.ok()) failure_ = Status(static_cast<Code>(failure->code), failure->text);
      return failure.status();
    }
    if (kind != wire::FrameKind::kMembers) {
      return error(Code::kProtocol, "{} frame from {} during the rendezvous", wire::kind_name(kind),
                   link.name());
    }
    auto members = wire::Members::decode(payload);
    if (!members.ok()) return members.status();
    if (members->members.size() != static_cast<size_t>(own_.size) || members->coordinator < 0 ||
        members->coordinator >= own_.size || members->coordinator == own_.rank) {
      return error(Code::kProtocol,
                   "{} answered with {} members and coordinator {} to rank {} of {}", link.name(),
                   members->members.size(), members->coordinator, own_.rank, own_.size);
    }
    result_ = members.take();
    return {};
  }

  void on_lost(ControlLink& link, const Status& why) override {
    if (failure_ || result_) return;
    lost_ = why.with_prefix(fmt::format("rank {}: rendezvous with {}", own_.rank, link.name()));
    if (why.code() == Code::kPeerLost && (at_address_ || !answered_)) {
      again_ = true;
    } else if (!answered_ && endpoints_.size() > 1 && !wire::is_version_mismatch(why)) {
      // Something else listens there. It was the last that was tried.
      log(LogLevel::kWarn, "{}; the other addresses are tried", lost_->text());
      endpoints_.pop_back();
      again_ = true;
    } else {
      failure_ = lost_;
    }
  }

  // Without this the closing connection would be a lost rank to the coordinator.
  void abort_join(Driver& driver) {
    if (!link_) return;
    const std::string why =
        missing_.empty() ? "the coordinator did not answer in time" : did_not_come(missing_);
    const std::string text =
        fmt::format("rank {} (pid {} on {}) gave up waiting at the rendezvous: {}", own_.rank,
                    own_.pid, own_.host, why);
    link_->send(wire::FrameKind::kFailure,
                wire::Failure{static_cast<int32_t>(Code::kTimeout), own_.rank, text}.encode());
    driver.run_until([this] { return link_->delivered(); },
                     Deadline::in_us(driver.clock(), kLastWordsUs));
  }

  Status late() const {
    if (link_ && !missing_.empty()) {
      return error(Code::kTimeout, "rank {}: rendezvous of {} ranks is not complete in time: {}",
                   own_.rank, own_.size, did_not_come(missing_));
    }
    if (link_) {
      return error(Code::kTimeout,
                   "rank {}: rendezvous of {} ranks: the coordinator at {} did not answer in time",
                   own_.rank, own_.size, link_->name());
    }
    std::string why = connector_->tried();
    if (why.empty() && lost_) why = lost_->text();
    return error(Code::kTransport, "rank {}: rendezvous at {}: not reachable in time{}{}",
                 own_.rank, endpoint_text(endpoints_.front()), why.empty() ? "" : ": tried ", why);
  }

  Membership take() {
    Membership out;
    out.rank = own_.rank;
    out.coordinator = result_->coordinator;
    out.token = result_->token;
    out.members = std::move(result_->members);
    out.members[static_cast<size_t>(out.coordinator)].address = link_->name();
    link_->rank = out.coordinator;
    out.links.push_back(std::move(link_));
    return out;
  }

  Reactor& reactor_;
  std::vector<Endpoint> endpoints_;
  bool at_address_;
  const wire::Join& own_;
  std::unique_ptr<Connector> connector_;
  std::unique_ptr<ControlLink> link_;
  std::optional<wire::Members> result_;
  std::optional<Status> failure_;
  std::optional<Status> lost_;  // why the last connection ended
  std::string missing_;
  int64_t joined_ns_ = 0;  // time of the last join
  bool answered_ = false;  // the coordinator has sent something on this connection
  bool again_ = false;
};

}  // namespace

Result<Membership> join_rendezvous(Reactor& reactor, std::vector<Endpoint> endpoints,
                                   bool at_address, const wire::Join& own, Driver& driver,
                                   Deadline deadline) {
  return RendezvousClient(reactor, std::move(endpoints), at_address, own).run(driver, deadline);
}

}  // namespace sotto::tcp
