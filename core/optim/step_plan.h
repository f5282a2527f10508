// The plan of an optimizer step: what its parts are given, and what they give.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "core/codec/compressed.h"
#include "core/codec/compressed_layout.h"
#include "core/optim/group_scalars.h"
#include "core/plan/late_inputs.h"
#include "core/plan/levels.h"

namespace sotto {

// Gradients that arrive while the step runs, in inputs of the operation.
struct LateGradients {
  std::vector<std::vector<uint32_t>> inputs;  // tensors of each; every tensor once
  bool observes = false;  // ranks learn in which order gradients became ready on rank 0
  uint64_t hash() const;
};

// How gradients are averaged.
struct AverageShape {
  Dtype wire = Dtype::kF32;  // in full precision
  // In full precision: gradients times prescale (in float32, then rounded to `wire`), sum, times
  // postscale. Both 1: sum divided by the number of ranks.
  float prescale = 1, postscale = 1;
  NativeCollectives native = 0;  // that averages in full precision may use
  // What averages are compressed with instead (types that are not 1-bit; the step's layout is this
  // codec's), if there is more than one rank.
  std::optional<CodecSettings> codec;
  const LateGradients* late = nullptr;  // null: all gradients are there when the step begins
  const Levels* levels = nullptr;       // null: one level
};

struct ModelCopies {
  Dtype type = Dtype::kF32;
  std::vector<uint32_t> tensors;  // that have a copy
};

// What all steps of one optimizer share.
struct StepShape {
  int32_t rank = 0;
  int32_t size = 1;
  const CompressedLayout* layout = nullptr;  // flat space of m, v and, if compressed, of the bits
  uint64_t groups = 1;
  double clip = 0;                // 0: off
  Dtype gradients = Dtype::kF32;  // of all tensors; float32, float16 or bfloat16
  AverageShape average;
  // Sums of earlier micro-batches are there: the step adds its gradients and takes the mean.
  bool accumulated = false;
  bool loss_scaled = false;  // the host gives a factor for all gradients (unscale)
  ModelCopies copies;
  std::vector<uint8_t> frozen;        // flag per tensor: not updated; empty: none is
  StateType state = StateType::kF32;  // of m and v
  std::string_view valid;             // array of the bits of elements that count; empty: all do
  // The published arithmetic (specification, mode compat): padding is data of the layout, masks act
  // on what was averaged and nowhere else. There is a last group for padding.
  bool compat = false;
  // Updates of several passes make them over so many elements at a time: whole tensors of one
  // group, one at least. 0: over a group.
  uint64_t batch_elements = 0;
  MessageSizes sizes = {.segment_bytes = 256 * 1024};

  // One rank, or one host in two levels: nothing is compressed.
  bool alone() const {
    return size == 1 || (average.levels != nullptr && average.levels->host_count() == 1);
  }
  // This rank compresses a shard.
  bool serves() const { return sotto::serves(average.levels, rank); }
};

// StepShape::batch_elements on a device. Where a launch is a call of a function, one tensor: the
// next pass finds it in the caches. Else as many as one launch may have.
inline uint64_t batch_elements_of(const DeviceCaps& device) {
  return device.synchronous ? 1 : device.split_elements;
}

// Numbers of a step that are not a group's.
struct StepScalars {
  double unscale = 1;       // inverse of the loss scale
  double micro_factor = 1;  // inverse of the number of micro-batches
  uint64_t state_step = 0;  // for the rounding of low-precision state
};

// An array of the state that a run binds.
struct ArrayBinding {
  std::string_view name;  // of static storage
  uint32_t elements = kNoSlot;
  uint32_t exponents = kNoSlot;  // of fp8 state
};

// Slots that a run binds. Lists have one slot per tensor. kNoSlot: the plan does not use it.
struct StepSlots {
  uint32_t params = kNoSlot;          // list, float32
  uint32_t grads = kNoSlot;           // list
  uint32_t sums = kNoSlot;            // list, float32: of earlier micro-batches
  uint32_t copies = kNoSlot;          // list; tensors without a copy have no bytes
  std::vector<ScalarsArray> scalars;  // an element per group
  uint32_t step_scalars = kNoSlot;    // host, written before the start: StepScalars
  std::vector<ArrayBinding> arrays;
  CompressedSlots codec;
  uint32_t current_bits = kNoSlot, current_messages = kNoSlot;  // the codec's current result
  RoundEnd end;  // of a step whose gradients are late; the order: uint32 for each tensor
};

// What the host finds in the verdict slot when the step has completed, behind the word of the
// decision. It lies in one piece on the device too, so that one copy brings it. Offsets in bytes;
// norm 0, count 0: not there.
struct StepVerdict {
  uint64_t norm = 0;           // double: gradient norm before clipping
  uint64_t norm_messages = 0;  // 16 bytes per rank
  uint32_t norm_message_count = 0;
  uint64_t worker_messages = 0;  // scale messages
  uint32_t worker_message_count = 0;
  uint64_t tensor_steps = 0;  // TensorStep per tensor
  uint64_t tensor_step_count = 0;
  // Gradients that are late: what ranks have told each other, and the order of rank 0.
  uint64_t round_messages = 0, round_message_bytes = 0;
  uint64_t first_order = 0, first_order_bytes = 0;
};

struct StepPlan {
  LogicalPlan plan;
  StepSlots slots;
  StepVerdict verdict;
};

// Adds the gradients of one micro-batch to the sums; `first`: they become the sums.
StepPlan build_accumulation(const StepShape& shape, bool first);

}  // namespace sotto
