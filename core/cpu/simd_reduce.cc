// Vector kernel of the reduction over ranks for float32 and, where the target converts them
// exactly, 16-bit floats. Bytes per element: (world + 1) times the size of the dtype.
#include "core/cpu/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "core/cpu/simd_reduce.cc"
#include <hwy/foreach_target.h>

#include "core/cpu/simd-inl.h"
#include "core/iface/pieces.h"

#if SOTTO_SIMD_TARGET
HWY_BEFORE_NAMESPACE();
namespace sotto {
namespace HWY_NAMESPACE {
namespace {

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
#define SOTTO_SIMD_HALF 0
#endif

// Ne is an ordered comparison on some targets.
HWY_INLINE MF is_nan(VF x) { return hn::Not(hn::Eq(x, x)); }

template <ReduceOp kOp>
HWY_INLINE VF combine(VF acc, VF x) {
  if constexpr (kOp == ReduceOp::kMin) {
    return hn::IfThenElse(hn::Or(hn::Lt(x, acc), is_nan(x)), x, acc);
  } else if constexpr (kOp == ReduceOp::kMax) {
    return hn::IfThenElse(hn::Or(hn::Gt(x, acc), is_nan(x)), x, acc);
  } else {
    return hn::Add(acc, x);
  }
}

// n groups. rows: the group's first element in row 0. May write over own.
template <class Type, ReduceOp kOp>
uint32_t reduce_groups(const ReduceArgs& a, const typename Type::Stored* own,
                       const typename Type::Stored* rows, typename Type::Stored* out, uint64_t n) {
  const VF world = set(static_cast<float>(a.world));
  MF bad = no_lanes();
  for (; n != 0; --n, own += kNormLanes, rows += kNormLanes, out += kNormLanes) {
    VF acc[kVectors];
    for (uint32_t r = 0; r < a.world; ++r) {
      const auto* x = r == a.own_rank ? own : rows + r * a.row_stride;
      hwy::Prefetch(x + 2 * kNormLanes);
      if (r == 0) {
        SOTTO_FOR_VECTORS(k) acc[k] = Type::load(x + k * kN);
      } else {
        SOTTO_FOR_VECTORS(k) acc[k] = combine<kOp>(acc[k], Type::load(x + k * kN));
      }
    }
    SOTTO_FOR_VECTORS(k) {
      if constexpr (kOp == ReduceOp::kMean) acc[k] = hn::Div(acc[k], world);
      bad = Type::store(acc[k], out + k * kN, bad);
    }
  }
  return hn::AllFalse(DF(), bad) ? 0 : kFlagNonfinite;
}

template <class Type, ReduceOp kOp>
void reduce_as(const KernelCall& call) {
  using Stored = typename Type::Stored;
  const auto& a = call.arguments<ReduceArgs>();
  const Operand& own = call.operands[0];
  const Operand& out = call.operands[2];
  uint32_t flags = 0;
  for (const Piece& p : call.pieces) {
    const uint64_t n = p.count / kNormLanes;
    if (p.tensor == kNoTensor) continue;
    const Stored* from = a.own_flat ? own.flat<const Stored>() + (p.flat - a.own_base)
                                    : own.list<const Stored>(p.tensor) + p.offset;
    Stored* to = a.out_flat ? out.flat<Stored>() + (p.flat - a.out_base)
                            : out.list<Stored>(p.tensor) + p.target;
    const Stored* rows = call.operands[1].flat<const Stored>();
    if (a.world > 1) rows += p.flat - a.row_base;
    flags |= reduce_groups<Type, kOp>(a, from, rows, to, n);
    if (p.count % kNormLanes == 0) continue;
    const Piece rest = sub_piece(p, n * kNormLanes, p.count % kNormLanes);
    KernelCall tail = call;
    tail.pieces = std::span(&rest, 1);
    scalar::reduce(tail);
  }
  if (call.operands[3].data != nullptr) raise_flags(call.operands[3].flat<uint32_t>(), flags);
}

template <class Type>
void reduce_type(const KernelCall& call) {
  switch (call.arguments<ReduceArgs>().op) {
    case ReduceOp::kSum: return reduce_as<Type, ReduceOp::kSum>(call);
    case ReduceOp::kMean: return reduce_as<Type, ReduceOp::kMean>(call);
    case ReduceOp::kMin: return reduce_as<Type, ReduceOp::kMin>(call);
    case ReduceOp::kMax: return reduce_as<Type, ReduceOp::kMax>(call);
  }
}

void reduce(const KernelCall& call) {
  switch (call.arguments<ReduceArgs>().dtype) {
    case Dtype::kF32: return reduce_type<Float>(call);
    case Dtype::kBF16: return reduce_type<Brain>(call);
#if SOTTO_SIMD_HALF
    case Dtype::kF16: return reduce_type<Half>(call);
#endif
    default: return scalar::reduce(call);
  }
}

}  // namespace

void install_reduce(KernelTable& table) { kernel_entry(table, KernelId::kReduce) = reduce; }

}  // namespace HWY_NAMESPACE
}  // namespace sotto
HWY_AFTER_NAMESPACE();
#endif  // SOTTO_SIMD_TARGET
