// The 1-bit codec (specification of the 1-bit optimizers, section 1): encoder, server, decoder and
// their scales.
#include <cmath>

#include "core/cpu/elements.h"
#include "core/cpu/kernel_table.h"
#include "core/cpu/norm_blocks.h"

namespace sotto::scalar {

void onebit_encode(const KernelCall& call) {
  const auto& a = call.arguments<EncodeArgs>();
  float* c = call.operands[1].flat<float>();
  const float* old_scales = call.operands[2].flat<const float>();
  uint8_t* bits = call.operands[3].flat<uint8_t>();
  const uint8_t* valid = call.operands[5].flat<const uint8_t>();
  NormBlocks sums(call.operands[4].flat<float>());
  uint32_t flags = 0;
  for_each_run(call.pieces, [&](const Piece& p, uint64_t first, uint64_t count, uint64_t block) {
    float* lanes = sums.open(block);
    const uint64_t flat = p.flat + first;
    if (p.tensor == kNoTensor) return set_bits(bits, flat - a.bits_base, count);
    const float* x = call.operands[0].list<const float>(p.tensor) + p.offset + first;
    for (uint64_t i = 0; i < count; ++i) {
      float value = 0.0f;
      if (valid == nullptr || get_bit(valid, flat + i)) {
        value = guard_finite(x[i], &flags) + residual_of(c[flat + i], old_scales[p.scale]);
        lanes[(p.lane + first + i) % kNormLanes] += norm_term(a.scale, value);
      }
      c[flat + i] = value;
      set_bit(bits, flat + i - a.bits_base, value >= 0.0f);
    }
  });
  sums.finish();
  raise_flags(call.operands[6].flat<uint32_t>(), flags);
}

void onebit_encode_undo(const KernelCall& call) {
  float* c = call.operands[1].flat<float>();
  const float* old_scales = call.operands[2].flat<const float>();
  const uint8_t* valid = call.operands[5].flat<const uint8_t>();
  uint32_t unused = 0;
  for (const Piece& p : call.pieces) {
    if (p.tensor == kNoTensor) continue;
    const float* x = call.operands[0].list<const float>(p.tensor) + p.offset;
    for (uint64_t i = 0; i < p.count; ++i) {
      float& value = c[p.flat + i];
      value = valid != nullptr && !get_bit(valid, p.flat + i)
                  ? 0.0f
                  : undo_encode(value, guard_finite(x[i], &unused), old_scales[p.scale],
                                call.paired_ran);
    }
  }
}

void onebit_server(const KernelCall& call) {
  const auto& a = call.arguments<ServerArgs>();
  const uint8_t* rows = call.operands[0].flat<const uint8_t>();
  const uint8_t* messages = call.operands[1].flat<const uint8_t>();
  float* c = call.operands[2].flat<float>();
  const float* old_scales = call.operands[3].flat<const float>();
  uint8_t* bits = call.operands[4].flat<uint8_t>();
  const uint8_t* valid = call.operands[6].flat<const uint8_t>();
  NormBlocks sums(call.operands[5].flat<float>());
  const float part = 1.0f / static_cast<float>(a.world);
  for_each_run(call.pieces, [&](const Piece& p, uint64_t first, uint64_t count, uint64_t block) {
    float* lanes = sums.open(block);
    const uint64_t flat = p.flat + first;
    if (p.tensor == kNoTensor) return set_bits(bits, flat, count);
    for (uint64_t i = 0; i < count; ++i) {
      float value = 0.0f;
      if (valid == nullptr || get_bit(valid, flat + i + a.valid_base)) {
        for (uint32_t group = 0; group < a.world; group += 8) {
          float sum = 0.0f;
          for (uint32_t r = group; r < a.world && r < group + 8; ++r) {
            const float term = message_scale(messages, r, a.instances, p.scale) * part;
            sum += plus_minus(get_bit(rows + r * a.row_bytes, flat + i), term);
          }
          value += sum;
        }
        value = value + residual_of(c[flat + i], old_scales[p.scale]);
        lanes[(p.lane + first + i) % kNormLanes] += norm_term(a.scale, value);
      }
      c[flat + i] = value;
      set_bit(bits, flat + i, value >= 0.0f);
    }
  });
  sums.finish();
}

void onebit_decode(const KernelCall& call) {
  const uint64_t instances = call.arguments<DecodeArgs>().instances;
  const uint8_t* bits = call.operands[0].flat<const uint8_t>();
  const uint8_t* messages = call.operands[1].flat<const uint8_t>();
  const uint8_t* valid = call.operands[3].flat<const uint8_t>();
  for (const Piece& p : call.pieces) {
    if (p.tensor == kNoTensor) continue;
    const float scale = message_scale(messages, p.chunk, instances, p.scale);
    float* y = call.operands[2].list<float>(p.tensor) + p.target;
    for (uint64_t i = 0; i < p.count; ++i) {
      const bool masked = valid != nullptr && !get_bit(valid, p.flat + i);
      y[i] = masked ? 0.0f : plus_minus(get_bit(bits, p.flat + i), scale);
    }
  }
}

void norm_finish(const KernelCall& call) {
  const auto& a = call.arguments<NormArgs>();
  const float* sums = call.operands[0].flat<const float>();
  const uint64_t* counts = call.operands[1].flat<const uint64_t>();
  float* scales = call.operands[2].flat<float>();
  uint8_t* message = call.operands[3].flat<uint8_t>();
  uint32_t* flags = call.operands[4].flat<uint32_t>();
  for (uint64_t k = 0; k < a.n; ++k) {
    float scale = 0.0f;
    if (counts[k] != 0) {
      const double mean = add_blocks(sums, a.ranges[k].first_block, a.ranges[k].blocks) /
                          static_cast<double>(counts[k]);
      scale = static_cast<float>(a.scale == ScaleKind::kL2 ? std::sqrt(mean) : mean);
    }
    scales[k] = guard_finite(scale, flags);
    std::memcpy(message + 4 * k, &scales[k], 4);
  }
  std::memcpy(message + 4 * a.n, flags, 4);
}

void gate(const KernelCall& call) {
  const auto& a = call.arguments<GateArgs>();
  const uint8_t* messages = call.operands[0].flat<const uint8_t>();
  const uint32_t* prior = call.operands[1].flat<const uint32_t>();
  uint32_t flags = 0;
  for (uint32_t r = 0; r < a.world; ++r) {
    uint32_t word;
    std::memcpy(&word, messages + (r + uint64_t{1}) * a.message_bytes - 4, 4);
    flags |= word;
  }
  uint32_t decision = flags == 0 ? kCommit : a.fail_word;
  if (prior != nullptr && *prior != kCommit) decision = *prior;
  *call.operands[2].flat<uint32_t>() = decision;
}

}  // namespace sotto::scalar
