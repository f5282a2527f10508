// Casts and blockwise integers. The arithmetic of an element and the walk over pieces and blocks
// are here; a Math class does runs of elements, plainly (ScalarQuant) or with vectors.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "core/base/dtype.h"
#include "core/cpu/elements.h"
#include "core/kernels/quant.h"
#include "core/kernels/quant_elements.h"

namespace sotto {

struct ScalarQuant {
  // c = x' + e (e null: x'); flags; the bits of the largest |c|. c may be e.
  static uint32_t add(const float* x, const float* e, float* c, uint64_t n, uint32_t* flags) {
    uint32_t max_bits = 0;
    for (uint64_t i = 0; i < n; ++i) {
      const float in = guard_finite(x[i], flags);
      c[i] = e != nullptr ? in + e[i] : in;
      max_bits = std::max(max_bits, magnitude_bits(c[i]));
    }
    return max_bits;
  }
  // The bits of the largest |x|.
  static uint32_t largest(const float* x, uint64_t n) {
    uint32_t max_bits = 0;
    for (uint64_t i = 0; i < n; ++i) max_bits = std::max(max_bits, magnitude_bits(x[i]));
    return max_bits;
  }
  // 16-bit codes of c, and the error, unless null. error may be c.
  static void pack_half(CodecKind kind, const float* c, float* error, uint64_t n, uint8_t* out,
                        uint32_t* flags) {
    for (uint64_t i = 0; i < n; ++i) {
      const uint16_t code = guarded_half_code(kind, c[i], flags);
      std::memcpy(out + 2 * i, &code, 2);
      if (error != nullptr) error[i] = c[i] - half_value(kind, code);
    }
  }
  // Codes of a block, and the error, unless null. error may be c.
  static void pack_block(CodecKind kind, QuantScale s, const float* c, float* error, uint32_t block,
                         uint8_t* out) {
    const uint32_t per_byte = 8 / codec_bits(kind);
    for (uint32_t first = 0; first < block; first += per_byte) {
      float numbers[8];
      for (uint32_t i = 0; i < per_byte; ++i) {
        numbers[i] = quant_round(s, c[first + i]);
        if (error != nullptr) error[first + i] = c[first + i] - numbers[i] * s.scale;
      }
      out[first / per_byte] = packed_codes(kind, numbers);
    }
  }
  // Sums over ranks of n 16-bit values or of a block; rows: the first unit in row 0.
  static void sum_half(const QuantArgs& a, const uint8_t* rows, uint64_t n, float* sums) {
    const float part = 1.0f / static_cast<float>(a.world);
    for (uint64_t i = 0; i < n; ++i) {
      sums[i] = sum_of_ranks(a.world, [&](uint32_t r) {
        uint16_t code;
        std::memcpy(&code, rows + r * a.row_bytes + 2 * i, 2);
        return half_value(a.kind, code) * part;
      });
    }
  }
  static void sum_block(const QuantArgs& a, const uint8_t* rows, float* sums) {
    const float part = 1.0f / static_cast<float>(a.world);
    const PayloadUnit unit = payload_unit(a.kind, a.block);
    for (uint32_t i = 0; i < a.block; ++i) {
      sums[i] = sum_of_ranks(a.world, [&](uint32_t r) {
        const uint8_t* row = rows + r * a.row_bytes;
        return quant_number(a.kind, row, i) * (stored_scale(row, unit) * part);
      });
    }
  }
  // stream: y is not read again soon.
  static void decode_half(CodecKind kind, const uint8_t* codes, uint64_t n, float* y,
                          bool /*stream*/) {
    for (uint64_t i = 0; i < n; ++i) {
      uint16_t code;
      std::memcpy(&code, codes + 2 * i, 2);
      y[i] = half_value(kind, code);
    }
  }
  // Elements [first, first + n) of a block.
  static void decode_block(CodecKind kind, const uint8_t* unit, float scale, uint32_t first,
                           uint64_t n, float* y, bool /*stream*/) {
    for (uint32_t i = 0; i < n; ++i) y[i] = quant_number(kind, unit, first + i) * scale;
  }
  static void finish_streams() {}
};

// Turns c of consecutive flat elements into a payload. c is made in the residual's memory, where
// the error replaces it, or in a buffer.
template <class Math>
class QuantWriter {
 public:
  // base: flat index of the payload's first element; a multiple of the block.
  QuantWriter(const QuantArgs& args, uint64_t base, float* residual, uint8_t* payload)
      : kind_(args.kind),
        block_(codec_has_blocks(args.kind) ? args.block : kMaxQuantBlock),
        unit_(payload_unit(args.kind, args.block)),
        base_(base),
        residual_(residual),
        payload_(payload) {}

  // Elements from `flat` on that can be written at once, of `left`.
  uint64_t run(uint64_t flat, uint64_t left) const {
    return std::min<uint64_t>(left, block_ - flat % block_);
  }
  float* at(uint64_t flat) {
    return residual_ != nullptr ? residual_ + flat : buffer_ + flat % block_;
  }
  // at(flat) has c of n elements with the largest magnitude max_bits.
  void wrote(uint64_t flat, uint64_t n, uint32_t max_bits, uint32_t* flags) {
    if (!codec_has_blocks(kind_)) {
      pack_half(at(flat), flat, n, flags);
      return;
    }
    max_bits_ = std::max(max_bits_, max_bits);
    if ((flat + n) % block_ != 0) return;
    const uint64_t first = flat + n - block_;
    pack_block(at(first), first, max_bits_, flags);
    max_bits_ = 0;
  }
  // Without residual: the same from x itself, where that can be done.
  bool direct(const float* x, uint64_t flat, uint64_t n, uint32_t* flags) {
    if (residual_ != nullptr) return false;
    if (!codec_has_blocks(kind_)) {
      pack_half(x, flat, n, flags);
      return true;
    }
    if (n != block_) return false;
    const uint32_t max_bits = Math::largest(x, n);
    if (max_bits >= 0x7f800000u) return false;
    pack_block(x, flat, max_bits, flags);
    return true;
  }

 private:
  void pack_half(const float* c, uint64_t flat, uint64_t n, uint32_t* flags) {
    float* error = residual_ != nullptr ? residual_ + flat : nullptr;
    Math::pack_half(kind_, c, error, n, payload_ + 2 * (flat - base_), flags);
  }
  void pack_block(const float* c, uint64_t flat, uint32_t max_bits, uint32_t* flags) {
    uint8_t* out = payload_ + unit_.bytes_of(flat - base_);
    const QuantScale s = quant_scale(kind_, max_bits, flags);
    float* error = residual_ != nullptr ? residual_ + flat : nullptr;
    Math::pack_block(kind_, s, c, error, block_, out);
    std::memcpy(out + unit_.bytes - 4, &s.scale, 4);
  }

  const CodecKind kind_;
  const uint32_t block_;
  const PayloadUnit unit_;
  const uint64_t base_;
  float* residual_;
  uint8_t* payload_;
  uint32_t max_bits_ = 0;
  alignas(64) float buffer_[kMaxQuantBlock];
};

template <class Math>
void run_quant_encode(const KernelCall& call) {
  const auto& o = call.of<kernels::QuantEncode>();
  const auto& a = call.arguments<QuantArgs>();
  float* e = o.e.flat<float>();
  QuantWriter<Math> writer(a, a.base, e, o.payload.flat<uint8_t>());
  uint32_t flags = 0;
  for (const Piece& p : call.pieces) {
    for (uint64_t first = 0; first < p.count;) {
      const uint64_t flat = p.flat + first;
      const uint64_t n = writer.run(flat, p.count - first);
      float* c = writer.at(flat);
      uint32_t max_bits = 0;
      if (p.tensor == kNoTensor) {
        std::memset(c, 0, 4 * n);
      } else {
        const float* x = o.x.list<const float>(p.tensor) + p.offset + first;
        if (writer.direct(x, flat, n, &flags)) {
          first += n;
          continue;
        }
        max_bits = Math::add(x, e != nullptr ? e + flat : nullptr, c, n, &flags);
      }
      writer.wrote(flat, n, max_bits, &flags);
      first += n;
    }
  }
  raise_flags(o.flags.flat<uint32_t>(), flags);
}

template <class Math>
void run_quant_server(const KernelCall& call) {
  const auto& o = call.of<kernels::QuantServer>();
  const auto& a = call.arguments<QuantArgs>();
  const uint8_t* rows = o.rows.flat<const uint8_t>();
  const float* old_e = o.e.flat<const float>();
  const PayloadUnit unit = payload_unit(a.kind, a.block);
  QuantWriter<Math> writer(a, 0, o.new_e.flat<float>(), o.payload.flat<uint8_t>());
  alignas(64) float sums[kMaxQuantBlock];
  uint32_t flags = 0;
  for (const Piece& p : call.pieces) {
    for (uint64_t first = 0; first < p.count;) {
      const uint64_t flat = p.flat + first;
      const uint64_t n = writer.run(flat, p.count - first);
      float* c = writer.at(flat);
      uint32_t max_bits = 0;
      if (p.tensor == kNoTensor) {
        std::memset(c, 0, 4 * n);
      } else {
        const float* sum = sums;
        if (codec_has_blocks(a.kind)) {
          Math::sum_block(a, rows + unit.bytes_of(flat), sums);
          sum += flat % a.block;
        } else {
          Math::sum_half(a, rows + 2 * flat, n, sums);
        }
        max_bits = Math::add(sum, old_e != nullptr ? old_e + flat : nullptr, c, n, &flags);
      }
      writer.wrote(flat, n, max_bits, &flags);
      first += n;
    }
  }
  raise_flags(o.flags.flat<uint32_t>(), flags);
}

// y = v for every run of elements of one block (or of any elements of a cast).
template <class Math>
void decode_run(const QuantArgs& a, const uint8_t* payload, uint64_t flat, uint64_t n, float* y,
                bool stream) {
  if (!codec_has_blocks(a.kind)) {
    Math::decode_half(a.kind, payload + 2 * flat, n, y, stream);
    return;
  }
  const PayloadUnit unit = payload_unit(a.kind, a.block);
  const uint8_t* at = payload + unit.bytes_of(flat);
  Math::decode_block(a.kind, at, decoded_scale(at, unit), static_cast<uint32_t>(flat % a.block), n,
                     y, stream);
}

// Outputs of calls of this size are larger than what their reader finds in L2.
inline constexpr uint64_t kStreamElements = 32768;

template <class Math>
void run_quant_decode(const KernelCall& call) {
  const auto& o = call.of<kernels::QuantDecode>();
  const auto& a = call.arguments<QuantArgs>();
  const uint8_t* payload = o.payload.flat<const uint8_t>();
  const uint64_t block = codec_has_blocks(a.kind) ? a.block : kMaxQuantBlock;
  uint64_t total = 0;
  for (const Piece& p : call.pieces) total += p.count;
  const bool stream = total >= kStreamElements;
  for (const Piece& p : call.pieces) {
    if (p.tensor == kNoTensor) continue;
    float* y = o.y.list<float>(p.tensor) + p.target;
    for (uint64_t first = 0; first < p.count;) {
      const uint64_t flat = p.flat + first;
      const uint64_t n = std::min(p.count - first, block - flat % block);
      decode_run<Math>(a, payload, flat, n, y + first, stream);
      first += n;
    }
  }
  if (stream) Math::finish_streams();
}

}  // namespace sotto
