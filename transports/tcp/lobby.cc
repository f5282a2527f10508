#include "transports/tcp/lobby.h"

#include <sys/utsname.h>

#include <algorithm>

#include "core/base/log.h"
#include "core/iface/unique_id.h"

namespace sotto::tcp {
namespace {

constexpr uint64_t kMaxJoinBytes = 4096;
constexpr uint64_t kMaxMembersBytes = uint64_t{1} << 30;
constexpr size_t kMaxStrangers = 4096;  // connections that have not presented themselves
constexpr int64_t kNoteEveryMs = 50;
constexpr int64_t kLateComersUs = 1'000'000;
constexpr int64_t kComeBackUs = 20'000;  // pause before an address that has closed is tried again

std::string guest_text(int32_t rank, const wire::Join& join, const std::string& address) {
  return member_text(rank, {join.pid, join.host, address});
}

}  // namespace

std::string host_name() {
  utsname name;
  return ::uname(&name) == 0 ? name.nodename : "unknown host";
}

std::string member_text(int32_t rank, const wire::Members::Member& m) {
  return fmt::format("rank {} (pid {} on {}{}{})", rank, m.pid, m.host,
                     m.address.empty() ? "" : ", ", m.address);
}

std::string rank_list(const std::vector<int32_t>& ranks) {
  std::string text;
  for (size_t i = 0; i < ranks.size();) {
    size_t last = i;
    while (last + 1 < ranks.size() && ranks[last + 1] == ranks[last] + 1) ++last;
    text += text.empty() ? "" : ", ";
    text +=
        last > i + 1 ? fmt::format("{} to {}", ranks[i], ranks[last]) : fmt::format("{}", ranks[i]);
    i = last > i + 1 ? last + 1 : i + 1;
  }
  return text;
}

Lobby::Lobby(Reactor& reactor, uint64_t token) : reactor_(reactor), token_(token) {}
Lobby::~Lobby() = default;

Result<std::unique_ptr<Lobby>> Lobby::open(Reactor& reactor, uint64_t token, const Endpoint& at) {
  std::unique_ptr<Lobby> lobby(new Lobby(reactor, token));
  SOTTO_ASSIGN(lobby->listener_,
               Listener::open(reactor, at, [self = lobby.get()](int fd, std::string name) {
                 self->accepted(fd, std::move(name));
               }));
  return lobby;
}

void Lobby::accepted(int fd, std::string name) {
  // Nobody is inside a link here, so those that are done with can go.
  std::erase_if(guests_,
                [](const auto& g) { return !g->link->open() && (g->rejected || !g->join); });
  const auto strangers =
      std::count_if(guests_.begin(), guests_.end(), [](const auto& g) { return !g->join; });
  if (static_cast<size_t>(strangers) >= kMaxStrangers) {
    guests_.erase(
        std::find_if(guests_.begin(), guests_.end(), [](const auto& g) { return !g->join; }));
  }
  auto link = ControlLink::make(reactor_, fd, std::move(name), *this, kMaxJoinBytes);
  if (!link.ok()) {
    log(LogLevel::kWarn, "{}", link.status().text());
    return;
  }
  auto guest = std::make_unique<Guest>();
  guest->link = link.take();
  guests_.push_back(std::move(guest));
}

Lobby::Guest* Lobby::find(const ControlLink& link) {
  for (const auto& guest : guests_) {
    if (guest->link.get() == &link) return guest.get();
  }
  return nullptr;
}

Status Lobby::on_message(ControlLink& link, wire::FrameKind kind, wire::Bytes payload) {
  Guest* guest = find(link);
  if (guest == nullptr || guest->rejected) return {};
  if (kind == wire::FrameKind::kFailure && guest->join) {  // it gave up waiting
    auto failure = wire::Failure::decode(payload);
    if (!failure.ok()) return failure.status();
    guest->rejected = true;
    ++told_;
    if (own_ && !complete_) fail({static_cast<Code>(failure->code), failure->rank, failure->text});
    return {};
  }
  if (kind != wire::FrameKind::kJoin || guest->join) {
    return error(Code::kProtocol, "{} frame from {} during the rendezvous", wire::kind_name(kind),
                 link.name());
  }
  auto join = wire::Join::decode(payload);
  if (!join.ok()) return join.status();
  if (join->token != token_) {
    turned_away_ = fmt::format("{} came with the token of another group", link.name());
    reject(*guest, {Code::kProtocol, -1,
                    fmt::format("rank {} came with the token of another group: its unique id is "
                                "not the one of the rank "
                                "that listens at this port",
                                join->rank)});
    return {};
  }
  guest->join = join.take();
  if (own_) check(*guest);
  return {};
}

void Lobby::on_lost(ControlLink& link, const Status& why) {
  Guest* guest = find(link);
  if (guest == nullptr || guest->rejected) return;
  if (!guest->join) {
    guest->rejected = true;
    turned_away_ = why.text();
    // Somebody who speaks frames, but of another version, is one of ours.
    if (own_ && !complete_ && wire::is_version_mismatch(why)) {
      ++told_;
      fail({Code::kProtocol, -1, why.text()});
    }
    return;
  }
  if (own_ && !complete_) {
    ++told_;
    const std::string who = guest_text(guest->join->rank, *guest->join, link.name());
    fail({Code::kPeerLost, guest->join->rank,
          fmt::format("{} was lost during the rendezvous: {}", who, why.text())});
  }
}

void Lobby::reject(Guest& guest, const FailureCause& cause) {
  guest.rejected = true;
  if (failure_) ++told_;
  guest.link->send(
      wire::FrameKind::kFailure,
      wire::Failure{static_cast<int32_t>(cause.code), cause.rank, cause.text}.encode());
}

void Lobby::check_all() {
  for (size_t i = 0; i < guests_.size() && !failure_; ++i) {
    if (!guests_[i]->join || guests_[i]->rejected) continue;
    if (guests_[i]->link->open()) {
      check(*guests_[i]);
    } else {
      on_lost(*guests_[i]->link, error(Code::kPeerLost, "it closed the connection"));
    }
  }
}

void Lobby::check(Guest& guest) {
  const wire::Join& join = *guest.join;
  const std::string who = guest_text(join.rank, join, guest.link->name());
  const std::string coordinator = member_text(own_->rank, {own_->pid, own_->host, ""});
  if (complete_) {
    const bool taken = join.rank >= 0 && join.rank < own_->size;
    const std::string there =
        taken ? fmt::format("; its number belongs to {}",
                            member_text(join.rank, members_[static_cast<size_t>(join.rank)]))
              : "";
    reject(guest, {Code::kInvalidArgument, join.rank,
                   fmt::format("{} came when the group of {} ranks was complete{}", who, own_->size,
                               there)});
    return;
  }
  if (failure_) {
    reject(guest, *failure_);
    return;
  }
  if (join.size != own_->size) {
    fail({Code::kInvalidArgument, join.rank,
          fmt::format("sizes differ: {} says {} ranks, {} says {}", coordinator, own_->size, who,
                      join.size)});
    return;
  }
  if (join.rank < 0 || join.rank >= own_->size) {
    fail({Code::kInvalidArgument, join.rank,
          fmt::format("{} is out of range: the group has {} ranks", who, own_->size)});
    return;
  }
  const Guest* other = by_rank_[static_cast<size_t>(join.rank)];
  if (other != nullptr || join.rank == own_->rank) {
    const std::string first =
        other != nullptr ? guest_text(join.rank, *other->join, other->link->name()) : coordinator;
    fail({Code::kInvalidArgument, join.rank,
          fmt::format("two ranks with the number {}: {} and {}", join.rank, first, who)});
    return;
  }
  by_rank_[static_cast<size_t>(join.rank)] = &guest;
}

void Lobby::fail(FailureCause cause) {
  if (failure_) return;
  failure_ = std::move(cause);
  for (const auto& guest : guests_) {
    if (!guest->rejected && guest->link->open()) reject(*guest, *failure_);
  }
}

std::vector<int32_t> Lobby::missing() const {
  std::vector<int32_t> ranks;
  for (int32_t r = 0; r < own_->size; ++r) {
    if (r != own_->rank && by_rank_[static_cast<size_t>(r)] == nullptr) ranks.push_back(r);
  }
  return ranks;
}

std::string Lobby::missing_text() const {
  const std::vector<int32_t> ranks = missing();
  return ranks.empty() ? ""
                       : fmt::format("rank{} {}", ranks.size() == 1 ? "" : "s", rank_list(ranks));
}

// Tells those who are there whom they wait for, so that their own time-outs can name them.
void Lobby::send_note() {
  if (!own_ || complete_ || failure_) return;
  const std::string text = missing_text();
  if (text == noted_) return;
  noted_ = text;
  const std::string note = wire::Heartbeat{text, {}}.encode();
  for (Guest* guest : by_rank_) {
    if (guest != nullptr && guest->link->flushed())
      guest->link->send(wire::FrameKind::kHeartbeat, note);
  }
}

Membership Lobby::finish() {
  complete_ = true;
  Membership out;
  out.rank = out.coordinator = own_->rank;
  out.token = random_token();
  for (int32_t r = 0; r < own_->size; ++r) {
    Guest* guest = by_rank_[static_cast<size_t>(r)];
    if (guest == nullptr) {
      out.members.push_back({own_->pid, own_->host, ""});
      out.links.push_back(nullptr);
    } else {
      out.members.push_back({guest->join->pid, guest->join->host, guest->link->name()});
      guest->link->rank = r;
      out.links.push_back(std::move(guest->link));
    }
  }
  std::erase_if(guests_, [](const auto& g) { return g->link == nullptr; });
  by_rank_.clear();
  members_ = out.members;
  const std::string text = wire::Members{out.coordinator, out.token, out.members}.encode();
  for (const auto& link : out.links) {
    if (link) link->send(wire::FrameKind::kMembers, text);
  }
  ticker_.reset();
  return out;
}

// Those who are there get a moment to read why, those who are still on their way a little more to
// come and hear it; when the time is over nobody is on the way.
void Lobby::drain(Driver& driver) {
  const auto done = [this] {
    return (failure_->code == Code::kTimeout || told_ + 1 >= static_cast<size_t>(own_->size)) &&
           std::all_of(guests_.begin(), guests_.end(),
                       [](const auto& g) { return g->link->delivered(); });
  };
  const bool late = failure_->code == Code::kTimeout || own_->size < 1;
  driver.run_until(done, Deadline::in_us(driver.clock(), late ? kLastWordsUs : kLateComersUs));
}

Result<Membership> Lobby::meet(std::unique_ptr<Lobby> lobby, const wire::Join& own, Driver& driver,
                               Deadline deadline) {
  Lobby& self = *lobby;
  self.own_ = own;
  self.by_rank_.assign(static_cast<size_t>(std::max(own.size, 0)), nullptr);
  if (own.rank < 0 || own.rank >= own.size) {
    self.fail({Code::kInvalidArgument, own.rank,
               fmt::format("{} is out of range: the group has {} ranks",
                           member_text(own.rank, {own.pid, own.host, ""}), own.size)});
  }
  self.ticker_ = self.reactor_.every(kNoteEveryMs, [&self] { self.send_note(); });
  self.check_all();
  const auto done = [&self] { return self.failure_.has_value() || self.missing().empty(); };
  if (!driver.run_until(done, deadline)) {
    const std::string hint =
        self.turned_away_.empty() ? "" : fmt::format(" (turned away: {})", self.turned_away_);
    self.fail({Code::kTimeout, -1,
               fmt::format("rendezvous of {} ranks is not complete in time: {} did not come{}",
                           own.size, self.missing_text(), hint)});
  }
  if (self.failure_) {
    self.drain(driver);
    return Status(self.failure_->code, self.failure_->text);
  }
  Membership out = self.finish();
  if (self.token_ != 0) out.lobby = std::move(lobby);
  return out;
}

// ---- the other ranks

namespace {

class Visitor final : public ControlLinkOwner {
 public:
  Visitor(Reactor& reactor, std::vector<Endpoint> endpoints, bool at_address, const wire::Join& own)
      : reactor_(reactor), endpoints_(std::move(endpoints)), at_address_(at_address), own_(own) {
    connect();
  }

  Result<Membership> run(Driver& driver, Deadline deadline) {
    for (;;) {
      const bool in_time =
          driver.run_until([this] { return again_ || result_ || failure_; }, deadline);
      if (!in_time) {
        give_up(driver);
        return late();
      }
      if (failure_) return *failure_;
      if (result_) return take();
      // The coordinator of an address closed before it answered: another group was there, or it
      // starts again.
      again_ = false;
      link_.reset();
      driver.run_until([] { return false; }, Deadline::in_us(driver.clock(), kComeBackUs));
      connect();
    }
  }

 private:
  void connect() {
    connector_ = std::make_unique<Connector>(
        reactor_, endpoints_, at_address_,
        [this](int fd, std::string name) { connected(fd, std::move(name)); },
        [this](Status why) {
          failure_ = why.with_prefix(
              fmt::format("rank {}: the rank that made the unique id is not reachable", own_.rank));
        });
  }

  void connected(int fd, std::string name) {
    auto link = ControlLink::make(reactor_, fd, std::move(name), *this, kMaxMembersBytes);
    if (!link.ok()) {
      failure_ = link.status();
      return;
    }
    link_ = link.take();
    link_->send(wire::FrameKind::kJoin, own_.encode());
  }

  Status on_message(ControlLink& link, wire::FrameKind kind, wire::Bytes payload) override {
    if (kind == wire::FrameKind::kHeartbeat) {
      auto note = wire::Heartbeat::decode(payload);
      if (note.ok()) missing_ = note->waiting;
      return note.status();
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
    if (why.code() == Code::kPeerLost && at_address_) {
      again_ = true;
    } else {
      failure_ =
          why.with_prefix(fmt::format("rank {}: rendezvous with {}", own_.rank, link.name()));
    }
  }

  // The coordinator would otherwise take the closing connection for a loss.
  void give_up(Driver& driver) {
    if (!link_) return;
    const std::string why =
        missing_.empty() ? "the coordinator did not answer in time" : missing_ + " did not come";
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
      return error(Code::kTimeout,
                   "rank {}: rendezvous of {} ranks is not complete in time: {} did not come",
                   own_.rank, own_.size, missing_);
    }
    if (link_) {
      return error(Code::kTimeout,
                   "rank {}: rendezvous of {} ranks: the coordinator at {} did not answer in time",
                   own_.rank, own_.size, link_->name());
    }
    const std::string why = connector_->tried();
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
  std::string missing_;
  bool again_ = false;
};

}  // namespace

Result<Membership> join_lobby(Reactor& reactor, std::vector<Endpoint> endpoints, bool at_address,
                              const wire::Join& own, Driver& driver, Deadline deadline) {
  return Visitor(reactor, std::move(endpoints), at_address, own).run(driver, deadline);
}

}  // namespace sotto::tcp
