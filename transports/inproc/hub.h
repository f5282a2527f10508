// What the ranks of one root comm share when they are threads of one process: the meeting, the
// set-up exchange, the first cause of failure and the inboxes.
//
// Threads: any; every member locks for itself and wakes the ranks concerned.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/iface/rendezvous.h"
#include "transports/inproc/inbox.h"
#include "transports/inproc/mailbox.h"

namespace sotto::inproc {

class Hub {
 public:
  // A new hub, found by its token in this process as long as somebody holds it.
  static std::shared_ptr<Hub> make();
  // Null if there is none.
  static std::shared_ptr<Hub> find(uint64_t token);
  ~Hub();
  Hub(const Hub&) = delete;
  Hub& operator=(const Hub&) = delete;

  uint64_t token() const { return token_; }

  // The meeting. What one rank does wrong ends it for all of them, until it is complete.
  Status arrive(int32_t rank, int32_t size, std::shared_ptr<Mailbox> mailbox);
  void refuse(const Status& status);
  bool all_here() const;  // everybody is here
  bool settled() const;   // or somebody gave up
  // OK if everybody is here; otherwise the reason why not. If nothing has been decided yet the
  // caller's deadline has passed: decides for everybody, naming who is missing.
  Status conclude(int32_t rank);

  // The set-up exchange number `round`. Complete or failed for everybody alike.
  void contribute(uint64_t round, std::string_view what, int32_t rank, std::string_view blob);
  bool gathered(uint64_t round) const;
  // The blobs; as conclude, ends the exchange if nothing is decided.
  Result<std::vector<std::string>> collect(uint64_t round, int32_t rank);

  // The first cause counts.
  void fail(const FailureCause& cause);
  bool failed() const { return failed_.load(std::memory_order_acquire); }
  std::optional<FailureCause> cause() const;
  // Out of the group, in order or not.
  void leave(int32_t rank);
  void lost(int32_t rank);

  // Once everybody is here.
  Inbox& inbox(int32_t rank) { return *inboxes_[static_cast<size_t>(rank)]; }
  // Changes whenever an inbox has been closed.
  std::atomic<uint32_t> closings{0};

 private:
  struct HubMember {
    std::shared_ptr<Mailbox> mailbox;
    bool here = false;
    bool left = false;
  };
  struct SetupExchange {
    std::string what;
    int32_t first_rank = -1;
    std::vector<std::string> blobs;
    std::vector<bool> here;
    size_t count = 0;
    size_t readers = 0;
    Status failure;
  };
  explicit Hub(uint64_t token) : token_(token) {}
  void wake_all();  // with mutex_ held
  std::string missing(const std::vector<bool>& here) const;
  SetupExchange& exchange(uint64_t round);
  void fail_exchanges_without(int32_t rank, const Status& status);

  const uint64_t token_;
  mutable std::mutex mutex_;
  int32_t size_ = 0;  // as the first rank said
  int32_t size_said_by_ = -1;
  size_t arrived_ = 0;
  std::vector<HubMember> members_;
  Status refused_;
  std::map<uint64_t, SetupExchange> exchanges_;
  std::optional<FailureCause> cause_;
  std::atomic<bool> failed_{false};
  std::vector<std::unique_ptr<Inbox>> inboxes_;
};

}  // namespace sotto::inproc
