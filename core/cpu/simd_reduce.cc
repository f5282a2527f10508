// Vector kernel of the reduction over ranks. Left to the scalar kernel: float16 where the target
// does not convert it exactly, the mean of integers, and products of 8- and 64-bit integers, for
// which there are no instructions. Bytes per element: (world + 1) times the size of the dtype.
#include <limits>
#include <type_traits>

#include "core/cpu/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "core/cpu/simd_reduce.cc"
#include <hwy/foreach_target.h>

#include "core/cpu/simd-inl.h"
#include "core/cpu/simd_types-inl.h"
#include "core/kernels/pieces.h"
#include "core/kernels/reduce.h"
#include "core/kernels/reduce_elements.h"

#if SOTTO_SIMD_TARGET
HWY_BEFORE_NAMESPACE();
namespace sotto {
namespace HWY_NAMESPACE {
namespace {

// Ne is an ordered comparison on some targets.
HWY_INLINE MF is_nan(VF x) { return hn::Not(hn::Eq(x, x)); }

template <ReduceOp kOp>
HWY_INLINE VF combine(VF acc, VF x) {
  if constexpr (kOp == ReduceOp::kMin) {
    return hn::IfThenElse(hn::Or(hn::Lt(x, acc), is_nan(x)), x, acc);
  } else if constexpr (kOp == ReduceOp::kMax) {
    return hn::IfThenElse(hn::Or(hn::Gt(x, acc), is_nan(x)), x, acc);
  } else if constexpr (kOp == ReduceOp::kProd) {
    return hn::Mul(acc, x);
  } else {
    return hn::Add(acc, x);
  }
}

// Combines the ranks from `first` on that belong together.
template <class Type, ReduceOp kOp>
HWY_INLINE void combine_ranks(const ReduceArgs& a, const typename Type::Stored* own,
                              const typename Type::Stored* rows, uint32_t first, VF* acc) {
  const uint32_t end = end_of_group(first, a.group, a.world);
  for (uint32_t r = first; r < end; ++r) {
    const auto* x = r == a.own_rank ? own : rows + r * a.row_stride;
    hwy::Prefetch(x + 2 * kNormLanes);
    if (r == first) {
      SOTTO_FOR_VECTORS(k) acc[k] = Type::load(x + k * kN);
    } else {
      SOTTO_FOR_VECTORS(k) acc[k] = combine<kOp>(acc[k], Type::load(x + k * kN));
    }
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
    combine_ranks<Type, kOp>(a, own, rows, 0, acc);
    for (uint32_t first = end_of_group(0, a.group, a.world); first < a.world; first += a.group) {
      VF part[kVectors];
      combine_ranks<Type, kOp>(a, own, rows, first, part);
      SOTTO_FOR_VECTORS(k) acc[k] = combine<kOp>(acc[k], part[k]);
    }
    SOTTO_FOR_VECTORS(k) {
      if constexpr (kOp == ReduceOp::kMean) acc[k] = hn::Div(acc[k], world);
      bad = Type::store(acc[k], out + k * kN, bad);
    }
  }
  return hn::AllFalse(DF(), bad) ? 0 : kFlagNonfinite;
}

// Types that are combined as they are stored: float64 and integers.
template <class T, ReduceOp kOp>
struct PlainLoop {
  using D = HWY_FULL(T);
  using V = hn::Vec<D>;
  static constexpr size_t kLanes = hn::MaxLanes(D());
  static constexpr size_t kAtOnce = 4;
  static constexpr uint64_t kGroup = kAtOnce * kLanes;
  static constexpr bool kFloat = std::is_floating_point_v<T>;

  static HWY_INLINE V combine(V acc, V x) {
    if constexpr (kOp == ReduceOp::kBitOr) {
      return hn::Or(acc, x);
    } else if constexpr (kOp == ReduceOp::kProd) {
      return hn::Mul(acc, x);
    } else if constexpr (kOp != ReduceOp::kMin && kOp != ReduceOp::kMax) {
      return hn::Add(acc, x);
    } else if constexpr (kFloat) {
      const auto better = kOp == ReduceOp::kMin ? hn::Lt(x, acc) : hn::Gt(x, acc);
      return hn::IfThenElse(hn::Or(better, hn::Not(hn::Eq(x, x))), x, acc);
    } else {
      return kOp == ReduceOp::kMin ? hn::Min(acc, x) : hn::Max(acc, x);
    }
  }

  // Combines the ranks from `first` on that belong together.
  static HWY_INLINE void combine_ranks(const ReduceArgs& a, const T* own, const T* rows,
                                       uint32_t first, V* acc) {
    const uint32_t end = end_of_group(first, a.group, a.world);
    for (uint32_t r = first; r < end; ++r) {
      const T* x = r == a.own_rank ? own : rows + r * a.row_stride;
      hwy::Prefetch(x + 2 * kGroup);
      if (r == first) {
        HWY_UNROLL(4)
        for (size_t k = 0; k < kAtOnce; ++k) acc[k] = hn::LoadU(D(), x + k * kLanes);
      } else {
        HWY_UNROLL(4)
        for (size_t k = 0; k < kAtOnce; ++k)
          acc[k] = combine(acc[k], hn::LoadU(D(), x + k * kLanes));
      }
    }
  }

  // Stores, and returns whether all lanes are finite.
  static HWY_INLINE bool finish(V x, V world, T* out) {
    if constexpr (kFloat) {
      if constexpr (kOp == ReduceOp::kMean) x = hn::Div(x, world);
      const V nan = hn::Set(D(), std::numeric_limits<T>::quiet_NaN());
      x = hn::IfThenElse(hn::Eq(x, x), x, nan);
      hn::StoreU(x, D(), out);
      return hn::AllTrue(D(), hn::Lt(hn::Abs(x), hn::Set(D(), std::numeric_limits<T>::infinity())));
    } else {
      hn::StoreU(x, D(), out);
      return true;
    }
  }

  // As reduce_groups, in groups of kGroup elements.
  static uint32_t run(const ReduceArgs& a, const T* own, const T* rows, T* out, uint64_t n) {
    const V world = hn::Set(D(), static_cast<T>(a.world));
    bool all_finite = true;
    for (; n != 0; --n, own += kGroup, rows += kGroup, out += kGroup) {
      V acc[kAtOnce];
      combine_ranks(a, own, rows, 0, acc);
      for (uint32_t first = end_of_group(0, a.group, a.world); first < a.world; first += a.group) {
        V part[kAtOnce];
        combine_ranks(a, own, rows, first, part);
        HWY_UNROLL(4)
        for (size_t k = 0; k < kAtOnce; ++k) acc[k] = combine(acc[k], part[k]);
      }
      HWY_UNROLL(4)
      for (size_t k = 0; k < kAtOnce; ++k) all_finite &= finish(acc[k], world, out + k * kLanes);
    }
    return all_finite ? 0 : kFlagNonfinite;
  }
};

// group: elements of one group. run(own, rows, out, n): n groups, returns flags.
template <class Stored, class Run>
void reduce_pieces(const KernelCall& call, uint64_t group, Run&& run) {
  const auto& a = call.arguments<ReduceArgs>();
  const auto& o = call.of<kernels::Reduce>();
  const Operand& own = o.own;
  const Operand& out = o.out;
  uint32_t flags = 0;
  for (const Piece& p : call.pieces) {
    const uint64_t n = p.count / group;
    if (p.tensor == kNoTensor) continue;
    const Stored* from = a.own_flat ? own.flat<const Stored>() + (p.flat - a.own_base)
                                    : own.list<const Stored>(p.tensor) + p.offset;
    Stored* to = a.out_flat ? out.flat<Stored>() + (p.flat - a.out_base)
                            : out.list<Stored>(p.tensor) + p.target;
    const Stored* rows = o.rows.flat<const Stored>();
    if (a.world > 1) rows += p.flat - a.row_base;
    flags |= run(from, rows, to, n);
    if (p.count % group == 0) continue;
    const Piece rest = sub_piece(p, n * group, p.count % group);
    KernelCall tail = call;
    tail.pieces = std::span(&rest, 1);
    scalar::reduce(tail);
  }
  if (o.flags.data != nullptr) raise_flags(o.flags.flat<uint32_t>(), flags);
}

template <class Type, ReduceOp kOp>
void reduce_as(const KernelCall& call) {
  using Stored = typename Type::Stored;
  const auto& a = call.arguments<ReduceArgs>();
  reduce_pieces<Stored>(call, kNormLanes,
                        [&](const auto* own, const auto* rows, auto* out, auto n) {
                          return reduce_groups<Type, kOp>(a, own, rows, out, n);
                        });
}

template <class T, ReduceOp kOp>
void reduce_plain(const KernelCall& call) {
  using Loop = PlainLoop<T, kOp>;
  const auto& a = call.arguments<ReduceArgs>();
  reduce_pieces<T>(call, Loop::kGroup, [&](const T* own, const T* rows, T* out, uint64_t n) {
    return Loop::run(a, own, rows, out, n);
  });
}

template <class Type>
void reduce_type(const KernelCall& call) {
  switch (call.arguments<ReduceArgs>().op) {
    case ReduceOp::kSum: return reduce_as<Type, ReduceOp::kSum>(call);
    case ReduceOp::kMean: return reduce_as<Type, ReduceOp::kMean>(call);
    case ReduceOp::kMin: return reduce_as<Type, ReduceOp::kMin>(call);
    case ReduceOp::kMax: return reduce_as<Type, ReduceOp::kMax>(call);
    case ReduceOp::kProd: return reduce_as<Type, ReduceOp::kProd>(call);
    case ReduceOp::kBitOr: return scalar::reduce(call);
  }
}

template <class T>
void reduce_integers(const KernelCall& call) {
  switch (call.arguments<ReduceArgs>().op) {
    case ReduceOp::kSum: return reduce_plain<T, ReduceOp::kSum>(call);
    case ReduceOp::kMean: return scalar::reduce(call);
    case ReduceOp::kMin: return reduce_plain<T, ReduceOp::kMin>(call);
    case ReduceOp::kMax: return reduce_plain<T, ReduceOp::kMax>(call);
    case ReduceOp::kProd:
      if constexpr (sizeof(T) == 2 || sizeof(T) == 4) return reduce_plain<T, ReduceOp::kProd>(call);
      return scalar::reduce(call);
    case ReduceOp::kBitOr: return reduce_plain<T, ReduceOp::kBitOr>(call);
  }
}

void reduce_doubles(const KernelCall& call) {
  switch (call.arguments<ReduceArgs>().op) {
    case ReduceOp::kSum: return reduce_plain<double, ReduceOp::kSum>(call);
    case ReduceOp::kMean: return reduce_plain<double, ReduceOp::kMean>(call);
    case ReduceOp::kMin: return reduce_plain<double, ReduceOp::kMin>(call);
    case ReduceOp::kMax: return reduce_plain<double, ReduceOp::kMax>(call);
    case ReduceOp::kProd: return reduce_plain<double, ReduceOp::kProd>(call);
    case ReduceOp::kBitOr: return scalar::reduce(call);
  }
}

void reduce(const KernelCall& call) {
  switch (call.arguments<ReduceArgs>().dtype) {
    case Dtype::kF32: return reduce_type<Float>(call);
    case Dtype::kBF16: return reduce_type<Brain>(call);
#if SOTTO_SIMD_HALF
    case Dtype::kF16: return reduce_type<Half>(call);
#else
    case Dtype::kF16: return scalar::reduce(call);
#endif
    case Dtype::kF64: return reduce_doubles(call);
    case Dtype::kI8: return reduce_integers<int8_t>(call);
    case Dtype::kU8: return reduce_integers<uint8_t>(call);
    case Dtype::kI16: return reduce_integers<int16_t>(call);
    case Dtype::kU16: return reduce_integers<uint16_t>(call);
    case Dtype::kI32: return reduce_integers<int32_t>(call);
    case Dtype::kU32: return reduce_integers<uint32_t>(call);
    case Dtype::kI64: return reduce_integers<int64_t>(call);
    case Dtype::kU64: return reduce_integers<uint64_t>(call);
  }
}

}  // namespace

void install_reduce(KernelTable& table) { kernel_entry(table, KernelId::kReduce) = reduce; }

}  // namespace HWY_NAMESPACE
}  // namespace sotto
HWY_AFTER_NAMESPACE();
#endif  // SOTTO_SIMD_TARGET
