// Vector kernel of SGD. Bytes per element: 12 without momentum, 20 with it.
#include "core/cpu/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "core/cpu/simd_sgd.cc"
#include <hwy/foreach_target.h>

#include "core/cpu/ops_sgd.h"
#include "core/cpu/simd-inl.h"
#include "core/cpu/simd_types-inl.h"

#if SOTTO_SIMD_TARGET
HWY_BEFORE_NAMESPACE();
namespace sotto {
namespace HWY_NAMESPACE {
namespace {

template <bool kMomentum, bool kNesterov>
void sgd_groups(SgdOp& op, const Piece& piece, uint64_t first, uint64_t n, const float* g) {
  const GroupScalars& s = op.groups[piece.group];
  const bool decay = s.weight_decay != 0.0f;
  const VF momentum = set(s.b1);
  const VF kept = set(s.one_minus_b1);
  const VF wd = set(s.weight_decay);
  const VF lr = set(static_cast<float>(s.lr));
  const VF clip = set(op.gradients.clip != nullptr ? *op.gradients.clip : 1.0f);
  uint64_t flat = piece.flat + first;
  float* p = op.parameter(piece) + first;
  for (; n != 0; --n, flat += kNormLanes, g += kNormLanes, p += kNormLanes) {
    const uint64_t valid = valid_word(op.gradients.valid, flat);
    const WordMasks masks(valid);
    SOTTO_FOR_VECTORS(k) {
      const VF old = load(p + k * kN);
      VF gradient = hn::Mul(load(g + k * kN), clip);
      if (~valid != 0) gradient = hn::IfThenElseZero(masks[k], gradient);
      if (decay) gradient = hn::Add(gradient, hn::Mul(wd, old));
      VF direction = gradient;
      if constexpr (kMomentum) {
        float* at = op.m + flat + k * kN;
        const VF m = hn::Add(hn::Mul(momentum, load(at)), hn::Mul(kept, gradient));
        store(m, at);
        direction = kNesterov ? hn::Add(gradient, hn::Mul(momentum, m)) : m;
      }
      store(hn::Sub(old, hn::Mul(lr, direction)), p + k * kN);
    }
  }
}

void sgd_as(SgdOp& op, const Piece& p, uint64_t first, uint64_t n, const float* g) {
  if (op.m == nullptr) return sgd_groups<false, false>(op, p, first, n, g);
  return op.args.nesterov ? sgd_groups<true, true>(op, p, first, n, g)
                          : sgd_groups<true, false>(op, p, first, n, g);
}

void sgd(const KernelCall& call) { run_source_groups<SgdOp>(call, sgd_as); }

}  // namespace

void install_sgd(KernelTable& table) { kernel_entry(table, KernelId::kSgd) = sgd; }

}  // namespace HWY_NAMESPACE
}  // namespace sotto
HWY_AFTER_NAMESPACE();
#endif  // SOTTO_SIMD_TARGET
