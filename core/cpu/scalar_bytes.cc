// Fill, pack, unpack and the reduction over ranks.
#include <type_traits>

#include "core/cpu/elements.h"
#include "core/cpu/kernel_table.h"
#include "core/cpu/ops_convert.h"
#include "core/kernels/reduce_elements.h"

namespace sotto::scalar {
namespace {

// One piece. own and out: element 0 of the piece; rows: element 0 of the piece in row 0.
template <class Type, ReduceOp kOp>
uint32_t reduce_piece(const ReduceArgs& a, const typename Type::Stored* own,
                      const typename Type::Stored* rows, typename Type::Stored* out,
                      uint64_t count) {
  using Wide = typename Type::Wide;
  using Sum = Accumulator<kOp, Wide>;
  uint32_t flags = 0;
  for (uint64_t i = 0; i < count; ++i) {
    Sum acc{};
    for (uint32_t first = 0, end = 0; first < a.world; first = end) {
      end = end_of_group(first, a.group, a.world);
      Sum part{};
      for (uint32_t r = first; r < end; ++r) {
        const Sum x = Type::widen(r == a.own_rank ? own[i] : rows[r * a.row_stride + i]);
        part = r == first ? x : combine<kOp>(part, x);
      }
      acc = first == 0 ? part : combine<kOp>(acc, part);
    }
    if constexpr (kOp == ReduceOp::kMean) acc = divide(acc, a.world);
    out[i] = Type::narrow(static_cast<Wide>(acc));
    if (!Type::finite(out[i])) flags = kFlagNonfinite;
  }
  return flags;
}

template <class Type, ReduceOp kOp>
void reduce_as(const KernelCall& call) {
  const auto& o = call.of<kernels::Reduce>();
  using Stored = typename Type::Stored;
  const auto& a = call.arguments<ReduceArgs>();
  const Operand& own = o.own;
  const Operand& out = o.out;
  uint32_t flags = 0;
  for (const Piece& p : call.pieces) {
    if (p.tensor == kNoTensor) continue;
    const Stored* from = a.own_flat ? own.flat<const Stored>() + (p.flat - a.own_base)
                                    : own.list<const Stored>(p.tensor) + p.offset;
    Stored* to = a.out_flat ? out.flat<Stored>() + (p.flat - a.out_base)
                            : out.list<Stored>(p.tensor) + p.target;
    const Stored* rows = o.rows.flat<const Stored>();
    if (a.world > 1) rows += p.flat - a.row_base;
    flags |= reduce_piece<Type, kOp>(a, from, rows, to, p.count);
  }
  if (o.flags.data != nullptr) raise_flags(o.flags.flat<uint32_t>(), flags);
}

template <class Type>
void reduce_type(const KernelCall& call) {
  switch (call.arguments<ReduceArgs>().op) {
    case ReduceOp::kSum: return reduce_as<Type, ReduceOp::kSum>(call);
    case ReduceOp::kMean: return reduce_as<Type, ReduceOp::kMean>(call);
    case ReduceOp::kMin: return reduce_as<Type, ReduceOp::kMin>(call);
    case ReduceOp::kMax: return reduce_as<Type, ReduceOp::kMax>(call);
    case ReduceOp::kProd: return reduce_as<Type, ReduceOp::kProd>(call);
    case ReduceOp::kBitOr:
      if constexpr (std::is_integral_v<typename Type::Wide>)
        return reduce_as<Type, ReduceOp::kBitOr>(call);
      return;  // refused at the C ABI
  }
}

}  // namespace

void fill(const KernelCall& call) {
  if (call.bytes != 0) {
    std::memset(call.of<kernels::Fill>().out.data, call.arguments<FillArgs>().value, call.bytes);
  }
}

void pack(const KernelCall& call) {
  const auto& o = call.of<kernels::Pack>();
  const auto& a = call.arguments<PackArgs>();
  for (const Piece& p : call.pieces) {
    if (p.tensor == kNoTensor || p.count == 0) continue;
    std::memcpy(o.flat.flat<uint8_t>() + (p.flat - a.flat_base) * a.element_bytes,
                o.tensors.list<const uint8_t>(p.tensor) + p.offset * a.element_bytes,
                p.count * a.element_bytes);
  }
}

void unpack(const KernelCall& call) {
  const auto& o = call.of<kernels::Unpack>();
  const auto& a = call.arguments<PackArgs>();
  for (const Piece& p : call.pieces) {
    if (p.tensor == kNoTensor || p.count == 0) continue;
    std::memcpy(o.tensors.list<uint8_t>(p.tensor) + p.target * a.element_bytes,
                o.flat.flat<const uint8_t>() + (p.flat - a.flat_base) * a.element_bytes,
                p.count * a.element_bytes);
  }
}

void convert(const KernelCall& call) { run_elements<ConvertOp>(call); }
void accumulate(const KernelCall& call) { run_elements<AccumulateOp>(call); }

void reduce(const KernelCall& call) {
  switch (call.arguments<ReduceArgs>().dtype) {
    case Dtype::kF32: return reduce_type<PlainElement<float>>(call);
    case Dtype::kF64: return reduce_type<PlainElement<double>>(call);
    case Dtype::kF16: return reduce_type<HalfElement>(call);
    case Dtype::kBF16: return reduce_type<BrainElement>(call);
    case Dtype::kI8: return reduce_type<PlainElement<int8_t>>(call);
    case Dtype::kI16: return reduce_type<PlainElement<int16_t>>(call);
    case Dtype::kI32: return reduce_type<PlainElement<int32_t>>(call);
    case Dtype::kI64: return reduce_type<PlainElement<int64_t>>(call);
    case Dtype::kU8: return reduce_type<PlainElement<uint8_t>>(call);
    case Dtype::kU16: return reduce_type<PlainElement<uint16_t>>(call);
    case Dtype::kU32: return reduce_type<PlainElement<uint32_t>>(call);
    case Dtype::kU64: return reduce_type<PlainElement<uint64_t>>(call);
  }
}

}  // namespace sotto::scalar
