// A plan: steps over buffer regions, with their order derived from what they read and write.
// Builders emit steps in program order; lower() turns them into an executable Plan for one device
// and the links of a comm; the engine runs it.
//
// A plan is immutable and may run many times, also at once: a run binds pointers to its slots.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "core/base/status.h"
#include "core/iface/device.h"
#include "core/iface/transport.h"
#include "core/kernels/registry.h"

namespace sotto {

inline constexpr uint32_t kNoSlot = 0xffffffffu;
inline constexpr uint32_t kNoStep = 0xffffffffu;

enum class SlotKind : uint8_t {
  kBound,     // memory of the caller or of a long-lived object, bound at every run
  kScratch,   // device memory of the run
  kHost,      // host memory of the run: what the host writes before or reads after the steps
  kConstant,  // host memory of the plan, never written: small messages known in advance. Only sent:
              // a device that copied from it would hold up the host
};

struct Slot {
  SlotKind kind = SlotKind::kBound;
  uint64_t bytes = 0;
  // The same memory as another slot, from alias_offset on (in-place operations).
  uint32_t alias_of = kNoSlot;
  uint64_t alias_offset = 0;
  uint64_t arena_offset = 0;       // kScratch and kHost: place in the run's arena; set by lower()
  const void* constant = nullptr;  // kConstant: owned by the plan
  bool callers = false;            // kBound: work on the caller's stream may use it too
  bool committed = false;          // kBound: only committing steps may write it
};

struct Region {
  uint32_t slot = kNoSlot;
  uint64_t offset = 0;
  uint64_t bytes = 0;
};

// The slot whose memory it is.
inline uint32_t root_slot(std::span<const Slot> slots, uint32_t slot) {
  while (slots[slot].alias_of != kNoSlot) slot = slots[slot].alias_of;
  return slot;
}

// How much of an operand a call touches.
enum class Footprint : uint8_t {
  kWhole,    // `bytes` from `offset`
  kFlat,     // per piece: elements flat - base ..., `unit_bits` each, from `offset`
  kRows,     // as kFlat, in each of `rows` rows `row_bytes` apart
  kList,     // per piece: tensor slot `slot + piece.tensor`, elements piece.offset ...
  kTarget,   // as kList at piece.target
  kBlocks,   // per piece: one unit for each norm block it touches
  kScale,    // per piece: the unit with index piece.scale
  kMessage,  // per piece: the unit with index piece.message
};

struct OperandRef {
  uint32_t slot = kNoSlot;  // kNoSlot: optional operand left out
  uint64_t offset = 0;
  Access access = Access::kRead;
  Footprint footprint = Footprint::kWhole;
  uint32_t unit_bits = 32;
  uint32_t unit_elements = 1;  // kFlat, kRows: elements that share a unit
  uint64_t base = 0;
  uint64_t bytes = 0;
  uint64_t row_bytes = 0;
  uint32_t rows = 0;
};

// Which half of a reduction a message belongs to, for time lines.
enum class Stage : uint8_t {
  kOther,
  kScatter,  // phase 1: to the rank that adds up
  kGather,   // phase 2: results to all
};

// What a message has to say. A message that says something else fails the operation as PROTOCOL.
struct Expectation {
  std::vector<std::byte> bytes;
  // Text of the error; the span has as many bytes.
  std::function<std::string(std::span<const std::byte>)> explain;
};

enum class StepKind : uint8_t {
  kKernel,
  kCopy,
  kSend,
  kRecv,
  kAwait,  // done when an input of the operation has arrived (Engine::arrive)
};
enum class Phase : uint8_t {
  kBody,
  // Writes parameters or optimizer state, if the plan's decision says so. It comes after the
  // decision, which comes after every message: lower() sees to both. Once one has been issued, the
  // operation is finished, not undone.
  kCommitting,
};

// A word of memory that decides whether a step has an effect (KernelCall::predicate).
struct Predicate {
  uint32_t slot = kNoSlot;
  uint64_t offset = 0;
  uint32_t expect = 0;
};

// A collective of the transport's own that does what several sends and receives say.
struct NativeStep {
  NativeCall call;
  Region in, out;
};

// What lower() adds to a step.
struct LoweredStep {
  uint32_t call = 0;     // kernels: number of the call in the plan (Plan::calls)
  bool callers = false;  // touches memory of the caller
  uint8_t link = 0;      // messages: Plan::links
  uint32_t group = 0;    // messages of links that match by order: Plan::groups
};

struct Step {
  StepKind kind = StepKind::kKernel;
  Phase phase = Phase::kBody;
  uint16_t lane = 0;
  // kKernel; kAwait: the whole slots whose contents, and perhaps addresses, arrive
  KernelId kernel = KernelId::kFill;
  std::vector<OperandRef> operands;
  std::vector<Piece> pieces;
  const void* args = nullptr;  // owned by the plan
  uint64_t fill_bytes = 0;
  Predicate predicate;  // kernels and copies
  // kCopy
  Region source, destination;
  // kSend, kRecv
  int32_t peer = -1;         // rank in the comm
  uint32_t round = 0;        // part of the match key, equal at both ends
  uint32_t segment = 0;      // counts the messages of (posting, round, source, destination)
  uint32_t issue_round = 0;  // links that match by order: rounds of the operation, ascending
  uint16_t posting = 0;      // which of the operation's postings the message belongs to
  MessageClass message_class = MessageClass::kPayload;
  Stage stage = Stage::kOther;
  Region data;
  // Messages of one round that this call moves, one after the other in the plan; owned by the plan.
  // What they touch is what it touches. Null: each goes on its own.
  const NativeStep* native = nullptr;
  // kRecv into a kHost slot, or the copy that brings what was received there; or null.
  std::shared_ptr<const Expectation> expected;
  // Steps that come before this one although no region says so.
  std::vector<uint32_t> after;
  // kRecv: the send to the same peer without whose message the peer could not send this one. When
  // it arrives, nothing reads what that send reads any more, so the receive does not wait for it.
  uint32_t answers = kNoStep;
  LoweredStep lowered;
};

inline bool on_device(const Step& step) {
  return step.kind == StepKind::kKernel || step.kind == StepKind::kCopy;
}

inline bool is_message(const Step& step) {
  return step.kind == StepKind::kSend || step.kind == StepKind::kRecv;
}

// Runs when an operation that had started does not commit: in order, one after the other, after
// everything else.
struct UndoStep {
  Step step;                      // a kernel
  uint32_t pair_first = kNoStep;  // the steps that it takes back, [pair_first, pair_last]
  uint32_t pair_last = kNoStep;
  bool only_if_paired_ran = false;
};

// The steps of one rank before lowering.
struct LogicalPlan {
  std::vector<Slot> slots;
  std::vector<Step> steps;
  std::vector<UndoStep> undo;
  // Where the decision of all ranks ends up (a kHost slot of 4 bytes, kCommit or another word), and
  // where it is made; kNoSlot: no decision.
  uint32_t verdict_slot = kNoSlot;
  uint32_t word_slot = kNoSlot;
  uint16_t postings = 1;
  // Owns argument structs and tables that steps point to.
  std::shared_ptr<std::deque<std::vector<std::byte>>> storage =
      std::make_shared<std::deque<std::vector<std::byte>>>();

  template <class T>
  const T* keep(const T& value) {
    return keep_array(std::span<const T>(&value, 1));
  }
  template <class T>
  const T* keep_array(std::span<const T> values) {
    static_assert(std::is_trivially_copyable_v<T>);
    auto& bytes = storage->emplace_back(values.size_bytes() + 1);
    if (!values.empty()) std::memcpy(bytes.data(), values.data(), values.size_bytes());
    return reinterpret_cast<const T*>(bytes.data());
  }
};

// What a plan makes this rank send to and receive from one peer.
struct PeerTraffic {
  uint64_t payload_bytes_sent = 0, payload_bytes_received = 0;
  uint64_t metadata_bytes_sent = 0, metadata_bytes_received = 0;
  uint64_t header_bytes_sent = 0, header_bytes_received = 0;  // frame overhead only
  uint64_t messages_sent = 0, messages_received = 0;
};

// Receives of one round from one peer: what a READY frame vouches for.
struct RoundReceives {
  uint32_t round = 0;
  uint32_t count = 0;
  uint64_t largest = 0;
};

// How messages of a link match: by their keys, or by the order of their groups.
enum class Matching : uint8_t { kByKey, kByOrder };

// What a plan knows of a link of its comm.
struct PlanLink {
  Matching matching = Matching::kByKey;
  bool stream_ordered = false;  // its messages are calls of lanes
};

// Messages of one round that a link which matches by order issues together.
struct IssueGroup {
  uint8_t link = 0;
  std::vector<uint32_t> steps;  // ascending
  // The group enters its queue when so many of the operation's first inputs are there: those that
  // the builder has named before its messages, whether or not this rank's need them. So it is the
  // same on all ranks.
  uint32_t inputs = 0;
};

// Devices that cannot read host memory: the addresses of all slots, for kernels that take lists.
struct AddressTable {
  uint32_t host = kNoSlot;    // written when a run is bound
  uint32_t device = kNoSlot;  // gets a copy by the first step
  // Of slots that arrive later; what follows an await copies theirs. kNoSlot: there are none.
  uint32_t late = kNoSlot;
};

// An executable plan. Everything is precomputed; the engine allocates nothing to run it.
struct Plan {
  std::vector<Slot> slots;
  std::vector<Step> steps;
  std::vector<UndoStep> undo;
  uint32_t verdict_slot = kNoSlot;
  uint16_t postings = 1;
  std::shared_ptr<const void> storage;

  // Order: step i waits for predecessors[pred_begin[i] .. pred_begin[i+1]) and releases successors
  // likewise.
  std::vector<uint32_t> pred_begin, predecessors;
  std::vector<uint32_t> succ_begin, successors;
  // Asynchronous devices: an event is recorded behind the step (something outside its lane waits
  // for it).
  std::vector<uint8_t> needs_event;
  // Channel steps: index into the run's array of transfers; others kNoStep.
  std::vector<uint32_t> transfer_index;
  uint32_t transfers = 0;
  std::vector<PlanLink> links;
  std::vector<IssueGroup> groups;  // of each link in the order of rounds
  // Receives per posting, peer (indices into the vectors below are posting * comm_size + peer).
  int32_t comm_size = 1;
  std::vector<std::vector<RoundReceives>> receives;
  std::vector<PeerTraffic> traffic;  // per peer
  PeerTraffic total;
  uint32_t calls = 0;  // kernel calls of steps and undo steps
  AddressTable addresses;
  std::vector<uint32_t> awaits;  // the await steps, by the number of the input
  // Plans with a decision, for stream-ordered transports and graphs: a word in host memory, 0 or
  // kSkipGivenUp.
  uint32_t given_up = kNoSlot;
  uint64_t scratch_bytes = 0;  // device arena of a run
  uint64_t host_bytes = 0;     // host arena of a run

  // Some messages are calls of lanes.
  bool stream_ordered() const { return std::ranges::any_of(links, &PlanLink::stream_ordered); }
  std::span<const uint32_t> preds(uint32_t step) const {
    return std::span(predecessors)
        .subspan(pred_begin[step], pred_begin[step + 1] - pred_begin[step]);
  }
  std::span<const uint32_t> succs(uint32_t step) const {
    return std::span(successors).subspan(succ_begin[step], succ_begin[step + 1] - succ_begin[step]);
  }
};

// Whether an operand is an array of tensor pointers.
inline bool is_list(const OperandRef& op) {
  return op.footprint == Footprint::kList || op.footprint == Footprint::kTarget;
}

// Whether later calls of a lane can be queued behind the step before it is done: it is a call of a
// lane itself, or an input that arrives with an event.
inline bool on_lane(const Plan& plan, const Step& step) {
  return !is_message(step) || plan.links[step.lowered.link].stream_ordered;
}

// The same bytes as a region of the slot whose memory it is.
Region resolve(std::span<const Slot> slots, Region region);

// Byte ranges that a step touches, by slot (aliases resolved).
struct Use {
  Region region;
  Access access = Access::kRead;
};
void collect_uses(std::span<const Slot> slots, const Step& step, std::vector<Use>* uses);

struct LinkTarget {
  Matching matching = Matching::kByKey;
  const TransportCaps* transport = nullptr;
  const Transport* headers = nullptr;  // prices frame headers; null: 0
};

struct LoweringTarget {
  const DeviceCaps* device = nullptr;
  std::span<const LinkTarget> links;
  std::span<const uint8_t> link_of;  // by rank in the comm; empty: the first for all
  int32_t comm_size = 1;
};

// Cuts long kernels, stages messages where their link cannot reach the device's memory, puts
// lists of tensor pointers where the device can read them, derives the order of steps from their
// regions, puts the decision behind all messages, groups rounds, predicts bytes. INTERNAL if the
// plan is inconsistent, or writes state that only a decision may change before there is one.
Result<std::shared_ptr<const Plan>> lower(LogicalPlan logical, const LoweringTarget& target);

}  // namespace sotto
