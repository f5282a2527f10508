// The state that ranks of one root comm share as threads of one process: the rendezvous, set-up
// exchanges, the first cause of failure and the inboxes.
//
// Threads: any; every function locks and wakes the ranks concerned.
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
  // A new hub. Within this process `find` has it by its token while a reference is held.
  static std::shared_ptr<Hub> make();
  // Null if there is none.
  static std::shared_ptr<Hub> find(uint64_t token);
  // The inboxes of ranks whose control plane, with this token, is another one: all callers of this
  // process get the same hub.
  static std::shared_ptr<Hub> of_group(uint64_t token, int32_t size);
  ~Hub();
  Hub(const Hub&) = delete;
  Hub& operator=(const Hub&) = delete;

  uint64_t token() const { return token_; }

  // The rendezvous. Until it is complete an error of one rank ends it for all.
  Status arrive(int32_t rank, int32_t size, std::shared_ptr<Mailbox> mailbox);
  void refuse(const Status& status);
  bool all_here() const;
  bool settled() const;  // all ranks are here, or the rendezvous has failed
  // OK if all ranks are here, else the cause. To be called when it is settled or the deadline of
  // this rank has passed, which fails the rendezvous for all and names the missing ranks.
  Status conclude(int32_t rank);

  // The set-up exchange number `round`: complete for all ranks, or failed for all.
  void contribute(uint64_t round, std::string_view what, int32_t rank, std::string_view blob);
  bool gathered(uint64_t round) const;
  // The blobs. As conclude: fails an exchange that is not settled.
  Result<std::vector<std::string>> collect(uint64_t round, int32_t rank);

  // A service message on its way to its destination, which finds it when its mailbox polls. One to
  // a rank that has left is lost.
  void post(ServiceMessage message);
  // Those for a rank. `seen`: posted() of the last call; nothing is locked if none came since.
  std::vector<ServiceMessage> take_posted(int32_t rank, uint64_t* seen);

  // The first cause counts.
  void fail(const FailureCause& cause);
  bool failed() const { return failed_.load(std::memory_order_acquire); }
  std::optional<FailureCause> cause() const;
  // The end of a rank, in order (leave) or not (lost).
  void leave(int32_t rank);
  void lost(int32_t rank);

  // Once all ranks are here.
  Inbox& inbox(int32_t rank) { return *inboxes_[static_cast<size_t>(rank)]; }
  // Number of inboxes that were closed.
  std::atomic<uint32_t> closings{0};

 private:
  struct HubMember {
    std::shared_ptr<Mailbox> mailbox;
    bool here = false;
    bool left = false;
    std::vector<ServiceMessage> posted;
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
  void make_inboxes(int32_t size);
  void wake_all();  // with mutex_ held
  std::string missing(const std::vector<bool>& here) const;
  SetupExchange& exchange(uint64_t round);
  void fail_exchanges_without(int32_t rank, const Status& status);

  const uint64_t token_;
  mutable std::mutex mutex_;
  int32_t size_ = 0;  // of the first rank that came
  int32_t size_said_by_ = -1;
  size_t arrived_ = 0;
  std::vector<HubMember> members_;
  Status refused_;
  std::map<uint64_t, SetupExchange> exchanges_;
  std::atomic<uint64_t> posted_{0};  // service messages of all ranks so far
  std::optional<FailureCause> cause_;
  std::atomic<bool> failed_{false};
  std::vector<std::unique_ptr<Inbox>> inboxes_;
};

}  // namespace sotto::inproc
