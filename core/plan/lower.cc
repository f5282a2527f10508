#include <algorithm>
#include <map>
#include <set>

#include "core/kernels/pieces.h"
#include "core/plan/hazards.h"
#include "core/plan/plan.h"
#include "core/plan/slices.h"

namespace sotto {
namespace {

constexpr uint64_t kArenaAlignment = 128;
constexpr uint32_t kAddressStep = 0;  // the copy of Plan::addresses, where there is one

uint64_t align_up(uint64_t value, uint64_t to) { return (value + to - 1) / to * to; }

// One logical plan on its way to an executable one.
class Lowering {
 public:
  Lowering(LogicalPlan logical, const LoweringTarget& target)
      : in_(std::move(logical)),
        target_(target),
        plan_(std::make_shared<Plan>()),
        slices_(in_.slicing, in_.steps) {}

  Result<std::shared_ptr<const Plan>> run() {
    plan_->slots = in_.slots;
    plan_->decision = in_.decision;
    plan_->collectives = in_.collectives;
    plan_->storage = in_.storage;
    plan_->messages.descriptors = in_.descriptors;
    plan_->messages.comm_size = target_.comm_size;
    for (const LinkTarget& link : target_.links) {
      plan_->messages.links.push_back(
          {link.matching, link.transport->stream_ordered && !target_.device->synchronous});
    }
    first_.resize(in_.steps.size() + 1);
    for (const Step& step : in_.steps) SOTTO_TRY(check_call(step));
    place_addresses();
    SOTTO_TRY(keep_slices_back());
    const size_t decides = decision();
    for (size_t i = 0; i < in_.steps.size(); ++i) {
      first_[i] = static_cast<uint32_t>(plan_->steps.size());
      emit(in_.steps[i]);
      if (i == decides) complete_decision();
    }
    first_[in_.steps.size()] = static_cast<uint32_t>(plan_->steps.size());
    SOTTO_TRY(check_undo());
    lower_undo();
    number_calls();
    place_slots();
    SOTTO_TRY(derive_order());
    index_messages();
    if (sliced_) plan_->slice_steps = steps_by_slice(*plan_);
    return std::shared_ptr<const Plan>(plan_);
  }

 private:
  void emit(Step& step) {
    step.lane = static_cast<uint16_t>(step.lane % target_.device->lanes);
    std::vector<uint32_t> after;
    for (uint32_t logical : step.after) {
      for (uint32_t s = first_[logical]; s < first_[logical + 1]; ++s) after.push_back(s);
    }
    step.after = std::move(after);
    if (KernelStep* kernel = std::get_if<KernelStep>(&step.work)) {
      emit_kernel(step, *kernel);
    } else if (MessageStep* message = std::get_if<MessageStep>(&step.work)) {
      emit_message(step, *message);
    } else if (step.await() != nullptr) {
      emit_await(step);
    } else {
      plan_->steps.push_back(std::move(step));
    }
  }

  uint8_t link_to(int32_t peer) const {
    return target_.link_of.empty() ? 0 : target_.link_of[static_cast<size_t>(peer)];
  }

  // The inputs that let slices of messages go, if any link keeps them back.
  Status keep_slices_back() {
    const auto by_order = [this](const Step& step) {
      return step.message() != nullptr &&
             target_.links[link_to(step.message()->peer)].matching == Matching::kByOrder;
    };
    sliced_ = slices_.count() > 1 && std::ranges::any_of(in_.steps, by_order);
    if (!sliced_) return ok_status();
    if (std::ranges::any_of(in_.steps, [](const Step& s) { return s.await() != nullptr; }))
      return error(Code::kInternal, "a plan in slices has other inputs");
    for (uint32_t slice = 1; slice < slices_.count(); ++slice) {
      Step await;
      await.work = AwaitStep{};
      emit_await(await);
    }
    return ok_status();
  }

  // The operands of the builder agree with the kernel's description: which there are,
  // which are lists, and which are written. (Of what a call updates, arguments may say that it is
  // only written.)
  static Status check_call(const Step& step) {
    const KernelStep* const kernel = step.kernel();
    if (kernel == nullptr) return ok_status();
    const std::span<const OperandSpec> specs = kernel_spec(kernel->id).operands;
    if (specs.size() != kernel->operands.size())
      return error(Code::kInternal, "a call of {} with {} operands instead of {}",
                   kernel_name(kernel->id), kernel->operands.size(), specs.size());
    const uint32_t lists = list_operands(kernel->id, kernel->args);
    for (size_t k = 0; k < specs.size(); ++k) {
      const OperandRef& op = kernel->operands[k];
      if (op.slot == kNoSlot ? specs[k].optional
                             : writes(op.access) == writes(specs[k].access) &&
                                   is_list(op) == ((lists >> k & 1) != 0))
        continue;
      return error(Code::kInternal, "operand '{}' of {} is not what the kernel says", specs[k].name,
                   kernel_name(kernel->id));
    }
    return ok_status();
  }
  static bool writes(Access access) {
    return access == Access::kWrite || access == Access::kReadWrite;
  }

  static bool takes_list(const KernelStep& kernel) {
    return std::ranges::any_of(
        kernel.operands, [](const OperandRef& op) { return op.slot != kNoSlot && is_list(op); });
  }
  static bool has_list(const Step& step) {
    return step.kernel() != nullptr && takes_list(*step.kernel());
  }

  // The first step copies the addresses of all slots to the device, if any kernel takes a list and
  // the device could not read it in host memory.
  void place_addresses() {
    const bool lists = std::any_of(in_.steps.begin(), in_.steps.end(), has_list) ||
                       std::any_of(in_.undo.begin(), in_.undo.end(),
                                   [](const UndoStep& undo) { return has_list(undo.step); });
    if (target_.device->host_memory || !lists) return;
    const uint64_t bytes = plan_->slots.size() * sizeof(void*);
    AddressTable& table = plan_->addresses;
    table.host = static_cast<uint32_t>(plan_->slots.size());
    table.device = table.host + 1;
    plan_->slots.push_back({SlotKind::kHost, bytes, kNoSlot, 0, 0});
    plan_->slots.push_back({SlotKind::kScratch, bytes, kNoSlot, 0, 0});
    if (std::ranges::any_of(in_.steps, [](const Step& s) { return s.await() != nullptr; })) {
      table.late = table.device + 1;
      plan_->slots.push_back({SlotKind::kHost, bytes, kNoSlot, 0, 0});
    }
    copy_addresses(table.host, 0, plan_->slots.size());
  }

  // Of slots [first, end), from a table of the host's.
  uint32_t copy_addresses(uint32_t from, uint64_t first, uint64_t end) {
    const uint64_t known = plan_->slots[from].bytes / sizeof(void*);
    const uint64_t offset = first * sizeof(void*);
    const uint64_t bytes = (std::min(end, known) - first) * sizeof(void*);
    Step copy;
    copy.work = CopyStep{{from, offset, bytes}, {plan_->addresses.device, offset, bytes}};
    plan_->steps.push_back(std::move(copy));
    return static_cast<uint32_t>(plan_->steps.size()) - 1;
  }

  // Where kernels find lists in device memory, the addresses that arrive follow the input.
  void emit_await(Step& step) {
    const auto await = static_cast<uint32_t>(plan_->steps.size());
    plan_->awaits.push_back(await);
    AwaitStep& input = std::get<AwaitStep>(step.work);
    const std::set<uint32_t> arriving(input.slots.begin(), input.slots.end());
    std::vector<uint32_t> slots;
    for (uint32_t s = 0; s < in_.slots.size(); ++s) {
      if (!arriving.contains(root_slot(in_.slots, s))) continue;
      slots.push_back(s);
      if (in_.slots[s].alias_of != kNoSlot) input.aliases.push_back(s);
    }
    plan_->steps.push_back(std::move(step));
    if (plan_->addresses.late == kNoSlot) return;
    for (size_t begin = 0, end = 0; begin < slots.size(); begin = end) {
      for (end = begin + 1; end < slots.size() && slots[end] == slots[end - 1] + 1;) ++end;
      const uint32_t copy =
          copy_addresses(plan_->addresses.late, slots[begin], uint64_t{slots[end - 1]} + 1);
      plan_->steps[copy].after.push_back(await);
      for (size_t i = begin; i < end; ++i) late_addresses_[slots[i]] = copy;
    }
  }

  // The copies of the addresses that a kernel finds its lists at.
  void order_behind_addresses(Step& step, const KernelStep& kernel) {
    step.after.push_back(kAddressStep);
    if (late_addresses_.empty()) return;
    for (const OperandRef& op : kernel.operands) {
      if (op.slot == kNoSlot || !is_list(op)) continue;
      for (const Piece& piece : kernel.pieces) {
        if (piece.tensor == kNoTensor) continue;
        const auto late = late_addresses_.find(op.slot + piece.tensor);
        if (late != late_addresses_.end()) step.after.push_back(late->second);
      }
    }
    std::ranges::sort(step.after);
    step.after.erase(std::unique(step.after.begin(), step.after.end()), step.after.end());
  }

  // The logical step that makes the plan's decision, the last one that writes its word; past the
  // end if there is none.
  size_t decision() const {
    const uint32_t word = in_.decision.word;
    const auto writes_word = [&](const OperandRef& op) {
      return op.slot == word && op.access != Access::kRead;
    };
    size_t step = in_.steps.size();
    while (word != kNoSlot && step-- > 0) {
      const Step& s = in_.steps[step];
      if (s.copy() != nullptr && s.copy()->destination.slot == word) return step;
      if (s.kernel() != nullptr && std::ranges::any_of(s.kernel()->operands, writes_word))
        return step;
    }
    return in_.steps.size();
  }

  // It brings something from outside: from another rank, or an input.
  static bool arrives(const Step& step) { return is_receive(step) || step.await() != nullptr; }

  // The decision, just emitted, waits for every message and input, whether or not it reads what
  // they bring: what commits behind it needs no more of others.
  void complete_decision() {
    decision_ = static_cast<uint32_t>(plan_->steps.size()) - 1;
    Step& decision = plan_->steps.back();
    bool queued = false;  // a message that is a call of a lane
    for (uint32_t s = 0; s < decision_; ++s) {
      const Step& step = plan_->steps[s];
      if (!arrives(step)) continue;
      decision.after.push_back(first_of_call(s));
      queued |= is_receive(step) && on_lane(*plan_, step);
    }
    if (target_.device->captures || queued) guard_decision();
  }

  // The device may reach the decision after the operation was aborted: the lanes behind an aborted
  // stream-ordered link go on without the messages, and a graph is launched by its owner. The
  // engine sets the word first (Run::abort); a decision that was made before that had all messages.
  void guard_decision() {
    const auto aborted = static_cast<uint32_t>(plan_->slots.size());
    plan_->decision.aborted = aborted;
    plan_->slots.push_back({SlotKind::kHost, 4, kNoSlot, 0, 0});
    Step guard;
    guard.lane = plan_->steps.back().lane;
    guard.predicate = {aborted, 0, kSkipAborted};
    guard.work = CopyStep{{aborted, 0, 4}, {in_.decision.word, 0, 4}};
    decision_ = static_cast<uint32_t>(plan_->steps.size());
    plan_->steps.push_back(std::move(guard));
  }

  void number_calls() {
    const auto number = [this](Step& step) {
      if (KernelStep* kernel = std::get_if<KernelStep>(&step.work)) kernel->call = plan_->calls++;
    };
    for (Step& step : plan_->steps) number(step);
    for (UndoStep& undo : plan_->undo) number(undo.step);
  }

  void emit_kernel(Step& step, KernelStep& kernel) {
    if (plan_->addresses.device != kNoSlot && takes_list(kernel))
      order_behind_addresses(step, kernel);
    const uint64_t limit = target_.device->split_elements;
    if (limit == 0 || !kernel_cuts(kernel.id) || piece_elements(kernel.pieces) <= limit) {
      plan_->steps.push_back(std::move(step));
      return;
    }
    for (std::vector<Piece>& part : cut_pieces(kernel.pieces, limit))
      plan_->steps.push_back(with_pieces(step, std::move(part)));
  }

  // A kernel step with other pieces.
  static Step with_pieces(Step step, std::vector<Piece> pieces) {
    std::get<KernelStep>(step.work).pieces = std::move(pieces);
    return step;
  }

  static bool in_host_memory(const Slot& slot) {
    return slot.kind == SlotKind::kHost || slot.kind == SlotKind::kConstant;
  }

  // The message lies on the other side than its link reaches: of a stream-ordered one, in host
  // memory; of others, on a device whose memory is none of the host's.
  bool needs_staging(const MessageStep& message, bool stream_ordered) const {
    if (target_.device->host_memory || message.data.bytes == 0) return false;
    const bool host = in_host_memory(plan_->slots[resolve(plan_->slots, message.data).slot]);
    return stream_ordered
               ? host
               : target_.links[message.lowered.link].transport->host_memory_only && !host;
  }

  void emit_message(Step& step, MessageStep& message) {
    if (message.elided_anti_dependency != kNoStep) {  // the send, behind its staging
      message.elided_anti_dependency = first_[message.elided_anti_dependency + 1] - 1;
    }
    message.lowered.link = link_to(message.peer);
    const bool stream_ordered = on_lane(*plan_, step);
    // Where a stream-ordered link queues messages: one lane for all of a root comm, so that ranks
    // issue them in one order.
    step.lane =
        stream_ordered ? static_cast<uint16_t>(target_.device->message_lane(target_.channel)) : 0;
    if (needs_staging(message, stream_ordered)) {
      stage(step, message, stream_ordered);
    } else {
      plan_->steps.push_back(std::move(step));
    }
  }

  // A message by way of memory that its link reaches.
  void stage(Step& step, MessageStep& message, bool stream_ordered) {
    const auto slot = static_cast<uint32_t>(plan_->slots.size());
    const SlotKind kind = stream_ordered ? SlotKind::kScratch : SlotKind::kHost;
    plan_->slots.push_back({kind, message.data.bytes, kNoSlot, 0, 0});
    const Region staged{slot, 0, message.data.bytes};
    const Region data = std::exchange(message.data, staged);
    Step copy;
    // Copies in one direction do not wait for those in the other, if there are lanes enough.
    const uint32_t lanes = target_.device->lanes;
    const bool apart = lanes > 3 && !message.is_send;
    copy.lane = static_cast<uint16_t>(apart ? lanes - 2 : lanes - 1);
    if (message.is_send) {
      copy.after = std::exchange(step.after, {});
      copy.work = CopyStep{data, staged};
      plan_->steps.push_back(std::move(copy));
      plan_->steps.push_back(std::move(step));
    } else {
      copy.work = CopyStep{staged, data, stream_ordered ? std::move(message.expected) : nullptr};
      plan_->steps.push_back(std::move(step));
      plan_->steps.push_back(std::move(copy));
    }
  }

  // Undo runs whether or not inputs have arrived.
  Status check_undo() const {
    std::set<uint32_t> late;
    for (const uint32_t await : plan_->awaits) {
      for (const uint32_t slot : plan_->steps[await].await()->slots) late.insert(slot);
    }
    if (late.empty()) return ok_status();
    std::vector<Use> uses;
    for (const UndoStep& undo : in_.undo) collect_uses(plan_->slots, undo.step, &uses);
    for (const Use& use : uses) {
      if (late.contains(use.region.slot))
        return error(Code::kInternal, "an undo step uses slot {}, which is an input that arrives",
                     use.region.slot);
    }
    return ok_status();
  }

  // Undo kernels are cut exactly like the step they take back, so that each part knows whether its
  // own part ran.
  void lower_undo() {
    for (UndoStep& undo : in_.undo) {
      const uint32_t first = undo.pair_first == kNoStep ? kNoStep : first_[undo.pair_first];
      const uint32_t last = undo.pair_last == kNoStep ? kNoStep : first_[undo.pair_last + 1] - 1;
      const KernelStep* const kernel = undo.step.kernel();
      const bool parallel = undo.pair_first != kNoStep && undo.pair_first == undo.pair_last &&
                            kernel != nullptr && !kernel->pieces.empty();
      if (!parallel) {
        plan_->undo.push_back({std::move(undo.step), first, last, undo.only_if_paired_ran});
        continue;
      }
      for (uint32_t s = first; s <= last; ++s) {
        Step part = with_pieces(undo.step, plan_->steps[s].kernel()->pieces);
        plan_->undo.push_back({std::move(part), s, s, undo.only_if_paired_ran});
      }
    }
  }

  void place_slots() {
    for (Slot& slot : plan_->slots) {
      uint64_t* arena = slot.kind == SlotKind::kScratch ? &plan_->arenas.scratch
                        : slot.kind == SlotKind::kHost  ? &plan_->arenas.host
                                                        : nullptr;
      if (arena == nullptr || slot.alias_of != kNoSlot) continue;
      slot.arena_offset = *arena;
      *arena = align_up(*arena + std::max<uint64_t>(slot.bytes, 1), kArenaAlignment);
    }
  }

  Status derive_order() {
    const auto n = static_cast<uint32_t>(plan_->steps.size());
    Hazards hazards(plan_->slots.size());
    std::vector<std::vector<uint32_t>> waits(n);
    std::vector<Use> uses;
    for (uint32_t i = 0; i < n; ++i) {
      if (i > 0 && same_call(plan_->steps[i - 1], plan_->steps[i])) {
        plan_->steps[i].user = plan_->steps[i - 1].user;
        waits[i] = waits[i - 1];
        continue;
      }
      uses.clear();
      collect_uses(plan_->slots, plan_->steps[i], &uses);
      for (const Use& use : uses) {
        if (use.region.offset + use.region.bytes > plan_->slots[use.region.slot].bytes) {
          return error(Code::kInternal,
                       "step {} ({}) touches bytes {}..{} of slot {}, which has {}", i,
                       step_name(i), use.region.offset, use.region.offset + use.region.bytes,
                       use.region.slot, plan_->slots[use.region.slot].bytes);
        }
        plan_->steps[i].user |= plan_->slots[use.region.slot].user;
        SOTTO_TRY(check_write(i, use));
        hazards.touch(i, use, &waits[i]);
      }
      waits[i].insert(waits[i].end(), plan_->steps[i].after.begin(), plan_->steps[i].after.end());
      std::sort(waits[i].begin(), waits[i].end());
      waits[i].erase(std::unique(waits[i].begin(), waits[i].end()), waits[i].end());
      if (const MessageStep* message = plan_->steps[i].message())
        std::erase(waits[i], message->elided_anti_dependency);
    }
    SOTTO_TRY(check_commits(waits));
    store_order(waits);
    return ok_status();
  }

  // State that a step which does not commit must leave alone is written by committing steps alone.
  Status check_write(uint32_t i, const Use& use) const {
    if (use.access == Access::kRead || !plan_->slots[use.region.slot].committed ||
        plan_->steps[i].phase == Phase::kCommitting)
      return ok_status();
    return error(Code::kInternal, "step {} ({}) writes slot {} without committing", i, step_name(i),
                 use.region.slot);
  }

  // No committing step can be issued before the decision, nor without it, and no message arrives
  // behind it.
  Status check_commits(const std::vector<std::vector<uint32_t>>& waits) const {
    std::vector<uint8_t> decided(waits.size(), 0);
    for (uint32_t i = 0; i < waits.size(); ++i) {
      const Step& step = plan_->steps[i];
      decided[i] = i == decision_ || std::any_of(waits[i].begin(), waits[i].end(),
                                                 [&](uint32_t w) { return decided[w] != 0; });
      if (step.await() != nullptr && !waits[i].empty())
        return error(Code::kInternal, "step {} ({}) writes what earlier steps use", i,
                     step_name(i));
      if (decision_ != kNoStep && arrives(step) && i > decision_)
        return error(Code::kInternal, "step {} ({}) comes after the decision", i, step_name(i));
      if (step.phase != Phase::kCommitting) continue;
      if (!decided[i])
        return error(Code::kInternal, "step {} ({}) commits before the decision", i, step_name(i));
      if (step.predicate.slot != in_.decision.word || step.predicate.offset != 0 ||
          step.predicate.expect != kCommit)
        return error(Code::kInternal, "step {} ({}) commits whatever is decided", i, step_name(i));
    }
    return ok_status();
  }

  // Messages that one native collective moves.
  static bool same_call(const Step& a, const Step& b) {
    return a.message() != nullptr && b.message() != nullptr && a.message()->native != nullptr &&
           a.message()->native == b.message()->native;
  }

  // The first message of a native collective stands for all of them: they complete together.
  uint32_t first_of_call(uint32_t i) const {
    while (i > 0 && same_call(plan_->steps[i - 1], plan_->steps[i])) --i;
    return i;
  }

  std::string step_name(uint32_t i) const {
    const Step& step = plan_->steps[i];
    if (const KernelStep* kernel = step.kernel()) return kernel_name(kernel->id);
    if (const MessageStep* message = step.message())
      return fmt::format("{} {}", message->is_send ? "send to" : "receive from", message->peer);
    return step.copy() != nullptr ? "copy" : "await";
  }

  void store_order(const std::vector<std::vector<uint32_t>>& waits) {
    const size_t n = waits.size();
    StepOrder& order = plan_->order;
    order.pred_begin.assign(n + 1, 0);
    order.succ_begin.assign(n + 1, 0);
    for (size_t i = 0; i < n; ++i) {
      order.pred_begin[i + 1] = order.pred_begin[i] + static_cast<uint32_t>(waits[i].size());
      for (uint32_t w : waits[i]) {
        order.predecessors.push_back(w);
        ++order.succ_begin[w + 1];
      }
    }
    for (size_t i = 0; i < n; ++i) order.succ_begin[i + 1] += order.succ_begin[i];
    order.successors.resize(order.predecessors.size());
    std::vector<uint32_t> at(order.succ_begin.begin(), order.succ_begin.end() - 1);
    for (uint32_t i = 0; i < n; ++i) {
      for (uint32_t w : waits[i]) order.successors[at[w]++] = i;
    }
    order.needs_event.assign(n, 0);
    for (uint32_t i = 0; i < n; ++i) order.needs_event[i] = observed_outside_lane(i);
  }

  // True if something other than later work of the same lane waits for the step, or nothing does
  // (then the run's end does), or the host compares what it brings.
  bool observed_outside_lane(uint32_t i) const {
    const Step& step = plan_->steps[i];
    if (!on_lane(*plan_, step) || step.await() != nullptr) return false;
    const std::span<const uint32_t> successors = plan_->order.succs(i);
    if (successors.empty() || expectation(step) != nullptr) return true;
    for (uint32_t s : successors) {
      const Step& next = plan_->steps[s];
      if (!on_lane(*plan_, next) || next.lane != step.lane) return true;
    }
    return false;
  }

  void index_messages() {
    PlanMessages& messages = plan_->messages;
    messages.receives.resize(static_cast<size_t>(messages.descriptors) * messages.comm_size);
    plan_->traffic.peers.resize(messages.comm_size);
    std::map<std::tuple<uint32_t, uint32_t, uint8_t>, std::vector<uint32_t>> groups;
    for (uint32_t i = 0; i < plan_->steps.size(); ++i) {
      MessageStep* const message = std::get_if<MessageStep>(&plan_->steps[i].work);
      if (message == nullptr) continue;
      message->lowered.transfer = messages.transfers++;
      count_traffic(*message);
      if (!message->is_send) add_receive(*message);
      const uint8_t link = message->lowered.link;
      if (messages.links[link].matching == Matching::kByOrder)
        groups[{message->issue_round, slices_.of(*message), link}].push_back(i);
    }
    for (auto& receives : messages.receives) {
      std::ranges::sort(receives, {}, &RoundReceives::round);
    }
    for (const PeerTraffic& t : plan_->traffic.peers) plan_->traffic.total += t;
    for (auto& [key, steps] : groups) {
      const auto [round, slice, link] = key;
      add_group(link, slice, std::move(steps));
    }
  }

  // What a link that matches by order issues together: a round of the operation, or a slice of it.
  void add_group(uint8_t link, uint32_t slice, std::vector<uint32_t> steps) {
    std::vector<IssueGroup>& groups = plan_->messages.groups;
    for (const uint32_t i : steps) {
      std::get<MessageStep>(plan_->steps[i].work).lowered.group =
          static_cast<uint32_t>(groups.size());
    }
    const auto named = std::ranges::lower_bound(plan_->awaits, steps.back());
    const uint32_t inputs = sliced_ ? slice : static_cast<uint32_t>(named - plan_->awaits.begin());
    groups.push_back({link, std::move(steps), inputs});
  }

  void add_receive(const MessageStep& message) {
    PlanMessages& messages = plan_->messages;
    auto& rounds =
        messages
            .receives[static_cast<size_t>(message.descriptor) * messages.comm_size + message.peer];
    auto it = std::ranges::find(rounds, message.round, &RoundReceives::round);
    if (it == rounds.end()) it = rounds.insert(rounds.end(), RoundReceives{message.round, 0, 0});
    ++it->count;
    it->largest = std::max(it->largest, message.data.bytes);
  }

  void count_traffic(const MessageStep& message) {
    PeerTraffic& t = plan_->traffic.peers[message.peer];
    const uint64_t bytes = message.data.bytes;
    const Transport* const headers = target_.links[message.lowered.link].headers;
    const uint64_t header = headers != nullptr ? headers->header_bytes(bytes) : 0;
    const bool payload = message.message_class == MessageClass::kPayload;
    if (message.is_send) {
      (payload ? t.payload_bytes_sent : t.metadata_bytes_sent) += bytes;
      t.header_bytes_sent += header;
      ++t.messages_sent;
    } else {
      (payload ? t.payload_bytes_received : t.metadata_bytes_received) += bytes;
      t.header_bytes_received += header;
      ++t.messages_received;
    }
  }

  LogicalPlan in_;
  LoweringTarget target_;
  std::shared_ptr<Plan> plan_;
  std::vector<uint32_t> first_;                  // first lowered step of each logical step
  std::map<uint32_t, uint32_t> late_addresses_;  // by slot: the step that copies its address
  // The step that makes the decision, or the guard behind it.
  uint32_t decision_ = kNoStep;
  const MessageSlices slices_;
  bool sliced_ = false;  // they are kept back
};

}  // namespace

PeerTraffic& PeerTraffic::operator+=(const PeerTraffic& o) {
  payload_bytes_sent += o.payload_bytes_sent;
  payload_bytes_received += o.payload_bytes_received;
  metadata_bytes_sent += o.metadata_bytes_sent;
  metadata_bytes_received += o.metadata_bytes_received;
  header_bytes_sent += o.header_bytes_sent;
  header_bytes_received += o.header_bytes_received;
  messages_sent += o.messages_sent;
  messages_received += o.messages_received;
  return *this;
}

Result<std::shared_ptr<const Plan>> lower(LogicalPlan logical, const LoweringTarget& target) {
  return Lowering(std::move(logical), target).run();
}

}  // namespace sotto
