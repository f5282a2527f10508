// 0/1 Adam.
#include "core/cpu/kernel_table.h"
#include "core/cpu/ops_zeroone.h"

namespace sotto::scalar {
namespace {

// One rank: nothing is encoded.
void front_identity(const KernelCall& call) {
  LocalFrontOp front(call);
  for (const Piece& p : call.pieces) {
    if (p.tensor == kNoTensor) continue;
    for (uint64_t j = 0; j < p.count; ++j) {
      const bool masked = front.gradients.masked(p.flat + j);
      front.c[p.flat + j] = masked ? 0.0f : guard_finite(front.input(p, j), &front.flags);
    }
  }
  front.finish();
}

}  // namespace

void frozen_adam(const KernelCall& call) { run_elements<FrozenAdamOp>(call); }
void local_momentum(const KernelCall& call) { run_elements<LocalMomentumOp>(call); }
void local_sync(const KernelCall& call) { run_elements<LocalSyncOp>(call); }

void local_front(const KernelCall& call) {
  if (call.arguments<EncodeArgs>().identity) return front_identity(call);
  run_elements<LocalFrontOp>(call);
}

void local_front_undo(const KernelCall& call) {
  LocalFrontOp front(call);
  uint32_t unused = 0;
  for (const Piece& p : call.pieces) {
    if (p.tensor == kNoTensor) continue;
    for (uint64_t j = 0; j < p.count; ++j) {
      float& value = front.c[p.flat + j];
      if (front.gradients.masked(p.flat + j)) {
        value = 0.0f;
        continue;
      }
      const float x = guard_finite(front.input(p, j), &unused);
      value = undo_encode(value, x, front.old_scales[p.scale], call.paired_ran);
    }
  }
}

}  // namespace sotto::scalar
