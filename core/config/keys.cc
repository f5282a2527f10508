#include "core/config/keys.h"

#include <fmt/core.h>

#include <limits>

#include "core/base/hierarchy.h"
#include "core/base/transports.h"
#include "core/config/optimizer_types.h"

namespace sotto {
namespace {

using enum ConfigSection;
using enum KeyType;
using enum Disposition;

constexpr uint32_t kAll = ~0u;
constexpr double kInf = std::numeric_limits<double>::infinity();

constexpr double kLargestFloat = 1e38;  // in the range of a float

constexpr NumberRange kNoRange{-kInf, kInf};
constexpr NumberRange kNotNegative{0, kInf};
constexpr NumberRange kPositive{0, kInf, true};
constexpr NumberRange kUnit{0, 1, false, true};
constexpr NumberRange kOpenUnit{0, 1, true, true};
constexpr NumberRange kCount{0, kMaxInt};
constexpr NumberRange kAtLeastOne{1, kMaxInt};
constexpr NumberRange kClosedUnit{0, 1};
constexpr NumberRange kFactor{1, kInf};
constexpr NumberRange kScale{Fp16Config::kSmallestScale, Fp16Config::kLargestScale};

template <class Has>
consteval uint32_t types_that(Has has) {
  uint32_t kinds = 0;
  for (const OptimizerType& type : kOptimizerTypes) kinds |= has(type) ? kind_bit(type.kind) : 0;
  return kinds;
}
constexpr uint32_t kOneBit = types_that([](const OptimizerType& t) { return t.one_bit; });
constexpr uint32_t kWithBetas = types_that([](const OptimizerType& t) { return t.has_betas; });
constexpr uint32_t kWithVariance = types_that([](const OptimizerType& t) { return t.variance; });

constexpr uint32_t kSgd = kind_bit(OptimizerKind::kSgd);
constexpr uint32_t kAdams = kind_bit(OptimizerKind::kAdam) | kind_bit(OptimizerKind::kAdamW);
constexpr uint32_t kLamb = kind_bit(OptimizerKind::kLamb);
constexpr uint32_t kOneBitAdam = kind_bit(OptimizerKind::kOneBitAdam);
constexpr uint32_t kZeroOne = kind_bit(OptimizerKind::kZeroOneAdam);
constexpr uint32_t kOneBitLamb = kind_bit(OptimizerKind::kOneBitLamb);

constexpr uint32_t kDecay = kind_bit(SchedulerKind::kWarmupDecayLR);
constexpr uint32_t kCosine = kind_bit(SchedulerKind::kWarmupCosineLR);
constexpr uint32_t kWarmups = kind_bit(SchedulerKind::kWarmupLR) | kDecay;
constexpr uint32_t kCycle = kind_bit(SchedulerKind::kOneCycle);
constexpr uint32_t kRangeTest = kind_bit(SchedulerKind::kLRRangeTest);

template <class Has>
consteval uint32_t codecs_that(Has has) {
  uint32_t kinds = 0;
  for (const CodecRow& row : kCodecs) kinds |= has(row) ? kind_bit(row.kind) : 0;
  return kinds;
}
constexpr uint32_t kScaled = codecs_that([](const CodecRow& c) { return c.scales; });
constexpr uint32_t kBlocks = codecs_that([](const CodecRow& c) { return c.block != 0; });
constexpr uint32_t kSparse = codecs_that([](const CodecRow& c) { return c.sparse; });
constexpr uint32_t kServed = codecs_that([](const CodecRow& c) { return !c.sparse; });
constexpr uint32_t kMayFeedBack =
    codecs_that([](const CodecRow& c) { return c.residual != ResidualUse::kAlways; });
constexpr std::string_view kBarAndWord =
#define SOTTO_CODEC(type, number, words, ...) "|" words
#include "core/base/codecs.def"
    ;
constexpr std::string_view kCodecWords = kBarAndWord.substr(1);  // "onebit|1bit|bf16|..."

constexpr std::string_view kBarAndPreset =
#define SOTTO_OUTER_PRESET(name, ...) "|" name
#include "core/config/outer_presets.def"
    ;
constexpr std::string_view kPresetWords = kBarAndPreset.substr(1);  // "co2|co2_paper|..."

constexpr NumberRange kAlign{8, 1073741824};
constexpr NumberRange kBucket{8192, 1099511627776};

constexpr std::string_view kDtypes = "fp32|fp16|bf16";
constexpr std::string_view kBatch = "batch arithmetic; the training program forms the batches";
constexpr std::string_view kReporting = "logging of the training program";
constexpr std::string_view kTransportHint =
    "host memory uses the CPU transports; sotto.transport names one";

// clang-format off
constexpr KeySpec kTable[] = {
    {kTop, "train_batch_size", kAll, kInt, true, kAtLeastOne, "", kChecked, kBatch},
    {kTop, "train_micro_batch_size_per_gpu", kAll, kInt, true, kAtLeastOne, "", kChecked, kBatch},
    {kTop, "gradient_accumulation_steps", kAll, kInt, true, kAtLeastOne, "", kChecked,
     "batch arithmetic; micro-batches before the last are given to sotto_optim_accumulate, or the training program "
     "averages them itself"},
    {kTop, "optimizer", kAll, kObject, false, kNoRange, "", kActs, "see its keys"},
    {kTop, "scheduler", kAll, kObject, true, kNoRange, "", kActs, "see its keys"},
    {kTop, "gradient_clipping", kAll, kNumber, false, kNotNegative, "", kActs,
     "limit of the gradients' global norm inside each step; 0 is off"},
    {kTop, "fp16", kAll, kObject, false, kNoRange, "", kActs, "see its keys"},
    {kTop, "bf16", kAll, kObject, false, kNoRange, "", kActs, "see its keys"},
    {kTop, "bfloat16", kAll, kObject, false, kNoRange, "", kActs, "old name of bf16"},
    {kTop, "amp", kAll, kObject, false, kNoRange, "", kActs, "see its keys"},
    {kTop, "data_types", kAll, kObject, false, kNoRange, "", kActs, "see its keys"},
    {kTop, "zero_optimization", kAll, kObjectOrBool, false, kNoRange, "", kActs, "see its keys"},
    {kTop, "communication_data_type", kAll, kText, true, kNoRange, kDtypes, kActs,
     "type of full-precision averages on the wire; compressed steps do not use it"},
    {kTop, "prescale_gradients", kAll, kBool, false, kNoRange, "", kActs, "gradients are divided before they are summed"},
    {kTop, "gradient_predivide_factor", kAll, kNumber, false, kScale, "", kActs, "division before the sum of gradients"},
    {kTop, "sparse_gradients", kAll, kBool, false, kNoRange, "", kActs, "gradients here are dense buffers"},
    {kTop, "sotto", kAll, kObject, false, kNoRange, "", kActs, "see its keys"},
    {kTop, "zero_allow_untested_optimizer", kAll, kBool, false, kNoRange, "", kIgnored, "only matters for ZeRO stages above 0"},
    {kTop, "zero_force_ds_cpu_optimizer", kAll, kBool, false, kNoRange, "", kIgnored, "only matters for ZeRO stages above 0"},
    {kTop, "steps_per_print", kAll, kInt, true, kCount, "", kHost, kReporting},
    {kTop, "wall_clock_breakdown", kAll, kBool, false, kNoRange, "", kIgnored, kReporting},
    {kTop, "dump_state", kAll, kBool, false, kNoRange, "", kIgnored, kReporting},
    {kTop, "memory_breakdown", kAll, kBool, false, kNoRange, "", kIgnored, kReporting},
    {kTop, "activation_checkpointing", kAll, kAny, true, kNoRange, "", kHost,
     "memory of the forward and backward pass, which the training program runs"},
    {kTop, "aio", kAll, kAny, true, kNoRange, "", kHost,
     "file access of DeepSpeed's offloading"},
    {kTop, "autotuning", kAll, kAny, true, kNoRange, "", kHost,
     "DeepSpeed's launcher searches configurations with it; the one it found is what to hand over"},
    {kTop, "checkpoint", kAll, kAny, true, kNoRange, "", kHost,
     "options of DeepSpeed's own checkpoint files; sotto.checkpoint is for the state exported here"},
    {kTop, "comet", kAll, kAny, true, kNoRange, "", kHost,
     "logging of the training program"},
    {kTop, "comms_logger", kAll, kAny, true, kNoRange, "", kHost,
     "log of DeepSpeed's collectives; operations here are traced by this library itself"},
    {kTop, "compile", kAll, kAny, true, kNoRange, "", kHost,
     "compilation of the model"},
    {kTop, "compression_training", kAll, kAny, true, kNoRange, "", kHost,
     "compression of the model's weights, not of what is sent"},
    {kTop, "csv_monitor", kAll, kAny, true, kNoRange, "", kHost,
     "logging of the training program"},
    {kTop, "curriculum_learning", kAll, kAny, true, kNoRange, "", kHost,
     "choice of training samples"},
    {kTop, "data_efficiency", kAll, kAny, true, kNoRange, "", kHost,
     "choice of training samples"},
    {kTop, "dataloader_drop_last", kAll, kAny, true, kNoRange, "", kHost,
     "the training program forms the batches"},
    {kTop, "disable_allgather", kAll, kAny, true, kNoRange, "", kHost,
     "a switch of DeepSpeed's ZeRO stages"},
    {kTop, "eigenvalue", kAll, kAny, true, kNoRange, "", kHost,
     "measurement of the model by the training program"},
    {kTop, "elasticity", kAll, kAny, true, kNoRange, "", kHost,
     "DeepSpeed's launcher computes batch size and world size with it; write the resulting batch keys"},
    {kTop, "flops_profiler", kAll, kAny, true, kNoRange, "", kHost,
     "measurement of the model by the training program"},
    {kTop, "graph_harvesting", kAll, kAny, true, kNoRange, "", kHost,
     "device graphs of DeepSpeed's engine"},
    {kTop, "hybrid_engine", kAll, kAny, true, kNoRange, "", kHost,
     "inference within DeepSpeed's engine"},
    {kTop, "load_universal_checkpoint", kAll, kAny, true, kNoRange, "", kHost,
     "a form of DeepSpeed's own checkpoint files"},
    {kTop, "monitor_config", kAll, kAny, true, kNoRange, "", kHost,
     "logging of the training program"},
    {kTop, "nebula", kAll, kAny, true, kNoRange, "", kHost,
     "a store for DeepSpeed's own checkpoint files"},
    {kTop, "pipeline", kAll, kAny, true, kNoRange, "", kHost,
     "stages of the model, which the training program runs; each stage's data-parallel ranks form one comm"},
    {kTop, "progressive_layer_drop", kAll, kAny, true, kNoRange, "", kHost,
     "the training program's forward pass"},
    {kTop, "seq_parallel_communication_data_type", kAll, kAny, true, kNoRange, "", kHost,
     "collectives inside the model, which the training program calls"},
    {kTop, "sparse_attention", kAll, kAny, true, kNoRange, "", kHost,
     "the training program's forward pass"},
    {kTop, "tensor_parallel", kAll, kAny, true, kNoRange, "", kHost,
     "shards of the model, which the training program runs; each shard's data-parallel ranks form one comm"},
    {kTop, "tensorboard", kAll, kAny, true, kNoRange, "", kHost,
     "logging of the training program"},
    {kTop, "timers", kAll, kAny, true, kNoRange, "", kHost,
     "measurement of DeepSpeed's engine"},
    {kTop, "use_data_before_expert_parallelism", kAll, kAny, true, kNoRange, "", kHost,
     "order of DeepSpeed's groups; the training program chooses the ranks of a comm"},
    {kTop, "use_node_local_storage", kAll, kAny, true, kNoRange, "", kHost,
     "a place for DeepSpeed's own checkpoint files"},
    {kTop, "quantize_training", kAll, kAny, true, kNoRange, "", kHost,
     "quantisation of the model's weights, not of what is sent"},
    {kTop, "torch_autocast", kAll, kAny, true, kNoRange, "", kHost,
     "types of the forward pass, which the training program runs"},
    {kTop, "vocabulary_size", kAll, kAny, true, kNoRange, "", kHost,
     "a number about the model for DeepSpeed's launcher"},
    {kTop, "zenflow", kAll, kAny, true, kNoRange, "", kHost,
     "DeepSpeed's offloading of optimizer steps"},
    {kTop, "wandb", kAll, kAny, true, kNoRange, "", kHost,
     "logging of the training program"},
    {kTop, "weight_quantization", kAll, kAny, true, kNoRange, "", kHost,
     "quantisation of the model's weights for inference, not of what is sent"},

    {kOptimizer, "type", kAll, kText, false, kNoRange, "", kActs, "the optimizer; case does not matter"},
    {kOptimizer, "params", kAll, kObject, true, kNoRange, "", kActs, "see its keys"},
    {kOptimizer, "legacy_fusion", kAll, kBool, false, kNoRange, "", kIgnored, "there is one implementation"},

    {kOptimizerParams, "lr", kAll, kNumber, false, kNotNegative, "", kActs, "learning rate; a scheduler overrides it"},
    {kOptimizerParams, "weight_decay", kAll, kNumber, false, kNotNegative, "", kActs, "weight decay"},
    {kOptimizerParams, "betas", kWithBetas, kBetas, false, kUnit, "", kActs, "decay of momentum and variance"},
    {kOptimizerParams, "eps", kWithVariance, kNumber, false, kNotNegative, "", kActs, "added to the square root of the variance"},
    {kOptimizerParams, "bias_correction", kAdams | kLamb, kBool, false, kNoRange, "", kActs, "bias correction of both moments"},
    {kOptimizerParams, "bias_correction", kOneBit, kBool, false, kNoRange, "", kIgnored, "the 1-bit optimizers never correct bias"},
    {kOptimizerParams, "amsgrad", kWithVariance, kBool, false, kNoRange, "", kChecked, "has to be false"},
    {kOptimizerParams, "adam_w_mode", kAdams, kBool, false, kNoRange, "", kActs, "decay in the update instead of the gradient"},
    {kOptimizerParams, "torch_adam", kAdams, kBool, false, kNoRange, "", kIgnored, "there is one implementation"},
    {kOptimizerParams, "set_grad_none", kWithBetas, kBool, false, kNoRange, "", kIgnored, "the training program clears its gradients"},
    {kOptimizerParams, "eps_inside_sqrt", kLamb, kBool, false, kNoRange, "", kActs, "eps is added to the variance instead"},
    {kOptimizerParams, "eps_inside_sqrt", kOneBit, kBool, false, kNoRange, "", kIgnored, "the 1-bit optimizers add eps outside the root"},
    {kOptimizerParams, "max_coeff", kLamb | kOneBitLamb, kNumber, false, kNotNegative, "", kActs, "upper bound of the trust ratio"},
    {kOptimizerParams, "min_coeff", kLamb | kOneBitLamb, kNumber, false, kNotNegative, "", kActs, "lower bound of the trust ratio"},
    {kOptimizerParams, "freeze_step", kOneBitAdam | kOneBitLamb, kInt, false, kAtLeastOne, "", kActs,
     "state step of the last update in full precision"},
    {kOptimizerParams, "coeff_beta", kOneBitLamb, kNumber, false, kUnit, "", kActs, "decay of the average trust ratio"},
    {kOptimizerParams, "factor_max", kOneBitLamb, kNumber, false, kNotNegative, "", kActs, "upper bound of the factor in compressed steps"},
    {kOptimizerParams, "factor_min", kOneBitLamb, kNumber, false, kNotNegative, "", kActs, "lower bound of the factor in compressed steps"},
    {kOptimizerParams, "factor_threshold", kOneBitLamb, kNumber, false, kOpenUnit, "", kActs, "bound of the factor's change per step"},
    {kOptimizerParams, "var_freeze_step", kZeroOne, kInt, false, kAtLeastOne, "", kActs, "updates before the variance is frozen"},
    {kOptimizerParams, "var_update_scaler", kZeroOne, kInt, false, kAtLeastOne, "", kActs, "variance updates per interval length"},
    {kOptimizerParams, "local_step_scaler", kZeroOne, kInt, false, kAtLeastOne, "", kActs, "steps per length of the local interval"},
    {kOptimizerParams, "local_step_clipper", kZeroOne, kInt, false, kAtLeastOne, "", kActs, "longest local interval"},
    {kOptimizerParams, "cuda_aware", kOneBit, kBool, false, kNoRange, "", kIgnored, kTransportHint},
    {kOptimizerParams, "comm_backend_name", kOneBit, kText, false, kNoRange, "", kIgnored, kTransportHint},
    {kOptimizerParams, "momentum", kSgd, kNumber, false, kNotNegative, "", kActs, "momentum"},
    {kOptimizerParams, "dampening", kSgd, kNumber, false, kNotNegative, "", kActs, "dampening of the momentum, but in the first step of the optimizer"},
    {kOptimizerParams, "nesterov", kSgd, kBool, false, kNoRange, "", kActs, "Nesterov's momentum"},

    {kScheduler, "type", kAll, kText, true, kNoRange, "", kActs, "the learning-rate schedule; case matters"},
    {kScheduler, "params", kAll, kObject, true, kNoRange, "", kActs, "see its keys"},

    {kSchedulerParams, "warmup_min_lr", kWarmups, kNumberOrList, false, kNotNegative, "", kActs, "rate of the first two updates"},
    {kSchedulerParams, "warmup_max_lr", kWarmups, kNumberOrList, true, kNotNegative, "", kActs, "rate at the end of the warm-up"},
    {kSchedulerParams, "warmup_num_steps", kWarmups | kCosine, kInt, false, kCount, "", kActs, "length of the warm-up"},
    {kSchedulerParams, "warmup_type", kWarmups | kCosine, kText, false, kNoRange, "", kActs, "shape of the warm-up"},
    {kSchedulerParams, "total_num_steps", kDecay | kCosine, kInt, false, kAtLeastOne, "", kActs, "length of the schedule"},
    {kSchedulerParams, "warmup_min_ratio", kCosine, kNumber, false, kNotNegative, "", kActs, "rate at the start, as part of lr"},
    {kSchedulerParams, "cos_min_ratio", kCosine, kNumber, false, kNotNegative, "", kActs, "rate at the end, as part of lr"},
    {kSchedulerParams, "cycle_min_lr", kCycle, kNumber, false, kNotNegative, "", kActs, "rate at both ends of the cycle"},
    {kSchedulerParams, "cycle_max_lr", kCycle, kNumber, false, kNotNegative, "", kActs, "rate at the peak of the cycle"},
    {kSchedulerParams, "decay_lr_rate", kCycle, kNumber, false, kNotNegative, "", kActs, "decay after the cycle"},
    {kSchedulerParams, "cycle_first_step_size", kCycle, kInt, false, kAtLeastOne, "", kActs, "updates up to the peak"},
    {kSchedulerParams, "cycle_second_step_size", kCycle, kInt, true, kAtLeastOne, "", kActs, "updates behind the peak"},
    {kSchedulerParams, "cycle_first_stair_count", kCycle, kInt, true, kCount, "", kIgnored, "DeepSpeed never uses it"},
    {kSchedulerParams, "cycle_second_stair_count", kCycle, kInt, true, kCount, "", kIgnored, "DeepSpeed never uses it"},
    {kSchedulerParams, "decay_step_size", kCycle, kInt, false, kCount, "", kActs, "length of one step of the decay; 0: none"},
    {kSchedulerParams, "cycle_momentum", kCycle, kBool, false, kNoRange, "", kActs, "the betas follow the cycle"},
    {kSchedulerParams, "cycle_min_mom", kCycle, kNumber, false, kUnit, "", kActs, "beta1 at the peak"},
    {kSchedulerParams, "cycle_max_mom", kCycle, kNumber, false, kUnit, "", kActs, "beta1 at the ends"},
    {kSchedulerParams, "decay_mom_rate", kCycle, kNumber, false, kNotNegative, "", kActs, "growth of beta1 after the cycle"},
    {kSchedulerParams, "lr_range_test_min_lr", kRangeTest, kNumberOrList, false, kNotNegative, "", kActs, "rate at the start"},
    {kSchedulerParams, "lr_range_test_step_size", kRangeTest, kInt, false, kAtLeastOne, "", kActs, "updates per unit of growth"},
    {kSchedulerParams, "lr_range_test_step_rate", kRangeTest, kNumber, false, kNotNegative, "", kActs, "growth per step size"},
    {kSchedulerParams, "lr_range_test_staircase", kRangeTest, kBool, false, kNoRange, "", kActs, "growth in stairs"},
    {kSchedulerParams, "last_batch_iteration", kAll, kInt, false, NumberRange{-1, -1}, "", kChecked, "has to be -1, the start: a state has the place in the schedule"},

    {kFp16, "enabled", kAll, kBool, false, kNoRange, "", kActs, "16-bit gradients and loss scaling"},
    {kFp16, "auto_cast", kAll, kBool, false, kNoRange, "", kHost, "the training program casts its inputs"},
    {kFp16, "loss_scale", kAll, kNumber, false, NumberRange{0, Fp16Config::kLargestScale}, "", kActs, "the loss scale; 0: dynamic"},
    {kFp16, "initial_scale_power", kAll, kInt, false, NumberRange{0, 127}, "", kActs, "the first dynamic loss scale is 2 to this power"},
    {kFp16, "loss_scale_window", kAll, kInt, false, kAtLeastOne, "", kActs, "attempts without overflow before the loss scale doubles"},
    {kFp16, "hysteresis", kAll, kInt, false, kCount, "", kIgnored, "the wrappers that serve these optimizers do not use it"},
    {kFp16, "consecutive_hysteresis", kAll, kBool, false, kNoRange, "", kIgnored, "the wrappers that serve these optimizers do not use it"},
    {kFp16, "min_loss_scale", kAll, kNumber, false, kScale, "", kActs, "overflows halve the loss scale down to this"},
    {kFp16, "fp16_master_weights_and_grads", kAll, kBool, false, kNoRange, "", kChecked, "has to be false"},

    {kBf16, "enabled", kAll, kBool, false, kNoRange, "", kActs, "16-bit gradients"},
    {kBf16, "check_grad_overflow", kAll, kBool, false, kNoRange, "", kIgnored, "NaN or Inf in a gradient is an error of the step"},
    {kBf16, "bf16_master_weights_and_grads", kAll, kBool, false, kNoRange, "", kChecked, "has to be false"},
    {kBf16, "bf16_optimizer_states", kAll, kBool, false, kNoRange, "", kChecked, "has to be false"},
    {kBf16, "immediate_grad_update", kAll, kBool, false, kNoRange, "", kIgnored, "gradients are read once, in the step"},
    {kAmp, "enabled", kAll, kBool, false, kNoRange, "", kChecked, "has to be false"},
    {kDataTypes, "grad_accum_dtype", kAll, kText, true, kNoRange, kDtypes, kActs, "type of the gradients that a step receives"},
    {kZero, "stage", kAll, kInt, false, NumberRange{0, 3}, "", kActs, "0: every rank holds the whole optimizer state"},

    {kSotto, "mode", kAll, kText, false, kNoRange, "strict|compat", kActs, "arithmetic of the 1-bit collectives and optimizers"},
    {kSotto, "transport", kAll, kText, false, kNoRange, kTransportWords, kActs, "how ranks talk; wins over comm_backend_name"},
    {kSotto, "scale", kAll, kText, false, kNoRange, "l2|l1", kActs, "scale of compressed data"},
    {kSotto, "granularity", kAll, kText, false, kNoRange, "flat|tensor|bucket", kActs,
     "how many elements share a scale; default flat, in mode compat what DeepSpeed has"},
    {kSotto, "bucket_elements", kAll, kInt, false, kBucket, "", kActs, "elements that share a scale with granularity bucket"},
    {kSotto, "chunk_align", kAll, kInt, false, kAlign, "", kActs, "elements; chunks are multiples of it"},
    {kSotto, "step_offset", kAll, kInt, false, NumberRange{0, 1}, "", kActs, "state step of update k is k + step_offset (1-bit types)"},
    {kSotto, "zero_variance_policy", kAll, kText, false, kNoRange, "mask|eps|error", kActs,
     "elements without variance when compression starts"},
    {kSotto, "coeff_debias", kAll, kBool, false, kNoRange, "", kActs, "corrects the frozen average trust ratio for its start at 0"},
    {kSotto, "checkpoint", kAll, kText, false, kNoRange, "exact|mean|reset", kActs,
     "error feedback in a state that is exported with the configuration's choice"},
    {kSotto, "initial_parameters", kAll, kText, false, kNoRange, "broadcast|check|trust", kActs,
     "parameters that differ between ranks at creation: rank 0's for all, an error, or not looked at"},
    {kSotto, "timeout_ms", kAll, kInt, false, NumberRange{1, 86400000}, "", kActs, "deadline of a step that names none itself"},
    {kSotto, "max_consecutive_skips", kAll, kInt, false, kAtLeastOne, "", kActs,
     "steps skipped in a row by overflow before a step fails for good"},
    {kSotto, "state_dtype", kAll, kText, false, kNoRange, "fp32|bf16|fp8", kActs,
     "type of momentum and variance between steps (SGD, Adam, AdamW, Lion)"},
    {kSotto, "gradient_codec", kAll, kObject, true, kNoRange, "", kActs, "see its keys"},
    {kSotto, "hierarchy", kAll, kText, false, kNoRange, kHierarchies, kActs,
     "two levels of averages: full precision (or communication_data_type) inside hosts, what the type sends between them; "
     "auto: sharded where several hosts have equally many ranks, more than one"},
    {kSotto, "outer", kAll, kObject, true, kNoRange, "", kActs, "see its keys"},
    {kSotto, "overlap", kAll, kObject, true, kNoRange, "", kActs, "see its keys"},
    {kSotto, "param_groups", kAll, kObjectList, false, kNoRange, "", kActs, "hyper-parameters of group 0, 1, ..."},

    {kGroup, "lr", kAll, kNumber, false, kNotNegative, "", kActs, "this group's learning rate; a scheduler overrides it"},
    {kGroup, "betas", kWithBetas, kBetas, false, kUnit, "", kActs, "for this group"},
    {kGroup, "eps", kWithVariance, kNumber, false, kNotNegative, "", kActs, "for this group"},
    {kGroup, "weight_decay", kAll, kNumber, false, kNotNegative, "", kActs, "for this group"},
    {kGroup, "max_coeff", kLamb | kOneBitLamb, kNumber, false, kNotNegative, "", kActs, "for this group"},
    {kGroup, "min_coeff", kLamb | kOneBitLamb, kNumber, false, kNotNegative, "", kActs, "for this group"},
    {kGroup, "non_freeze", kOneBitAdam, kBool, false, kNoRange, "", kActs, "this group is never compressed and its variance never frozen"},

    {kCodec, "type", kAll, kText, false, kNoRange, kCodecWords, kActs, "what an element is on the wire"},
    {kCodec, "chunk_align", kServed, kInt, false, kAlign, "", kActs, "elements; chunks are multiples of it"},
    {kCodec, "mode", kScaled, kText, false, kNoRange, "strict|compat", kActs, "arithmetic"},
    {kCodec, "scale", kScaled, kText, false, kNoRange, "l2|l1", kActs, "scale of compressed data"},
    {kCodec, "granularity", kScaled, kText, false, kNoRange, "flat|tensor|bucket", kActs, "how many elements share a scale"},
    {kCodec, "bucket_elements", kScaled, kInt, false, kBucket, "", kActs, "elements that share a scale with granularity bucket"},
    {kCodec, "block", kBlocks, kInt, false, NumberRange{kMinQuantBlock, kMaxQuantBlock}, "", kActs, "elements that share a scale"},
    {kCodec, "residual", kMayFeedBack, kBool, false, kNoRange, "", kActs, "error feedback"},
    {kCodec, "hierarchy", kServed, kText, false, kNoRange, kHierarchies, kActs, "two levels: full precision inside hosts, the codec between them"},
    {kCodec, "block", kSparse, kInt, false, NumberRange{kMinSparseBlock, kMaxSparseBlock}, "", kActs, "elements of which k are sent"},
    {kCodec, "k", kSparse, kInt, false, NumberRange{1, kMaxSparseBlock}, "", kActs, "elements that are sent of a block"},
    {kCodec, "bits", kSparse, kInt, false, kCount, "", kActs, "of a value"},
    {kCodec, "index", kSparse, kText, false, kNoRange, "ef|packed", kActs, "how indices are sent: Elias-Fano or a bitmap, or numbers of equal length"},
    {kCodec, "error_decay", kSparse, kNumber, false, kClosedUnit, "", kActs, "what error feedback is multiplied with in each call"},
    {kCodec, "exchange", kSparse, kText, false, kNoRange, "gather|two_phase", kActs, "who adds up: every rank all blocks, or each its own and sends the mean"},
    {kCodec, "k_server", kSparse, kInt, false, NumberRange{0, kMaxSparseBlock}, "", kActs, "elements that are sent of a block of the mean, of exchange two_phase; 0: by the number of ranks"},
    {kCodec, "median_clip", kSparse, kBool, false, kNoRange, "", kActs, "ranks whose payload of a tensor is larger than the median rank's count less"},
    {kCodec, "average", kSparse, kText, false, kNoRange, "ranks|contributors", kActs, "what sums are divided by: all ranks, or those that have sent the element"},
    {kCodec, "dense_below", kSparse, kInt, false, kCount, "", kActs, "tensors with fewer elements are sent as float32"},
    {kCodec, "alone", kSparse, kText, false, kNoRange, "identity", kActs, "what one rank does"},
    {kCodec, "shape", kSparse, kText, false, kNoRange, "flat", kActs, "blocks are runs of a tensor's elements in memory"},
    {kCodec, "levels", kSparse, kText, false, kNoRange, "block", kActs, "what has levels of its own"},

    {kOuter, "preset", kAll, kText, false, kNoRange, kPresetWords, kActs, "where all other keys start; without it co2"},
    {kOuter, "payload", kAll, kText, false, kNoRange, "delta|params", kActs, "what ranks average: anchor less parameters, or parameters"},
    {kOuter, "period", kAll, kIntOrAuto, false, kAtLeastOne, "", kActs, "inner steps from one launch of a fragment to the next"},
    {kOuter, "delay", kAll, kInt, false, kCount, "", kActs, "inner steps from a launch to the use of its average, at most period"},
    {kOuter, "rule", kAll, kText, false, kNoRange, "heavy_ball|nesterov|none", kActs, "outer momentum"},
    {kOuter, "form", kAll, kText, false, kNoRange, "delta|anchor_diff", kActs, "what a late average is subtracted from: the anchor it started at, or today's"},
    {kOuter, "alpha", kAll, kNumber, false, NumberRange{0, kLargestFloat, true}, "", kActs, "outer learning rate"},
    {kOuter, "beta", kAll, kNumber, false, kUnit, "", kActs, "outer momentum's decay"},
    {kOuter, "lr_normalised", kAll, kBool, false, kNoRange, "", kActs, "momentum in units of gradients: divided by the learning rate"},
    {kOuter, "penalty", kAll, kText, false, kNoRange, "none|const|gap_rel|gap_ema|gap_inner", kActs, "what a late pseudo-gradient is divided by"},
    {kOuter, "lambda_const", kAll, kNumber, false, kFactor, "", kActs, "divisor of penalty const"},
    {kOuter, "lambda_max", kAll, kNumber, false, kFactor, "", kActs, "largest divisor of a gap"},
    {kOuter, "granularity", kAll, kText, false, kNoRange, "global|tensor|element", kActs, "what has a gap of its own"},
    {kOuter, "auto_floor", kAll, kBool, false, kNoRange, "", kActs, "divides by 1.25 alpha / (1 - beta) at least: keeps the gain below 1"},
    {kOuter, "eps", kAll, kNumber, false, kNotNegative, "", kActs, "added to what a gap is compared with, times the root of its elements"},
    {kOuter, "consensus_scalars", kAll, kBool, false, kNoRange, "", kActs, "all ranks use the gap of rank 0"},
    {kOuter, "clip", kAll, kText, false, kNoRange, "none|coord|norm|rms", kActs, "limit of the outer momentum"},
    {kOuter, "phi", kAll, kNumber, false, NumberRange{0, kLargestFloat}, "", kActs, "the limit; of clip rms times the root mean square"},
    {kOuter, "clip_units", kAll, kText, false, kNoRange, "param|grad", kActs, "units of phi; grad: times the learning rate"},
    {kOuter, "freshness", kAll, kNumber, false, kClosedUnit, "", kActs, "share of a rank's own newest delta in a late average"},
    {kOuter, "merge", kAll, kText, false, kNoRange, "reset|lerp|add_progress|pull", kActs, "what parameters become when an average is used"},
    {kOuter, "merge_a", kAll, kNumber, false, kClosedUnit, "", kActs, "weight of merge lerp and pull"},
    {kOuter, "codec", kAll, kObjectOrText, false, kNoRange, "", kActs, "compresses payloads; \"none\", a type alone, or an object as gradient_codec"},
    {kOuter, "dense_rounds", kAll, kInt, false, kCount, "", kActs, "first launches of a fragment, in full precision"},
    {kOuter, "fragments", kAll, kFragments, false, kNoRange, "", kActs, "parts of the model with launches of their own"},
    {kOuter, "switch_step", kAll, kInt, false, kCount, "", kActs, "last step that averages as every step before it; outer steps follow"},
    {kOuter, "warmup_steps", kAll, kInt, false, kCount, "", kActs, "steps that average every time, before outer steps"},
    {kOuter, "every_step", kAll, kText, false, kNoRange, "parameters|gradients", kActs, "what steps average before outer steps"},
    {kOuter, "nonfinite", kAll, kText, false, kNoRange, "skip_rank|error|pass", kActs, "what becomes of a rank whose payload is not finite"},

    {kOverlap, "first_bucket_bytes", kAll, kInt, false, kAtLeastOne, "", kActs, "gradients of the first bucket, which has the shortest way to the network"},
    {kOverlap, "bucket_bytes", kAll, kInt, false, kAtLeastOne, "", kActs, "gradients of every other bucket"},
    {kOverlap, "order", kAll, kText, false, kNoRange, "reversed|registered|observed", kActs, "order in which buckets are cut and launched"},
    {kOverlap, "unused", kAll, kText, false, kNoRange, "error|zero", kActs, "what gradients are that a rank has not marked at the end of a round"},
    {kOverlap, "codec", kAll, kObjectOrText, true, kNoRange, "", kActs, "compresses buckets, with error feedback; a type alone, or an object as gradient_codec"},
    {kOverlap, "wire", kAll, kText, true, kNoRange, kDtypes, kActs, "type on the wire; without it each gradient's own"},
};
// clang-format on

}  // namespace

std::string_view disposition_name(Disposition disposition) {
  switch (disposition) {
    case kActs: return "acts";
    case kChecked: return "checked";
    case kHost: return "host";
    case kIgnored: return "ignored";
  }
  return "?";
}

bool NumberRange::contains(double value) const {
  return (lo_open ? value > lo : value >= lo) && (hi_open ? value < hi : value <= hi);
}

std::string NumberRange::text() const {
  if (lo == hi) return fmt::format("{}", lo);
  if (hi == kInf || hi == kMaxInt) return fmt::format("{} {}", lo_open ? ">" : ">=", lo);
  return fmt::format("in {}{}, {}{}", lo_open ? '(' : '[', lo, hi, hi_open ? ')' : ']');
}

std::span<const KeySpec> key_table() { return kTable; }

const KeySpec* find_key(ConfigSection section, std::string_view key, uint32_t kind_bits) {
  for (const KeySpec& spec : kTable) {
    if (spec.section == section && spec.key == key && (spec.kinds & kind_bits) != 0) return &spec;
  }
  return nullptr;
}

std::vector<std::string_view> keys_of(ConfigSection section, uint32_t kind_bits) {
  std::vector<std::string_view> keys;
  for (const KeySpec& spec : kTable) {
    if (spec.section == section && (spec.kinds & kind_bits) != 0) keys.push_back(spec.key);
  }
  return keys;
}

}  // namespace sotto
