// Vector kernel of SGD. Bytes per element: 12 without momentum, 20 with it (16 with
// bfloat16, 14 with 8 bits).
#include "core/cpu/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "core/cpu/simd_sgd.cc"
#include <hwy/foreach_target.h>

#include "core/cpu/ops_sgd.h"
#include "core/cpu/simd-inl.h"
#include "core/cpu/simd_state-inl.h"
#include "core/cpu/simd_types-inl.h"

#if SOTTO_SIMD_TARGET
HWY_BEFORE_NAMESPACE();
namespace sotto {
namespace HWY_NAMESPACE {
namespace {

template <bool kMomentum, bool kNesterov, class State>
void sgd_groups(SgdOp<State>& op, const Piece& piece, uint64_t first, uint64_t n, const float* g) {
  const GroupScalars& s = op.groups[piece.group];
  const bool decay = s.weight_decay != 0.0f;
  const VF momentum = set(s.b1);
  const VF kept = set(s.one_minus_b1);
  const VF wd = set(s.weight_decay);
  const VF lr = set(static_cast<float>(s.lr));
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
      const VF old = load(p + k * kN);
      VF gradient = hn::Mul(load(g + k * kN), clip);
      if (~valid != 0) gradient = hn::IfThenElseZero(masks[k], gradient);
      if (decay) gradient = hn::Add(gradient, hn::Mul(wd, old));
      VF direction = gradient;
      if constexpr (kMomentum) {
        const uint64_t at = flat + k * kN;
        const VF m = hn::Add(hn::Mul(momentum, old_m(op.state, at)), hn::Mul(kept, gradient));
        keep<false>(op.state, rounding, m, m, at, position + static_cast<uint32_t>(k * kN));
        direction = kNesterov ? hn::Add(gradient, hn::Mul(momentum, m)) : m;
      }
      store(hn::Sub(old, hn::Mul(lr, direction)), p + k * kN);
    }
  }
}

template <class State>
void sgd_as(SgdOp<State>& op, const Piece& p, uint64_t first, uint64_t n, const float* g) {
  if (!op.state.present()) return sgd_groups<false, false>(op, p, first, n, g);
  return op.nesterov ? sgd_groups<true, true>(op, p, first, n, g)
                     : sgd_groups<true, false>(op, p, first, n, g);
}

void sgd(const KernelCall& call) { run_source_groups<SgdOp<FloatState>>(call, sgd_as<FloatState>); }
void sgd_narrow(const KernelCall& call) {
  if (call.arguments<NarrowArgs>().state == StateType::kBf16)
    return run_source_groups<SgdOp<Bf16State>>(call, sgd_as<Bf16State>);
  run_source_groups<SgdOp<Fp8Vectors>>(call, sgd_as<Fp8Vectors>);
}

}  // namespace

void install_sgd(KernelTable& table) {
  kernel_entry(table, KernelId::kSgd) = sgd;
  kernel_entry(table, KernelId::kSgdNarrow) = sgd_narrow;
}

}  // namespace HWY_NAMESPACE
}  // namespace sotto
HWY_AFTER_NAMESPACE();
#endif  // SOTTO_SIMD_TARGET
