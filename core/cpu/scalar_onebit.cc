// The 1-bit codec (specification of the 1-bit optimizers, section 1): encoder, server, decoder and
// their scales.
#include "core/cpu/elements.h"
#include "core/cpu/kernel_table.h"
#include "core/cpu/ops_onebit.h"
#include "core/kernels/scalar_steps.h"

namespace sotto::scalar {

void onebit_encode(const KernelCall& call) { run_elements<EncodeOp>(call); }

void onebit_encode_undo(const KernelCall& call) {
  const EncodeOp encode(call);
  const float by = encode.factor();
  uint32_t unused = 0;
  for (const Piece& p : call.pieces) {
    if (p.tensor == kNoTensor) continue;
    const Floats x = encode.source(p);
    for (uint64_t i = 0; i < p.count; ++i) {
      float& value = encode.c[p.flat + i];
      value = encode.valid != nullptr && !get_bit(encode.valid, p.flat + i)
                  ? 0.0f
                  : undo_encode(value, guard_finite(x[i] * by, &unused), encode.old_scales[p.scale],
                                call.paired_ran);
    }
  }
}

void onebit_server(const KernelCall& call) { run_elements<ServerOp>(call); }
void onebit_decode(const KernelCall& call) { run_elements<DecodeOp>(call); }

void norm_finish(const KernelCall& call) {
  const auto& o = call.of<kernels::NormFinish>();
  const auto& a = call.arguments<NormArgs>();
  const float* sums = o.sums.flat<const float>();
  const uint64_t* counts = o.counts.flat<const uint64_t>();
  float* scales = o.scales.flat<float>();
  uint8_t* message = o.message.flat<uint8_t>();
  uint32_t* flags = o.flags.flat<uint32_t>();
  for (uint64_t k = 0; k < a.n; ++k) {
    const double sum = add_blocks(sums, a.ranges[k].first_block, a.ranges[k].blocks);
    scales[k] = guard_finite(norm_scale(a.scale, sum, counts[k]), flags);
    std::memcpy(message + 4 * k, &scales[k], 4);
  }
  std::memcpy(message + 4 * a.n, flags, 4);
}

void gate(const KernelCall& call) {
  const auto& o = call.of<kernels::Gate>();
  const auto& a = call.arguments<GateArgs>();
  const uint8_t* messages = o.messages.flat<const uint8_t>();
  const uint32_t* prior = o.prior.flat<const uint32_t>();
  uint32_t flags = 0;
  const auto section = [&](uint64_t bytes) {
    for (uint32_t r = 0; r < a.world; ++r) {
      uint32_t word;
      messages += bytes;
      std::memcpy(&word, messages - 4, 4);
      flags |= word;
    }
  };
  if (a.n_sections == 0) section(a.message_bytes);
  for (uint64_t s = 0; s < a.n_sections; ++s) section(a.sections[s]);
  uint32_t decision = flags == 0 ? kCommit : a.fail_word;
  if (prior != nullptr && *prior != kCommit) decision = *prior;
  *o.word.flat<uint32_t>() = decision;
}

}  // namespace sotto::scalar
