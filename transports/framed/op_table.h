// The operations in flight. Of each operation: its descriptor here. Of each operation and peer (a
// flow): receives that wait for messages, sends that wait for READY or credit, and messages that
// came before their receive.
//
// Memory: maps and buffers come from one pool that keeps its memory, so a steady state allocates
// nothing. It is bounded by the operations in flight, kMaxUnposted operations that are known from
// peers only, the credit of every peer (unexpected messages), and the comms that are there or were
// among the last kLeft.
//
// Threads: the driving thread.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory_resource>
#include <optional>
#include <unordered_map>
#include <vector>

#include "core/iface/transport.h"

namespace sotto::framed {

class PeerCounters;
struct OpState;

// Singly linked through Transfer::next, in order of arrival.
struct TransferList {
  Transfer* head = nullptr;
  Transfer* tail = nullptr;

  bool empty() const { return head == nullptr; }
  void push(Transfer& t) {
    t.next = nullptr;
    (head == nullptr ? head : tail->next) = &t;
    tail = &t;
  }
  // Unlinks the first transfer that fits; null: none does.
  template <class Fits>
  Transfer* take_first(Fits fits) {
    Transfer* before = nullptr;
    for (Transfer* t = head; t != nullptr; before = t, t = t->next) {
      if (!fits(*t)) continue;
      (before == nullptr ? head : before->next) = t->next;
      if (tail == t) tail = before;
      t->next = nullptr;
      return t;
    }
    return nullptr;
  }
};

// A message that came before its receive was posted. Its bytes are behind it in the same block.
struct Unexpected {
  Unexpected* next = nullptr;
  uint32_t round = 0;
  uint32_t segment = 0;
  uint64_t bytes = 0;
  uint64_t cost = 0;  // credit
  uint8_t* data() { return reinterpret_cast<uint8_t*>(this + 1); }
};

struct FlowKey {
  OpKey op;
  int32_t peer = 0;
  bool operator==(const FlowKey&) const = default;
};

// What this rank has told, and could tell, with READY frames.
struct OwnReady {
  std::optional<uint32_t> round;  // last round whose receives are posted
  std::optional<uint32_t> sent;   // the same in the last READY
  int64_t changed_ns = 0;         // time of the last change of `round`
};

struct Flow {
  OpState* op = nullptr;
  int32_t peer = -1;
  Flow* next_of_op = nullptr;
  Flow* previous_of_peer = nullptr;
  Flow* next_of_peer = nullptr;
  PeerCounters* counters = nullptr;

  TransferList receives;
  uint32_t receives_open = 0;  // posted and not complete
  TransferList waiting;        // sends without READY or credit
  Unexpected* unexpected = nullptr;

  std::optional<OpSignature> peer_signature;  // of the operation on the peer
  std::optional<uint32_t> peer_ready;         // last round whose receives the peer has posted
  OwnReady own_ready;                         // the same of this rank
  int64_t waiting_since_ns = 0;
  bool announced = false;
};

struct OpState {
  OpKey key;
  const OpDescriptor* descriptor = nullptr;  // null: not posted here yet
  Flow* flows = nullptr;
};

// Numbers of the completed operations of one space of one comm. Operations end in nearly ascending
// order, so a few disjoint intervals hold them.
class NumberSet {
 public:
  bool contains(uint64_t number) const;
  void insert(uint64_t number);
  void clear() { intervals_.clear(); }

 private:
  struct Interval {
    uint64_t begin, end;
  };
  std::vector<Interval> intervals_;  // ascending
};

class OpTable {
 public:
  static constexpr size_t kMaxUnposted = 65536;
  static constexpr size_t kLeft = 1024;

  OpTable();
  OpTable(const OpTable&) = delete;
  OpTable& operator=(const OpTable&) = delete;
  ~OpTable();

  // All flows of one peer, linked by next_of_peer, the oldest first: the longest wait is served
  // first.
  void set_peers(int32_t peers) { by_peer_.assign(static_cast<size_t>(peers), {}); }
  Flow* flows_of(int32_t peer) const { return by_peer_[static_cast<size_t>(peer)].first; }

  Flow* find(const OpKey& op, int32_t peer);
  // Finds or makes the flow; a new one has no counters yet.
  Flow& flow(const OpKey& op, int32_t peer);
  OpState* find_op(const OpKey& op);
  OpState& post(const OpDescriptor& op);
  // Forgets the operation and frees its messages. done: it has completed, and its late frames are
  // to be recognised.
  void erase(OpState& op, bool done);
  bool done(const OpKey& op) const;
  // The comm has ended here. Late frames of its operations are recognised until those of kLeft
  // other comms may come; by then they have arrived. True: nothing of it is in flight.
  bool leave(uint64_t comm);
  // The signature of an operation that has recently completed here.
  std::optional<OpSignature> recent(const OpKey& op) const;
  // Number spaces of comms in which operations have completed.
  size_t spaces() const { return done_.size(); }
  size_t unposted() const { return ops_.size() - posted_; }

  Unexpected* make_unexpected(uint64_t bytes);
  void free_unexpected(Unexpected* message);

 private:
  struct Hash {
    size_t operator()(const OpKey& k) const { return k.comm ^ (k.number * kMix); }
    size_t operator()(const FlowKey& k) const {
      return Hash{}(k.op) + static_cast<uint64_t>(k.peer) * kMix;
    }
    static constexpr uint64_t kMix = 0x9e3779b97f4a7c15u;
  };
  struct Space {
    uint64_t comm, space;
    auto operator<=>(const Space&) const = default;
  };
  struct Recent {
    OpKey key;
    OpSignature signature;
  };
  static constexpr size_t kRecent = 64;
  static Space space_of(const OpKey& op);
  static uint64_t number_of(const OpKey& op);
  OpState& op_state(const OpKey& op);

  std::pmr::unsynchronized_pool_resource pool_;
  std::pmr::unordered_map<OpKey, OpState, Hash> ops_;
  std::pmr::unordered_map<FlowKey, Flow, Hash> flows_;
  size_t posted_ = 0;
  struct PeerFlows {
    Flow* first = nullptr;
    Flow* last = nullptr;
  };
  std::vector<PeerFlows> by_peer_;
  std::map<Space, NumberSet> done_;
  std::deque<uint64_t> left_;  // comms that have ended and are in done_, the oldest first
  std::vector<Recent> recent_;
  size_t recent_at_ = 0;
};

}  // namespace sotto::framed
