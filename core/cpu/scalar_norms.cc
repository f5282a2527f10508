// Norms of gradients, clipping, counts of valid elements.
#include <cmath>

#include "core/cpu/elements.h"
#include "core/cpu/kernel_table.h"
#include "core/cpu/ops_adam.h"

namespace sotto::scalar {
namespace {

struct NormMessage {
  double norm;
  uint32_t flags;
  uint32_t reserved;
};
static_assert(sizeof(NormMessage) == 16);

}  // namespace

void sum_squares(const KernelCall& call) { run_elements<SumSquaresOp>(call); }

void norm_message(const KernelCall& call) {
  const uint32_t* flags = call.operands[1].flat<const uint32_t>();
  NormMessage message{};
  message.norm = std::sqrt(
      add_blocks(call.operands[0].flat<const float>(), 0, call.arguments<BlocksArgs>().blocks));
  message.flags = flags != nullptr ? *flags : 0;
  if (!std::isfinite(message.norm)) message.flags |= kFlagNonfinite;
  std::memcpy(call.operands[2].data, &message, sizeof message);
}

void clip_coefficient(const KernelCall& call) {
  const auto& a = call.arguments<ClipArgs>();
  const uint8_t* messages = call.operands[0].flat<const uint8_t>();
  double norm = 0;
  uint32_t flags = 0;
  for (uint32_t r = 0; r < a.world; ++r) {
    NormMessage message;
    std::memcpy(&message, messages + r * sizeof message, sizeof message);
    norm += message.norm;
    flags |= message.flags;
  }
  const double* given = call.operands[4].flat<const double>();
  const double unscale = given != nullptr ? *given : 1.0;
  norm = norm / a.world * unscale;
  const double ratio = a.clip / (norm + 1e-6);
  *call.operands[1].flat<float>() =
      static_cast<float>((a.clip != 0 && ratio < 1 ? ratio : 1.0) * unscale);
  *call.operands[2].flat<double>() = norm;
  const uint32_t* prior = call.operands[5].flat<const uint32_t>();
  const uint32_t before = prior != nullptr ? *prior : kCommit;
  *call.operands[3].flat<uint32_t>() = before == kCommit && flags != 0 ? a.fail_word : before;
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
