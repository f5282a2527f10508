// What an optimizer and its algorithm work on.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "core/codec/compressed_state.h"
#include "core/config/config.h"
#include "core/engine/device_array.h"
#include "core/group/comm.h"
#include "core/optim/param_groups.h"
#include "core/optim/parameter_set.h"
#include "core/optim/state_arrays.h"
#include "core/optim/step_plan.h"

namespace sotto {

// Every algorithm has the array "tensor_states" (TensorState per tensor, padding that is data
// included); with masks, "valid" (bits of the flat space).
struct OptimizerData {
  OptimizerData(std::shared_ptr<Comm> comm_of, DeviceAccess access_to, Config configured,
                ParameterSet registered, ParamGroups param_groups)
      : comm(std::move(comm_of)),
        access(std::move(access_to)),
        config(std::move(configured)),
        parameters(std::move(registered)),
        groups(std::move(param_groups)) {}

  std::shared_ptr<Comm> comm;   // of its steps; with outer steps, of this rank alone
  std::shared_ptr<Comm> group;  // that has created it; null: not yet
  DeviceAccess access;
  Levels levels, group_levels;  // of `comm`, and of `group` where that is another one
  Config config;
  ParameterSet parameters;
  ParamGroups groups;
  std::unique_ptr<CompressedLayout> layout;  // flat space of the state
  StateArrays arrays;
  std::optional<CodecSettings> codec;  // of later steps (1-bit types), or of all averages
  CompressedState compressed;          // with codec
  bool masked = false;                 // elements may be left out: "valid" is there
  uint64_t step = 0;                   // updates done

  // Layout and codec; then arrays and error feedback. masks_zero_variance: elements may be left out
  // whose variance is 0.
  Status lay_out(bool masks_zero_variance);
  Status allocate(const std::vector<StateArraySpec>& arrays);

  // Of every step of those ranks; loss scale, codec and micro-batches are for the optimizer to say.
  StepShape step_shape(const Comm& ranks) const;
  // together: of a step that all ranks make together (StepVariant).
  Comm& ranks(bool together) const { return together ? *group : *comm; }

  bool one_bit() const { return optimizer_is_one_bit(config.optimizer.kind); }
  // The published arithmetic; for other types both modes are the same.
  bool compat() const { return one_bit() && config.sotto.mode == Mode::kCompat; }
  Mode mode() const { return compat() ? Mode::kCompat : Mode::kStrict; }
  // One rank, or one host in two levels: nothing is compressed.
  bool alone() const { return levels.host_count() == 1; }
  // State step of the update after `done` updates.
  uint64_t state_step(uint64_t done) const { return done + (one_bit() ? step_offset() : 0); }
  uint64_t next_t() const { return state_step(step + 1); }
  uint32_t step_offset() const { return one_bit() ? config.sotto.step_offset : 0; }
  // Of momentum and variance.
  StateType moment_type() const { return config.sotto.state_dtype; }
  bool keeps_errors() const { return codec && codec->residual; }

  // Valid bits from the callers' masks and, if the variance is frozen, from it; and the counts that
  // follow.
  Status write_valid_bits(bool frozen_variance);
  // Elements that have error feedback; empty: all.
  Result<std::vector<uint8_t>> valid_bits() const;
};

}  // namespace sotto
