// Vector kernel of Lion. Bytes per element: 20 (16 with bfloat16, 14 with 8 bits).
#include "core/cpu/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "core/cpu/simd_lion.cc"
#include <hwy/foreach_target.h>

#include "core/cpu/simd_first_moment-inl.h"
#include "core/kernels/lion.h"

#if SOTTO_SIMD_TARGET
HWY_BEFORE_NAMESPACE();
namespace sotto {
namespace HWY_NAMESPACE {
namespace {

struct LionRule {
  static constexpr bool kMomentum = true;
  HWY_INLINE explicit LionRule(const LionGroupScalars& s)
      : b1(set(s.b1)),
        one_minus_b1(set(s.one_minus_b1)),
        b2(set(s.b2)),
        one_minus_b2(set(s.one_minus_b2)),
        decay(set(s.decay)),
        lr(set(static_cast<float>(s.lr))) {}
  HWY_INLINE VF step(VF old, VF gradient, VF* m) const {
    const VF zero = hn::Zero(DF());
    const VF c = hn::Add(hn::Mul(b1, *m), hn::Mul(one_minus_b1, gradient));
    const VF change =
        hn::Sub(hn::IfThenElseZero(hn::Gt(c, zero), lr), hn::IfThenElseZero(hn::Lt(c, zero), lr));
    *m = hn::Add(hn::Mul(b2, *m), hn::Mul(one_minus_b2, gradient));
    return hn::Sub(hn::Mul(decay, old), change);
  }
  VF b1, one_minus_b1, b2, one_minus_b2, decay, lr;
};

template <class State>
void run(const KernelCall& call) {
  run_source_groups<FirstMomentOp<State, LionElement>>(
      call, [](auto& op, const Piece& p, uint64_t first, uint64_t n, const float* g) {
        first_moment_groups<LionRule>(op, p, first, n, g);
      });
}

void lion(const KernelCall& call) { run<FloatState>(call); }
void lion_low_precision(const KernelCall& call) {
  if (call.arguments<LowPrecisionArgs>().state == StateType::kBf16) return run<Bf16State>(call);
  run<Fp8Vectors>(call);
}

}  // namespace

void install_lion(KernelTable& table) {
  kernel_entry(table, KernelId::kLion) = lion;
  kernel_entry(table, KernelId::kLionLowPrecision) = lion_low_precision;
}

}  // namespace HWY_NAMESPACE
}  // namespace sotto
HWY_AFTER_NAMESPACE();
#endif  // SOTTO_SIMD_TARGET
