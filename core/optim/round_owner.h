// Who says which gradients of an operation are there, and when nothing more comes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "core/base/status.h"
#include "core/plan/late_inputs.h"

namespace sotto {

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

}  // namespace sotto
