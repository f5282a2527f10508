// Outer steps behind the steps of an optimizer, where the configuration has "sotto.outer". Steps of
// the optimizer are local then; what many of them have changed is averaged (core/outer).
//
// Threads: as Optimizer.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "core/config/config.h"
#include "core/group/comm.h"
#include "core/optim/parameter_set.h"
#include "core/optim/snapshot.h"

namespace sotto {

class OuterSteps {
 public:
  virtual ~OuterSteps() = default;

  // Why no step with this learning rate can be made now.
  virtual Status check(double lr) const = 0;
  // Whether something happens after the next step. If not, passed() counts it when it is in flight.
  virtual bool due() const = 0;
  virtual void passed(double lr) = 0;
  // Whether the next step averages gradients over ranks, since outer steps have not begun.
  virtual bool averages_gradients() const = 0;
  // Comes after a step with learning rate `lr`, which is in flight. The operation is what the
  // caller waits for. inner: it ends well, unless the comm or the device has failed (skipped).
  virtual Result<OpRef> step(OpRef inner, double lr, const CallOptions& options) = 0;
  // The step in flight, which step() follows, has changed nothing on this rank: the operation of
  // step() ends with `why`. Driver.
  virtual void skipped(const Status& why) noexcept = 0;
  virtual bool busy() const = 0;

  virtual Status set_parameters(std::span<const ParameterPlace> params,
                                std::span<const ParameterPlace> copies) = 0;
  // What the next step sends.
  virtual Result<PeerTraffic> next_traffic() = 0;
  virtual uint64_t state_bytes() const = 0;

  // Everything that this rank has, which waits for averages under way.
  // errors: error feedback that belongs to it. UNSUPPORTED: kMean where there is any.
  virtual Result<std::vector<std::byte>> state(StateErrors errors) = 0;
  // INVALID_ARGUMENT: not such a state. own: of this rank, which continues bit for bit; else of any
  // rank of any number: parameters become the anchor.
  virtual Status check_state(std::span<const std::byte> state, bool own) const = 0;
  // One that has been checked, after parameters have been restored.
  virtual Status restore(std::span<const std::byte> state, bool own) = 0;
  // Parameters have been replaced: everything begins anew with them.
  virtual Status restart() = 0;
};

// Collective: as Optimizer::create.
using MakeOuterSteps = std::function<Result<std::shared_ptr<OuterSteps>>(
    const std::shared_ptr<Comm>&, const Config&, std::vector<ParamSpec>, std::shared_ptr<Device>)>;

}  // namespace sotto
