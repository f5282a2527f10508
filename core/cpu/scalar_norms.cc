// Norms of gradients, clipping, counts of valid elements.
#include "core/cpu/elements.h"
#include "core/cpu/kernel_table.h"
#include "core/cpu/ops_adam.h"
#include "core/kernels/scalar_steps.h"

namespace sotto::scalar {
void sum_squares(const KernelCall& call) { run_elements<SumSquaresOp>(call); }

void norm_message(const KernelCall& call) {
  const auto& o = call.of<kernels::NormMessage>();
  const uint32_t* flags = o.flags.flat<const uint32_t>();
  const double sum = add_blocks(o.sums.flat<const float>(), 0, call.arguments<BlocksArgs>().blocks);
  const NormMessage message = norm_message_of(sum, flags != nullptr ? *flags : 0);
  std::memcpy(o.message.data, &message, sizeof message);
}

void clip_coefficient(const KernelCall& call) {
  const auto& o = call.of<kernels::ClipCoefficient>();
  const ClipResult result =
      clip_result(call.arguments<ClipArgs>(), o.messages.flat<const uint8_t>(),
                  o.unscale.flat<const double>(), o.prior.flat<const uint32_t>());
  *o.coefficient.flat<float>() = result.coefficient;
  *o.norm.flat<double>() = result.norm;
  *o.word.flat<uint32_t>() = result.word;
}

void count_valid(const KernelCall& call) {
  const auto& o = call.of<kernels::CountValid>();
  const uint8_t* valid = o.valid.flat<const uint8_t>();
  uint64_t* counts = o.counts.flat<uint64_t>();
  for (const Piece& p : call.pieces) {
    if (p.tensor == kNoTensor) continue;
    counts[p.block] += valid == nullptr ? p.count : count_bits(valid, p.flat, p.count);
  }
}

}  // namespace sotto::scalar
