// Norms of gradients, clipping, counts of valid elements.
#include "core/cpu/elements.h"
#include "core/cpu/kernel_table.h"
#include "core/cpu/ops_adam.h"
#include "core/iface/scalar_steps.h"

namespace sotto::scalar {
void sum_squares(const KernelCall& call) { run_elements<SumSquaresOp>(call); }

void norm_message(const KernelCall& call) {
  const uint32_t* flags = call.operands[1].flat<const uint32_t>();
  const double sum =
      add_blocks(call.operands[0].flat<const float>(), 0, call.arguments<BlocksArgs>().blocks);
  const NormMessage message = norm_message_of(sum, flags != nullptr ? *flags : 0);
  std::memcpy(call.operands[2].data, &message, sizeof message);
}

void clip_coefficient(const KernelCall& call) {
  const ClipResult result =
      clip_result(call.arguments<ClipArgs>(), call.operands[0].flat<const uint8_t>(),
                  call.operands[4].flat<const double>(), call.operands[5].flat<const uint32_t>());
  *call.operands[1].flat<float>() = result.coefficient;
  *call.operands[2].flat<double>() = result.norm;
  *call.operands[3].flat<uint32_t>() = result.word;
}

void count_valid(const KernelCall& call) {
  const uint8_t* valid = call.operands[0].flat<const uint8_t>();
  uint64_t* counts = call.operands[1].flat<uint64_t>();
  for (const Piece& p : call.pieces) {
    if (p.tensor == kNoTensor) continue;
    counts[p.block] += valid == nullptr ? p.count : count_bits(valid, p.flat, p.count);
  }
}

}  // namespace sotto::scalar
