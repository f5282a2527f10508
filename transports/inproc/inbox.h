// Matching of the messages to one rank with its receives.
//
// A send is published in the inbox of its destination, without a copy. The later one of a send and
// its receive finds the other. The copy is always made by the destination's driving thread,
// straight from the sender's memory to the receiver's, and without a lock. So copies to different
// destinations run in parallel.
//
// Transfers are linked intrusively (Transfer::next); scratch words:
//   send: [0] source rank  [2] 1: the sizes differ  [3] bytes of the receive
//   recv: [0] the send it was paired with
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "core/iface/transport.h"
#include "transports/inproc/mailbox.h"

namespace sotto::inproc {

inline int32_t source_of(const Transfer& send) { return static_cast<int32_t>(send.scratch[0]); }
inline Transfer* send_of(const Transfer& recv) {
  return reinterpret_cast<Transfer*>(recv.scratch[0]);
}

// First in, first out, linked by Transfer::next.
class TransferQueue {
 public:
  bool empty() const { return head_ == nullptr; }
  void push(Transfer* t);
  Transfer* pop();
  Transfer* take_all();
  // Unlinks those for which `drop` is true.
  template <class F>
  void remove_if(F drop) {
    Transfer* all = take_all();
    while (all != nullptr) {
      Transfer* next = all->next;
      if (!drop(*all)) push(all);
      all = next;
    }
  }

 private:
  Transfer* head_ = nullptr;
  Transfer* tail_ = nullptr;
};

// Unmatched transfers by (operation, source, round, segment). Allocates only when it grows.
class TransferTable {
 public:
  TransferTable() : buckets_(kFirstBuckets) {}
  void insert(Transfer* t, int32_t source);
  // Removes an unmatched transfer of the other direction with the key of `t`; null: none. One whose
  // signature differs stays.
  Transfer* match(const Transfer& t, int32_t source);
  template <class F>
  void remove_if(F drop) {
    for (Transfer*& head : buckets_) {
      Transfer** link = &head;
      while (*link != nullptr) {
        Transfer* t = *link;
        if (drop(*t)) {
          *link = t->next;
          --count_;
        } else {
          link = &t->next;
        }
      }
    }
  }

 private:
  static constexpr size_t kFirstBuckets = 64;
  void grow();

  std::vector<Transfer*> buckets_;  // a power of two
  size_t count_ = 0;
};

// The state of one operation at one rank.
struct OpEntry {
  OpKey key;
  OpEntry* next = nullptr;
  bool posted = false;      // by the owner of the inbox
  OpSignature signature;    // if posted
  int32_t heard_from = -1;  // peer whose message or READY came first
  OpSignature heard;
  uint32_t waiting_sends = 0;        // in the table
  std::vector<uint32_t> open_recvs;  // per source, not completed
};

// Entries by key; entries are reused.
class OpEntryTable {
 public:
  explicit OpEntryTable(size_t ranks) : ranks_(ranks), buckets_(kBuckets) {}
  OpEntry* find(const OpKey& key) const;
  OpEntry& get(const OpKey& key);
  // Frees an entry without any state.
  void drop_if_idle(OpEntry& entry);

 private:
  static constexpr size_t kBuckets = 256;
  size_t ranks_;
  std::vector<OpEntry*> buckets_;
  std::vector<std::unique_ptr<OpEntry>> all_;
  std::vector<OpEntry*> free_;
};

struct Inbox {
  Inbox(int32_t owner_rank, size_t ranks) : owner(owner_rank), ops(ranks) {}

  const int32_t owner;
  std::mutex mutex;  // guards everything down to `closed_as`
  std::condition_variable copy_done;
  OpEntryTable ops;
  TransferTable waiting;
  TransferQueue ready;                // receives with their send, to be copied by the owner
  const Transfer* copying = nullptr;  // send that the owner is reading
  int32_t failed_peer = -1;
  std::optional<Status> failure;  // for the owner to report
  uint32_t closed_as = 0;         // number of this closing in Hub::closings; 0: not closed

  std::mutex done_mutex;  // innermost: locked inside any inbox's mutex
  TransferQueue done;     // sends of the owner that receivers have copied

  std::shared_ptr<Mailbox> mailbox;  // of the owner; set before the barrier in connect

  // With `mutex` held. Compares the signature from `from` with the known one, or keeps it if there
  // is none.
  Status check_signature(const OpDescriptor& op, int32_t from);
  // With `mutex` held. The first failure counts; the owner reports it in its next poll.
  void report(int32_t peer, const Status& status);
};

}  // namespace sotto::inproc
