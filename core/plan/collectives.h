// Builders of the uncompressed collectives. They do no I/O; what they emit can be looked at.
//
// Algorithms (W ranks, n bytes per rank):
//  - all_reduce: if (W - 1) * n is at most 64 KiB, every rank sends everything to every other and
//    adds up itself (one hop); else every rank reduces its chunk (direct reduce-scatter) and sends
//    the result to all (direct all-gather): 2 (W-1)/W * n sent per rank. Sums run over ranks in
//    ascending order in both.
//  - reduce_scatter, all_gather: direct exchange, (W-1)/W of the larger buffer sent per rank.
//    Direct reductions keep a bounded part of what arrives at a time (plan/direct.h).
//  - broadcast: binomial tree up to 256 KiB; above, the root scatters chunks and every rank passes
//    its chunk on.
//  - of these four, where the transport has the collective itself and the request permits it: one
//    call per tensor (plan/native.h).
//  - all_gather and reduce_scatter with unequal counts: as with equal ones, never native.
//  - reduce: between two ranks, or if (W - 1) * n is at most 64 KiB, every rank sends everything to
//    the root, which adds up; else every rank reduces its chunk and sends the result to the root: n
//    sent per rank. Sums run over ranks in ascending order in both.
//  - gather, scatter: one message stream between the root and every other rank.
//  - all_to_all: direct exchange. In place, what is sent is copied first, because no rank could
//    receive before it has sent. With parts that differ from pair to pair, the two ranks of every
//    pair first tell each other how much they send and expect (metadata, two numbers per tensor);
//    payload moves between them only if they agree, PROTOCOL otherwise.
//  - barrier: dissemination, ceil(log2 W) rounds of empty messages.
//
// With several levels (CollectiveRequest::levels) all_reduce, reduce_scatter, all_gather,
// broadcast, reduce and barrier are compositions of these inside hosts and between them:
// plan/two_level.h.
#pragma once

#include <cstdint>

#include "core/base/dtype.h"
#include "core/base/status.h"
#include "core/plan/builder.h"
#include "core/plan/collective_request.h"
#include "core/plan/layout.h"

namespace sotto {

struct Levels;

// Appends one collective to the builder, between all ranks or, inside PlanBuilder::within, those of
// a group (never native). It takes rounds from next_round() on, as many on all ranks.
Result<CollectiveSlots> emit_collective(PlanBuilder& builder, const CollectiveRequest& request);
// The same in memory that the plan has already: slots [in, in + n) and [out, out + n), which are
// the same ones where the request says in_place and both are whole tensors.
Status emit_collective(PlanBuilder& builder, const CollectiveRequest& request,
                       const CollectiveSlots& slots);

// An all-gather of small messages: every rank has its row of `rows` (message r at r *
// message_bytes) written, and gets all others. In one round, where each rank sends its own to all
// others. In two levels in two: to those of its host, then those of the host to the ranks of other
// hosts that have the same number there. levels: of these ranks; null: one level.
void emit_message_exchange(PlanBuilder& builder, int32_t rank, int32_t size, const Levels* levels,
                           uint32_t rows, uint64_t message_bytes, uint32_t round);

}  // namespace sotto
