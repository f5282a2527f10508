// Fill, pack, unpack, and the reduction over ranks.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>

#include "tests/support/kernel_cases.h"

namespace sotto::test {
namespace {

constexpr Dtype kDtypes[] = {Dtype::kF32, Dtype::kF64, Dtype::kF16, Dtype::kBF16,
                             Dtype::kI8,  Dtype::kI16, Dtype::kI32, Dtype::kI64,
                             Dtype::kU8,  Dtype::kU16, Dtype::kU32, Dtype::kU64};
constexpr ReduceOp kOps[] = {ReduceOp::kSum, ReduceOp::kMean, ReduceOp::kMin,
                             ReduceOp::kMax, ReduceOp::kProd, ReduceOp::kBitOr};

TEST(KernelsBytes, FillSetsEveryByte) {
  for (const uint64_t n : {0, 1, 63, 4097}) {
    KernelCase work(KernelId::kFill);
    work.bytes = n;
    work.set_args(FillArgs{0x5a});
    auto& o = work.named<kernels::Fill>();
    o.out = work.flat(std::vector<uint8_t>(n, 1));
    const size_t out = o.out.at();
    EXPECT_EQ(compare_on_all_targets(work), "");
    EXPECT_EQ(execute_reference(work).memory[out], std::vector<uint8_t>(n, 0x5a));
  }
}

TEST(KernelsBytes, PackAndUnpackAreInverse) {
  Random random(1);
  for (const Layout& layout : all_layouts()) {
    for (const uint32_t width : {1u, 2u, 4u, 8u}) {
      SCOPED_TRACE(layout.elements());
      std::vector<std::vector<uint8_t>> tensors, empty;
      for (const uint64_t size : layout.sizes) {
        tensors.push_back(random.bytes(size * width));
        empty.push_back(std::vector<uint8_t>(size * width));
      }
      constexpr uint64_t kBase = 24;  // elements
      const auto shifted = [&](std::vector<Piece> pieces) {
        for (Piece& p : pieces) p.flat += kBase;
        return pieces;
      };
      KernelCase pack(KernelId::kPack);
      pack.pieces = shifted(layout.by_chunk);
      pack.set_args(PackArgs{kBase, width});
      auto& o = pack.named<kernels::Pack>();
      o.tensors = pack.list(tensors, width);
      o.flat = pack.flat(std::vector<uint8_t>(layout.padded * width, 7));
      const size_t flat = o.flat.at();
      EXPECT_EQ(compare_on_all_targets(pack), "");
      const Outcome packed = execute_reference(pack);
      for (size_t t = 0; t < tensors.size(); ++t) {
        EXPECT_TRUE(std::equal(
            tensors[t].begin(), tensors[t].end(),
            packed.memory[flat].begin() + static_cast<int64_t>(layout.starts[t] * width)));
      }
      KernelCase unpack(KernelId::kUnpack);
      unpack.pieces = pack.pieces;
      unpack.set_args(PackArgs{kBase, width});
      auto& u = unpack.named<kernels::Unpack>();
      u.flat = unpack.flat(packed.memory[flat]);
      u.tensors = unpack.list(empty, width);
      const size_t first = u.tensors.at();
      EXPECT_EQ(compare_on_all_targets(unpack), "");
      const Outcome unpacked = execute_reference(unpack);
      for (size_t t = 0; t < tensors.size(); ++t) EXPECT_EQ(unpacked.memory[first + t], tensors[t]);
    }
  }
}

// Rows and own values as bytes of the dtype. Floats get special values.
std::vector<uint8_t> reduce_values(Random* random, Dtype dtype, uint64_t n, bool specials) {
  std::vector<float> values = random->normal(n);
  if (specials) random->sprinkle(&values);
  std::vector<uint8_t> out(n * dtype_bytes(dtype));
  for (uint64_t i = 0; i < n; ++i) {
    uint8_t* at = out.data() + i * dtype_bytes(dtype);
    const double wide = values[i];
    const uint16_t half = dtype == Dtype::kF16 ? f32_to_f16(values[i]) : f32_to_bf16(values[i]);
    switch (dtype) {
      case Dtype::kF32: std::memcpy(at, &values[i], 4); break;
      case Dtype::kF64: std::memcpy(at, &wide, 8); break;
      case Dtype::kF16:
      case Dtype::kBF16: std::memcpy(at, &half, 2); break;
      default: {
        const std::vector<uint8_t> any = random->bytes(dtype_bytes(dtype));
        std::memcpy(at, any.data(), any.size());
      }
    }
  }
  return out;
}

struct ReduceSetup {
  Dtype dtype;
  ReduceOp op;
  uint32_t world;
  uint32_t own_rank;
  bool flat;  // own and out; else lists
  uint32_t group = 0;
};

KernelCase reduce_case(Random* random, const Layout& layout, const ReduceSetup& setup,
                       bool specials) {
  KernelCase work(KernelId::kReduce);
  work.pieces = layout.by_chunk;
  ReduceArgs args{};
  args.row_stride = layout.padded + 3;
  args.dtype = setup.dtype;
  args.world = setup.world;
  args.own_rank = setup.own_rank;
  args.op = setup.op;
  args.own_flat = args.out_flat = setup.flat;
  args.group = setup.group;
  work.set_args(args);
  auto& o = work.named<kernels::Reduce>();
  const uint64_t element = dtype_bytes(setup.dtype);
  if (setup.flat) {
    o.own = work.flat(reduce_values(random, setup.dtype, layout.padded, specials));
  } else {
    std::vector<std::vector<uint8_t>> own;
    for (const uint64_t size : layout.sizes)
      own.push_back(reduce_values(random, setup.dtype, size, specials));
    o.own = work.list(own, element);
  }
  o.rows = work.flat(reduce_values(random, setup.dtype, setup.world * args.row_stride, specials));
  if (setup.flat) {
    o.out = o.own;  // in place
  } else {
    std::vector<std::vector<uint8_t>> out;
    for (const uint64_t size : layout.sizes) out.emplace_back(size * element);
    o.out = work.list(out, element);
  }
  o.flags = work.flat(std::vector<uint32_t>{0});
  return work;
}

TEST(KernelsReduce, EveryTargetEqualsTheReference) {
  Random random(2);
  for (const Dtype dtype : kDtypes) {
    for (const ReduceOp op : kOps) {
      if (op == ReduceOp::kBitOr && dtype_is_float(dtype)) continue;
      for (const uint32_t world : {1u, 2u, 5u}) {
        const ReduceSetup setup{dtype, op, world, world / 2, world == 2};
        std::vector<Layout> layouts{make_layout({1, 63, 0, 900}, 1, 8),
                                    make_layout({1, 63, 0, 8200}, 1, 8)};
        // How threads share the elements does not depend on the number of ranks.
        if (world == 2) layouts.push_back(make_layout({kLarge}, 2, 512));
        for (const Layout& layout : layouts) {
          SCOPED_TRACE(std::string(dtype_name(dtype)) + " op " +
                       std::to_string(static_cast<int>(op)) + " world " + std::to_string(world));
          EXPECT_EQ(compare_on_all_targets(reduce_case(&random, layout, setup, true)), "");
          EXPECT_EQ(compare_on_all_targets(reduce_case(&random, layout, setup, false)), "");
        }
        if (world != 5) continue;
        for (const uint32_t group : {2u, 4u, 8u}) {
          ReduceSetup grouped = setup;
          grouped.group = group;
          EXPECT_EQ(compare_on_all_targets(reduce_case(&random, layouts[0], grouped, true)), "")
              << dtype_name(dtype) << " op " << static_cast<int>(op) << " group " << group;
        }
      }
    }
  }
}

// One element per rank through kReduce, rank 0 being this rank. T: storage type.
template <class T>
T reduce_one(Dtype dtype, ReduceOp op, const std::vector<T>& ranks, uint32_t* flags = nullptr,
             uint32_t group = 0) {
  KernelCase work(KernelId::kReduce);
  Piece p;
  p.count = 1;
  work.pieces = {p};
  ReduceArgs args{};
  args.row_stride = 1;
  args.dtype = dtype;
  args.world = static_cast<uint32_t>(ranks.size());
  args.op = op;
  args.group = group;
  args.own_flat = args.out_flat = true;
  work.set_args(args);
  auto& o = work.named<kernels::Reduce>();
  o.own = work.flat(std::vector<T>{ranks[0]});
  o.rows = work.flat(ranks);
  o.out = work.flat(std::vector<T>(1));
  const size_t out = o.out.at();
  o.flags = work.flat(std::vector<uint32_t>{0});
  const size_t flag = o.flags.at();
  EXPECT_EQ(compare_on_all_targets(work), "");
  const Outcome outcome = execute_reference(work);
  if (flags != nullptr) *flags = outcome.as<uint32_t>(flag)[0];
  return outcome.as<T>(out)[0];
}

TEST(KernelsReduce, FloatsAddInRankOrder) {
  const float big = 0x1p24f;
  // (2^24 + 1) + 1 stays 2^24; 1 + 1 first would reach 2^24 + 2.
  EXPECT_EQ(reduce_one<float>(Dtype::kF32, ReduceOp::kSum, {big, 1, 1}), big);
  EXPECT_EQ(reduce_one<float>(Dtype::kF32, ReduceOp::kSum, {1, 1, big}), big + 2);
  EXPECT_EQ(reduce_one<float>(Dtype::kF32, ReduceOp::kMean, {1, 2, 4}), 7.0f / 3.0f);
  EXPECT_EQ(reduce_one<double>(Dtype::kF64, ReduceOp::kMean, {1, 2, 4}), 7.0 / 3.0);
}

TEST(KernelsReduce, GroupsOfRanksAreCombinedFirst) {
  const float big = 0x1p24f;
  const auto sum = [](const std::vector<float>& ranks, uint32_t group) {
    return reduce_one<float>(Dtype::kF32, ReduceOp::kSum, ranks, nullptr, group);
  };
  EXPECT_EQ(sum({big, 1, 1, 1}, 0), big);
  EXPECT_EQ(sum({big, 1, 1, 1}, 2), big + 2);
  EXPECT_EQ(sum({big, 1, 1, 1, 1}, 2), big + 4);  // one rank in the last group; a tie, to even
  EXPECT_EQ(sum({big, 1, 1, 1}, 3), big);
  EXPECT_EQ(sum({big, 1, 1, 1}, 8), big);
  EXPECT_EQ(reduce_one<float>(Dtype::kF32, ReduceOp::kMean, {big, 1, 1, 1}, nullptr, 2),
            (big + 2) / 4);
  EXPECT_EQ(reduce_one<int32_t>(Dtype::kI32, ReduceOp::kMean, {7, 1, -2, 5, 4}, nullptr, 2), 3);
}

TEST(KernelsReduce, SixteenBitFloatsAreRoundedOnce) {
  // Half a unit in the last place twice: lost when rounded after each addition, a whole unit when
  // rounded once.
  const auto bf = [](float x) { return f32_to_bf16(x); };
  const auto hf = [](float x) { return f32_to_f16(x); };
  EXPECT_EQ(reduce_one<uint16_t>(Dtype::kBF16, ReduceOp::kSum, {bf(1), bf(0x1p-8f), bf(0x1p-8f)}),
            bf(1 + 0x1p-7f));
  EXPECT_EQ(reduce_one<uint16_t>(Dtype::kF16, ReduceOp::kSum, {hf(1), hf(0x1p-11f), hf(0x1p-11f)}),
            hf(1 + 0x1p-10f));
  // Sums beyond the range of the type come back if the mean is inside; those of a sum do not.
  uint32_t flags = 0;
  EXPECT_EQ(reduce_one<uint16_t>(Dtype::kF16, ReduceOp::kMean, {hf(60000), hf(60000)}, &flags),
            hf(60000));
  EXPECT_EQ(flags, 0u);
  EXPECT_EQ(reduce_one<uint16_t>(Dtype::kF16, ReduceOp::kSum, {hf(60000), hf(60000)}, &flags),
            0x7c00u);
  EXPECT_EQ(flags, kFlagNonfinite);
}

TEST(KernelsReduce, MinAndMaxGiveNanIfAnyRankHasOne) {
  const float nan = -std::numeric_limits<float>::quiet_NaN();
  const float inf = std::numeric_limits<float>::infinity();
  for (const ReduceOp op : {ReduceOp::kMin, ReduceOp::kMax}) {
    for (const std::vector<float>& ranks :
         {std::vector<float>{nan, 1, 2}, {1, nan, 2}, {1, 2, nan}, {inf, nan, -inf}}) {
      uint32_t flags = 0;
      const float result = reduce_one<float>(Dtype::kF32, op, ranks, &flags);
      EXPECT_EQ(std::bit_cast<uint32_t>(result), 0x7fc00000u);
      EXPECT_EQ(flags, kFlagNonfinite);
      std::vector<uint16_t> half, brain;
      for (const float r : ranks) half.push_back(f32_to_f16(r)), brain.push_back(f32_to_bf16(r));
      EXPECT_EQ(reduce_one<uint16_t>(Dtype::kF16, op, half), 0x7e00u);
      EXPECT_EQ(reduce_one<uint16_t>(Dtype::kBF16, op, brain), 0x7fc0u);
    }
  }
  EXPECT_EQ(reduce_one<float>(Dtype::kF32, ReduceOp::kMin, {3, -inf, 2}), -inf);
  EXPECT_EQ(reduce_one<float>(Dtype::kF32, ReduceOp::kMax, {3, -inf, 4}), 4);
}

TEST(KernelsReduce, FirstZeroStaysInMinAndMax) {
  for (const ReduceOp op : {ReduceOp::kMin, ReduceOp::kMax}) {
    EXPECT_TRUE(std::signbit(reduce_one<float>(Dtype::kF32, op, {-0.0f, 0.0f})));
    EXPECT_FALSE(std::signbit(reduce_one<float>(Dtype::kF32, op, {0.0f, -0.0f})));
  }
}

TEST(KernelsReduce, InfinityMinusInfinityIsTheNamedNan) {
  const float inf = std::numeric_limits<float>::infinity();
  EXPECT_EQ(std::bit_cast<uint32_t>(reduce_one<float>(Dtype::kF32, ReduceOp::kSum, {inf, -inf})),
            0x7fc00000u);
  const double wide = reduce_one<double>(Dtype::kF64, ReduceOp::kSum, {double{inf}, -double{inf}});
  EXPECT_EQ(std::bit_cast<uint64_t>(wide), 0x7ff8000000000000u);
}

TEST(KernelsReduce, IntegersWrapAround) {
  using L = std::numeric_limits<int64_t>;
  EXPECT_EQ(reduce_one<uint8_t>(Dtype::kU8, ReduceOp::kSum, {200, 100}), 44);
  EXPECT_EQ(reduce_one<int32_t>(Dtype::kI32, ReduceOp::kSum, {INT32_MAX, 1}), INT32_MIN);
  EXPECT_EQ(reduce_one<int64_t>(Dtype::kI64, ReduceOp::kSum, {L::min(), -1}), L::max());
  EXPECT_EQ(reduce_one<int32_t>(Dtype::kI32, ReduceOp::kMin, {-3, 2}), -3);
  EXPECT_EQ(reduce_one<uint8_t>(Dtype::kU8, ReduceOp::kMax, {200, 100}), 200);
  EXPECT_EQ(reduce_one<int8_t>(Dtype::kI8, ReduceOp::kSum, {127, 2}), -127);
  EXPECT_EQ(reduce_one<int8_t>(Dtype::kI8, ReduceOp::kMin, {127, -128}), -128);
  EXPECT_EQ(reduce_one<uint32_t>(Dtype::kU32, ReduceOp::kMax, {1, 0x80000000u}), 0x80000000u);
  EXPECT_EQ(reduce_one<int16_t>(Dtype::kI16, ReduceOp::kSum, {INT16_MAX, 1}), INT16_MIN);
  EXPECT_EQ(reduce_one<uint16_t>(Dtype::kU16, ReduceOp::kProd, {65535, 65535}), 1);
}

// The mean of the smallest and of the largest numbers is exact, and the quotient goes towards zero.
template <class T>
void expect_exact_mean(Dtype dtype) {
  using L = std::numeric_limits<T>;
  const auto mean = [&](const std::vector<T>& ranks) {
    return reduce_one<T>(dtype, ReduceOp::kMean, ranks);
  };
  EXPECT_EQ(mean({L::max(), L::max(), L::max()}), L::max());
  EXPECT_EQ(mean({L::min(), L::min(), L::min()}), L::min());
  EXPECT_EQ(mean({L::max(), L::max(), 0}),
            static_cast<T>(L::max() - L::max() / 3 - (L::max() % 3 != 0)));
  EXPECT_EQ(mean({3, 0}), 1);
  EXPECT_EQ(mean({2, 3, 3}), 2);
  // More ranks than the type can count.
  EXPECT_EQ(mean(std::vector<T>(300, 1)), 1);
  EXPECT_EQ(mean(std::vector<T>(300, L::max())), L::max());
  if (!std::is_signed_v<T>) return;
  const auto minus = [](int x) { return static_cast<T>(-x); };
  EXPECT_EQ(mean({minus(3), 0}), minus(1));
  EXPECT_EQ(mean({minus(2), minus(3), minus(3)}), minus(2));
  EXPECT_EQ(mean({L::min(), L::max()}), 0);
  EXPECT_EQ(mean({L::min(), L::min(), 0}), static_cast<T>(L::min() / 3 * 2 + L::min() % 3 * 2 / 3));
  EXPECT_EQ(mean(std::vector<T>(300, L::min())), L::min());
}

TEST(KernelsReduce, MeansOfIntegersAreExactAndGoTowardsZero) {
  expect_exact_mean<int8_t>(Dtype::kI8);
  expect_exact_mean<int16_t>(Dtype::kI16);
  expect_exact_mean<int32_t>(Dtype::kI32);
  expect_exact_mean<int64_t>(Dtype::kI64);
  expect_exact_mean<uint8_t>(Dtype::kU8);
  expect_exact_mean<uint16_t>(Dtype::kU16);
  expect_exact_mean<uint32_t>(Dtype::kU32);
  expect_exact_mean<uint64_t>(Dtype::kU64);
}

TEST(KernelsReduce, ProductsAndBitOr) {
  EXPECT_EQ(reduce_one<float>(Dtype::kF32, ReduceOp::kProd, {3, -2, 0.5f}), -3.0f);
  // (2^120 * 2^120) is infinite and stays so; the other way round the product is finite.
  const float big = 0x1p120f;
  EXPECT_EQ(reduce_one<float>(Dtype::kF32, ReduceOp::kProd, {big, big, 1 / big}),
            std::numeric_limits<float>::infinity());
  EXPECT_EQ(reduce_one<float>(Dtype::kF32, ReduceOp::kProd, {big, 1 / big, big}), big);
  // Beyond float16 in between, rounded once at the end.
  EXPECT_EQ(reduce_one<uint16_t>(Dtype::kF16, ReduceOp::kProd,
                                 {f32_to_f16(60000), f32_to_f16(4), f32_to_f16(0.25f)}),
            f32_to_f16(60000));
  const float inf = std::numeric_limits<float>::infinity();
  EXPECT_EQ(std::bit_cast<uint32_t>(reduce_one<float>(Dtype::kF32, ReduceOp::kProd, {0, -inf})),
            0x7fc00000u);
  EXPECT_EQ(reduce_one<int8_t>(Dtype::kI8, ReduceOp::kProd, {-128, -1}), -128);
  EXPECT_EQ(reduce_one<int32_t>(Dtype::kI32, ReduceOp::kProd, {1 << 20, 1 << 12}), 0);
  EXPECT_EQ(reduce_one<int64_t>(Dtype::kI64, ReduceOp::kProd, {INT64_MAX, 2}), -2);
  EXPECT_EQ(reduce_one<uint64_t>(Dtype::kU64, ReduceOp::kProd, {uint64_t{1} << 63, 3}),
            uint64_t{1} << 63);
  EXPECT_EQ(reduce_one<uint8_t>(Dtype::kU8, ReduceOp::kBitOr, {1, 0x80, 4}), 0x85);
  EXPECT_EQ(reduce_one<int64_t>(Dtype::kI64, ReduceOp::kBitOr, {INT64_MIN, 1}), INT64_MIN + 1);
}

}  // namespace
}  // namespace sotto::test
