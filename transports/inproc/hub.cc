#include "transports/inproc/hub.h"

#include <unordered_map>
#include <utility>

#include "core/base/text.h"
#include "core/iface/unique_id.h"

namespace sotto::inproc {
namespace {

constexpr size_t kBlobBytes = size_t{1} << 20;

struct Registry {
  std::mutex mutex;
  std::unordered_map<uint64_t, std::weak_ptr<Hub>> hubs;
};

Registry& registry() {
  // Never destroyed: threads may still leave at exit.
  static Registry* const the_registry = new Registry;
  return *the_registry;
}

}  // namespace

std::shared_ptr<Hub> Hub::make() {
  std::shared_ptr<Hub> hub(new Hub(random_token()));
  Registry& r = registry();
  std::lock_guard lock(r.mutex);
  r.hubs[hub->token()] = hub;
  return hub;
}

std::shared_ptr<Hub> Hub::find(uint64_t token) {
  Registry& r = registry();
  std::lock_guard lock(r.mutex);
  const auto it = r.hubs.find(token);
  return it == r.hubs.end() ? nullptr : it->second.lock();
}

std::shared_ptr<Hub> Hub::of_group(uint64_t token, int32_t size) {
  Registry& r = registry();
  std::lock_guard lock(r.mutex);
  std::weak_ptr<Hub>& known = r.hubs[token];
  std::shared_ptr<Hub> hub = known.lock();
  if (hub == nullptr) {
    hub.reset(new Hub(token));
    hub->make_inboxes(size);
    known = hub;
  }
  return hub;
}

Hub::~Hub() {
  Registry& r = registry();
  std::lock_guard lock(r.mutex);
  const auto it = r.hubs.find(token_);
  if (it != r.hubs.end() && it->second.expired()) r.hubs.erase(it);
}

void Hub::make_inboxes(int32_t size) {
  for (int32_t i = 0; i < size; ++i)
    inboxes_.push_back(std::make_unique<Inbox>(i, static_cast<size_t>(size)));
}

Status Hub::arrive(int32_t rank, int32_t size, std::shared_ptr<Mailbox> mailbox) {
  std::lock_guard lock(mutex_);
  if (!refused_.ok()) return refused_;
  const bool complete = size_ > 0 && arrived_ == static_cast<size_t>(size_);
  if (size_ == 0) {
    size_ = size;
    size_said_by_ = rank;
    members_.resize(static_cast<size_t>(size));
  }
  Status wrong;
  if (size != size_) {
    wrong = invalid_argument("rendezvous: rank {} is one of {}, rank {} one of {}", rank,
                             counted(size, "rank"), size_said_by_, size_);
  } else if (members_[static_cast<size_t>(rank)].here) {
    wrong = invalid_argument("rendezvous: two callers came as rank {} of {}", rank, size);
  }
  if (!wrong.ok()) {
    if (!complete) refused_ = wrong;  // a late rank does not fail a complete group
    wake_all();
    return wrong;
  }
  members_[static_cast<size_t>(rank)] = {std::move(mailbox), true, false, {}};
  if (++arrived_ == static_cast<size_t>(size_)) {
    make_inboxes(size_);
    wake_all();
  }
  return ok_status();
}

void Hub::refuse(const Status& status) {
  std::lock_guard lock(mutex_);
  if (!inboxes_.empty() || !refused_.ok()) return;
  refused_ = status;
  wake_all();
}

bool Hub::all_here() const {
  std::lock_guard lock(mutex_);
  return !inboxes_.empty();
}

bool Hub::settled() const {
  std::lock_guard lock(mutex_);
  return !inboxes_.empty() || !refused_.ok();
}

Status Hub::conclude(int32_t rank) {
  std::lock_guard lock(mutex_);
  if (!inboxes_.empty()) return ok_status();
  if (refused_.ok()) {
    std::vector<bool> here;
    for (const HubMember& m : members_) here.push_back(m.here);
    refused_ = error(Code::kTimeout,
                     "rendezvous: {} of {} did not come before the deadline of rank {} passed",
                     missing(here), size_, rank);
    wake_all();
  }
  return refused_;
}

void Hub::contribute(uint64_t round, std::string_view what, int32_t rank, std::string_view blob) {
  std::lock_guard lock(mutex_);
  SetupExchange& e = exchange(round);
  if (e.first_rank < 0) {
    e.what = what;
    e.first_rank = rank;
  }
  if (!e.failure.ok()) return;
  if (e.what != what) {
    e.failure =
        error(Code::kProtocol, "set-up exchange {}: rank {} is at \"{}\", rank {} at \"{}\"", round,
              e.first_rank, e.what, rank, what);
  } else if (blob.size() > kBlobBytes) {
    e.failure = invalid_argument("{}: rank {} gives {} bytes, at most {} are allowed", what, rank,
                                 blob.size(), kBlobBytes);
  } else {
    e.blobs[static_cast<size_t>(rank)] = blob;
    e.here[static_cast<size_t>(rank)] = true;
    ++e.count;
  }
  if (!e.failure.ok() || e.count == e.blobs.size()) wake_all();
}

bool Hub::gathered(uint64_t round) const {
  std::lock_guard lock(mutex_);
  const SetupExchange& e = exchanges_.at(round);
  return e.count == e.blobs.size() || !e.failure.ok() || cause_.has_value();
}

Result<std::vector<std::string>> Hub::collect(uint64_t round, int32_t rank) {
  std::lock_guard lock(mutex_);
  SetupExchange& e = exchange(round);
  if (e.count < e.blobs.size() && e.failure.ok()) {
    if (cause_) {
      e.failure = error(cause_->code, "{}: the group has failed: {}", e.what, cause_->text);
    } else {
      e.failure =
          error(Code::kTimeout, "{}: {} of {} did not come before the deadline of rank {} passed",
                e.what, missing(e.here), size_, rank);
    }
    wake_all();
  }
  Result<std::vector<std::string>> result =
      e.failure.ok() ? Result(e.blobs) : Result<std::vector<std::string>>(e.failure);
  if (++e.readers == e.blobs.size()) exchanges_.erase(round);
  return result;
}

void Hub::post(ServiceMessage message) {
  std::lock_guard lock(mutex_);
  HubMember& to = members_[static_cast<size_t>(message.destination)];
  if (to.mailbox == nullptr) return;
  to.posted.push_back(std::move(message));
  posted_.fetch_add(1, std::memory_order_release);
  to.mailbox->wake();
}

std::vector<ServiceMessage> Hub::take_posted(int32_t rank, uint64_t* seen) {
  const uint64_t posted = posted_.load(std::memory_order_acquire);
  if (posted == *seen) return {};
  *seen = posted;
  std::lock_guard lock(mutex_);
  return std::exchange(members_[static_cast<size_t>(rank)].posted, {});
}

void Hub::fail(const FailureCause& cause) {
  std::lock_guard lock(mutex_);
  if (cause_) return;
  cause_ = cause;
  failed_.store(true, std::memory_order_release);
  wake_all();
}

std::optional<FailureCause> Hub::cause() const {
  std::lock_guard lock(mutex_);
  return cause_;
}

void Hub::leave(int32_t rank) {
  std::lock_guard lock(mutex_);
  HubMember& m = members_[static_cast<size_t>(rank)];
  m.left = true;
  m.mailbox.reset();
  fail_exchanges_without(rank, error(Code::kPeerLost, "rank {} has left the group", rank));
  wake_all();
}

void Hub::lost(int32_t rank) {
  fail({Code::kPeerLost, rank,
        fmt::format("rank {} went away without leaving the group: its context was destroyed",
                    rank)});
  leave(rank);
}

void Hub::wake_all() {
  for (const HubMember& m : members_) {
    if (m.mailbox) m.mailbox->wake();
  }
}

std::string Hub::missing(const std::vector<bool>& here) const {
  std::string list;
  int n = 0;
  for (size_t i = 0; i < here.size(); ++i) {
    if (here[i]) continue;
    list += fmt::format("{}{}", n++ == 0 ? "" : ", ", i);
  }
  return fmt::format("{} {}", n == 1 ? "rank" : "ranks", list);
}

Hub::SetupExchange& Hub::exchange(uint64_t round) {
  const auto [it, is_new] = exchanges_.try_emplace(round);
  SetupExchange& e = it->second;
  if (is_new) {
    e.blobs.resize(members_.size());
    e.here.resize(members_.size());
    for (size_t i = 0; i < members_.size(); ++i) {
      if (members_[i].left) e.failure = error(Code::kPeerLost, "rank {} has left the group", i);
    }
  }
  return e;
}

void Hub::fail_exchanges_without(int32_t rank, const Status& status) {
  for (auto& [round, e] : exchanges_) {
    if (!e.here[static_cast<size_t>(rank)] && e.failure.ok())
      e.failure = status.with_prefix(e.what);
  }
}

}  // namespace sotto::inproc
