// An optimizer over registered parameters: SGD, Adam, AdamW, LAMB, 1-bit Adam, 0/1 Adam, 1-bit
// LAMB. One step is one operation: gradients are averaged (or what the compressed stages average
// is), clipped, applied; either all of it happens or nothing.
//
// Threads: one at a time per optimizer. While a step is in flight everything but step's own
// operation answers BUSY.
#pragma once

#include <array>
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
#include "core/group/compressed_state.h"
#include "core/optim/loss_scale.h"
#include "core/optim/state_arrays.h"
#include "core/optim/step_plan.h"

namespace sotto {

class ArrayReader;

struct ParamSpec {
  std::string name;
  uint64_t count = 0;
  uint32_t group = 0;
  float* param = nullptr;  // borrowed, as the following
  const void* grad = nullptr;
  const uint8_t* mask = nullptr;   // count values of 0 or 1; null: no mask
  Dtype grad_dtype = Dtype::kF32;  // float32, float16 or bfloat16; the same for all parameters
  void* copy = nullptr;            // the model's own parameter, written after each step; null: none
  Dtype copy_dtype = Dtype::kF16;  // float16 or bfloat16; the same for all that have a copy
};

// Memory of one parameter's gradient, borrowed.
struct GradientPlace {
  const void* data = nullptr;
  uint64_t count = 0;
  Dtype dtype = Dtype::kF32;
  DeviceId device;
};

// Memory of one parameter, or of its model copy, borrowed. No elements: there is no model copy.
struct ParameterPlace {
  void* data = nullptr;
  uint64_t count = 0;
  Dtype dtype = Dtype::kF32;
  DeviceId device;
};

// An array of a DeepSpeed checkpoint. Its name says what it is: see sotto.h.
struct NamedArray {
  std::string name;
  const void* data = nullptr;  // host or device memory, borrowed
  uint64_t count = 0;
  Dtype dtype = Dtype::kF32;
};

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

// Longest state of the trainer's own.
inline constexpr uint64_t kMaxUserState = uint64_t{1} << 26;

// The large parts of a state: float32, the tensors one after the other in order of registration.
enum class StatePart : uint8_t {
  kParams,
  kM,
  kV,
  kVf,
  kPaddingM,
  kLocalSum,
  kAnchor,
  kWorkerError,
  kServerError,
  kMeanWorkerError,
  kMeanServerError,
};
inline constexpr size_t kStateParts = 11;
// Opens a part for reading, from its beginning.
using PartSource = std::function<Result<FloatSource>(StatePart)>;

// Which error feedback belongs to a state.
enum class StateErrors : uint8_t { kNone, kOwn, kMean };

// Everything that a run must keep, on the host, independent of how it lies in memory. Parts are in
// the vectors, or elsewhere: then `outside` has their numbers of values.
struct OptimSnapshot {
  std::string algorithm;        // "Adam", "AdamW", "Lamb", "OneBitLamb"
  std::string mode = "strict";  // or "compat"
  uint64_t step = 0;
  uint32_t step_offset = 0;
  bool compressed = false;
  bool stage_started = false;  // the compressed stage has vf and scaling coefficients
  int64_t scheduler_iteration = -1;
  LossScale loss_scale;
  std::vector<std::string> names;
  std::vector<uint64_t> counts;
  std::vector<float> params, m, v, vf;
  std::vector<TensorState> tensor_states;
  // 0/1 Adam. With a frozen variance, of this rank: params are what the last synchronisation gave
  // plus the sum of local updates.
  ZeroOneCounters zeroone;
  uint64_t skipped_steps = 0;
  std::vector<std::byte> user;                 // the trainer's own
  std::vector<double> lr_sums, anchor_decays;  // per group
  std::vector<float> local_sum, anchor;
  uint64_t average_since = 0;  // 1-bit LAMB: updates before the average trust ratios started
  // 1-bit types: what is exchanged in place of the momentum of frozen parameters; empty: zeros.
  std::vector<float> frozen_m;
  std::vector<float> padding_m;           // 1-bit LAMB in mode compat, on the same number of ranks
  bool local_sum_is_common = false;       // all ranks have the same (never so in a blob)
  std::optional<ErrorFeedback> residual;  // error feedback of this rank; empty: none stored
  std::optional<MeanErrorFeedback> mean;  // error feedback of all ranks; empty: none stored
  std::array<uint64_t, kStateParts> outside{};

  // The vector of a part; null: of error feedback that is not stored.
  std::vector<float>* part(StatePart part);
  const std::vector<float>* part(StatePart which) const {
    return const_cast<OptimSnapshot*>(this)->part(which);
  }
  uint64_t values(StatePart which) const {
    const std::vector<float>* vector = part(which);
    return vector != nullptr && !vector->empty() ? vector->size()
                                                 : outside[static_cast<size_t>(which)];
  }
};

class Optimizer : public std::enable_shared_from_this<Optimizer> {
 public:
  // Collective: ranks compare what they register and, as sotto.initial_parameters says, the values.
  // If one of them refuses, all of them end with its code and text, and the comm stays healthy.
  // `config_text`: JSON as in parse_config. device: where the memory of all parameters is; null:
  // the context's. refused: what the caller has found wrong itself; the rest is then not looked at.
  static Result<std::shared_ptr<Optimizer>> create(std::shared_ptr<Comm> comm,
                                                   std::string_view config_text,
                                                   std::vector<ParamSpec> params,
                                                   std::shared_ptr<Device> device = nullptr,
                                                   const Status& refused = {});

  // Adds the gradients of a micro-batch to those that the next step averages. INVALID_STATE if
  // that would be more than gradient_accumulation_steps.
  Result<OpRef> accumulate(const CallOptions& options);
  // INVALID_STATE if micro-batches were accumulated, but not as many as
  // gradient_accumulation_steps, this one included. If the call's stream is being captured into a
  // graph, the step is recorded and does not happen (replay).
  Result<OpRef> step(const CallOptions& options);
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
  // A state without its parts. kOwn: of this rank; else one that any ranks may load: what 0/1
  // Adam's ranks have summed up since the last synchronisation is averaged in it, not in the
  // optimizer.
  Result<OptimSnapshot> describe(StateErrors errors);
  // A part of such a state. Parts that any ranks may load are collectives where ranks have to ask
  // each other: those of mean error feedback, and 0/1 Adam's between synchronisations.
  Status stream(StatePart part, StateErrors errors, const FloatSink& sink);
  // All of this rank's state in vectors, with its error feedback or without.
  Result<OptimSnapshot> snapshot(bool with_residual);
  // Adds the error feedback of all ranks to a snapshot (nothing for types without). Collective.
  Status add_mean(OptimSnapshot* snapshot);
  // Checks everything first, error feedback included, which must be there and fit (kOwn: this
  // rank); on error nothing has changed. Only if a source fails that had given all values for the
  // check, the state is torn, and steps and exports are refused until another is restored.
  Status restore(const OptimSnapshot& snapshot, StateErrors errors, const PartSource& source);
  // The same with vectors.
  Status restore(const OptimSnapshot& snapshot, bool with_residual);
  // What a DeepSpeed checkpoint holds, the same on all ranks; error feedback starts at zero. An
  // error in place of arrays is one that only this rank may have met. Collective: all ranks hear
  // of a refusal and of a difference, and then nothing has changed on any.
  Status import_arrays(const Result<std::vector<NamedArray>>& arrays);
  // Bytes of the trainer's own that belong to the state, at most kMaxUserState.
  Status set_user_state(std::vector<std::byte> bytes);
  const std::vector<std::byte>& user_state() const { return user_state_; }
  // sotto.checkpoint.
  CheckpointErrors checkpoint_policy() const { return config_.sotto.checkpoint; }
  // Whether a state has error feedback.
  bool keeps_errors() const { return codec_ && codec_->residual; }

  bool busy() const { return in_flight_.load(std::memory_order_acquire); }
  const std::shared_ptr<Comm>& comm() const { return comm_; }
  const std::shared_ptr<Device>& device() const { return access_.device(); }

 private:
  class StepHooks;
  class RecordedHooks;
  // What kind of step a plan is for.
  enum class Variant : uint8_t {
    kFull,
    kFirstCompressed,  // 1-bit Adam, 1-bit LAMB
    kCompressedFloats,
    kCompressedBits,
    kGradient,  // 0/1 Adam: compressed gradient
    kGradientNewMask,
    kLocal,
    kFirstLocal,
    kSync,
    kFirstSync,
    kForcedSync,    // between steps, without a gradient
    kAccumulation,  // no step: one more micro-batch
    kFirstAccumulation,
  };
  static bool accumulates(Variant variant) {
    return variant == Variant::kAccumulation || variant == Variant::kFirstAccumulation;
  }
  struct Prepared {
    std::shared_ptr<PreparedPlan> plan;
    StepSlots slots;
    StepVerdict verdict;
  };
  struct Memory {
    DeviceArray m, v, tensor_states, valid;
    DeviceArray m_exponents, v_exponents;       // fp8 state
    DeviceArray den;                            // 1-bit types
    DeviceArray vf, tensor_counts;              // 1-bit LAMB
    DeviceArray local_sum, anchor, base_valid;  // 0/1 Adam
    DeviceArray micro_sums;                     // float32 per element, since the first accumulation
    std::vector<const DeviceArray*> all() const {
      return {&m,         &v,  &tensor_states, &valid,     &m_exponents, &v_exponents,
              &den,       &vf, &tensor_counts, &local_sum, &anchor,      &base_valid,
              &micro_sums};
    }
  };

  Optimizer(std::shared_ptr<Comm> comm, std::shared_ptr<Device> device, Config config,
            std::vector<OptimizerParams> groups, LrSchedule schedule,
            std::vector<ParamSpec> params);
  // Everything about a new optimizer that this rank can do alone.
  static Result<std::shared_ptr<Optimizer>> make(std::shared_ptr<Comm> comm,
                                                 std::string_view config_text,
                                                 std::vector<ParamSpec> params,
                                                 std::shared_ptr<Device> device);
  Status fetch_masks();
  Status check_params() const;
  Status check_dtypes() const;
  StepShape shape() const;
  std::string settings() const;
  uint64_t group_settings_hash() const;
  uint64_t registration_hash() const;
  // Whether ranks have made the same; if not, the same error on all. Collective.
  static Status meet(Comm& comm, const Result<std::shared_ptr<Optimizer>>& mine);
  Status hash_values();
  Status name_other_values() const;
  Status broadcast_parameters();
  uint64_t import_hash(const OptimSnapshot& s,
                       const std::array<uint64_t, kStateParts>& parts) const;
  Status allocate();
  Status write_valid_bits(bool frozen_variance);

  OptimizerKind kind() const { return config_.optimizer.kind; }
  bool onebit() const { return optimizer_is_one_bit(kind()); }
  bool onebit_lamb() const { return kind() == OptimizerKind::kOneBitLamb; }
  bool zeroone() const { return kind() == OptimizerKind::kZeroOneAdam; }
  bool has_momentum() const;
  bool has_variance() const { return kind() != OptimizerKind::kSgd; }
  // Of momentum and variance. Other types than float32: SGD with momentum, Adam, AdamW.
  StateType state_type() const {
    return has_momentum() ? config_.sotto.state_dtype : StateType::kF32;
  }
  StateArray m_array() const {
    return {state_type(), false, memory_.m.data(), memory_.m_exponents.data()};
  }
  StateArray v_array() const {
    return {state_type(), true, memory_.v.data(), memory_.v_exponents.data()};
  }
  // The published arithmetic; for other types both modes are the same.
  bool compat() const { return onebit() && config_.sotto.mode == Mode::kCompat; }
  bool may_mask_zero_variance() const;
  uint64_t next_t() const { return step_ + 1 + (onebit() ? config_.sotto.step_offset : 0); }
  Variant next_variant() const;
  Variant next_zeroone_variant() const;
  // 0/1 Adam: this step's learning rates and decays added to those since the last synchronisation.
  double next_lr_sum(uint64_t group) const { return lr_sums_[group] + lr_of(group); }
  double next_anchor_decay(uint64_t group) const;
  StepPlan build(Variant variant, bool accumulated) const;
  void advance(Variant variant);
  void advance_zeroone(Variant variant);
  // Whether the variant averages micro-batches now.
  bool accumulated(Variant variant) const {
    return micro_batches_ > 0 && variant != Variant::kForcedSync && !accumulates(variant);
  }
  Result<Prepared*> prepared(Variant variant);
  static uint64_t traffic_of(Variant variant);
  static bool starts_compression(Variant variant);
  bool silent(Variant variant) const;
  void overflowed(Status& status);
  Result<OpRef> launch(Variant variant, CallOptions options);
  Result<OpRef> record(Variant variant, CallOptions options,
                       std::shared_ptr<GraphRecorder> recorder);
  Status bind_again(const RecordedHooks& recorded, Run& run) const;
  Result<Prepared> prepare(Variant variant, bool accumulated,
                           const std::shared_ptr<Device>& device) const;
  SmallVector<GroupScalars> scalars_of(Variant variant) const;
  void bind(Run& run, const Prepared& prepared, Variant variant) const;
  uint64_t group_hash(uint64_t group) const;
  uint64_t other_settings_hash() const;
  OpSignature signature(Variant variant) const;
  void completed(Variant variant, const StepVerdict& verdict, Status& status,
                 std::span<const std::byte> bytes);
  std::string nonfinite_text(Variant variant, std::span<const std::byte> bytes,
                             const StepVerdict& verdict) const;
  std::string first_nonfinite_gradient() const;
  Status check_snapshot(const OptimSnapshot& s, StateErrors errors) const;
  Status check_onebit(const OptimSnapshot& s, StateErrors errors) const;
  Status check_zeroone(const OptimSnapshot& s, StateErrors errors) const;
  Status check_errors(const OptimSnapshot& s, StateErrors errors, const PartSource& source) const;
  Status apply(const OptimSnapshot& s, StateErrors errors, const PartSource& source);
  Status apply_arrays(const OptimSnapshot& s, StateErrors errors, const PartSource& source);
  Status apply_errors(const OptimSnapshot& s, StateErrors errors, const PartSource& source);
  Status check_whole() const;
  const DeviceArray* flat_array(StatePart part) const;
  struct CommonRun;
  Status common_run(const TensorRun& run, const GroupScalars& group,
                    const std::vector<uint8_t>& valid, CommonRun* out);
  Status stream_common(StatePart part, const FloatSink& sink);
  bool late_stage(uint64_t step) const;
  Result<OptimSnapshot> read_arrays(std::span<const NamedArray> arrays) const;
  Status read_onebit_lamb(const ArrayReader& reader, OptimSnapshot* s) const;
  Status read_zeroone(const ArrayReader& reader, OptimSnapshot* s) const;
  Status read_local_sum(const ArrayReader& reader, OptimSnapshot* s) const;
  Status compare_import(const Result<OptimSnapshot>& mine) const;
  Status momentum_to_floats();
  // Momentum of frozen parameters of the 1-bit types: what is exchanged, and the runs put aside.
  Result<std::vector<float>> exchanged_momentum() const;
  bool read_aside(const TensorRun& run, float* out) const;
  Result<std::vector<uint8_t>> valid_bits() const;
  Status check_zero_variance();
  Status check_nothing_accumulated() const;
  bool moved_since_synchronisation() const;
  Status restore_stage();
  double lr_of(uint64_t group) const;
  // What is in force in the next step, but for lr.
  OptimizerParams params_of(uint64_t group) const;
  Status set_group_number(std::string_view name, uint64_t group, double value);
  Status set_scheduler_iteration(int32_t group, double value);
  Status check_group_number(std::string_view name, uint64_t group, double value) const;
  Status set_momentum_aside(std::span<const uint8_t> frozen, std::vector<float>* aside,
                            std::span<const float> exchanged = {}) const;

  std::shared_ptr<Comm> comm_;
  DeviceAccess access_;
  Config config_;
  std::vector<OptimizerParams> groups_;
  std::vector<double> lr_override_;  // NaN: none
  std::vector<double> beta1_override_, beta2_override_;
  std::vector<uint8_t> frozen_;  // per parameter; empty: none is
  uint64_t frozen_hash_ = 0;     // 0: none is
  // 1-bit types exchange the momentum of all parameters: that of frozen ones, one after the other.
  std::vector<float> aside_m_;
  LrSchedule schedule_;
  std::vector<ParamSpec> params_;
  std::vector<std::vector<uint8_t>> masks_;  // on the host, where the callers' are not
  std::vector<uint64_t> value_hashes_;       // per parameter, at creation; empty: not compared
  std::unique_ptr<CompressedLayout> layout_;
  Memory memory_;
  std::optional<CodecSettings> codec_;  // of later steps (1-bit types), or of all averages
  CompressedState compressed_state_;    // with codec_
  bool masked_ = false;
  std::map<std::pair<Variant, bool>, Prepared> prepared_;  // bool: with micro-batches
  uint64_t accumulation_steps_ = 0;  // gradient_accumulation_steps; 0: not given
  uint64_t micro_batches_ = 0;       // in the sums

  uint64_t step_ = 0;
  bool compressed_ = false;
  bool stage_started_ = false;
  bool momentum_bits_ = false;
  uint64_t average_since_ = 0;
  // 0/1 Adam.
  ZeroOneSchedule zeroone_;
  std::vector<double> lr_sums_, anchor_decays_;  // per group, since the last synchronisation
  bool mask_is_old_ = true;                      // v has changed since the mask was made
  double grad_norm_ = std::numeric_limits<double>::quiet_NaN();
  uint64_t skipped_ = 0;
  std::vector<std::byte> user_state_;
  LossScaler loss_scaler_;
  uint64_t skipped_in_a_row_ = 0;
  std::vector<TensorStep> last_steps_;
  bool torn_ = false;      // an import ended in the middle
  uint64_t imported_ = 0;  // hash of what was imported since the last step; 0: nothing
  std::atomic<bool> in_flight_{false};
};

}  // namespace sotto
