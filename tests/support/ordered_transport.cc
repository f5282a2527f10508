#include "tests/support/ordered_transport.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <random>
#include <unordered_map>

#include "tests/support/overlay_poller.h"

namespace sotto::test {
namespace {

std::mutex g_violations_mutex;
std::vector<std::string>& violations() {
  static auto* const all = new std::vector<std::string>;
  return *all;
}

std::string name_of(const Transfer& t) {
  return fmt::format("comm {:x}, operation {:x}, round {}, segment {}, {} bytes, {}",
                     t.op->key.comm, t.op->key.number, t.round, t.segment, t.bytes,
                     describe(t.op->signature));
}

bool same_message(const Transfer& a, const Transfer& b) {
  return a.op->key == b.op->key && a.op->signature == b.op->signature && a.round == b.round &&
         a.segment == b.segment && a.bytes == b.bytes;
}

class OrderedTransport;

// Shared by the ranks of a group. One lock for everything: this is a test.
struct OrderedHub {
  struct Rank {
    OrderedTransport* transport = nullptr;
    Poller* poller = nullptr;
    std::deque<std::vector<Transfer*>>
        groups;                       // of each, what is not complete; the first one is under way
    std::vector<Transfer*> finished;  // to be reported by the rank
    std::optional<std::pair<int32_t, Status>> failure;
  };
  explicit OrderedHub(int32_t size) : ranks(static_cast<size_t>(size)) {}

  // All with the mutex held.
  Rank& rank(int32_t r) { return ranks[static_cast<size_t>(r)]; }
  // The first transfer of the group under way on `r` in one direction with `peer`.
  Transfer* first(int32_t r, int32_t peer, bool is_send);
  void advance();
  bool match_one();
  void complete(int32_t r, Transfer* t);
  void look_for_deadlock();
  void violation(int32_t a, int32_t b, const std::string& text);

  std::mutex mutex;
  std::vector<Rank> ranks;
  std::mt19937_64 random;
  bool failed = false;
};

std::shared_ptr<OrderedHub> hub_of(uint64_t token, int32_t size) {
  static std::mutex mutex;
  static auto* const hubs = new std::unordered_map<uint64_t, std::weak_ptr<OrderedHub>>;
  std::lock_guard lock(mutex);
  std::erase_if(*hubs, [](const auto& entry) { return entry.second.expired(); });
  auto hub = (*hubs)[token].lock();
  if (!hub) {
    hub = std::make_shared<OrderedHub>(size);
    (*hubs)[token] = hub;
  }
  return hub;
}

class OrderedTransport final : public QueueTransport, private OverlaySource {
 public:
  OrderedTransport(std::shared_ptr<OrderedHub> hub, std::shared_ptr<OverlayPoller> poller,
                   int32_t rank, TransferSink& sink, uint64_t seed, const TransportCaps& caps)
      : hub_(std::move(hub)),
        poller_(std::move(poller)),
        rank_(rank),
        sink_(sink),
        caps_(caps),
        random_(seed * 31 + rank) {
    std::lock_guard lock(hub_->mutex);
    hub_->rank(rank_).transport = this;
    hub_->rank(rank_).poller = poller_.get();
    poller_->add(this);
  }
  ~OrderedTransport() override {
    poller_->remove(this);
    drop(nullptr);
    std::lock_guard lock(hub_->mutex);
    hub_->rank(rank_).transport = nullptr;
    hub_->rank(rank_).poller = nullptr;
  }

  const TransportCaps& caps() const override { return caps_; }
  uint64_t header_bytes(uint64_t) const override { return 0; }
  Status post_op(const OpDescriptor&) override { return ok_status(); }
  void complete(const OpDescriptor&) override {}
  void cancel(const OpDescriptor& op) override { drop(&op); }
  Status issue(std::span<Transfer* const> group, Device* device, uint32_t lane) override;
  std::string route(int32_t) const override { return "ordered test transport"; }
  TransferCounters counters(uint64_t comm, int32_t peer) const override;
  void leave(uint64_t comm) override;
  void close(Deadline) override {}

 private:
  bool run() override;
  void drop(const OpDescriptor* op);
  void check_order(std::span<Transfer* const> group);
  void count(const Transfer& t);

  const std::shared_ptr<OrderedHub> hub_;
  const std::shared_ptr<OverlayPoller> poller_;
  const int32_t rank_;
  TransferSink& sink_;
  const TransportCaps caps_;
  std::mt19937_64 random_;
  std::map<uint64_t, std::pair<uint64_t, uint32_t>>
      last_of_comm_;  // number and round of its last group
  std::map<std::pair<uint64_t, uint64_t>, uint32_t> last_round_;  // of a key
  mutable std::mutex counters_mutex_;
  std::map<std::pair<uint64_t, int32_t>, TransferCounters> counters_;
};

Transfer* OrderedHub::first(int32_t r, int32_t peer, bool is_send) {
  Rank& at = rank(r);
  if (at.groups.empty()) return nullptr;
  for (Transfer* t : at.groups.front()) {
    if (t->peer == peer && t->is_send == is_send) return t;
  }
  return nullptr;
}

void OrderedHub::violation(int32_t a, int32_t b, const std::string& text) {
  if (failed) return;  // what follows from the first one
  {
    std::lock_guard lock(g_violations_mutex);
    violations().push_back(text);
  }
  failed = true;
  for (size_t i = 0; i < ranks.size(); ++i) {
    const auto r = static_cast<int32_t>(i);
    if (!ranks[i].failure) ranks[i].failure = {r == a ? b : a, Status(Code::kProtocol, text)};
    if (ranks[i].poller != nullptr) ranks[i].poller->wake();
  }
}

void OrderedHub::complete(int32_t r, Transfer* t) {
  Rank& at = rank(r);
  std::erase(at.groups.front(), t);
  at.finished.push_back(t);
  while (!at.groups.empty() && at.groups.front().empty()) at.groups.pop_front();
  if (at.poller != nullptr) at.poller->wake();
}

bool OrderedHub::match_one() {
  const auto n = static_cast<int32_t>(ranks.size());
  for (int32_t s = 0; s < n; ++s) {
    if (rank(s).groups.empty()) continue;
    for (Transfer* send : rank(s).groups.front()) {
      if (!send->is_send || send != first(s, send->peer, true)) continue;
      const int32_t d = send->peer;
      Transfer* recv = first(d, s, false);
      if (recv == nullptr) continue;
      if (!same_message(*send, *recv)) {
        violation(s, d,
                  fmt::format("rank {} sends ({}) where rank {} receives ({})", s, name_of(*send),
                              d, name_of(*recv)));
        return false;
      }
      if (send->bytes != 0) std::memcpy(recv->data, send->data, send->bytes);
      complete(s, send);
      complete(d, recv);
      return true;
    }
  }
  return false;
}

// Two ranks whose groups under way each hold a transfer with the other that the other's group has
// no partner for.
void OrderedHub::look_for_deadlock() {
  const auto n = static_cast<int32_t>(ranks.size());
  const auto unmet = [&](int32_t a, int32_t b) -> Transfer* {
    for (const bool is_send : {true, false}) {
      Transfer* t = first(a, b, is_send);
      if (t != nullptr && first(b, a, !is_send) == nullptr) return t;
    }
    return nullptr;
  };
  for (int32_t a = 0; a < n && !failed; ++a) {
    for (int32_t b = a + 1; b < n && !failed; ++b) {
      const Transfer* of_a = unmet(a, b);
      const Transfer* of_b = unmet(b, a);
      if (of_a == nullptr || of_b == nullptr) continue;
      violation(a, b,
                fmt::format("groups in different order: rank {} {} ({}) while rank {} {} ({})", a,
                            of_a->is_send ? "sends" : "receives", name_of(*of_a), b,
                            of_b->is_send ? "sends" : "receives", name_of(*of_b)));
    }
  }
}

void OrderedHub::advance() {
  while (!failed && match_one()) {
  }
  if (!failed) look_for_deadlock();
}

void OrderedTransport::check_order(std::span<Transfer* const> group) {
  for (const Transfer* t : group) {
    const OpKey& key = t->op->key;
    const bool p2p = (key.number >> 63) != 0;
    const auto [round, new_key] = last_round_.try_emplace({key.comm, key.number}, t->round);
    if (!new_key && t->round < round->second) {
      hub_->violation(rank_, rank_,
                      fmt::format("rank {} issues round {} after round {} ({})", rank_, t->round,
                                  round->second, name_of(*t)));
    }
    round->second = t->round;
    if (p2p || !ordered_calls_ascend) continue;
    const auto [last, new_comm] = last_of_comm_.try_emplace(key.comm, key.number, t->round);
    if (!new_comm && std::pair(key.number, t->round) < last->second) {
      hub_->violation(
          rank_, rank_,
          fmt::format("rank {} issues operation {:x} after operation {:x} of comm {:x} ({})", rank_,
                      key.number, last->second.first, key.comm, name_of(*t)));
    }
    last->second = {key.number, t->round};
  }
}

Status OrderedTransport::issue(std::span<Transfer* const> group, Device*, uint32_t) {
  std::lock_guard lock(hub_->mutex);
  for (const Transfer* t : group) {
    if (t->peer < 0 || t->peer >= static_cast<int32_t>(hub_->ranks.size())) {
      return error(Code::kInternal, "message to or from rank {} of {}", t->peer,
                   hub_->ranks.size());
    }
  }
  for (const Transfer* t : group) {
    // The round before this group must not come again: it would be one round in two groups.
    const auto it = last_round_.find({t->op->key.comm, t->op->key.number});
    if (it != last_round_.end() && it->second == t->round) {
      hub_->violation(
          rank_, rank_,
          fmt::format("rank {} issues round {} in two groups ({})", rank_, t->round, name_of(*t)));
    }
  }
  check_order(group);
  if (!group.empty()) hub_->rank(rank_).groups.emplace_back(group.begin(), group.end());
  poller_->wake();  // the rest is done in poll
  return ok_status();
}

bool OrderedTransport::run() {
  std::vector<Transfer*> finished;
  std::optional<std::pair<int32_t, Status>> failure;
  {
    std::lock_guard lock(hub_->mutex);
    OrderedHub::Rank& me = hub_->rank(rank_);
    hub_->advance();
    std::shuffle(me.finished.begin(), me.finished.end(), random_);
    while (!me.finished.empty()) {
      if (!finished.empty() && random_() % 4 == 0) break;  // the rest later
      finished.push_back(me.finished.back());
      me.finished.pop_back();
    }
    if (!me.finished.empty()) poller_->wake();
    failure.swap(me.failure);
  }
  for (Transfer* t : finished) {
    count(*t);
    sink_.on_transfer(*t, ok_status());
  }
  if (failure) sink_.on_failure(failure->first, failure->second);
  return failure.has_value() || !finished.empty();
}

void OrderedTransport::drop(const OpDescriptor* op) {
  std::lock_guard lock(hub_->mutex);
  const auto concerned = [&](const Transfer* t) { return op == nullptr || t->op->key == op->key; };
  OrderedHub::Rank& me = hub_->rank(rank_);
  std::erase_if(me.finished, concerned);
  size_t removed = 0;
  for (auto& group : me.groups) removed += std::erase_if(group, concerned);
  std::erase_if(me.groups, [](const auto& group) { return group.empty(); });
  if (removed != 0) hub_->failed = true;  // the order has a hole: nothing may match any more
}

void OrderedTransport::count(const Transfer& t) {
  std::lock_guard lock(counters_mutex_);
  counters_[{t.op->key.comm, t.peer}].add(t);
}

TransferCounters OrderedTransport::counters(uint64_t comm, int32_t peer) const {
  std::lock_guard lock(counters_mutex_);
  const auto it = counters_.find({comm, peer});
  return it == counters_.end() ? TransferCounters{} : it->second;
}

void OrderedTransport::leave(uint64_t comm) {
  const auto of_comm = [comm](const auto& entry) { return entry.first.first == comm; };
  last_of_comm_.erase(comm);
  std::erase_if(last_round_, of_comm);
  std::lock_guard lock(counters_mutex_);
  std::erase_if(counters_, of_comm);
}

class OrderedBackend final : public Backend {
 public:
  OrderedBackend(std::unique_ptr<Backend> base, uint64_t seed, const TransportCaps& caps)
      : base_(std::move(base)),
        poller_(std::make_shared<OverlayPoller>(base_->poller())),
        seed_(seed),
        caps_(caps) {}
  const char* name() const override { return "ordered"; }
  Poller& poller() override { return *poller_; }
  Result<UniqueId> make_unique_id(Reach reach) override { return base_->make_unique_id(reach); }
  bool knows(const UniqueId& id) const override { return base_->knows(id); }
  Result<std::unique_ptr<ControlPlane>> join(const JoinRequest& request, Driver& driver) override {
    return base_->join(request, driver);
  }
  uint64_t place() const override { return base_->place(); }
  Result<std::unique_ptr<Transport>> connect(ControlPlane& control, const LinkPeers&,
                                             TransferSink& sink, Driver& driver,
                                             Deadline deadline) override {
    auto transport = std::make_unique<OrderedTransport>(
        hub_of(control.token(), control.size()), poller_, control.rank(), sink, seed_, caps_);
    auto met = control.all_gather("connecting the ordered transport", "", driver, deadline);
    if (!met.ok()) return met.status();
    return std::unique_ptr<Transport>(std::move(transport));
  }

 private:
  const std::unique_ptr<Backend> base_;
  const std::shared_ptr<OverlayPoller> poller_;
  const uint64_t seed_;
  const TransportCaps caps_;
};

}  // namespace

std::unique_ptr<Backend> make_ordered_backend(std::unique_ptr<Backend> base, uint64_t seed,
                                              const TransportCaps& caps) {
  return std::make_unique<OrderedBackend>(std::move(base), seed, caps);
}

std::vector<std::string> take_ordered_violations() {
  std::lock_guard lock(g_violations_mutex);
  return std::exchange(violations(), {});
}

}  // namespace sotto::test
