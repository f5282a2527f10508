// Vector kernel of SGD. Bytes per element: 12 without momentum, 20 with it (16 with
// bfloat16, 14 with 8 bits).
#include "core/cpu/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "core/cpu/simd_sgd.cc"
#include <hwy/foreach_target.h>

#include "core/cpu/simd_first_moment-inl.h"

#if SOTTO_SIMD_TARGET
HWY_BEFORE_NAMESPACE();
namespace sotto {
namespace HWY_NAMESPACE {
namespace {

template <bool kHasMomentum, bool kNesterov>
struct SgdRule {
  static constexpr bool kMomentum = kHasMomentum;
  HWY_INLINE explicit SgdRule(const SgdGroupScalars& s)
      : momentum(set(s.momentum)),
        kept(set(s.one_minus_dampening)),
        wd(set(s.weight_decay)),
        lr(set(static_cast<float>(s.lr))),
        decay(s.weight_decay != 0.0f) {}
  HWY_INLINE VF step(VF old, VF gradient, VF* m) const {
    if (decay) gradient = hn::Add(gradient, hn::Mul(wd, old));
    VF direction = gradient;
    if constexpr (kMomentum) {
      *m = hn::Add(hn::Mul(momentum, *m), hn::Mul(kept, gradient));
      direction = kNesterov ? hn::Add(gradient, hn::Mul(momentum, *m)) : *m;
    }
    return hn::Sub(old, hn::Mul(lr, direction));
  }
  VF momentum, kept, wd, lr;
  bool decay;
};

template <class State>
void run(const KernelCall& call) {
  run_source_groups<FirstMomentOp<State, SgdElement>>(
      call, [](auto& op, const Piece& p, uint64_t first, uint64_t n, const float* g) {
        if (!op.state.present())
          return first_moment_groups<SgdRule<false, false>>(op, p, first, n, g);
        return op.element.nesterov ? first_moment_groups<SgdRule<true, true>>(op, p, first, n, g)
                                   : first_moment_groups<SgdRule<true, false>>(op, p, first, n, g);
      });
}

void sgd(const KernelCall& call) { run<FloatState>(call); }
void sgd_low_precision(const KernelCall& call) {
  if (call.arguments<LowPrecisionArgs>().state == StateType::kBf16) return run<Bf16State>(call);
  run<Fp8Vectors>(call);
}

}  // namespace

void install_sgd(KernelTable& table) {
  kernel_entry(table, KernelId::kSgd) = sgd;
  kernel_entry(table, KernelId::kSgdLowPrecision) = sgd_low_precision;
}

}  // namespace HWY_NAMESPACE
}  // namespace sotto
HWY_AFTER_NAMESPACE();
#endif  // SOTTO_SIMD_TARGET
