// What makes one type of optimizer: its state, the kinds of its steps and their plans, what a step
// that has committed changes, and how its state goes in and out. Everything else is Optimizer.
//
// An algorithm is a file in core/optim/algorithms and a row in core/config/optimizers.def.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "core/optim/named_arrays.h"
#include "core/optim/optimizer_data.h"
#include "core/optim/snapshot.h"
#include "core/optim/step_frame.h"

namespace sotto {

// Which of its steps an algorithm makes. Follows from counters that are equal on all ranks.
struct StepVariant {
  uint8_t number = 0;         // its plan is kept under it
  uint8_t traffic = 0;        // variants that exchange the same messages have the same
  bool begins_stage = false;  // comes once: what follows from the state is made first
  bool local = false;         // nothing is exchanged
  bool update = true;         // false: not a step of the trainer's
  // All ranks of the group average the gradients, before outer steps begin.
  bool together = false;
  bool operator==(const StepVariant&) const = default;
};

class Algorithm {
 public:
  // The data outlives it, and has its layout when arrays() is asked for.
  static std::unique_ptr<Algorithm> make(OptimizerData& data);

  explicit Algorithm(OptimizerData& data) : d_(data) {}
  virtual ~Algorithm() = default;
  Algorithm(const Algorithm&) = delete;
  Algorithm& operator=(const Algorithm&) = delete;

  // ---- creation ----

  virtual std::vector<StateArraySpec> arrays() const = 0;
  // After the arrays are there.
  virtual Status allocated() { return ok_status(); }
  // Whether full-precision averages are compressed if the configuration has a codec for gradients.
  virtual bool compresses_gradients() const { return true; }
  // Elements may be left out because their variance is 0.
  virtual bool masks_zero_variance() const { return false; }

  // ---- settings ----

  // Names of a group's numbers that callers may set between steps.
  virtual std::span<const std::string_view> settable() const = 0;
  // INVALID_ARGUMENT, INVALID_STATE: a number that the group may have, but not here or now.
  virtual Status check_setting(std::string_view /*name*/, size_t /*group*/,
                               double /*value*/) const {
    return ok_status();
  }
  // Before flags of frozen parameters change: what belongs to them is put aside. A step of
  // synchronisation() has been made.
  virtual Status freeze(const std::vector<uint8_t>& /*flags*/) { return ok_status(); }
  // Whether the state that was restored last had these flags, and no step has been made from it:
  // they come late, and are no change.
  virtual bool restored_with(const std::vector<uint8_t>& /*flags*/) const { return false; }

  // ---- steps ----

  virtual StepVariant next() const { return {}; }
  // What makes replicas equal that have made local steps; nothing: they are.
  virtual std::optional<StepVariant> synchronisation() const { return std::nullopt; }
  // Comes before the first step of a stage. INVALID_STATE: it cannot begin with this state.
  virtual Status start_stage() { return ok_status(); }
  virtual StepPlan build(const StepVariant& variant, const StepShape& shape) const = 0;
  // Numbers of a group in that step, of each type that the plan's kernels read. Here: those that
  // all types have. An algorithm adds what is its own.
  virtual void write_scalars(const StepVariant& variant, size_t group, ScalarsRef scalars) const;
  // Of padding that is data.
  virtual void write_padding_scalars(ScalarsRef scalars) const;
  // A step has committed; `step` is still the number of updates before it.
  virtual void committed(const StepVariant& variant);

  // ---- reports ----

  // Whether the stage that saves traffic has come.
  virtual bool late() const { return false; }
  virtual std::string_view stage() const { return "full precision"; }
  virtual void report_settings(nlohmann::ordered_json* /*report*/) const {}
  virtual void report_tensor(const TensorState& /*state*/,
                             nlohmann::ordered_json* /*tensor*/) const {}

  // ---- state ----

  // Adds its own numbers and arrays. errors: as Optimizer::describe.
  virtual Status describe(StateErrors /*errors*/, OptimSnapshot* /*s*/) { return ok_status(); }
  // An array that has another way out than to be read; nothing: it has not.
  virtual std::optional<Status> stream(std::string_view /*array*/, StateErrors /*errors*/,
                                       const FloatSink& /*sink*/) {
    return std::nullopt;
  }
  // INVALID_ARGUMENT: not a state of this optimizer; sizes of error feedback included.
  Status accepts(const OptimSnapshot& s, StateErrors errors) const;
  // The same of what is the algorithm's own.
  virtual Status check(const OptimSnapshot& /*s*/, StateErrors /*errors*/) const {
    return ok_status();
  }
  // Whether an array that is exported is read from the snapshot.
  virtual bool restores(std::string_view /*array*/, const OptimSnapshot& /*s*/) const {
    return true;
  }
  // The arrays are in place: the rest of the state follows. `step` is still the old one.
  virtual Status restore(const OptimSnapshot& s);
  // Arrays that the same state has on all ranks.
  virtual std::vector<std::string_view> common_arrays(const OptimSnapshot& s) const;

  // ---- DeepSpeed checkpoints ----

  // UNSUPPORTED: none of its checkpoints is known.
  virtual Status check_importable() const { return ok_status(); }
  // What its checkpoints have beside the common keys.
  virtual std::span<const ArrayKey> array_keys() const { return {}; }
  // Reads what the algorithm has beside step, parameters, exp_avg and exp_avg_sq, which are in s.
  virtual Status read_arrays(const ArrayReader& /*reader*/, OptimSnapshot* /*s*/) const {
    return ok_status();
  }

 protected:
  // A flat array of float32; exported: it is part of a state.
  StateArraySpec floats(std::string_view name, bool exported) const;
  // Momentum ("m") or variance ("v").
  StateArraySpec moment(std::string_view name) const;

  OptimizerData& d_;
};

// The algorithm of each type, in its own file. A name that several types have is declared several
// times, which says the same.
#define SOTTO_OPTIMIZER(type, number, name, algorithm, ...) \
  std::unique_ptr<Algorithm> make_##algorithm(OptimizerData& data);
#include "core/config/optimizers.def"

}  // namespace sotto
