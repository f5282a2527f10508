#include "core/plan/builder.h"

#include <algorithm>
#include <set>
#include <utility>

namespace sotto {

OperandRef whole(uint32_t slot, Access access, uint64_t offset, uint64_t bytes) {
  OperandRef op;
  op.slot = slot;
  op.access = access;
  op.offset = offset;
  op.bytes = bytes;
  return op;
}

OperandRef flat(uint32_t slot, Access access, uint32_t unit_bits, uint64_t base, uint64_t offset) {
  OperandRef op;
  op.slot = slot;
  op.access = access;
  op.footprint = Footprint::kFlat;
  op.unit_bits = unit_bits;
  op.base = base;
  op.offset = offset;
  return op;
}

OperandRef list(uint32_t first_slot, Access access, uint32_t unit_bits) {
  OperandRef op;
  op.slot = first_slot;
  op.access = access;
  op.footprint = Footprint::kList;
  op.unit_bits = unit_bits;
  return op;
}

OperandRef target(uint32_t first_slot, Access access, uint32_t unit_bits) {
  OperandRef op = list(first_slot, access, unit_bits);
  op.footprint = Footprint::kTarget;
  return op;
}

OperandRef blocks(uint32_t slot, Access access, uint32_t unit_bits) {
  OperandRef op;
  op.slot = slot;
  op.access = access;
  op.footprint = Footprint::kBlocks;
  op.unit_bits = unit_bits;
  return op;
}

OperandRef scales(uint32_t slot, Access access) {
  OperandRef op;
  op.slot = slot;
  op.access = access;
  op.footprint = Footprint::kScale;
  return op;
}

OperandRef message_scales(uint32_t slot, Access access) {
  OperandRef op = scales(slot, access);
  op.footprint = Footprint::kMessage;
  return op;
}

OperandRef absent() { return {}; }

Step undo_of(KernelStep call) {
  call.id = kernel_spec(call.id).undo;
  const std::span<const OperandSpec> specs = kernel_spec(call.id).operands;
  for (size_t k = 0; k < specs.size(); ++k) {
    if (specs[k].access == Access::kNone) call.operands[k] = absent();
    call.operands[k].access = specs[k].access;
  }
  Step step;
  step.work = std::move(call);
  return step;
}

uint32_t PlanBuilder::bound_list(std::span<const uint64_t> bytes) {
  const auto first = static_cast<uint32_t>(plan_.slots.size());
  for (uint64_t b : bytes) plan_.slots[bound(b)].user = true;
  return first;
}

void PlanBuilder::alias(uint32_t slot, uint32_t of, uint64_t offset) {
  plan_.slots[slot].alias_of = of;
  plan_.slots[slot].alias_offset = offset;
}

void PlanBuilder::committed(uint32_t first, uint64_t n) {
  for (uint64_t i = 0; i < n; ++i) plan_.slots[first + i].committed = true;
}

uint32_t PlanBuilder::fill(Region region, uint8_t value, KernelOptions options) {
  return add_step(detached_fill(region, value).work, std::move(options));
}

Step PlanBuilder::detached_fill(Region region, uint8_t value) {
  KernelStep fill = call_of<kernels::Fill>(
      {.out = whole(region.slot, Access::kWrite, region.offset, region.bytes)}, {},
      FillArgs{value});
  fill.fill_bytes = region.bytes;
  Step step;
  step.work = std::move(fill);
  return step;
}

uint32_t PlanBuilder::copy(Region destination, Region source, KernelOptions options) {
  return add_step(CopyStep{source, destination}, std::move(options));
}

void PlanBuilder::send(int32_t peer, Region data, uint32_t round, MessageClass message_class) {
  add_message(true, peer, data, round, message_class);
}

void PlanBuilder::recv(int32_t peer, Region data, uint32_t round, MessageClass message_class) {
  last_receive_ = steps();
  add_message(false, peer, data, round, message_class);
}

uint32_t PlanBuilder::await(std::span<const uint32_t> slots) {
  add_step(AwaitStep{{slots.begin(), slots.end()}, {}}, {});
  return awaits_++;
}

void PlanBuilder::expect(Expectation expected) {
  std::get<MessageStep>(plan_.steps.back().work).expected =
      std::make_shared<const Expectation>(std::move(expected));
}

void PlanBuilder::elide_anti_dependency(uint32_t send) {
  std::get<MessageStep>(plan_.steps[last_receive_].work).elided_anti_dependency = send;
}

void PlanBuilder::begin_descriptor(uint16_t index, bool together) {
  if (!together) issue_base_ += next_round_;
  next_round_ = 0;
  descriptor_ = index;
  plan_.descriptors = std::max<uint16_t>(plan_.descriptors, static_cast<uint16_t>(index + 1));
}

Status PlanBuilder::within(std::span<const RankGroup> groups, int32_t me,
                           const EmitForGroup& emit) {
  const uint32_t first = next_round_;
  const auto mine = std::ranges::find_if(
      groups, [me](const RankGroup& group) { return std::ranges::find(group, me) != group.end(); });
  std::set<size_t> counted{0};  // sizes
  if (mine != groups.end()) {
    const auto place = std::ranges::find(*mine, me) - mine->begin();
    SOTTO_TRY(emit_for(*mine, static_cast<int32_t>(place), emit));
    counted.insert(mine->size());
  }
  uint32_t end = next_round_;
  next_round_ = first;
  for (const RankGroup& group : groups) {
    if (!counted.insert(group.size()).second) continue;
    SOTTO_ASSIGN(const uint32_t theirs, end_of_rounds([&] { return emit_for(group, 0, emit); }));
    end = std::max(end, theirs);
  }
  reserve_rounds(end);
  return ok_status();
}

Status PlanBuilder::emit_for(const RankGroup& group, int32_t rank, const EmitForGroup& emit) {
  RankGroup ranks;
  for (const int32_t r : group) ranks.push_back(comm_rank(r));
  std::swap(group_, ranks);
  Status status = emit(rank, static_cast<int32_t>(group.size()));
  std::swap(group_, ranks);
  return status;
}

Result<uint32_t> PlanBuilder::end_of_rounds(const std::function<Status()>& emit) {
  std::vector<Step> steps;
  std::swap(steps, plan_.steps);  // not copied
  PlanBuilder before = *this;
  const Status status = emit();
  const uint32_t end = next_round_;
  *this = std::move(before);
  std::swap(steps, plan_.steps);
  SOTTO_TRY(status);
  return end;
}

uint32_t PlanBuilder::add_slot(Slot slot) {
  plan_.slots.push_back(slot);
  return static_cast<uint32_t>(plan_.slots.size() - 1);
}

uint32_t PlanBuilder::add_step(StepWork work, KernelOptions options) {
  Step step;
  step.phase = options.phase;
  step.lane = options.lane;
  step.predicate = options.predicate;
  step.after = std::move(options.after);
  step.work = std::move(work);
  plan_.steps.push_back(std::move(step));
  return steps() - 1;
}

void PlanBuilder::add_message(bool is_send, int32_t peer, Region data, uint32_t round,
                              MessageClass message_class) {
  MessageStep message;
  message.is_send = is_send;
  message.message_class = message_class;
  message.stage = message_class == MessageClass::kPayload ? stage_ : Stage::kOther;
  message.descriptor = descriptor_;
  message.peer = comm_rank(peer);
  message.round = round;
  message.segment = segments_[{descriptor_, round, message.peer, is_send}]++;
  message.issue_round = issue_base_ + round;
  message.data = data;
  message.native = native_;
  reserve_rounds(round + 1);
  add_step(std::move(message), {});
}

}  // namespace sotto
