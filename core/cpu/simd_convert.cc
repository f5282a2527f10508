// Vector kernels of conversions between float types (bytes per element: those of both types) and of
// sums of micro-batches (8, 4 for the first, and those of the source).
#include "core/cpu/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "core/cpu/simd_convert.cc"
#include <hwy/foreach_target.h>

#include "core/cpu/ops_convert.h"
#include "core/cpu/simd-inl.h"
#include "core/cpu/simd_types-inl.h"

#if SOTTO_SIMD_TARGET
HWY_BEFORE_NAMESPACE();
namespace sotto {
namespace HWY_NAMESPACE {
namespace {

template <class From, class To>
void convert_as(const KernelCall& call) {
  run_groups<ConvertOp>(call, [](ConvertOp& op, const Piece& p, uint64_t first, uint64_t n) {
    const auto* x = reinterpret_cast<const typename From::Stored*>(op.from.of(p).data) + first;
    auto* y = reinterpret_cast<typename To::Stored*>(op.target(p)) + first;
    const VF factor = set(op.args.factor);
    for (; n != 0; --n, x += kNormLanes, y += kNormLanes) {
      SOTTO_FOR_VECTORS(k) {
        To::store(hn::Mul(From::load(x + k * kN), factor), y + k * kN, no_lanes());
      }
    }
  });
}

template <class From>
void convert_from(const KernelCall& call) {
  switch (call.arguments<ConvertArgs>().to) {
    case Dtype::kF32: return convert_as<From, Float>(call);
    case Dtype::kBF16: return convert_as<From, Brain>(call);
#if SOTTO_SIMD_HALF
    case Dtype::kF16: return convert_as<From, Half>(call);
#endif
    default: return scalar::convert(call);
  }
}

void convert(const KernelCall& call) {
  switch (call.arguments<ConvertArgs>().from) {
    case Dtype::kF32: return convert_from<Float>(call);
    case Dtype::kBF16: return convert_from<Brain>(call);
#if SOTTO_SIMD_HALF
    case Dtype::kF16: return convert_from<Half>(call);
#endif
    default: return scalar::convert(call);
  }
}

void accumulate(const KernelCall& call) {
  run_source_groups<AccumulateOp>(
      call, [](AccumulateOp& op, const Piece& p, uint64_t first, uint64_t n, const float* x) {
        float* sum = op.sum(p) + first;
        const VF factor = set(op.factor);
        for (; n != 0; --n, x += kNormLanes, sum += kNormLanes) {
          SOTTO_FOR_VECTORS(k) {
            VF value = load(x + k * kN);
            if (!op.first_one) value = hn::Add(load(sum + k * kN), value);
            store(hn::Mul(value, factor), sum + k * kN);
          }
        }
      });
}

}  // namespace

void install_convert(KernelTable& table) {
  kernel_entry(table, KernelId::kConvert) = convert;
  kernel_entry(table, KernelId::kAccumulate) = accumulate;
}

}  // namespace HWY_NAMESPACE
}  // namespace sotto
HWY_AFTER_NAMESPACE();
#endif  // SOTTO_SIMD_TARGET
