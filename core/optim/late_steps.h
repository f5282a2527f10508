// Steps of an optimizer that begin before their gradients are there (core/overlap), and the plans
// of them.
//
// Threads: as Optimizer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <utility>

#include "core/group/comm.h"
#include "core/optim/step_plan.h"

namespace sotto {

struct PreparedStep {
  std::shared_ptr<PreparedPlan> plan;
  StepSlots slots;
  StepVerdict verdict;
};
// By the number of the variant; bool: with micro-batches.
using PreparedSteps = std::map<std::pair<uint8_t, bool>, PreparedStep>;

// Who says which gradients are there, and when nothing more comes.
class RoundOwner {
 public:
  virtual ~RoundOwner() = default;
  // Where the operation, which is being started, reads what this rank tells the others, and the
  // order of its gradients if ranks learn that (else null).
  virtual void bound(RoundMessage* told, uint32_t* order) = 0;
  // What ranks have told each other, by rank, and the order of rank 0 if ranks learn it; no bytes
  // where the operation has not come so far. Driver.
  virtual void ended(Status& status, std::span<const std::byte> messages,
                     std::span<const std::byte> order) noexcept = 0;
};

struct LateSteps {
  LateGradients gradients;
  // Of the optimizer's ranks, for these steps alone: gradients become ready beside collectives of
  // the optimizer's comm.
  std::shared_ptr<Comm> comm;
  PreparedSteps prepared;  // the optimizer's
  uint64_t prepared_for = 0;
};

}  // namespace sotto
