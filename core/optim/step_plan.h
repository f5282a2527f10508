// The plans of optimizer steps: how gradients are averaged, clipped and applied, as sequences of
// kernels and messages.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "core/codec/compressed_layout.h"
#include "core/optim/zeroone_schedule.h"
#include "core/plan/builder.h"
#include "core/plan/compressed.h"

namespace sotto {

// What all steps of one optimizer share.
struct StepShape {
  int32_t rank = 0;
  int32_t size = 1;
  const CompressedLayout* layout = nullptr;  // flat space of m, v and, if compressed, of the bits
  uint64_t groups = 1;
  double clip = 0;                // 0: off
  Dtype gradients = Dtype::kF32;  // of all tensors; float32, float16 or bfloat16
  Dtype wire = Dtype::kF32;       // of full-precision averages
  // Full-precision averages: gradients times prescale (in float32, then rounded to `wire`), sum,
  // times postscale. Both 1: sum divided by the number of ranks.
  float prescale = 1, postscale = 1;
  // Sums of earlier micro-batches are there: the step adds its gradients and takes the mean.
  bool accumulated = false;
  bool loss_scaled = false;           // the host gives a factor for all gradients (unscale)
  Dtype copies = Dtype::kF32;         // of model copies
  std::vector<uint32_t> copied;       // tensors that have a model copy
  std::vector<uint8_t> frozen;        // flag per tensor: not updated; empty: none is
  StateType state = StateType::kF32;  // of m and v; others: SGD, Adam, AdamW alone
  bool masked = false;                // a mask of valid elements is bound
  // What averages are compressed with instead (SGD, Adam, AdamW, LAMB; layout is this codec's), if
  // there is more than one rank.
  std::optional<CodecSettings> codec;
  // The published arithmetic (specification, mode compat): padding is data of the layout, masks act
  // on what was averaged and nowhere else. There is a last group for padding.
  bool compat = false;
  uint64_t segment_bytes = 256 * 1024;
};

// Numbers of a step that are not a group's.
struct StepScalars {
  double unscale = 1;       // inverse of the loss scale
  double micro_factor = 1;  // inverse of the number of micro-batches
  uint64_t state_step = 0;  // for the rounding of narrow state
};

// Slots that a run binds. Lists have one slot per tensor. kNoSlot: the plan does not use it.
struct StepSlots {
  uint32_t params = kNoSlot;         // list, float32
  uint32_t grads = kNoSlot;          // list
  uint32_t sums = kNoSlot;           // list, float32: of earlier micro-batches
  uint32_t copies = kNoSlot;         // list; tensors without a copy have no bytes
  uint32_t m = kNoSlot;              // flat
  uint32_t v = kNoSlot;              // flat
  uint32_t m_exponents = kNoSlot;    // fp8 state: exponents of m's blocks
  uint32_t v_exponents = kNoSlot;    // likewise of v
  uint32_t valid = kNoSlot;          // flat bits
  uint32_t tensor_states = kNoSlot;  // TensorState per tensor
  // Host, written before the start: GroupScalars per group, then StepScalars.
  uint32_t scalars = kNoSlot;
  // Compressed steps.
  uint32_t den = kNoSlot;                               // flat: sqrt(v) + eps
  uint32_t old_bits = kNoSlot, old_messages = kNoSlot;  // momentum as bits
  uint32_t vf = kNoSlot;                                // 1-bit LAMB: flat
  uint32_t tensor_counts = kNoSlot;                     // 1-bit LAMB: uint64 per tensor
  uint32_t local_sum = kNoSlot, anchor = kNoSlot;       // 0/1 Adam: flat (compat: no anchor)
  uint32_t base_valid = kNoSlot;                        // 0/1 Adam: the callers' masks as bits
  CompressedSlots codec;
};

// What the host finds in the verdict slot when the step has completed. Offsets in bytes; count 0:
// not there.
struct StepVerdict {
  uint64_t norm = 8;           // double: gradient norm before clipping; NaN: not computed
  uint64_t norm_messages = 0;  // 16 bytes per rank
  uint32_t norm_message_count = 0;
  uint64_t worker_messages = 0;  // scale messages
  uint32_t worker_message_count = 0;
  uint64_t tensor_steps = 0;  // TensorStep per tensor
  uint64_t tensor_step_count = 0;
  uint64_t bytes = 0;
};

struct StepPlan {
  LogicalPlan plan;
  StepSlots slots;
  StepVerdict verdict;
};

// Adds the gradients of one micro-batch to the sums; `first`: they become the sums.
StepPlan build_accumulation(const StepShape& shape, bool first);

// Steps whose gradient is averaged in full precision.
enum class DenseUpdate : uint8_t {
  kAdam,  // Adam, AdamW, the warm-up of 1-bit Adam, variance steps of 0/1 Adam
  kLamb,
  kLambAverage,  // the warm-up of 1-bit LAMB: c_avg is updated
  kSgd,
};
struct FullStepRequest {
  StepShape shape;
  DenseUpdate update = DenseUpdate::kAdam;
  bool momentum = true;   // SGD: m exists
  bool nesterov = false;  // SGD
};
StepPlan build_full_step(const FullStepRequest& request);

// A compressed step of 1-bit Adam (specification 5.3) or 1-bit LAMB (7.4).
struct CompressedStepRequest {
  StepShape shape;
  ScaleKind scale = ScaleKind::kL2;
  bool lamb = false;
  bool momentum_bits = false;  // m is {old_bits, old_messages, TensorState}; else floats in m
  bool first = false;  // the stage starts: den, mask and, for LAMB, vf and scaling coefficients are
                       // made first
  bool mask_zero_variance = false;  // first: elements with v = 0 leave the valid bits
  double debias = 0;                // LAMB, first: c_avg is divided by it; 0: off
};
StepPlan build_compressed_step(const CompressedStepRequest& request);

// A step of 0/1 Adam that is no variance step (specification 6.3, 6.4).
struct ZeroOneRequest {
  StepShape shape;
  ScaleKind scale = ScaleKind::kL2;
  ZeroOneUpdate kind = ZeroOneUpdate::kCompressed;  // not kVariance
  bool refresh_mask = false;                        // v has changed: the mask is made anew
  bool mask_zero_variance = false;                  // elements with v = 0 leave it
  bool begin = false;  // the variance is frozen from now on: den, anchor and an empty sum are made,
                       // error feedback starts again
  bool own_masks = false;  // base_valid is bound; else every element is valid in it
  bool gradients = true;   // kSync: false: only what has been summed up
};
StepPlan build_zeroone_step(const ZeroOneRequest& request);

}  // namespace sotto
