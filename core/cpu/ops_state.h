// Where momentum and variance of SGD and Adam lie, as the ops see it. A State class has the old
// values of an element as float32 and keeps the new ones:
//
//   void open(uint64_t block)      elements of this norm block follow
//   uint64_t begin(piece, first, count)   the run that follows; how much of it may be done before
//                                         begin is called again (whole groups of kNormLanes, if the
//                                         run starts with one)
//   float old_m(flat), old_v(flat)
//   void keep(moments, flat, position)    position: of the element in its norm block
//   void finish()                         end of the call
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>

#include "core/base/low_precision_state.h"
#include "core/cpu/elements.h"
#include "core/kernels/adam.h"

namespace sotto {

// Operands of the state. v null: there is no variance.
struct StateOperands {
  void* m = nullptr;
  void* v = nullptr;
  const uint64_t* step = nullptr;  // as the following: low-precision state alone
  uint8_t* m_exponents = nullptr;
  uint8_t* v_exponents = nullptr;
};

inline uint32_t position_in_block(const Piece& piece, uint64_t element) {
  return static_cast<uint32_t>((piece.lane + element) % kNormBlock);
}

struct FloatState {
  static constexpr bool kLowPrecision = false;
  explicit FloatState(const StateOperands& at)
      : m(static_cast<float*>(at.m)), v(static_cast<float*>(at.v)) {}

  bool present() const { return m != nullptr; }
  void open(uint64_t) {}
  uint64_t begin(const Piece&, uint64_t, uint64_t count) { return count; }
  float old_m(uint64_t flat) const { return m[flat]; }
  float old_v(uint64_t flat) const { return v[flat]; }
  void keep(const Moments& x, uint64_t flat, uint32_t) {
    m[flat] = x.m;
    if (v != nullptr) v[flat] = x.v;
  }
  void finish() {}

  float* m;
  float* v;
};

struct Bf16State {
  static constexpr bool kLowPrecision = true;
  explicit Bf16State(const StateOperands& at)
      : m(static_cast<uint16_t*>(at.m)), v(static_cast<uint16_t*>(at.v)), step(*at.step) {}

  bool present() const { return true; }
  void open(uint64_t block) { key = rounding_key(step, block); }
  uint64_t begin(const Piece&, uint64_t, uint64_t count) { return count; }
  float old_m(uint64_t flat) const { return bf16_to_f32(m[flat]); }
  float old_v(uint64_t flat) const { return bf16_to_f32(v[flat]); }
  void keep(const Moments& x, uint64_t flat, uint32_t position) {
    const uint32_t random = rounding_bits(key, position);
    m[flat] = bf16_m_code(x.m, random);
    if (v != nullptr) v[flat] = bf16_v_code(x.v, random);
  }
  void finish() {}

  uint16_t* m;
  uint16_t* v;
  uint64_t step;
  RoundingKey key{};
};

// New values of one block as floats, and where their codes go.
struct Fp8Run {
  uint64_t flat = 0;
  uint32_t first = 0;  // in the block
  uint32_t count = 0;
};

// What Fp8State does with whole runs of floats.
struct ScalarFp8 {
  // Largest magnitude.
  static float largest(const float* x, uint32_t n) {
    float most = 0;
    for (uint32_t i = 0; i < n; ++i) most = std::max(most, std::fabs(x[i]));
    return most;
  }
  // position: of the first element in its norm block. v null: there is none.
  static void pack(const float* m, const float* v, uint32_t n, RoundingKey key, uint32_t position,
                   uint32_t m_base, uint32_t v_base, uint8_t* m_codes, uint8_t* v_codes) {
    for (uint32_t i = 0; i < n; ++i) {
      const uint32_t random = rounding_bits(key, position + i);
      m_codes[i] = fp8_m_code(m[i], m_base, random >> 12);
      if (v != nullptr) v_codes[i] = fp8_v_code(v[i], v_base, random & 0xfffffu);
    }
  }
};

// The new values of a block wait as floats until all are there, since its exponent follows from
// the largest. A block may have several pieces (a call has all of them).
template <class Math>
class Fp8State {
 public:
  static constexpr bool kLowPrecision = true;
  explicit Fp8State(const StateOperands& at)
      : m(static_cast<uint8_t*>(at.m)),
        v(static_cast<uint8_t*>(at.v)),
        m_exponents_(at.m_exponents),
        v_exponents_(at.v_exponents),
        step_(*at.step) {}

  bool present() const { return true; }
  void open(uint64_t block) {
    if (runs_ != 0 && block == norm_block_) return;
    finish();
    norm_block_ = block;
    key_ = rounding_key(step_, block);
  }
  uint64_t begin(const Piece& piece, uint64_t first, uint64_t count) {
    const uint32_t position = position_in_block(piece, first);
    const uint32_t index = position / kStateBlock;
    if (runs_ == 0 || index != index_) {
      finish();
      start(index);
    }
    const uint32_t inside = position % kStateBlock;
    const auto n = static_cast<uint32_t>(std::min<uint64_t>(count, kStateBlock - inside));
    const uint64_t flat = piece.flat + first;
    if (runs_ != 0) {
      Fp8Run& last = run_[runs_ - 1];
      if (last.first + last.count == inside && last.flat + last.count == flat) {
        last.count += n;
        return n;
      }
    }
    run_[runs_++] = {flat, inside, n};
    return n;
  }
  float old_m(uint64_t flat) const { return fp8_m_value(m[flat], m_base); }
  float old_v(uint64_t flat) const { return fp8_v_value(v[flat], v_base); }
  void keep(const Moments& x, uint64_t, uint32_t position) {
    new_m[position % kStateBlock] = within(x.m, kFp8Limit);
    new_v[position % kStateBlock] = at_most(x.v, kFp8Limit);
  }
  void finish() {
    if (runs_ == 0) return;
    float most_m = 0, most_v = 0;
    for (uint32_t i = 0; i < runs_; ++i) {
      const Fp8Run& run = run_[i];
      most_m = std::max(most_m, Math::largest(new_m + run.first, run.count));
      if (v != nullptr) most_v = std::max(most_v, Math::largest(new_v + run.first, run.count));
    }
    const uint64_t block = norm_block_ * kStateBlocksPerNormBlock + index_;
    m_exponents_[block] = fp8_m_exponent(most_m);
    if (v != nullptr) v_exponents_[block] = fp8_v_exponent(most_v);
    const uint32_t base_m = fp8_base(fp8_m_exponent(most_m), kFp8LargestM);
    const uint32_t base_v = fp8_base(fp8_v_exponent(most_v), kFp8LargestV);
    for (uint32_t i = 0; i < runs_; ++i) {
      const Fp8Run& run = run_[i];
      Math::pack(new_m + run.first, v != nullptr ? new_v + run.first : nullptr, run.count, key_,
                 index_ * kStateBlock + run.first, base_m, base_v, m + run.flat,
                 v != nullptr ? v + run.flat : nullptr);
    }
    runs_ = 0;
  }

  alignas(64) float new_m[kStateBlock];
  alignas(64) float new_v[kStateBlock];
  uint8_t* m;
  uint8_t* v;
  uint32_t m_base = 0, v_base = 0;  // of the block's old values

 private:
  void start(uint32_t index) {
    index_ = index;
    const uint64_t block = norm_block_ * kStateBlocksPerNormBlock + index;
    m_base = fp8_base(m_exponents_[block], kFp8LargestM);
    if (v != nullptr) v_base = fp8_base(v_exponents_[block], kFp8LargestV);
  }

  uint8_t* m_exponents_;
  uint8_t* v_exponents_;
  uint64_t step_;
  uint64_t norm_block_ = 0;
  uint32_t index_ = 0;  // of the block in its norm block
  uint32_t runs_ = 0;
  RoundingKey key_{};
  std::array<Fp8Run, kStateBlock> run_;
};

}  // namespace sotto
