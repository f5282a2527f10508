#include "core/engine/run.h"

#include <algorithm>

namespace sotto {

PreparedPlan::PreparedPlan(std::shared_ptr<const Plan> plan, std::shared_ptr<Device> device)
    : plan_(std::move(plan)), device_(std::move(device)) {}

PreparedPlan::~PreparedPlan() {
  for (auto& run : free_) device_->free(run->scratch, std::max<uint64_t>(plan_->scratch_bytes, 1));
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
    SOTTO_ASSIGN(run, make());
  }
  const Plan& p = *plan_;
  for (size_t i = 0; i < p.steps.size(); ++i)
    run->pending[i] = p.pred_begin[i + 1] - p.pred_begin[i];
  std::fill(run->progress.begin(), run->progress.end(), StepProgress::kWaiting);
  std::fill(run->events.begin(), run->events.end(), EventId{0});
  for (size_t g = 0; g < p.groups.size(); ++g)
    run->group_pending[g] = static_cast<uint32_t>(p.groups[g].size());
  for (Run::Announce& a : run->announce) {
    a.round_index = 0;
    std::fill(a.posted.begin(), a.posted.end(), 0u);
  }
  run->receives_posted = false;
  run->done_steps = 0;
  run->device_steps_in_flight = 0;
  return run;
}

Result<std::unique_ptr<Run>> PreparedPlan::make() {
  auto run = std::make_unique<Run>();
  const Plan& p = *plan_;
  run->plan = plan_;
  SOTTO_ASSIGN(run->scratch, device_->alloc(std::max<uint64_t>(p.scratch_bytes, 1)));
  run->host.resize(p.host_bytes + 128);
  const auto address = reinterpret_cast<uintptr_t>(run->host.data());
  run->host_base = run->host.data() + ((128 - address % 128) % 128);
  run->bases.assign(p.slots.size(), nullptr);
  for (size_t s = 0; s < p.slots.size(); ++s) {
    const Slot& slot = p.slots[s];
    if (slot.alias_of != kNoSlot) continue;
    if (slot.kind == SlotKind::kScratch)
      run->bases[s] = static_cast<std::byte*>(run->scratch) + slot.arena_offset;
    if (slot.kind == SlotKind::kHost) run->bases[s] = run->host_base + slot.arena_offset;
    if (slot.kind == SlotKind::kConstant) run->bases[s] = const_cast<void*>(slot.constant);
  }
  run->pending.resize(p.steps.size());
  run->progress.resize(p.steps.size());
  if (!device_->caps().synchronous) run->events.resize(p.steps.size());
  run->transfers.resize(p.transfers);
  run->postings.resize(p.postings);
  run->group_pending.resize(p.groups.size());
  run->announce.resize(p.receives.size());
  for (size_t i = 0; i < p.receives.size(); ++i)
    run->announce[i].posted.resize(p.receives[i].size());
  std::lock_guard lock(mutex_);
  ++made_;
  return run;
}

void PreparedPlan::give_back(std::unique_ptr<Run> run) {
  std::lock_guard lock(mutex_);
  free_.push_back(std::move(run));
}

uint64_t PreparedPlan::held_bytes() const {
  std::lock_guard lock(mutex_);
  return made_ * (plan_->scratch_bytes + plan_->host_bytes);
}

void bind_aliases(Run& run) {
  const std::vector<Slot>& slots = run.plan->slots;
  for (size_t s = 0; s < slots.size(); ++s) {
    if (slots[s].alias_of == kNoSlot) continue;
    run.bases[s] = static_cast<std::byte*>(run.bases[slots[s].alias_of]) + slots[s].alias_offset;
  }
}

}  // namespace sotto
