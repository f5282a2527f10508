// Fill, pack, unpack and the reduction over ranks.
#include <cmath>
#include <limits>
#include <type_traits>

#include "core/cpu/elements.h"
#include "core/cpu/kernel_table.h"

namespace sotto::scalar {
namespace {

// How a dtype is stored, in which type it is added, and how the result is rounded back. A NaN
// result is always the quiet NaN without payload, so that the bits do not depend on which operand a
// processor propagates.
template <class T>
struct Plain {
  using Stored = T;
  using Wide = T;
  static Wide widen(T x) { return x; }
  static T narrow(Wide x) {
    if constexpr (std::is_floating_point_v<T>) {
      if (std::isnan(x)) return std::numeric_limits<T>::quiet_NaN();
    }
    return x;
  }
  static bool finite(T x) {
    if constexpr (std::is_floating_point_v<T>) return std::isfinite(x);
    return true;
  }
};

struct Half {
  using Stored = uint16_t;
  using Wide = float;
  static float widen(uint16_t x) { return f16_to_f32(x); }
  static uint16_t narrow(float x) { return std::isnan(x) ? 0x7e00u : f32_to_f16(x); }
  static bool finite(uint16_t x) { return (x & 0x7c00u) != 0x7c00u; }
};

struct Brain {
  using Stored = uint16_t;
  using Wide = float;
  static float widen(uint16_t x) { return bf16_to_f32(x); }
  static uint16_t narrow(float x) { return std::isnan(x) ? 0x7fc0u : f32_to_bf16(x); }
  static bool finite(uint16_t x) { return (x & 0x7f80u) != 0x7f80u; }
};

template <class T>
T wrapping_add(T a, T b) {
  if constexpr (std::is_floating_point_v<T>) {
    return a + b;
  } else {
    using U = std::make_unsigned_t<T>;
    return static_cast<T>(static_cast<U>(static_cast<U>(a) + static_cast<U>(b)));
  }
}

template <class T>
T combine(ReduceOp op, T acc, T x) {
  if (op == ReduceOp::kSum || op == ReduceOp::kMean) return wrapping_add(acc, x);
  if constexpr (std::is_floating_point_v<T>) {
    if (std::isnan(acc)) return acc;
    if (std::isnan(x)) return x;
  }
  if (op == ReduceOp::kMin) return x < acc ? x : acc;
  return x > acc ? x : acc;
}

// One piece. own and out: element 0 of the piece; rows: element 0 of the piece in row 0.
template <class Type>
uint32_t reduce_piece(const ReduceArgs& a, const typename Type::Stored* own,
                      const typename Type::Stored* rows, typename Type::Stored* out,
                      uint64_t count) {
  using Wide = typename Type::Wide;
  uint32_t flags = 0;
  for (uint64_t i = 0; i < count; ++i) {
    Wide acc{};
    for (uint32_t r = 0; r < a.world; ++r) {
      const Wide x = Type::widen(r == a.own_rank ? own[i] : rows[r * a.row_stride + i]);
      acc = r == 0 ? x : combine(a.op, acc, x);
    }
    if (a.op == ReduceOp::kMean) acc = static_cast<Wide>(acc / static_cast<Wide>(a.world));
    out[i] = Type::narrow(acc);
    if (!Type::finite(out[i])) flags = kFlagNonfinite;
  }
  return flags;
}

template <class Type>
void reduce_as(const KernelCall& call) {
  using Stored = typename Type::Stored;
  const auto& a = call.arguments<ReduceArgs>();
  const Operand& own = call.operands[0];
  const Operand& out = call.operands[2];
  uint32_t flags = 0;
  for (const Piece& p : call.pieces) {
    if (p.tensor == kNoTensor) continue;
    const Stored* from = a.own_flat ? own.flat<const Stored>() + (p.flat - a.own_base)
                                    : own.list<const Stored>(p.tensor) + p.offset;
    Stored* to = a.out_flat ? out.flat<Stored>() + (p.flat - a.out_base)
                            : out.list<Stored>(p.tensor) + p.target;
    const Stored* rows = call.operands[1].flat<const Stored>();
    if (a.world > 1) rows += p.flat - a.row_base;
    flags |= reduce_piece<Type>(a, from, rows, to, p.count);
  }
  if (call.operands[3].data != nullptr) raise_flags(call.operands[3].flat<uint32_t>(), flags);
}

}  // namespace

void fill(const KernelCall& call) {
  if (call.bytes != 0) {
    std::memset(call.operands[0].data, call.arguments<FillArgs>().value, call.bytes);
  }
}

void pack(const KernelCall& call) {
  const auto& a = call.arguments<PackArgs>();
  for (const Piece& p : call.pieces) {
    if (p.tensor == kNoTensor || p.count == 0) continue;
    std::memcpy(call.operands[1].flat<uint8_t>() + (p.flat - a.flat_base) * a.element_bytes,
                call.operands[0].list<const uint8_t>(p.tensor) + p.offset * a.element_bytes,
                p.count * a.element_bytes);
  }
}

void unpack(const KernelCall& call) {
  const auto& a = call.arguments<PackArgs>();
  for (const Piece& p : call.pieces) {
    if (p.tensor == kNoTensor || p.count == 0) continue;
    std::memcpy(call.operands[1].list<uint8_t>(p.tensor) + p.target * a.element_bytes,
                call.operands[0].flat<const uint8_t>() + (p.flat - a.flat_base) * a.element_bytes,
                p.count * a.element_bytes);
  }
}

void reduce(const KernelCall& call) {
  switch (call.arguments<ReduceArgs>().dtype) {
    case Dtype::kF32: return reduce_as<Plain<float>>(call);
    case Dtype::kF64: return reduce_as<Plain<double>>(call);
    case Dtype::kF16: return reduce_as<Half>(call);
    case Dtype::kBF16: return reduce_as<Brain>(call);
    case Dtype::kI32: return reduce_as<Plain<int32_t>>(call);
    case Dtype::kI64: return reduce_as<Plain<int64_t>>(call);
    case Dtype::kU8: return reduce_as<Plain<uint8_t>>(call);
  }
}

}  // namespace sotto::scalar
