// The plans of optimizer steps: how gradients are averaged, clipped and applied, as sequences of
// kernels and messages.
#pragma once

#include <cstdint>
#include <vector>

#include "core/codec/onebit_layout.h"
#include "core/plan/builder.h"
#include "core/plan/onebit.h"

namespace sotto {

// What all steps of one optimizer share.
struct StepShape {
  int32_t rank = 0;
  int32_t size = 1;
  const OnebitLayout* layout = nullptr;  // flat space of m, v and, if compressed, of the bits
  uint64_t groups = 1;
  double clip = 0;      // 0: off
  bool masked = false;  // a mask of valid elements is bound
  uint64_t segment_bytes = 256 * 1024;
};

// Slots that a run binds. Lists have one slot per tensor. kNoSlot: the plan does not use it.
struct StepSlots {
  uint32_t params = kNoSlot;         // list, float32
  uint32_t grads = kNoSlot;          // list, float32
  uint32_t m = kNoSlot;              // flat
  uint32_t v = kNoSlot;              // flat
  uint32_t valid = kNoSlot;          // flat bits
  uint32_t tensor_states = kNoSlot;  // TensorState per tensor
  uint32_t scalars = kNoSlot;        // host: GroupScalars per group, written before the start
  // Compressed steps of 1-bit LAMB.
  uint32_t vf = kNoSlot, den = kNoSlot;
  uint32_t old_bits = kNoSlot, old_messages = kNoSlot;
  uint32_t tensor_counts = kNoSlot;  // uint64 per tensor
  OnebitSlots onebit;
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

// Adam, AdamW, LAMB, and the warm-up of 1-bit LAMB (`average`: c_avg is updated).
struct FullStepRequest {
  StepShape shape;
  bool lamb = false;
  bool average = false;
};
StepPlan build_full_step(const FullStepRequest& request);

// A compressed step of 1-bit LAMB (specification 7.4).
struct OnebitLambRequest {
  StepShape shape;
  ScaleKind scale = ScaleKind::kL2;
  bool momentum_bits = false;  // m is {old_bits, old_messages, TensorState}; else floats in m
  bool first = false;  // the stage starts: vf, den, mask and scaling coefficients are made first
  bool mask_zero_variance = false;  // first: elements with v = 0 leave the valid bits
  double debias = 0;                // first: c_avg is divided by it; 0: off
};
StepPlan build_onebit_lamb_step(const OnebitLambRequest& request);

}  // namespace sotto
