// The all-reduce of optimizers: tensors of one type are one sequence of elements, and the result
// goes to one flat buffer.
//
// Messages: direct reduce-scatter and all-gather (plan/direct.h). Where messages are not cut, most
// span tensors; they are packed in the place that their results will take, so that a plan has no
// memory for them.
//
// Native, where the transport may add floats in its own order: a reduce-scatter and an all-gather
// of its own, both in the flat buffer. All ranks have the same bits whatever the transport's order
// is, since one rank adds up and what it has is moved: an all-reduce of the transport's own would
// make that its promise, and with it that all ranks decide alike on what is not finite.
//
// On two levels (FlatReduceRequest::levels): inside hosts shares of the flat space are added up and
// lie in the flat buffer; ranks of a column add up these; inside hosts everybody gets all shares.
// With leaders there is one share. Each level divides for a mean, and rounds to the type.
//
// Scratch memory beside the flat buffer: the rows of HeldWindows, none if it is native; messages
// that are cut and span tensors.
#pragma once

#include <cstdint>

#include "core/base/dtype.h"
#include "core/plan/builder.h"
#include "core/plan/layout.h"
#include "core/plan/levels.h"

namespace sotto {

struct FlatReduceRequest {
  int32_t rank = 0;
  int32_t size = 1;
  const FlatLayout* layout = nullptr;  // concatenated
  Dtype dtype = Dtype::kF32;
  ReduceOp op = ReduceOp::kMean;
  // Ranks that are combined before they join the result, in each level (ReduceArgs::group); 0: all.
  // Not with what the transport adds up.
  uint32_t group = 0;
  uint32_t in_list = kNoSlot;   // first slot of the tensors
  uint32_t out_flat = kNoSlot;  // flat_reduce_bytes
  // The tensors are out_flat: they lie in it one after the other.
  bool in_place = false;
  // uint32 that is or-ed with kFlagNonfinite if this rank's share of the result is not finite;
  // kNoSlot: none.
  uint32_t flags = kNoSlot;
  uint32_t round = 0;                   // the first; more follow
  uint64_t segment_bytes = 256 * 1024;  // 0: messages are not cut
  HeldWindows held = {};
  NativeCollectives native = 0;  // that may be used, between all ranks of the comm, on one level
  // Of all ranks of the comm; null: one level.
  const Levels* levels = nullptr;
};

// The layout's elements, rounded up to equal shares of all ranks if it is native.
uint64_t flat_reduce_bytes(const FlatReduceRequest& request);
// Whether what is sent is packed in out_flat: then tensors that are made for this may as well be
// made there (in_place).
bool packs_in_place(const FlatReduceRequest& request);

void emit_flat_all_reduce(PlanBuilder& builder, const FlatReduceRequest& request);

}  // namespace sotto
