// Collectives on two levels: messages inside hosts, and messages between them. They are
// compositions of those on one level (plan/one_level.h) in groups of ranks; what each level sends,
// and where it cuts, is theirs.
//
// For both hierarchies:
//  - all_reduce, sharded: reduce-scatter inside the host, all-reduce of every shard in its column,
//    all-gather inside the host. A host sends as much to others as one rank of M.
//  - all_reduce, leader: reduce to the first rank of the host, all-reduce among these, broadcast
//    inside the host.
//  - reduce_scatter, sharded: inside the host every rank gets the parts of its column, which the
//    column scatters.
//  - reduce_scatter, leader: reduce to the first rank, reduce-scatter among these, scatter.
//  - all_gather, sharded: parts inside the column, then inside the host those of all columns.
//  - all_gather, leader: inside the host, among first ranks, and a broadcast of what other hosts
//    have. A host receives every part of other hosts once.
//  - broadcast: the root to one rank of every other host, each of these inside its host.
//  - reduce: the same back. Those ranks are the root's column (sharded) or the first of their hosts
//    (leader).
//  - barrier: inside the host, then among the ranks with one number in their hosts.
//
// Reductions run inside hosts in rank order, and then in the order of hosts. Each level rounds to
// the type, and divides for a mean: sums of 16-bit floats are of as many ranks as a level has. A
// mean of integers is rounded towards 0 twice.
//
// All other kinds send as many bytes between hosts on one level, and have one.
#pragma once

#include "core/plan/builder.h"
#include "core/plan/collective_request.h"

namespace sotto {

// The request names levels, of which there are two, and the kind has them.
bool on_two_levels(const CollectiveRequest& request);
// Between all ranks of the comm, as emit_collective.
Status emit_two_level(PlanBuilder& builder, const CollectiveRequest& request,
                      const CollectiveSlots& slots);

}  // namespace sotto
