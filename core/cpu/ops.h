// How a kernel over pieces is executed: an op holds the operands of one call, opens norm blocks and
// does elements. The scalar table does every element with the op; vector tables do whole groups of
// kNormLanes elements with their own code and leave the elements before and after them to the op.
// So both share operands, edges, padding and the order of sums.
//
//   void open(uint64_t block)                                     a run in this norm block follows
//   void pad(const Piece&, uint64_t first, uint64_t count)        a run of padding
//   void elements(const Piece&, uint64_t first, uint64_t count)   a run in one norm block
//   void finish()                                                 end of the call
#pragma once

#include <algorithm>

#include "core/cpu/norm_blocks.h"
#include "core/kernels/pieces.h"

namespace sotto {

// Parts of an op that most have no use for.
struct OpBase {
  void open(uint64_t) {}
  void pad(const Piece&, uint64_t, uint64_t) {}
  void finish() {}
};

template <class Op>
void run_elements(const KernelCall& call) {
  Op op(call);
  for_each_block_run(call.pieces,
                     [&](const Piece& p, uint64_t first, uint64_t count, uint64_t block) {
                       op.open(block);
                       if (p.tensor == kNoTensor) {
                         op.pad(p, first, count);
                       } else {
                         op.elements(p, first, count);
                       }
                     });
  op.finish();
}

// groups(op, piece, first, n): n groups of kNormLanes elements; the first element is at lane 0. n >
// 0.
template <class Op, class Groups>
void run_groups(const KernelCall& call, Groups&& groups) {
  Op op(call);
  for_each_block_run(
      call.pieces, [&](const Piece& p, uint64_t first, uint64_t count, uint64_t block) {
        op.open(block);
        if (p.tensor == kNoTensor) return op.pad(p, first, count);
        const uint64_t to_lane_0 = (kNormLanes - (p.lane + first) % kNormLanes) % kNormLanes;
        const uint64_t head = std::min(count, to_lane_0);
        const uint64_t n = (count - head) / kNormLanes;
        if (head != 0) op.elements(p, first, head);
        if (n != 0) groups(op, p, first + head, n);
        const uint64_t done = head + n * kNormLanes;
        if (done != count) op.elements(p, first + done, count - done);
      });
  op.finish();
}

}  // namespace sotto
