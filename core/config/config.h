// A DeepSpeed-style JSON file as a typed, validated configuration.
//
// parse_config reads everything that is valid, also what this release cannot run, so that a report
// can explain a whole file. check_supported is the second gate, used where something is about to be
// created from a configuration.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/codec.h"
#include "core/base/dtype.h"
#include "core/base/low_precision_state.h"
#include "core/base/status.h"
#include "core/config/hyper_parameters.h"
#include "core/config/outer.h"
#include "core/config/overlap.h"

namespace sotto {

enum class OptimizerKind : int32_t {
  kNone = 0,  // the file has no "optimizer"
#define SOTTO_OPTIMIZER(type, number, ...) k##type = number,
#include "core/config/optimizers.def"
};
// The name as DeepSpeed writes it ("OneBitLamb"); "none" for kNone.
std::string_view optimizer_kind_name(OptimizerKind kind);
// OneBitAdam, ZeroOneAdam, OneBitLamb: the types whose later steps send compressed data.
bool optimizer_is_one_bit(OptimizerKind kind);

struct OptimizerConfig {
  OptimizerKind kind = OptimizerKind::kNone;
  OptimizerParams params;
  std::string comm_backend_name = "nccl";  // 1-bit types: nccl | mpi | compressed
  bool cuda_aware = false;
};

enum class SchedulerKind : int32_t {
  kNone = 0,
  kWarmupLR = 1,
  kWarmupDecayLR = 2,
  kWarmupCosineLR = 3,
  kOneCycle = 4,
  kLRRangeTest = 5,
};
std::string_view scheduler_kind_name(SchedulerKind kind);

enum class WarmupType : int32_t { kLog = 1, kLinear = 2 };

// WarmupLR, WarmupDecayLR, WarmupCosineLR.
struct WarmupConfig {
  // One value for all groups, or one per group. max_lr empty: WarmupLR, the lr of group 0.
  std::vector<double> min_lr = {0.0};
  std::vector<double> max_lr;
  uint64_t num_steps = 1000;  // >= 2 after parsing
  WarmupType type = WarmupType::kLog;
  uint64_t total_num_steps = 0;  // WarmupDecayLR, WarmupCosineLR: required there
  // WarmupCosineLR.
  double min_ratio = 0.0;
  double cos_min_ratio = 1e-4;
};

struct OneCycleConfig {
  double min_lr = 0.0;
  double max_lr = 0.0;
  double decay_lr_rate = 0.0;
  uint64_t first_step_size = 2000;
  uint64_t second_step_size = 2000;  // = first unless given
  uint64_t decay_step_size = 0;
  bool momentum = true;
  double min_mom = 0.8;
  double max_mom = 0.9;
  double decay_mom_rate = 0.0;

  uint64_t steps() const { return first_step_size + second_step_size; }
};

struct RangeTestConfig {
  std::vector<double> min_lr = {1e-3};
  uint64_t step_size = 2000;
  double step_rate = 1.0;
  bool staircase = false;
};

struct SchedulerConfig {
  SchedulerKind kind = SchedulerKind::kNone;
  WarmupConfig warmup;
  OneCycleConfig cycle;
  RangeTestConfig range_test;
};

// Loss scaling; unused unless enabled.
struct Fp16Config {
  // Scales are float32, and so is what gradients are multiplied with: 1 / scale.
  static constexpr double kSmallestScale = 1e-37, kLargestScale = 1e38;
  bool enabled = false;
  double loss_scale = 0.0;            // > 0: static; 0: dynamic
  uint64_t initial_scale_power = 16;  // dynamic: the first scale is 2^k
  uint64_t loss_scale_window = 1000;  // updates without overflow before the scale doubles
  uint64_t hysteresis = 2;            // not used, as the following
  bool consecutive_hysteresis = false;
  double min_loss_scale = 1.0;  // halving stops here
  bool auto_cast = false;
};

// Hyper-parameters that one group sets for itself ("sotto": {"param_groups": [...]}); the rest is
// optimizer.params.
struct GroupOverride {
  std::optional<double> lr, beta1, beta2, eps, weight_decay, max_coeff, min_coeff;
  std::optional<bool> non_freeze;
};

enum class Mode : int32_t { kStrict = 1, kCompat = 2 };
std::string_view mode_name(Mode mode);
enum class ZeroVariancePolicy : int32_t { kMask = 1, kEps = 2, kError = 3 };
// What becomes of error feedback in an export that leaves the choice to the configuration.
enum class CheckpointErrors : int32_t { kExact = 1, kMean = 2, kReset = 3 };
// What an optimizer does about parameter values that differ between ranks when it is created:
// gives all ranks rank 0's, refuses, or does not look. kTrust does not compare imported state
// either.
enum class InitialParameters : int32_t { kBroadcast = 1, kCheck = 2, kTrust = 3 };
std::string_view initial_parameters_name(InitialParameters policy);

// Keys of "sotto" that act with the 1-bit types alone.
struct OneBitConfig {
  ScaleKind scale = ScaleKind::kL2;
  std::optional<Granularity> granularity;  // flat, tensor, bucket; nothing: Config::granularity
  uint64_t bucket_elements = uint64_t{1} << 22;  // granularity bucket: >= 8192, multiple of 512
  uint64_t chunk_align = 512;                    // elements, a positive multiple of 8
  uint32_t step_offset = 1;                      // 0 or 1; only the 1-bit types have one
  ZeroVariancePolicy zero_variance_policy = ZeroVariancePolicy::kMask;
  bool coeff_debias = false;
};

// The product's own section.
struct SottoConfig : OneBitConfig {
  Mode mode = Mode::kStrict;
  std::string transport = "auto";  // of kTransportChoices
  CheckpointErrors checkpoint = CheckpointErrors::kMean;
  InitialParameters initial_parameters = InitialParameters::kCheck;
  std::optional<uint64_t> timeout_ms;    // of steps that name none themselves; nothing: the comm's
  uint64_t max_consecutive_skips = 100;  // overflows in a row before a step fails for good; >= 1
  // Of momentum and variance; types other than float32: those with low_precision_state.
  StateType state_dtype = StateType::kF32;
  // Of the gradients' average of types that are not 1-bit; nothing: full precision.
  std::optional<CodecSettings> gradient_codec;
  Hierarchy hierarchy = Hierarchy::kFlat;  // of all averages
  std::vector<GroupOverride> param_groups;
  std::optional<OuterConfig> outer;      // nothing: there are no outer steps
  std::optional<OverlapConfig> overlap;  // of steps; nothing: the file does not ask for it
};

// The batch keys of a file.
struct BatchConfig {
  std::optional<uint64_t> train_batch_size;
  std::optional<uint64_t> train_micro_batch_size_per_gpu;
  std::optional<uint64_t> gradient_accumulation_steps;
};

struct BatchNumbers {
  uint64_t train = 0;  // samples per update over all ranks = micro * gas * dp_world
  uint64_t micro = 0;  // samples per rank and backward pass
  uint64_t gas = 0;    // backward passes per update
};

// What one key of the file does here; the rows of the report.
struct KeyNote {
  std::string path;         // "optimizer.params.lr"
  std::string value;        // as JSON text
  std::string disposition;  // acts | checked | host | ignored | unsupported | unknown
  std::string reason;
};

struct Config {
  BatchConfig batch;
  OptimizerConfig optimizer;
  SchedulerConfig scheduler;
  double gradient_clipping = 0.0;  // 0: off
  Fp16Config fp16;
  bool bf16_enabled = false;
  std::optional<Dtype> grad_accum_dtype;         // data_types.grad_accum_dtype
  std::optional<Dtype> communication_data_type;  // nothing: the gradients' own type
  bool prescale_gradients = false;
  double gradient_predivide_factor = 1.0;
  bool sparse_gradients = false;
  uint32_t zero_stage = 0;
  SottoConfig sotto;

  std::vector<std::string> warnings;  // each names its key; to be logged once
  std::vector<KeyNote> keys;          // every key of the file, section by section

  // Hyper-parameters of groups 0 .. n_groups-1. INVALID_ARGUMENT if the file overrides more groups
  // than exist, or a group's values contradict each other.
  Result<std::vector<OptimizerParams>> resolve_groups(uint64_t n_groups) const;

  // Batch arithmetic for dp_world data-parallel ranks (>= 1). Nothing if the file has no batch key
  // at all; INVALID_ARGUMENT if the keys contradict each other or dp_world.
  Result<std::optional<BatchNumbers>> resolve_batch(uint64_t dp_world) const;

  // Whether gradients have 16 bits, as far as the file says.
  bool half_gradients() const;
  // The file's, or the default of mode and type: flat, but in mode compat what DeepSpeed compresses
  // as one. Its 1-bit Adam and 0/1 Adam take tensor by tensor what they are given: a float32
  // model's tensors, or, with `half` gradients, the one tensor that the fp16 wrapper makes of a
  // parameter group.
  Granularity granularity(bool half) const;
  // What the later steps of a 1-bit type compress with over `world` ranks, or gradient_codec;
  // nothing: all is sent in full precision. half: as above.
  std::optional<CodecSettings> compression(uint64_t world, bool half) const;
  std::optional<CodecSettings> compression(uint64_t world) const {
    return compression(world, half_gradients());
  }

  // Updates in full precision before the first compressed one; UINT64_MAX for types without
  // compression.
  uint64_t full_precision_updates() const;
};

// text: what a file holds, or the same as one base64url word, as DeepSpeed takes it on a command
// line. Files are read by the callers. INVALID_ARGUMENT names line and column or the key, what was
// found, what is allowed and, where there is one, a remedy.
Result<Config> parse_config(std::string_view text);

// OK if this release can run the configuration. Else UNSUPPORTED with every key that stands in the
// way, its value and what is supported; INVALID_ARGUMENT if there is no optimizer.
Status check_supported(const Config& config);

// The same as a list, one text per obstacle; empty if there is none.
std::vector<std::string> unsupported_reasons(const Config& config);

// The file as plain JSON on one line. values: empty, or a JSON object from paths
// ("optimizer.params.lr", "sotto.param_groups[0].lr") to what takes the place of an "auto" there;
// paths where the file has something else, or nothing, are not used. An "auto" without a value
// stays. INVALID_ARGUMENT as parse_config for what is no JSON, and for values of another form.
Result<std::string> config_resolve(std::string_view text, std::string_view values);

// What a file will do, as JSON. world_size and n_params 0: unknown, and what depends on them is
// null.
Result<std::string> config_report(std::string_view text, uint64_t world_size, uint64_t n_params);

}  // namespace sotto
