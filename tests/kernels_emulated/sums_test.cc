// What is of CUDA's kernels alone: sums of many norm blocks by many threads have the bits of one
// thread that adds in order, and one launch serves many small tensors.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <numeric>

#include "tests/support/kernel_cases.h"

namespace sotto::test {
namespace {

// kNormFinish over ranges of these lengths.
KernelCase norm_case(const std::vector<uint64_t>& lengths, const std::vector<float>& sums,
                     std::vector<NormRange>* ranges) {
  uint64_t first = 0;
  std::vector<uint64_t> counts;
  for (const uint64_t blocks : lengths) {
    NormRange range;
    range.first_block = first;
    range.blocks = blocks;
    ranges->push_back(range);
    counts.push_back(blocks * kNormBlock);
    first += blocks;
  }
  KernelCase work(KernelId::kNormFinish);
  work.set_args(NormArgs{ranges->data(), ranges->size(), ScaleKind::kL2});
  auto& o = work.named<kernels::NormFinish>();
  o.sums = work.flat(sums);
  o.counts = work.flat(counts);
  o.scales = work.flat(std::vector<float>(lengths.size()));
  o.message = work.flat(std::vector<uint8_t>(4 * lengths.size() + 4));
  o.flags = work.flat(std::vector<uint32_t>{0});
  return work;
}

// The sum of the first `n`, in order and in halves.
std::pair<double, double> two_orders(const std::vector<float>& sums, size_t first, size_t n) {
  double ordered = 0, low = 0, high = 0;
  for (size_t i = 0; i < n; ++i) {
    ordered += sums[first + i];
    (i % 2 == 0 ? low : high) += sums[first + i];
  }
  return {ordered, low + high};
}

TEST(KernelsSums, ManyThreadsAddAsOneWould) {
  // Warps add 32 at once, thread blocks 1024: around, at and between multiples of both.
  const std::vector<uint64_t> lengths = {0, 1, 31, 32, 33, 64, 1024, 1025, 2048, 2049, 5000};
  const uint64_t all = std::accumulate(lengths.begin(), lengths.end(), uint64_t{0});
  Random random(5);
  uint64_t orders_differ = 0;
  for (const bool wide : {false, true}) {
    for (int round = 0; round < 8; ++round) {
      std::vector<float> sums = random.positive(all, 100.0f, 1000.0f);
      if (wide) {  // of very different sizes: partial sums round
        for (float& s : sums) s = std::ldexp(s, static_cast<int>(random.below(90)) - 45);
      }
      size_t first = 0;
      for (const uint64_t n : lengths) {
        const auto [ordered, halves] = two_orders(sums, first, n);
        orders_differ += wide && ordered != halves;
        first += n;
      }
      std::vector<NormRange> ranges;
      EXPECT_EQ(compare_on_all_targets(norm_case(lengths, sums, &ranges)), "");
    }
  }
  EXPECT_GT(orders_differ, 0u);  // so the order was put to the test
}

// Block sums whose partial sums round, in several ways.
using Make = std::function<std::vector<float>(Random*, uint64_t)>;
struct Kind {
  const char* what;
  Make make;
};
float times_power(float x, int64_t power) { return std::ldexp(x, static_cast<int>(power)); }

const Kind kKinds[] = {
    {"any sizes",
     [](Random* random, uint64_t n) {
       std::vector<float> sums = random->positive(n, 100.0f, 1000.0f);
       for (float& s : sums) s = times_power(s, int64_t{random->below(90)} - 45);
       return sums;
     }},
    {"halfway between two sums",  // the last place of 2^60 is 2^8
     [](Random* random, uint64_t n) {
       std::vector<float> sums(n, 0x1p60f);
       for (uint64_t i = 1; i < n; ++i)
         sums[i] = times_power(static_cast<float>(random->below(16)), 6 + random->below(3));
       return sums;
     }},
    {"halfway, beyond several powers of two",
     [](Random* random, uint64_t n) {
       std::vector<float> sums(n);
       for (uint64_t i = 0; i < n; ++i)
         sums[i] = times_power(static_cast<float>(1 + random->below(3)),
                               int64_t{60} * (i % 7 == 0) + static_cast<int64_t>(i * 9 / n));
       return sums;
     }},
    {"zeros first",
     [](Random* random, uint64_t n) {
       std::vector<float> sums = random->positive(n, 1.0f, 0.001f);
       for (uint64_t i = 0; i < n; ++i)
         sums[i] = i < n * 2 / 3 ? 0.0f : times_power(sums[i], int64_t{random->below(60)} - 30);
       return sums;
     }},
    {"growing",
     [](Random* random, uint64_t n) {
       std::vector<float> sums = random->positive(n, 1.0f, 1.0f);
       for (uint64_t i = 0; i < n; ++i)
         sums[i] = times_power(sums[i], static_cast<int64_t>(i * 120 / n) - 60);
       return sums;
     }},
    {"shrinking",
     [](Random* random, uint64_t n) {
       std::vector<float> sums = random->positive(n, 1.0f, 1.0f);
       for (uint64_t i = 0; i < n; ++i)
         sums[i] = times_power(sums[i], 60 - static_cast<int64_t>(i * 120 / n));
       return sums;
     }},
    {"the least and the largest",
     [](Random* random, uint64_t n) {
       std::vector<float> sums(n);
       for (float& s : sums)
         s = random->below(50) == 0 ? 3e38f : times_power(1.0f + random->below(9), -149);
       return sums;
     }},
};

// Roots of sums by whole thread blocks, as float64.
TEST(KernelsSums, ThreadBlocksRoundEveryPartialSum) {
  Random random(7);
  uint64_t orders_differ = 0;
  for (const Kind& kind : kKinds) {
    for (const uint64_t n : {1u, 31u, 33u, 1023u, 1024u, 1025u, 1056u, 4100u, 20000u}) {
      const std::vector<float> sums = kind.make(&random, n);
      const auto [ordered, halves] = two_orders(sums, 0, n);
      orders_differ += std::sqrt(ordered) != std::sqrt(halves);
      KernelCase work(KernelId::kNormMessage);
      work.set_args(BlocksArgs{n});
      auto& o = work.named<kernels::NormMessage>();
      o.sums = work.flat(sums);
      o.message = work.flat(std::vector<uint8_t>(kNormMessageBytes));
      EXPECT_EQ(compare_on_all_targets(work), "") << n << ", " << kind.what;
    }
  }
  EXPECT_GT(orders_differ, 10u);
}

// Trust ratios are such roots where the other sum is 1. Warps have the short tensors, thread blocks
// the long ones.
TEST(KernelsSums, WarpsRoundEveryPartialSum) {
  const std::vector<uint64_t> lengths = {1, 2, 31, 32, 33, 64, 500, 1000, 1024, 1025, 3000};
  Random random(8);
  for (const Kind& kind : kKinds) {
    std::vector<NormRange> ranges;
    std::vector<float> p, u;
    for (const uint64_t n : lengths) {
      NormRange range;
      range.first_block = p.size();
      range.blocks = n;
      range.tensor = static_cast<uint32_t>(ranges.size());
      ranges.push_back(range);
      const std::vector<float> sums = kind.make(&random, n);
      p.insert(p.end(), sums.begin(), sums.end());
      u.resize(p.size(), 0.0f);
      u[range.first_block] = 1.0f;
    }
    KernelCase work(KernelId::kLambScalars);
    TensorArgs args{};
    args.ranges = ranges.data();
    args.n = ranges.size();
    work.set_args(args);
    LambGroupScalars scalars;
    scalars.max_coeff = std::numeric_limits<double>::max();
    auto& o = work.named<kernels::LambScalars>();
    o.p_sums = work.flat(p);
    o.u_sums = work.flat(u);
    o.scalars = work.flat(std::vector<LambGroupScalars>{scalars});
    o.steps = work.flat(std::vector<TensorStep>(ranges.size()));
    EXPECT_EQ(compare_on_all_targets(work), "") << kind.what;
  }
}

TEST(KernelsSums, ZerosSubnormalsAndWhatIsNotANumber) {
  const std::vector<uint64_t> lengths = {100, 2000};
  using Limits = std::numeric_limits<float>;
  for (const float special : {0.0f, Limits::denorm_min(), Limits::min(), Limits::max(),
                              Limits::infinity(), Limits::quiet_NaN()}) {
    for (const float other : {0.0f, Limits::denorm_min(), 1.0f}) {
      std::vector<float> sums(2100, other);
      for (size_t i = 7; i < sums.size(); i += 50) sums[i] = special;
      std::vector<NormRange> ranges;
      EXPECT_EQ(compare_on_all_targets(norm_case(lengths, sums, &ranges)), "")
          << special << " among " << other;
    }
  }
}

TEST(KernelsSums, AThousandSmallTensorsInOneLaunch) {
  std::vector<uint64_t> sizes;
  for (uint64_t t = 0; t < 1000; ++t) sizes.push_back(t % 37);
  const Layout layout = make_layout(sizes, 1, 8);
  Random random(6);
  KernelCase work(KernelId::kAdam);
  work.pieces = layout.by_tensor;
  work.set_args(SourceArgs{});
  auto& o = work.named<kernels::Adam>();
  o.g = work.list(random.tensors(sizes));
  o.m = work.flat(random.normal(layout.padded));
  o.v = work.flat(random.positive(layout.padded, 1.0f, 0.1f));
  o.p = work.list(random.tensors(sizes));
  AdamGroupScalars s;
  s.lr = 1e-3;
  s.b1 = 0.9f, s.one_minus_b1 = 0.1f, s.b2 = 0.99f, s.one_minus_b2 = 0.01f, s.eps = 1e-8f;
  o.scalars = work.flat(std::vector<AdamGroupScalars>{s});
  o.valid = work.flat(random.mask(layout.padded));
  EXPECT_EQ(compare_on_all_targets(work), "");
}

}  // namespace
}  // namespace sotto::test
