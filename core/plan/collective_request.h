// What an uncompressed collective is to do.
#pragma once

#include <cstdint>
#include <vector>

#include "core/base/dtype.h"
#include "core/base/small_vector.h"
#include "core/iface/transport.h"
#include "core/plan/layout.h"

namespace sotto {

struct Levels;

// Elements to which chunks of uncompressed collectives are aligned.
inline constexpr uint64_t kDenseChunkAlign = 16;

struct CollectiveRequest {
  OpKind kind = OpKind::kBarrier;
  int32_t rank = 0;
  int32_t size = 1;
  ReduceOp reduce = ReduceOp::kSum;
  int32_t root = 0;      // broadcast, reduce, gather, scatter
  int32_t peer = -1;     // kSendRecv
  bool is_send = false;  // kSendRecv
  // Per tensor. all_gather, gather: elements of `in`; reduce_scatter, scatter: elements of `out`;
  // all_to_all: elements for one rank; others: elements of both.
  SmallVector<uint64_t> counts;
  SmallVector<Dtype> dtypes;
  SmallVector<uint8_t> in_place;
  // kAllToAllParts: what of tensor t goes to rank k and what comes from it, at [t * size + k];
  // counts are not used. Parts of the output do not overlap; this rank's own parts have equal
  // counts; with in_place all parts of both sides are equal. kAllGatherParts has out_parts,
  // kReduceScatterParts in_parts alone, whose counts are the same on all ranks; `counts` are those
  // of all parts together.
  std::vector<Range> in_parts, out_parts;
  uint64_t segment_bytes = 256 * 1024;  // 0: messages are not cut
  HeldWindows held = {};
  NativeCollectives native = 0;    // that may be used
  const Levels* levels = nullptr;  // null: one level; lives as long as the request
  bool operator==(const CollectiveRequest&) const = default;
};

}  // namespace sotto
