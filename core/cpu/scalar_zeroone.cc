// 0/1 Adam.
#include "core/cpu/kernel_table.h"
#include "core/cpu/ops_zeroone.h"

namespace sotto::scalar {
namespace {

// One rank: nothing is encoded.
void zeroone_identity(const KernelCall& call) {
  ZeroOneEncodeOp encode(call);
  for (const Piece& p : call.pieces) {
    if (p.tensor == kNoTensor) continue;
    for (uint64_t j = 0; j < p.count; ++j) {
      const bool masked = encode.gradients.masked(p.flat + j);
      encode.c[p.flat + j] = masked ? 0.0f : guard_finite(encode.input(p, j), &encode.flags);
    }
  }
  encode.finish();
}

}  // namespace

void frozen_adam(const KernelCall& call) { run_elements<FrozenAdamOp>(call); }
void zeroone_local(const KernelCall& call) { run_elements<ZeroOneLocalOp>(call); }
void zeroone_sync(const KernelCall& call) { run_elements<ZeroOneSyncOp>(call); }

void zeroone_encode(const KernelCall& call) {
  if (call.arguments<EncodeArgs>().identity) return zeroone_identity(call);
  run_elements<ZeroOneEncodeOp>(call);
}

void zeroone_encode_undo(const KernelCall& call) {
  ZeroOneEncodeOp encode(call);
  uint32_t unused = 0;
  for (const Piece& p : call.pieces) {
    if (p.tensor == kNoTensor) continue;
    for (uint64_t j = 0; j < p.count; ++j) {
      float& value = encode.c[p.flat + j];
      if (encode.gradients.masked(p.flat + j)) {
        value = 0.0f;
        continue;
      }
      const float x = guard_finite(encode.input(p, j), &unused);
      value = undo_encode(value, x, encode.old_scales[p.scale], call.paired_ran);
    }
  }
}

}  // namespace sotto::scalar
