#include "core/engine/run.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>

namespace sotto {

PreparedPlan::PreparedPlan(std::shared_ptr<const Plan> plan, std::shared_ptr<Device> device,
                           std::shared_ptr<ScratchPool> scratch)
    : plan_(std::move(plan)),
      device_(std::move(device)),
      scratch_(scratch != nullptr ? scratch : std::make_shared<ScratchPool>(device_)),
      shares_scratch_(scratch != nullptr) {}

PreparedPlan::~PreparedPlan() {
  for (auto& run : free_) device_->free_host(run->host, plan_->arenas.host);
}

Result<std::shared_ptr<PreparedPlan>> PreparedPlan::make(std::shared_ptr<const Plan> plan,
                                                         std::shared_ptr<Device> device,
                                                         std::shared_ptr<ScratchPool> scratch) {
  std::shared_ptr<PreparedPlan> prepared(
      new PreparedPlan(std::move(plan), std::move(device), std::move(scratch)));
  const Plan& p = *prepared->plan_;
  if (p.calls == 0) return prepared;
  std::vector<KernelCall> calls;
  std::deque<std::vector<Operand>> operands;
  const auto add = [&](const Step& step) {
    const KernelStep* const kernel = step.kernel();
    if (kernel == nullptr) return;
    KernelCall call = constant_call(*kernel);
    // Which operands there are is constant, and a device may ask; where they are is not.
    std::vector<Operand>& present = operands.emplace_back(kernel->operands.size());
    for (size_t i = 0; i < present.size(); ++i) {
      if (kernel->operands[i].slot != kNoSlot) present[i].data = prepared.get();
    }
    call.operands = present;
    calls.push_back(call);
  };
  for (const Step& step : p.steps) add(step);
  for (const UndoStep& undo : p.undo) add(undo.step);
  SOTTO_ASSIGN(prepared->tables_, prepared->device_->prepare(calls));
  return prepared;
}

KernelCall constant_call(const KernelStep& kernel) {
  KernelCall call;
  call.id = kernel.id;
  call.pieces = kernel.pieces;
  call.args = kernel.args;
  call.bytes = kernel.fill_bytes;
  return call;
}

Result<std::unique_ptr<Run>> PreparedPlan::acquire() {
  std::unique_ptr<Run> run;
  {
    std::lock_guard lock(mutex_);
    if (!free_.empty()) {
      run = std::move(free_.back());
      free_.pop_back();
    }
  }
  if (run == nullptr) {
    SOTTO_ASSIGN(run, make_run());
  }
  const Plan& p = *plan_;
  Result<ScratchBlock> block = scratch_->take(p.arenas.scratch);
  if (!block.ok()) {
    const std::lock_guard lock(mutex_);
    free_.push_back(std::move(run));
    return block.status();
  }
  bind_scratch(*run, *block);
  run->steps.reset(p);
  std::fill(run->events.begin(), run->events.end(), StepEvent{});
  for (Run::Announce& a : run->announce) {
    a.round_index = 0;
    std::fill(a.posted.begin(), a.posted.end(), 0u);
  }
  run->arrivals.assign(p.awaits.size(), {});
  run->receives_posted = false;
  return run;
}

Result<std::unique_ptr<Run>> PreparedPlan::make_run() {
  auto run = std::make_unique<Run>();
  const Plan& p = *plan_;
  run->plan = plan_;
  SOTTO_ASSIGN(run->host, device_->alloc_host(p.arenas.host));
  run->bases.assign(p.slots.size(), nullptr);
  for (size_t s = 0; s < p.slots.size(); ++s) {
    const Slot& slot = p.slots[s];
    if (slot.alias_of != kNoSlot) continue;
    if (slot.kind == SlotKind::kHost)
      run->bases[s] = static_cast<std::byte*>(run->host) + slot.arena_offset;
    if (slot.kind == SlotKind::kConstant) run->bases[s] = const_cast<void*>(slot.constant);
  }
  if (!device_->caps().synchronous) run->events.resize(p.steps.size());
  run->transfers.resize(p.messages.transfers);
  run->descriptors.resize(p.messages.descriptors);
  const auto& receives = p.messages.receives;
  run->announce.resize(receives.size());
  for (size_t i = 0; i < receives.size(); ++i) run->announce[i].posted.resize(receives[i].size());
  std::lock_guard lock(mutex_);
  ++made_;
  return run;
}

void PreparedPlan::bind_scratch(Run& run, const ScratchBlock& block) const {
  const bool elsewhere = run.scratch.memory != block.memory;
  run.scratch = block;
  if (!elsewhere) return;
  for (size_t s = 0; s < plan_->slots.size(); ++s) {
    const Slot& slot = plan_->slots[s];
    if (slot.alias_of == kNoSlot && slot.kind == SlotKind::kScratch)
      run.bases[s] = static_cast<std::byte*>(block.memory) + slot.arena_offset;
  }
}

void PreparedPlan::give_back(std::unique_ptr<Run> run) {
  scratch_->give_back(run->scratch);
  std::lock_guard lock(mutex_);
  free_.push_back(std::move(run));
}

uint64_t PreparedPlan::held_bytes() const {
  std::lock_guard lock(mutex_);
  return made_ * plan_->arenas.host + (shares_scratch_ ? 0 : scratch_->held_bytes());
}

void Run::abort() const {
  const uint32_t slot = plan->decision.aborted;
  if (slot != kNoSlot) std::atomic_ref(*static_cast<uint32_t*>(bases[slot])).store(kSkipAborted);
}

void bind_input(Run& run, uint32_t input, std::span<void* const> memory) {
  const Plan& plan = *run.plan;
  const AwaitStep& await = *plan.steps[plan.awaits[input]].await();
  const auto put = [&](uint32_t slot, void* address) {
    run.bases[slot] = address;
    if (plan.addresses.late != kNoSlot)
      static_cast<void**>(run.bases[plan.addresses.late])[slot] = address;
  };
  for (size_t i = 0; i < await.slots.size(); ++i) {
    const uint32_t slot = await.slots[i];
    put(slot, memory.empty() ? run.bases[slot] : memory[i]);
  }
  for (const uint32_t s : await.aliases) {
    const Slot& alias = plan.slots[s];
    put(s, static_cast<std::byte*>(run.bases[alias.alias_of]) + alias.alias_offset);
  }
}

void finish_binding(Run& run) {
  const std::vector<Slot>& slots = run.plan->slots;
  for (size_t s = 0; s < slots.size(); ++s) {
    if (slots[s].alias_of == kNoSlot) continue;
    auto* const of = static_cast<std::byte*>(run.bases[slots[s].alias_of]);
    run.bases[s] = of == nullptr ? nullptr : of + slots[s].alias_offset;  // null: an input
  }
  const uint32_t aborted = run.plan->decision.aborted;
  if (aborted != kNoSlot) std::memset(run.bases[aborted], 0, 4);
  const uint32_t addresses = run.plan->addresses.host;
  if (addresses != kNoSlot)
    std::memcpy(run.bases[addresses], run.bases.data(), slots[addresses].bytes);
}

}  // namespace sotto
