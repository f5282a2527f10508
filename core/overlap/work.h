// What the operation of a round does with the gradients that arrive: it averages them
// (core/overlap/average.h), or it is a step of an optimizer (core/overlap/step.h).
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "core/base/status.h"
#include "core/engine/engine.h"
#include "core/group/comm.h"
#include "core/optim/round_owner.h"
#include "core/overlap/buckets.h"

namespace sotto {

// What this rank sends in a round.
struct RoundTraffic {
  PeerTraffic total;
  // Payload of gradients that needs none of the last bucket.
  uint64_t early_payload_bytes = 0;

  static RoundTraffic of(const Plan& plan, size_t buckets);
};

// Threads: one at a time.
class RoundWork {
 public:
  virtual ~RoundWork() = default;

  // That rounds run on: a duplicate, which is given before anything else.
  virtual const std::shared_ptr<Comm>& comm() const = 0;
  virtual void set_comm(std::shared_ptr<Comm> comm) = 0;
  // Where gradients lie from now on, unless a round is told other places.
  virtual void locate(std::vector<OverlapTensor>* tensors) const = 0;
  // The next rounds have these buckets. observes: ranks learn in which order gradients became ready
  // on rank 0. Collective where error feedback has to move. On error nothing has changed.
  virtual Status use(const std::vector<OverlapBucket>& buckets, bool observes) = 0;
  // Input b is bucket b; the last one is what the owner tells.
  virtual Result<OpRef> launch(const CallOptions& options, ReduceOp reduce,
                               std::shared_ptr<RoundOwner> owner) = 0;
  // Of the round that began last, or of the next one if none has.
  virtual RoundTraffic traffic() const = 0;
  // Plans and error feedback that are its own.
  virtual uint64_t bytes() const = 0;
  // Why nothing is sent before all gradients are there, if that is so.
  virtual std::string_view why_not_hidden() const = 0;
  // What a round leaves that a rank has withdrawn from.
  virtual std::string_view leaves() const = 0;
};

}  // namespace sotto
