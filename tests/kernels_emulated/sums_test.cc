// What is of CUDA's kernels alone: sums of many norm blocks by many threads have the bits of one
// thread that adds in order, and one launch serves many small tensors.
#include <gtest/gtest.h>

#include <cmath>
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
  // Warps add in order by 32, thread blocks by 1024: around, at and between multiples of both.
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
