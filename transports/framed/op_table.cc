#include "transports/framed/op_table.h"

#include <algorithm>
#include <new>

namespace sotto::framed {
namespace {

// Largest block that the pool keeps. Larger ones are unexpected messages of a large eager limit.
constexpr size_t kLargestPooled = 128 * 1024;
constexpr uint64_t kP2pBit = uint64_t{1} << 63;
constexpr uint64_t kP2pCounterMask = 0x7fffffffu;

}  // namespace

bool NumberSet::contains(uint64_t number) const {
  const auto after = std::upper_bound(intervals_.begin(), intervals_.end(), number,
                                      [](uint64_t n, const Interval& i) { return n < i.begin; });
  return after != intervals_.begin() && number < std::prev(after)->end;
}

void NumberSet::insert(uint64_t number) {
  const auto after = std::upper_bound(intervals_.begin(), intervals_.end(), number,
                                      [](uint64_t n, const Interval& i) { return n < i.begin; });
  const bool joins_next = after != intervals_.end() && after->begin == number + 1;
  if (after != intervals_.begin()) {
    const auto before = std::prev(after);
    if (number < before->end) return;
    if (before->end == number) {
      before->end = joins_next ? after->end : number + 1;
      if (joins_next) intervals_.erase(after);
      return;
    }
  }
  if (joins_next) {
    after->begin = number;
  } else {
    intervals_.insert(after, {number, number + 1});
  }
}

OpTable::OpTable()
    : pool_(std::pmr::pool_options{0, kLargestPooled}), ops_(&pool_), flows_(&pool_) {
  recent_.reserve(kRecent);
}

OpTable::~OpTable() {
  while (!ops_.empty()) erase(ops_.begin()->second, false);
}

OpTable::Space OpTable::space_of(const OpKey& op) {
  return {op.comm, (op.number & kP2pBit) != 0 ? op.number & ~kP2pCounterMask : 0};
}

uint64_t OpTable::number_of(const OpKey& op) {
  return (op.number & kP2pBit) != 0 ? op.number & kP2pCounterMask : op.number;
}

Flow* OpTable::find(const OpKey& op, int32_t peer) {
  const auto found = flows_.find(FlowKey{op, peer});
  return found == flows_.end() ? nullptr : &found->second;
}

OpState* OpTable::find_op(const OpKey& op) {
  const auto found = ops_.find(op);
  return found == ops_.end() ? nullptr : &found->second;
}

OpState& OpTable::op_state(const OpKey& op) {
  OpState& state = ops_[op];
  state.key = op;
  return state;
}

Flow& OpTable::flow(const OpKey& op, int32_t peer) {
  const auto [at, made] = flows_.try_emplace(FlowKey{op, peer});
  Flow& flow = at->second;
  if (!made) return flow;
  OpState& state = op_state(op);
  flow.op = &state;
  flow.peer = peer;
  flow.next_of_op = std::exchange(state.flows, &flow);
  PeerFlows& list = by_peer_[static_cast<size_t>(peer)];
  flow.previous_of_peer = list.last;
  (list.last != nullptr ? list.last->next_of_peer : list.first) = &flow;
  list.last = &flow;
  return flow;
}

OpState& OpTable::post(const OpDescriptor& op) {
  OpState& state = op_state(op.key);
  if (state.descriptor == nullptr) ++posted_;
  state.descriptor = &op;
  // A counter that has gone round begins again.
  const auto space = done_.find(space_of(op.key));
  if (space != done_.end() && space->second.contains(number_of(op.key))) space->second.clear();
  return state;
}

void OpTable::erase(OpState& op, bool done) {
  if (op.descriptor != nullptr) {
    --posted_;
    if (done) {
      const Recent entry{op.key, op.descriptor->signature};
      if (recent_.size() < kRecent) {
        recent_.push_back(entry);
      } else {
        recent_[recent_at_++ % kRecent] = entry;
      }
    }
  }
  if (done) done_[space_of(op.key)].insert(number_of(op.key));
  for (Flow* flow = op.flows; flow != nullptr;) {
    Flow* next = flow->next_of_op;
    while (flow->unexpected != nullptr) {
      Unexpected* message = flow->unexpected;
      flow->unexpected = message->next;
      free_unexpected(message);
    }
    PeerFlows& list = by_peer_[static_cast<size_t>(flow->peer)];
    (flow->previous_of_peer != nullptr ? flow->previous_of_peer->next_of_peer : list.first) =
        flow->next_of_peer;
    (flow->next_of_peer != nullptr ? flow->next_of_peer->previous_of_peer : list.last) =
        flow->previous_of_peer;
    flows_.erase(FlowKey{op.key, flow->peer});
    flow = next;
  }
  const OpKey key = op.key;  // `op` goes with the entry
  ops_.erase(key);
}

bool OpTable::leave(uint64_t comm) {
  const auto spaces_of = [this](uint64_t of) {
    return std::pair(done_.lower_bound({of, 0}), done_.upper_bound({of, UINT64_MAX}));
  };
  if (const auto [first, last] = spaces_of(comm); first != last) left_.push_back(comm);
  if (left_.size() > kLeft) {
    const auto [first, last] = spaces_of(left_.front());
    done_.erase(first, last);
    left_.pop_front();
  }
  return std::ranges::none_of(ops_, [&](const auto& op) { return op.first.comm == comm; });
}

bool OpTable::done(const OpKey& op) const {
  const auto found = done_.find(space_of(op));
  return found != done_.end() && found->second.contains(number_of(op));
}

std::optional<OpSignature> OpTable::recent(const OpKey& op) const {
  for (const Recent& r : recent_) {
    if (r.key == op) return r.signature;
  }
  return {};
}

Unexpected* OpTable::make_unexpected(uint64_t bytes) {
  void* block = pool_.allocate(sizeof(Unexpected) + bytes, alignof(Unexpected));
  auto* message = new (block) Unexpected;
  message->bytes = bytes;
  return message;
}

void OpTable::free_unexpected(Unexpected* message) {
  pool_.deallocate(message, sizeof(Unexpected) + message->bytes, alignof(Unexpected));
}

}  // namespace sotto::framed
