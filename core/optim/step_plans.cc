#include "core/optim/step_plans.h"

#include <cstring>
#include <utility>
#include <vector>

#include "core/base/hash.h"

namespace sotto {

uint64_t LateGradients::hash() const {
  std::vector<uint64_t> words{observes};
  for (const std::vector<uint32_t>& input : inputs) {
    words.push_back(input.size());
    words.insert(words.end(), input.begin(), input.end());
  }
  return hash64(words.data(), words.size() * sizeof(uint64_t));
}

Status Accumulation::check_none(const Comm& comm) const {
  if (done == 0 || !comm.failure().ok()) return ok_status();
  return invalid_state("{} micro-batches are accumulated: possible after the step that takes them",
                       done);
}

Result<PreparedStep*> StepPlans::get(const StepVariant& variant, LateSteps* late) {
  if (std::exchange(late_stage_, algorithm_.late()) != algorithm_.late()) clear();
  if (late != nullptr && std::exchange(late->prepared_for, made_for_) != made_for_) {
    late->prepared.clear();
    late->scratch.reset();
  }
  PreparedSteps& steps = late == nullptr ? prepared_ : late->prepared;
  const std::tuple key(variant.number, variant.together, accumulated(variant));
  if (const auto it = steps.find(key); it != steps.end()) return &it->second;
  const std::shared_ptr<Device>& device = d_.access.device();
  std::shared_ptr<ScratchPool>& scratch = late == nullptr ? scratch_ : late->scratch;
  if (scratch == nullptr) scratch = std::make_shared<ScratchPool>(device);
  SOTTO_ASSIGN(PreparedStep p, make(variant, accumulated(variant), device, scratch, late));
  return &steps.insert_or_assign(key, std::move(p)).first->second;
}

Result<PreparedStep> StepPlans::make(const StepVariant& variant, bool accumulated,
                                     const std::shared_ptr<Device>& device,
                                     std::shared_ptr<ScratchPool> scratch,
                                     const LateSteps* late) const {
  const Comm& comm = late == nullptr ? d_.ranks(variant.together) : *late->comm;
  StepShape shape = d_.step_shape(comm);
  if (late != nullptr) shape.average.late = &late->gradients;
  shape.loss_scaled = scaler_.enabled();
  if (algorithm_.compresses_gradients() && !shape.alone()) shape.average.codec = d_.codec;
  shape.accumulated = accumulated;
  shape.batch_elements = batch_elements_of(device->caps());
  StepPlan step = accumulates(variant) ? build_accumulation(shape, variant == kFirstAccumulation)
                                       : algorithm_.build(variant, shape);
  PreparedStep p;
  p.slots = std::move(step.slots);
  p.verdict = step.verdict;
  SOTTO_ASSIGN(p.plan, comm.prepare(std::move(step.plan), device, std::move(scratch)));
  return p;
}

void StepPlans::bind(Run& run, const PreparedStep& p, const StepVariant& variant) const {
  const ParameterSet& params = d_.parameters;
  const StepSlots& s = p.slots;
  auto* sums = static_cast<std::byte*>(d_.arrays.data("micro_sums"));
  for (uint32_t t = 0; t < params.size(); ++t) {
    run.bases[s.params + t] = params[t].param;
    run.bases[s.grads + t] = const_cast<void*>(params[t].grad);
    if (s.copies != kNoSlot) run.bases[s.copies + t] = params[t].copy;
    if (s.sums != kNoSlot) run.bases[s.sums + t] = sums;
    sums += params[t].count * 4;
  }
  for (const ArrayBinding& binding : s.arrays) {
    const StateArray array = d_.arrays[binding.name];
    run.bases[binding.elements] = array.elements;
    if (binding.exponents != kNoSlot) run.bases[binding.exponents] = array.exponents;
  }
  if (d_.codec) d_.compressed.bind(run, s.codec);
  if (s.current_bits != kNoSlot)
    d_.compressed.bind_current(run, s.current_bits, s.current_messages);
  for (const ScalarsArray& array : s.scalars) {
    auto* at = static_cast<std::byte*>(run.bases[array.host]);
    for (size_t g = 0; g < d_.groups.size(); ++g, at += array.type->bytes)
      algorithm_.write_scalars(variant, g, ScalarsRef(*array.type, at));
    if (!d_.layout->padding().empty())
      algorithm_.write_padding_scalars(ScalarsRef(*array.type, at));
  }
  if (s.step_scalars == kNoSlot) return;
  const StepScalars step{1 / scaler_.scale(), 1 / static_cast<double>(accumulation_.done + 1),
                         d_.next_t()};
  std::memcpy(run.bases[s.step_scalars], &step, sizeof step);
}

void StepPlans::clear() {
  prepared_.clear();
  scratch_.reset();
  ++made_for_;
}

uint64_t StepPlans::bytes() const {
  uint64_t bytes = scratch_ == nullptr ? 0 : scratch_->held_bytes();
  for (const auto& [variant, step] : prepared_) bytes += step.plan->held_bytes();
  return bytes;
}

}  // namespace sotto
