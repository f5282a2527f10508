// An optimizer over registered parameters, of a type in core/config/optimizers.def. One step is one
// operation: gradients are averaged (or what the compressed stages average is), clipped, applied;
// either all of it happens or nothing. What makes the types different is their Algorithm.
//
// Threads: one at a time per optimizer. While a step is in flight everything but step's own
// operation answers BUSY.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/optim/algorithm.h"
#include "core/optim/loss_scale.h"
#include "core/optim/named_arrays.h"
#include "core/optim/optimizer_data.h"
#include "core/optim/outer_steps.h"
#include "core/optim/round_owner.h"
#include "core/optim/snapshot.h"
#include "core/optim/step_plans.h"

namespace sotto {

struct OptimInfo {
  int32_t stage = 0;        // 0: full precision, 1: compressed (0/1 Adam: variance frozen)
  uint64_t step = 0;        // updates done
  uint64_t state_step = 0;  // step + step_offset for the 1-bit types
  double lr = 0;            // of group 0 in the next step
  double grad_norm = std::numeric_limits<double>::quiet_NaN();
  uint64_t payload_bytes_next_step = 0;
  uint64_t header_bytes_next_step = 0;
  uint64_t state_bytes = 0;
  uint64_t skipped_steps = 0;
  double loss_scale = 1;       // what the gradients of the next step have to be multiplied with
  uint64_t micro_batches = 0;  // accumulated for the next step
};

// Opens an array of a state for reading, from its beginning.
using ArraySource = std::function<Result<FloatSource>(std::string_view)>;

class Optimizer : public std::enable_shared_from_this<Optimizer> {
 public:
  // Collective: ranks compare what they register and, as sotto.initial_parameters says, the values.
  // If one of them refuses, all of them end with its code and text, and the comm stays healthy.
  // `config_text`: JSON as in parse_config. device: where the memory of all parameters is; null:
  // the context's. refused: what the caller has found wrong itself; the rest is then not looked at.
  // make_outer: for a configuration with "sotto.outer", whose steps are local; UNSUPPORTED without.
  static Result<std::shared_ptr<Optimizer>> create(std::shared_ptr<Comm> comm,
                                                   std::string_view config_text,
                                                   std::vector<ParamSpec> params,
                                                   std::shared_ptr<Device> device = nullptr,
                                                   const Status& refused = {},
                                                   const MakeOuterSteps& make_outer = nullptr);

  // Adds the gradients of a micro-batch to those that the next step averages. INVALID_STATE if
  // that would be more than gradient_accumulation_steps.
  Result<OpRef> accumulate(const CallOptions& options);
  // INVALID_STATE if micro-batches were accumulated, but not as many as
  // gradient_accumulation_steps, this one included. If the call's stream is being captured into a
  // graph, the step is recorded and does not happen (replay). With outer steps the operation ends
  // when parameters may be used; averages go on behind it.
  Result<OpRef> step(const CallOptions& options);
  // A step whose gradients arrive as inputs of its operation, in the order of `late.gradients`, and
  // then the owner's message; `late` is of this optimizer's ranks and outlives the step. Scalars
  // are those of now. CANCELLED if a rank has withdrawn. INVALID_STATE: the stream is captured, or
  // there are outer steps.
  Result<OpRef> begin(const CallOptions& options, const std::shared_ptr<LateSteps>& late,
                      std::shared_ptr<RoundOwner> owner);
  // A recorded step of this optimizer happens with the next launch of its graph. INVALID_STATE: the
  // next step is not like the recorded one, or has other memory; see Engine::replay.
  Status replay(const OpRef& op);
  // "lr", "beta1" and "beta2" (NaN: the schedule's or the configuration's again), "weight_decay",
  // "eps", "momentum", "max_coeff", "min_coeff", group -1: all; "loss_scale",
  // "scheduler_iteration" (as LrSchedule::restore), group -1.
  Status set(std::string_view name, int32_t group, double value);
  // Where the gradients of each parameter lie from now on, in order of registration; of the
  // registered type and count. On error nothing has changed.
  Status set_gradients(std::span<const GradientPlace> grads);
  // Where parameters and model copies lie from now on, in order of registration; of the registered
  // types and counts. copies: empty: they stay where they are. On error nothing has changed.
  Status set_parameters(std::span<const ParameterPlace> params,
                        std::span<const ParameterPlace> copies);
  // Which parameters the next steps leave as they are, with their momentum and variance: a flag for
  // each, in order of registration, the same on all ranks. 0/1 Adam is synchronised first if flags
  // change: a collective then. On error nothing has changed.
  Status set_frozen(std::span<const uint8_t> frozen);
  Result<OptimInfo> info();
  // kind: "all", "config", "groups", "tensors".
  Result<std::string> report_json(std::string_view kind);

  // 0/1 Adam with a frozen variance: averages what ranks have summed up since the last
  // synchronisation, so that all have the same parameters. A collective step; where there is
  // nothing to average, and for other types, an operation that does nothing.
  Result<OpRef> synchronise(const CallOptions& options);
  Status synchronise();
  // A state without the arrays that `stream` gives. kOwn: of this rank; else one that any ranks may
  // load: what 0/1 Adam's ranks have summed up since the last synchronisation is averaged in it,
  // not in the optimizer.
  Result<OptimSnapshot> describe(StateErrors errors);
  // Whether an array is one of those, which are large.
  bool streams(std::string_view array) const;
  // The values of such an array. Those that any ranks may load are collectives where ranks have to
  // ask each other: mean error feedback, and what is 0/1 Adam's between synchronisations.
  Status stream(std::string_view array, StateErrors errors, const FloatSink& sink);
  // All of this rank's state in vectors, with its error feedback or without.
  Result<OptimSnapshot> snapshot(bool with_residual);
  // Checks everything first, error feedback included, which must be there and fit (kOwn: this
  // rank); on error nothing has changed. Only if a source fails that had given all values for the
  // check, the state is torn, and steps and exports are refused until another is restored.
  Status restore(const OptimSnapshot& snapshot, StateErrors errors, const ArraySource& source);
  // The same with vectors.
  Status restore(const OptimSnapshot& snapshot, bool with_residual);
  // What a DeepSpeed checkpoint holds, the same on all ranks; error feedback starts at zero. An
  // error in place of arrays is one that only this rank may have met. Collective: all ranks hear
  // of a refusal and of a difference, and then nothing has changed on any.
  Status import_arrays(const Result<std::vector<NamedArray>>& arrays);
  // Bytes of the trainer's own that belong to the state, at most kMaxUserState.
  Status set_user_state(std::vector<std::byte> bytes);
  const std::vector<std::byte>& user_state() const { return user_state_; }
  const Config& config() const { return data_.config; }
  // Whether a state has error feedback.
  bool keeps_errors() const { return data_.keeps_errors(); }

  // BUSY: a step is in flight.
  Status check_idle() const;
  bool busy() const {
    return in_flight_.load(std::memory_order_acquire) || (outer_ != nullptr && outer_->busy());
  }
  // Of its steps; with outer steps, of this rank alone.
  const std::shared_ptr<Comm>& comm() const { return data_.comm; }
  const std::shared_ptr<Device>& device() const { return data_.access.device(); }
  const ParameterSet& parameters() const { return data_.parameters; }
  // Of the next step.
  Result<PreparedStep*> next_plan(LateSteps* late);

 private:
  class StepHooks;
  class CapturedHooks;
  // What steps have left behind.
  struct Outcomes {
    double grad_norm = std::numeric_limits<double>::quiet_NaN();
    uint64_t skipped = 0, skipped_in_a_row = 0;
    std::vector<TensorStep> last_steps;  // per tensor
    // Gradients have overflowed. With a dynamic loss scale that is no error, at most `limit` times
    // in a row: the scale is halved and the step left out.
    void overflowed(LossScaler& scaler, uint64_t limit, Status& status);
  };

  explicit Optimizer(OptimizerData data);
  // Everything about a new optimizer that this rank can do alone.
  static Result<std::shared_ptr<Optimizer>> make(std::shared_ptr<Comm> comm,
                                                 std::string_view config_text,
                                                 std::vector<ParamSpec> params,
                                                 std::shared_ptr<Device> device, bool has_outer);
  // INVALID_STATE: an import ended in the middle.
  Status check_whole() const;

  // What a step needs whose call is right. The stage that it begins can begin.
  Result<StepVariant> next_step() const;
  // late, owner: null: gradients are there.
  OpSignature signature(const StepVariant& variant, const LateSteps* late = nullptr) const;
  Result<OpRef> launch(const StepVariant& variant, CallOptions options, LateSteps* late = nullptr,
                       const std::shared_ptr<RoundOwner>& owner = nullptr);
  Result<OpRef> capture(const StepVariant& variant, CallOptions options,
                        std::shared_ptr<GraphCapture> graph);
  Status bind_again(const CapturedHooks& recorded, Run& run) const;
  void completed(const StepVariant& variant, const StepVerdict& verdict, Status& status,
                 std::span<const std::byte> bytes);

  Status apply(const OptimSnapshot& s, StateErrors errors, const ArraySource& source);

  OptimizerData data_;
  std::unique_ptr<Algorithm> algorithm_;
  std::shared_ptr<OuterSteps> outer_;  // null: there are none
  bool followed_ = false;              // the step in flight, by outer steps
  Accumulation accumulation_;
  LossScaler loss_scaler_;
  StepPlans plans_;
  Outcomes outcomes_;
  std::vector<std::byte> user_state_;
  bool torn_ = false;      // an import ended in the middle
  uint64_t imported_ = 0;  // hash of what was imported since the last step; 0: nothing
  std::atomic<bool> in_flight_{false};
};

}  // namespace sotto
