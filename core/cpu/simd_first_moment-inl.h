// Vector loops of optimizers that keep a first moment at most. Included once per target, like
// simd-inl.h.
//
// A Rule is an Element in vectors: it is made of a group's numbers, kMomentum says whether it has
// an m, and step() takes old parameters and gradients, replaces m and returns new parameters.
#if defined(SOTTO_CORE_CPU_SIMD_FIRST_MOMENT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SOTTO_CORE_CPU_SIMD_FIRST_MOMENT_INL_H_
#undef SOTTO_CORE_CPU_SIMD_FIRST_MOMENT_INL_H_
#else
#define SOTTO_CORE_CPU_SIMD_FIRST_MOMENT_INL_H_
#endif

#include "core/cpu/ops_first_moment.h"
#include "core/cpu/simd-inl.h"
#include "core/cpu/simd_state-inl.h"
#include "core/cpu/simd_types-inl.h"

#if SOTTO_SIMD_TARGET
HWY_BEFORE_NAMESPACE();
namespace sotto {
namespace HWY_NAMESPACE {

template <class Rule, class State, class Element>
void first_moment_groups(FirstMomentOp<State, Element>& op, const Piece& piece, uint64_t first,
                         uint64_t n, const float* g) {
  const Rule rule(op.groups[piece.group]);
  const VF clip = set(op.gradients.clip != nullptr ? *op.gradients.clip : 1.0f);
  uint64_t flat = piece.flat + first;
  float* p = op.parameter(piece) + first;
  for (; n != 0; --n, first += kNormLanes, flat += kNormLanes, g += kNormLanes, p += kNormLanes) {
    op.state.begin(piece, first, kNormLanes);
    const uint32_t position = position_in_block(piece, first);
    const uint64_t valid = valid_word(op.gradients.valid, flat);
    const WordMasks masks(valid);
    [[maybe_unused]] auto rounding = rounding_of(op.state, position);
    SOTTO_FOR_VECTORS(k) {
      VF gradient = hn::Mul(load(g + k * kN), clip);
      if (~valid != 0) gradient = hn::IfThenElseZero(masks[k], gradient);
      const uint64_t at = flat + k * kN;
      VF m = hn::Zero(DF());
      if constexpr (Rule::kMomentum) m = old_m(op.state, at);
      store(rule.step(load(p + k * kN), gradient, &m), p + k * kN);
      if constexpr (Rule::kMomentum)
        keep<false>(op.state, rounding, m, m, at, position + static_cast<uint32_t>(k * kN));
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace sotto
HWY_AFTER_NAMESPACE();
#endif  // SOTTO_SIMD_TARGET
#endif  // per-target guard
