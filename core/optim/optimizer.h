// An optimizer over registered parameters: Adam, AdamW, LAMB, 1-bit LAMB. One step is one
// operation: gradients are averaged (or the compressed momentum is), clipped, applied; either all
// of it happens or nothing.
//
// Threads: one at a time per optimizer. While a step is in flight everything but step's own
// operation answers BUSY.
#pragma once

#include <atomic>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/config/config.h"
#include "core/config/schedule.h"
#include "core/engine/device_array.h"
#include "core/group/comm.h"
#include "core/group/onebit_state.h"
#include "core/optim/step_plan.h"

namespace sotto {

struct ParamSpec {
  std::string name;
  uint64_t count = 0;
  uint32_t group = 0;
  float* param = nullptr;  // borrowed, as the following
  const float* grad = nullptr;
  const uint8_t* mask = nullptr;  // count values of 0 or 1, read at creation; null: no mask
};

struct OptimInfo {
  int32_t stage = 0;        // 0: full precision, 1: compressed
  uint64_t step = 0;        // updates done
  uint64_t state_step = 0;  // step + step_offset for the 1-bit types
  double lr = 0;            // of group 0 in the next step
  double grad_norm = std::numeric_limits<double>::quiet_NaN();
  uint64_t payload_bytes_next_step = 0;
  uint64_t header_bytes_next_step = 0;
  uint64_t state_bytes = 0;
  uint64_t skipped_steps = 0;
};

// Everything that a run must keep, on the host, independent of how it lies in memory. Vectors hold
// the tensors one after the other in order of registration.
struct OptimSnapshot {
  std::string algorithm;  // "Adam", "AdamW", "Lamb", "OneBitLamb"
  uint64_t step = 0;
  uint32_t step_offset = 0;
  bool compressed = false;
  bool stage_started = false;  // the compressed stage has vf and scaling coefficients
  int64_t scheduler_iteration = -1;
  std::vector<std::string> names;
  std::vector<uint64_t> counts;
  std::vector<float> params, m, v, vf;
  std::vector<TensorState> tensor_states;
  std::optional<OnebitResidual> residual;  // error feedback of this rank; empty: none stored
};

class Optimizer : public std::enable_shared_from_this<Optimizer> {
 public:
  // Collective: ranks compare what they register. `config_text`: JSON as in parse_config.
  static Result<std::shared_ptr<Optimizer>> create(std::shared_ptr<Comm> comm,
                                                   std::string_view config_text,
                                                   std::vector<ParamSpec> params);

  Result<OpRef> step(const CallOptions& options);
  // "lr" (NaN: the schedule again) or "weight_decay"; group -1: all.
  Status set(std::string_view name, int32_t group, double value);
  Result<OptimInfo> info();
  // kind: "all", "config", "groups", "tensors".
  Result<std::string> report_json(std::string_view kind);

  Result<OptimSnapshot> snapshot(bool with_residual);
  // Checks everything first; on error nothing has changed. with_residual: error feedback must be
  // there and fit this rank.
  Status restore(const OptimSnapshot& snapshot, bool with_residual);

  bool busy() const { return in_flight_.load(std::memory_order_acquire); }
  const std::shared_ptr<Comm>& comm() const { return comm_; }

 private:
  class StepHooks;
  enum class Variant : uint8_t { kFull, kFirstCompressed, kCompressedFloats, kCompressedBits };
  struct Prepared {
    std::shared_ptr<PreparedPlan> plan;
    StepSlots slots;
    StepVerdict verdict;
  };
  struct Memory {
    DeviceArray m, v, tensor_states, valid;
    DeviceArray vf, den, tensor_counts;  // 1-bit LAMB
  };

  Optimizer(std::shared_ptr<Comm> comm, Config config, std::vector<OptimizerParams> groups,
            LrSchedule schedule, std::vector<ParamSpec> params);
  Status check_params() const;
  Status compare_with_others() const;
  Status allocate();
  Status write_valid_bits(const std::vector<float>* frozen_v);

  bool onebit() const { return config_.optimizer.kind == OptimizerKind::kOneBitLamb; }
  bool may_mask_zero_variance() const;
  uint64_t next_t() const { return step_ + 1 + (onebit() ? config_.sotto.step_offset : 0); }
  Variant next_variant() const;
  Result<Prepared*> prepared(Variant variant);
  std::vector<GroupScalars> scalars_of_next_step() const;
  void bind(Run& run, const Prepared& prepared) const;
  OpSignature signature(Variant variant) const;
  void completed(Variant variant, const StepVerdict& verdict, Status& status,
                 std::span<const std::byte> bytes);
  std::string nonfinite_text(const StepVerdict& verdict, std::span<const std::byte> bytes) const;
  std::string first_nonfinite_gradient() const;
  Status check_snapshot(const OptimSnapshot& s, bool with_residual) const;
  Status momentum_to_floats();
  Status check_zero_variance();
  Status restore_stage(const OptimSnapshot& s);
  double lr_of(uint64_t group) const;

  std::shared_ptr<Comm> comm_;
  Config config_;
  std::vector<OptimizerParams> groups_;
  std::vector<double> lr_override_;  // NaN: none
  LrSchedule schedule_;
  std::vector<ParamSpec> params_;
  std::unique_ptr<OnebitLayout> layout_;
  Memory memory_;
  OnebitSettings onebit_settings_;
  OnebitState onebit_state_;  // 1-bit types
  bool masked_ = false;
  std::map<Variant, Prepared> prepared_;

  uint64_t step_ = 0;
  bool compressed_ = false;
  bool stage_started_ = false;
  bool momentum_bits_ = false;
  double grad_norm_ = std::numeric_limits<double>::quiet_NaN();
  uint64_t skipped_ = 0;
  std::vector<TensorStep> last_steps_;
  std::atomic<bool> in_flight_{false};
};

}  // namespace sotto
