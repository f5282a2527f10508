// Loads and stores of float types as vectors of float32, and kernels over sources. Included once
// per target, like simd-inl.h.
#if defined(SOTTO_CORE_CPU_SIMD_TYPES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SOTTO_CORE_CPU_SIMD_TYPES_INL_H_
#undef SOTTO_CORE_CPU_SIMD_TYPES_INL_H_
#else
#define SOTTO_CORE_CPU_SIMD_TYPES_INL_H_
#endif

#include "core/cpu/simd-inl.h"

#if SOTTO_SIMD_TARGET
HWY_BEFORE_NAMESPACE();
namespace sotto {
namespace HWY_NAMESPACE {

// Loads and stores of a dtype as float32 vectors. A NaN becomes the one that kReduce names; `bad`
// gets the lanes whose stored value is not finite.
struct Float {
  using Stored = float;
  static HWY_INLINE VF load(const float* p) { return hn::LoadU(DF(), p); }
  static HWY_INLINE MF store(VF x, float* p, MF bad) {
    const VF nan = hn::BitCast(DF(), hn::Set(DU(), 0x7fc00000u));
    x = hn::IfThenElse(hn::Eq(x, x), x, nan);
    hn::StoreU(x, DF(), p);
    return hn::Or(bad, hn::Not(finite(x)));
  }
};

struct Brain {
  using Stored = uint16_t;
  using D16 = hn::Rebind<uint16_t, DF>;
  static HWY_INLINE VF load(const uint16_t* p) {
    return hn::BitCast(DF(), hn::ShiftLeft<16>(hn::PromoteTo(DU(), hn::LoadU(D16(), p))));
  }
  static HWY_INLINE MF store(VF x, uint16_t* p, MF bad) {
    const VU bits = hn::BitCast(DU(), x);
    const VU odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(DU(), 1));
    const VU rounded = hn::ShiftRight<16>(hn::Add(bits, hn::Add(odd, hn::Set(DU(), 0x7fff))));
    const auto good = hn::RebindMask(DU(), hn::Eq(x, x));
    const VU result = hn::IfThenElse(good, rounded, hn::Set(DU(), 0x7fc0));
    hn::StoreU(hn::DemoteTo(D16(), hn::BitCast(DI(), result)), D16(), p);
    return hn::Or(bad, hn::Not(finite(hn::BitCast(DF(), hn::ShiftLeft<16>(result)))));
  }
};

#if HWY_TARGET <= HWY_AVX2  // conversions in hardware; better targets have smaller numbers
#undef SOTTO_SIMD_HALF
#define SOTTO_SIMD_HALF 1
struct Half {
  using Stored = uint16_t;
  using D16 = hn::Rebind<hwy::float16_t, DF>;
  using DU16 = hn::Rebind<uint16_t, DF>;
  static HWY_INLINE VF load(const uint16_t* p) {
    return hn::PromoteTo(DF(), hn::BitCast(D16(), hn::LoadU(DU16(), p)));
  }
  static HWY_INLINE MF store(VF x, uint16_t* p, MF bad) {
    const VF nan = hn::BitCast(DF(), hn::Set(DU(), 0x7fc00000u));
    x = hn::IfThenElse(hn::Eq(x, x), x, nan);
    const auto half = hn::DemoteTo(D16(), x);
    hn::StoreU(hn::BitCast(DU16(), half), DU16(), p);
    return hn::Or(bad, hn::Not(finite(hn::PromoteTo(DF(), half))));
  }
};
#else
#undef SOTTO_SIMD_HALF
#define SOTTO_SIMD_HALF 0
#endif

// Groups that are widened at a time: few enough that they stay in the first cache.
constexpr uint64_t kWideGroups = 4;

// n groups of 16-bit elements as float32.
template <class Type>
HWY_NOINLINE void widen_as(const uint8_t* data, uint64_t n, float* out) {
  const auto* x = reinterpret_cast<const typename Type::Stored*>(data);
  for (; n != 0; --n, x += kNormLanes, out += kNormLanes) {
    SOTTO_FOR_VECTORS(k) store(Type::load(x + k * kN), out + k * kN);
  }
}

// The same from element `first` of a source.
HWY_INLINE void widen(const Floats& source, uint64_t first, uint64_t n, float* out) {
  const uint8_t* data = source.data + 2 * first;
  if (source.type == Dtype::kBF16) return widen_as<Brain>(data, n, out);
#if SOTTO_SIMD_HALF
  widen_as<Half>(data, n, out);
#else
  for (uint64_t i = 0; i < n * kNormLanes; ++i) out[i] = source[first + i];
#endif
}

// run_groups for ops with a source: groups(op, piece, first, n, g), g being the n groups of the
// source as float32: its own memory, or widened, so that one loop serves all types. Bytes per
// element: 2 less than with float32.
template <class Op, class Groups>
void run_source_groups(const KernelCall& call, Groups&& groups) {
  run_groups<Op>(call, [&](Op& op, const Piece& p, uint64_t first, uint64_t n) {
    const Floats source = op.source(p);
    const bool widens = source.type != Dtype::kF32;
    HWY_ALIGN float wide[kWideGroups * kNormLanes];
    while (n != 0) {
      const uint64_t some = widens ? std::min(n, kWideGroups) : n;
      const float* g = wide;
      if (widens) {
        widen(source, first, some, wide);
      } else {
        g = reinterpret_cast<const float*>(source.data) + first;
      }
      groups(op, p, first, some, g);
      first += some * kNormLanes;
      n -= some;
    }
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace sotto
HWY_AFTER_NAMESPACE();
#endif  // SOTTO_SIMD_TARGET
#endif  // per-target guard
