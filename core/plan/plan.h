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
#include <variant>
#include <vector>

#include "core/base/status.h"
#include "core/iface/device.h"
#include "core/iface/transport.h"
#include "core/kernels/registry.h"

namespace sotto {

inline constexpr uint32_t kNoSlot = 0xffffffffu;
inline constexpr uint32_t kNoStep = 0xffffffffu;

enum class SlotKind : uint8_t {
  kBound,     // user memory or memory of a long-lived object, bound at every run
  kScratch,   // device memory of the run
  kHost,      // host memory of the run: what the host writes before or reads after the steps
  kConstant,  // host memory of the plan, never written: small messages known in advance. Only sent:
              // a device that copied from it would delay the host
};

struct Slot {
  SlotKind kind = SlotKind::kBound;
  uint64_t bytes = 0;
  // The same memory as another slot, from alias_offset on (in-place operations).
  uint32_t alias_of = kNoSlot;
  uint64_t alias_offset = 0;
  uint64_t arena_offset = 0;       // kScratch and kHost: place in the run's arena; set by lower()
  const void* constant = nullptr;  // kConstant: owned by the plan
  bool user = false;               // kBound: user memory, which work on user streams may use too
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

// The bytes that a message has to have. Other bytes fail the operation as PROTOCOL.
struct Expectation {
  std::vector<std::byte> bytes;
  // Text of the error; the span has as many bytes.
  std::function<std::string(std::span<const std::byte>)> explain;
};

enum class Phase : uint8_t {
  kBody,
  // Writes parameters or optimizer state, if the plan's decision is kCommit. It comes after the
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

// A collective of the transport's own that replaces several sends and receives.
struct NativeStep {
  NativeCall call;
  Region in, out;
};

// A call of a kernel.
struct KernelStep {
  KernelId id = KernelId::kFill;
  std::vector<OperandRef> operands;
  std::vector<Piece> pieces;
  const void* args = nullptr;  // owned by the plan
  uint64_t fill_bytes = 0;
  uint32_t call = 0;  // number of the call in the plan; set by lower()
};

struct CopyStep {
  Region source, destination;
  // The copy brings a received message to the host; or null.
  std::shared_ptr<const Expectation> expected = nullptr;
};

// What lower() adds to a message.
struct LoweredMessage {
  uint8_t link = 0;       // PlanMessages::links
  uint32_t group = 0;     // links that match by order: PlanMessages::groups
  uint32_t transfer = 0;  // index into the run's array of transfers
};

// A send or a receive.
struct MessageStep {
  bool is_send = false;
  MessageClass message_class = MessageClass::kPayload;
  Stage stage = Stage::kOther;
  uint16_t descriptor = 0;   // which of the operation's descriptors the message belongs to
  int32_t peer = -1;         // rank in the comm
  uint32_t round = 0;        // part of the match key, equal at both ends
  uint32_t segment = 0;      // counts the messages of (descriptor, round, source, destination)
  uint32_t issue_round = 0;  // links that match by order: rounds of the operation, ascending
  // Receives: the send to the same peer that this message is the reply to, or kNoStep. When the
  // reply arrives, nothing reads the data of that send any more, so the receive does not wait for
  // it.
  uint32_t elided_anti_dependency = kNoStep;
  Region data;
  // Messages of one round that this call moves, one after the other in the plan; owned by the plan.
  // What they touch is what it touches. Null: each goes on its own.
  const NativeStep* native = nullptr;
  // Receives into a kHost slot; or null.
  std::shared_ptr<const Expectation> expected = nullptr;
  LoweredMessage lowered;
};

// Done when an input of the operation has arrived (Engine::arrive).
struct AwaitStep {
  std::vector<uint32_t> slots;    // whose contents, and perhaps addresses, arrive
  std::vector<uint32_t> aliases;  // slots that lie in them, in order; set by lower()
};

using StepWork = std::variant<KernelStep, CopyStep, MessageStep, AwaitStep>;

struct Step {
  Phase phase = Phase::kBody;
  uint16_t lane = 0;
  bool user = false;    // touches user memory; set by lower()
  Predicate predicate;  // kernels and copies
  // Steps that come before this one without a region in common.
  std::vector<uint32_t> after;
  StepWork work;

  // The work, if it is of the kind; else null.
  const KernelStep* kernel() const { return std::get_if<KernelStep>(&work); }
  const CopyStep* copy() const { return std::get_if<CopyStep>(&work); }
  const MessageStep* message() const { return std::get_if<MessageStep>(&work); }
  const AwaitStep* await() const { return std::get_if<AwaitStep>(&work); }
};

inline bool is_send(const Step& step) {
  return step.message() != nullptr && step.message()->is_send;
}

inline bool is_receive(const Step& step) {
  return step.message() != nullptr && !step.message()->is_send;
}

// What the host compares with the bytes that a step brings, before anything reads them; or null.
inline const Expectation* expectation(const Step& step) {
  if (const MessageStep* message = step.message()) return message->expected.get();
  if (const CopyStep* copy = step.copy()) return copy->expected.get();
  return nullptr;
}

// Runs when an operation that had started does not commit: in order, one after the other, after
// everything else.
struct UndoStep {
  Step step;                      // a kernel or a copy
  uint32_t pair_first = kNoStep;  // the steps that it takes back, [pair_first, pair_last]
  uint32_t pair_last = kNoStep;
  bool only_if_paired_ran = false;
};

// Slots of the decision of all ranks; kNoSlot: the plan has none.
struct DecisionSlots {
  uint32_t word = kNoSlot;     // where it is made: kCommit or another word
  uint32_t verdict = kNoSlot;  // kHost, 4 bytes or more: the copy for the host
  // kHost, 4 bytes, 0 or kSkipAborted: Run::abort. For stream-ordered links and graphs; set by
  // lower().
  uint32_t aborted = kNoSlot;
};

// Slots that a run binds: inputs [in, in + n), outputs [out, out + n). Where a side has no meaning
// (the input of a broadcast on a rank that is not the root, the output of a send) its slots exist
// and may be bound to null.
struct CollectiveSlots {
  uint32_t in = kNoSlot;
  uint32_t out = kNoSlot;
};

// How messages of an operation that has time are kept back on links that match by order: in slices
// of its rounds, so that what comes behind one waits for it alone. The first slice enters its queue
// with the operation, slice k + 1 with input k. The same on all ranks. A plan whose links all match
// by key has no such inputs.
struct Slicing {
  uint32_t first_round = 0, rounds = 0;
  uint32_t per_round = 0;  // 0: nothing is kept back
};

// Descriptors of an operation: one for each collective of a group.
inline constexpr size_t kMaxDescriptors = UINT16_MAX;

// The steps of one rank before lowering.
struct LogicalPlan {
  std::vector<Slot> slots;
  std::vector<Step> steps;
  std::vector<UndoStep> undo;
  DecisionSlots decision;
  std::vector<CollectiveSlots> collectives;  // as Plan::collectives
  uint16_t descriptors = 1;
  Slicing slicing;  // then there are no other inputs
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
  PeerTraffic& operator+=(const PeerTraffic& o);
};

// Receives of one round from one peer, which one READY frame announces.
struct RoundReceives {
  uint32_t round = 0;
  uint32_t count = 0;
  uint64_t largest = 0;
};

// How messages of a link match: by their keys, or by the order of their groups.
enum class Matching : uint8_t { kByKey, kByOrder };

// A link of the comm, as a plan sees it.
struct PlanLink {
  Matching matching = Matching::kByKey;
  bool stream_ordered = false;  // its messages are calls of lanes
};

// Messages of one round, or of one of its slices, that a link which matches by order issues
// together.
struct IssueGroup {
  uint8_t link = 0;
  std::vector<uint32_t> steps;  // ascending
  // The group enters its queue when so many of the operation's first inputs are there: those that
  // the builder has named before its messages, whether or not this rank's need them, or the number
  // of its slice. So it is the same on all ranks.
  uint32_t inputs = 0;
};

// Devices that cannot read host memory: the addresses of all slots, for kernels that take lists.
struct AddressTable {
  uint32_t host = kNoSlot;    // written when a run is bound
  uint32_t device = kNoSlot;  // gets a copy by the first step
  // Of slots that arrive later; what follows an await copies theirs. kNoSlot: there are none.
  uint32_t late = kNoSlot;
};

// Step i waits for predecessors[pred_begin[i] .. pred_begin[i+1]) and releases successors likewise.
struct StepOrder {
  std::vector<uint32_t> pred_begin, predecessors;
  std::vector<uint32_t> succ_begin, successors;
  // Asynchronous devices: an event is recorded behind the step (something outside its lane waits
  // for it).
  std::vector<uint8_t> needs_event;

  std::span<const uint32_t> preds(uint32_t step) const {
    return std::span(predecessors)
        .subspan(pred_begin[step], pred_begin[step + 1] - pred_begin[step]);
  }
  std::span<const uint32_t> succs(uint32_t step) const {
    return std::span(successors).subspan(succ_begin[step], succ_begin[step + 1] - succ_begin[step]);
  }
};

// How the messages of a plan reach their peers.
struct PlanMessages {
  uint32_t transfers = 0;
  uint16_t descriptors = 1;
  int32_t comm_size = 1;
  std::vector<PlanLink> links;
  std::vector<IssueGroup> groups;  // of each link in the order of rounds
  // Per descriptor and peer: [descriptor * comm_size + peer].
  std::vector<std::vector<RoundReceives>> receives;

  // Some messages are calls of lanes.
  bool stream_ordered() const { return std::ranges::any_of(links, &PlanLink::stream_ordered); }
};

struct PlanTraffic {
  std::vector<PeerTraffic> peers;
  PeerTraffic total;
};

// Memory of a run.
struct ArenaBytes {
  uint64_t scratch = 0;  // device
  uint64_t host = 0;
};

// An executable plan. Everything is precomputed; the engine allocates nothing to run it.
struct Plan {
  std::vector<Slot> slots;
  std::vector<Step> steps;
  std::vector<UndoStep> undo;
  StepOrder order;
  PlanMessages messages;
  PlanTraffic traffic;
  DecisionSlots decision;
  AddressTable addresses;
  ArenaBytes arenas;
  uint32_t calls = 0;            // kernel calls of steps and undo steps
  std::vector<uint32_t> awaits;  // the await steps, by the number of the input
  // Of a plan whose messages are kept back in slices: an input lets the next slice go, and while k
  // of them are there slice_steps[k] of the steps can be done, the awaits among them. Empty:
  // inputs are data.
  std::vector<uint32_t> slice_steps;
  // Of the collectives that the plan was made for, in their order.
  std::vector<CollectiveSlots> collectives;
  std::shared_ptr<const void> storage;
};

// Whether an operand is an array of tensor pointers.
inline bool is_list(const OperandRef& op) {
  return op.footprint == Footprint::kList || op.footprint == Footprint::kTarget;
}

// Whether later calls of a lane can be queued behind the step before it is done: it is a call of a
// lane itself, or an input that arrives with an event.
inline bool on_lane(const Plan& plan, const Step& step) {
  const MessageStep* const message = step.message();
  return message == nullptr || plan.messages.links[message->lowered.link].stream_ordered;
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
  uint32_t channel = 0;  // number of the root comm, of those of the context
};

// Cuts long kernels, stages messages where their link cannot reach the device's memory, puts
// lists of tensor pointers where the device can read them, derives the order of steps from their
// regions, puts the decision behind all messages, groups rounds, predicts bytes. INTERNAL if the
// plan is inconsistent, or writes state that only a decision may change before there is one.
Result<std::shared_ptr<const Plan>> lower(LogicalPlan logical, const LoweringTarget& target);

}  // namespace sotto
