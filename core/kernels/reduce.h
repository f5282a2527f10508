// The reduction over ranks.
#pragma once

#include "core/kernels/schema.h"

namespace sotto {

struct ReduceArgs {
  uint64_t row_stride;  // elements
  uint64_t row_base;    // flat index of element 0 of a row
  uint64_t own_base;    // flat index of element 0 of a flat `own`
  uint64_t out_base;    // flat index of element 0 of a flat `out`
  Dtype dtype;
  uint32_t world;
  uint32_t own_rank;
  ReduceOp op;
  bool own_flat;
  bool out_flat;
  uint32_t group = 0;  // ranks whose elements are combined before they join the result; 0: all
};

namespace kernels {

// In ascending rank order: acc = x_0; acc = acc op x_1; ... Row s of rows lies at s * row_stride
// elements; row `own_rank` is unused, own takes its place.
//  - With a group g that is done for ranks 0 to g - 1, for g to 2 g - 1, ...; then what they come
//    to is combined in the same order. Results of up to g ranks have the bits of those without a
//    group.
//  - Floats of 16 bits: acc is float32 and is rounded once at the end.
//  - mean: the sum / world at the end (integers: towards 0).
//  - min and max: NaN if any rank has one; of +0 and -0 the first met stays.
//  - A NaN result is the positive quiet NaN without payload.
//  - Sums and products of integers wrap around. bit_or: integers only.
// own: a list, or flat. out: a list at `target`, or flat. flags |= kFlagNonfinite if a result is
// not finite.
template <class T>
struct ReduceOperands {
  T own{}, rows{}, out{}, flags{};
};
struct Reduce {
  template <class T>
  using Operands = ReduceOperands<T>;
  using Args = ReduceArgs;
  static const ReduceArgs& of(const void* args) { return *static_cast<const ReduceArgs*>(args); }
  static uint32_t bits(const void* args) {
    return dtype_bits<ReduceArgs, &ReduceArgs::dtype>(args);
  }
  static uint64_t own_base(const void* args) { return of(args).own_base; }
  static uint64_t row_base(const void* args) { return of(args).row_base; }
  static uint64_t out_base(const void* args) { return of(args).out_base; }
  static bool own_flat(const void* args) { return of(args).own_flat; }
  static bool out_flat(const void* args) { return of(args).out_flat; }
  static constexpr ReduceOperands<OperandSpec> kOperands = {
      .own =
          replaced(flat_if(based(sized(reads("own", Touched::kList), bits), own_base), own_flat)),
      .rows = based(sized(reads("rows", Touched::kRows), bits), row_base),
      .out = flat_if(based(sized(writes("out", Touched::kTarget), bits), out_base), out_flat),
      .flags = optional(raised_flags())};
  static constexpr Division kDivision = Division::kQuads;
};

}  // namespace kernels
}  // namespace sotto
