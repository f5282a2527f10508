// Emits steps into a LogicalPlan. Rounds are given by the caller and must be the same at both ends
// of a message; the segment number counts the messages of one (descriptor, round, peer, direction)
// in emission order, so both ends must emit the messages of a pair in the same order.
//
// Emitters number the ranks that they work with from 0. These are all ranks of the comm, or those
// of a group of them: see PlanBuilder::within.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

#include "core/plan/plan.h"

namespace sotto {

// Operand shorthands.
OperandRef whole(uint32_t slot, Access access, uint64_t offset, uint64_t bytes);
OperandRef flat(uint32_t slot, Access access, uint32_t unit_bits, uint64_t base = 0,
                uint64_t offset = 0);
OperandRef list(uint32_t first_slot, Access access, uint32_t unit_bits);
OperandRef target(uint32_t first_slot, Access access, uint32_t unit_bits);
OperandRef blocks(uint32_t slot, Access access, uint32_t unit_bits = 32);
OperandRef scales(uint32_t slot, Access access);          // float32 per compression instance
OperandRef message_scales(uint32_t slot, Access access);  // a message area
OperandRef absent();

// The call that takes a call back: Kernel::Undo on the same operands, where it has them.
Step undo_of(KernelStep call);

struct KernelOptions {
  Phase phase = Phase::kBody;
  Predicate predicate;
  uint16_t lane = 0;
  std::vector<uint32_t> after;
};

// Ranks that exchange messages with each other, in the order of their numbers in the group.
using RankGroup = std::vector<int32_t>;

class PlanBuilder {
 public:
  // Memory of a long-lived object.
  uint32_t bound(uint64_t bytes) { return add_slot({SlotKind::kBound, bytes, kNoSlot, 0, 0}); }
  // User tensors: one slot per tensor, numbered consecutively; returns the first.
  uint32_t bound_list(std::span<const uint64_t> bytes);
  uint32_t scratch(uint64_t bytes) { return add_slot({SlotKind::kScratch, bytes, kNoSlot, 0, 0}); }
  // `bytes` is copied.
  uint32_t constant(std::span<const std::byte> bytes) {
    return add_slot({SlotKind::kConstant, bytes.size(), kNoSlot, 0, 0, plan_.keep_array(bytes)});
  }
  uint32_t host(uint64_t bytes) { return add_slot({SlotKind::kHost, bytes, kNoSlot, 0, 0}); }
  // Declares that only committing steps write slots [first, first + n), which are bound.
  void committed(uint32_t first, uint64_t n = 1);
  // Declares that a bound or scratch slot is the same memory as another, from `offset` on.
  void alias(uint32_t slot, uint32_t of, uint64_t offset);

  // A call of K. Operands that are not named are absent.
  template <class K>
  uint32_t kernel(const typename K::template Operands<OperandRef>& operands,
                  std::vector<Piece> pieces, const typename K::Args& args,
                  KernelOptions options = {}) {
    return add_step(call_of<K>(operands, std::move(pieces), args), std::move(options));
  }
  // The same, and K::Undo takes it back if the operation does not commit; undone = false: what it
  // changes comes back anyway (bound_with_copy).
  template <class K>
  uint32_t kernel_with_undo(const typename K::template Operands<OperandRef>& operands,
                            std::vector<Piece> pieces, const typename K::Args& args,
                            bool undone = true) {
    if (!undone) return kernel<K>(operands, std::move(pieces), args);
    UndoStep undo;
    KernelStep call = call_of<K>(operands, std::move(pieces), args);
    undo.step = undo_of(call);
    undo.pair_first = undo.pair_last = add_step(std::move(call), {});
    plan_.undo.push_back(std::move(undo));
    return plan_.undo.back().pair_last;
  }
  uint32_t fill(Region region, uint8_t value, KernelOptions options = {});
  uint32_t copy(Region destination, Region source, KernelOptions options = {});
  void send(int32_t peer, Region data, uint32_t round,
            MessageClass message_class = MessageClass::kPayload);
  void recv(int32_t peer, Region data, uint32_t round,
            MessageClass message_class = MessageClass::kPayload);

  // The contents of bound slots, and where they are unless they were bound, arrive while the
  // operation runs; steps that use them come after this. Returns the number of the input, which
  // counts these calls.
  uint32_t await(std::span<const uint32_t> slots);

  // Of the messages that are emitted from now on, metadata apart.
  void stage(Stage stage) { stage_ = stage; }

  // Messages that are emitted until `with(nullptr)` are moved by this call.
  void with(const NativeStep* native) {
    native_ = native == nullptr ? nullptr : plan_.keep(*native);
  }

  // The last step, a receive into a host slot, has to bring these bytes.
  void expect(Expectation expected);

  // Step `later` waits for step `earlier` without a region in common.
  void order(uint32_t later, uint32_t earlier) { plan_.steps[later].after.push_back(earlier); }

  // The last receive brings what its sender makes of the message of step `send`; see
  // MessageStep::elided_anti_dependency.
  void elide_anti_dependency(uint32_t send);

  // Undo of steps [first, last]; see UndoStep.
  void undo(UndoStep step) { plan_.undo.push_back(std::move(step)); }
  // A fill that is not part of the plan's order.
  Step detached_fill(Region region, uint8_t value);

  uint32_t steps() const { return static_cast<uint32_t>(plan_.steps.size()); }
  // Rounds below are taken; the next section of the plan starts here.
  uint32_t next_round() const { return next_round_; }
  // Takes the rounds below `end`, whichever of them this rank has messages in. Emitters whose ranks
  // do not all have messages in the last round call it, so that next_round() is equal on all ranks.
  void reserve_rounds(uint32_t end) { next_round_ = std::max(next_round_, end); }

  // A section in which the ranks of each group exchange messages, all groups in the same rounds.
  // All ranks of the comm call it with the same groups; each is in one at most. `me` and the groups
  // are numbered as emitters number ranks here, so sections nest.
  //
  // emit(rank, size) emits from next_round() on; peers and roots are numbers in the group. How many
  // rounds it takes depends on `size` alone. It only adds to the plan: to count the rounds of other
  // sizes it is called for these too, and what it emits is taken back.
  //
  // All ranks go on in the same round, those of no group without steps.
  using EmitForGroup = std::function<Status(int32_t rank, int32_t size)>;
  Status within(std::span<const RankGroup> groups, int32_t me, const EmitForGroup& emit);
  // The round behind those that an emission takes. What is emitted for that is taken back.
  Result<uint32_t> end_of_rounds(const std::function<Status()>& emit);
  // Emitters work with all ranks of the comm.
  bool of_all_ranks() const { return group_.empty(); }
  // The number in the comm of a rank that an emitter works with.
  int32_t comm_rank(int32_t rank) const {
    return of_all_ranks() ? rank : group_[static_cast<size_t>(rank)];
  }

  // Messages emitted from now on belong to descriptor `index`, with rounds counted from 0 again.
  // `together`: on links that match by order its rounds are issued with those of the previous
  // descriptor instead of after them.
  void begin_descriptor(uint16_t index, bool together);

  template <class T>
  const T* keep_array(std::span<const T> values) {
    return plan_.keep_array(values);
  }
  // The decision is made in `word`, and copied to the first 4 bytes of `host_slot`: with all of
  // `outcome`, which begins with it, if that is a region.
  void set_verdict(uint32_t host_slot, uint32_t word, Region outcome = {}) {
    plan_.decision = {.word = word, .verdict = host_slot};
    if (outcome.slot == kNoSlot) outcome = {word, 0, 4};
    copy({host_slot, 0, outcome.bytes}, outcome);
  }
  const Slot& slot(uint32_t id) const { return plan_.slots[id]; }

  // The next one of the plan's collectives has these slots.
  void collective(const CollectiveSlots& slots) { plan_.collectives.push_back(slots); }

  LogicalPlan take() { return std::move(plan_); }

 private:
  uint32_t add_slot(Slot slot);
  template <class K>
  static std::vector<OperandRef> in_order(
      const typename K::template Operands<OperandRef>& operands) {
    static_assert(sizeof operands == kOperandCount<K> * sizeof(OperandRef));
    const auto* first = reinterpret_cast<const OperandRef*>(&operands);
    return {first, first + kOperandCount<K>};
  }
  template <class K>
  KernelStep call_of(const typename K::template Operands<OperandRef>& operands,
                     std::vector<Piece> pieces, const typename K::Args& args) {
    return {.id = kKernelId<K>,
            .operands = in_order<K>(operands),
            .pieces = std::move(pieces),
            .args = plan_.keep(args)};
  }
  uint32_t add_step(StepWork work, KernelOptions options);
  void add_message(bool is_send, int32_t peer, Region data, uint32_t round,
                   MessageClass message_class);
  Status emit_for(const RankGroup& group, int32_t rank, const EmitForGroup& emit);

  LogicalPlan plan_;
  RankGroup group_;  // ranks of the comm that emitters work with; empty: all of them
  std::map<std::tuple<uint16_t, uint32_t, int32_t, bool>, uint32_t> segments_;
  uint32_t last_receive_ = kNoStep;
  uint32_t next_round_ = 0;
  uint32_t issue_base_ = 0;
  uint16_t descriptor_ = 0;
  uint32_t awaits_ = 0;
  Stage stage_ = Stage::kOther;
  const NativeStep* native_ = nullptr;
};

}  // namespace sotto
