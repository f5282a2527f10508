// Kernels of outer optimizers that make numbers of a boundary, and boundaries made of all of them.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <optional>

#include "tests/support/kernel_cases.h"

namespace sotto::test {
namespace {

template <class T>
T first(const Outcome& out, const OperandMemory& operand) {
  return out.as<T>(operand.at())[0];
}

// Executes the call, after a comparison of all targets.
Outcome run(const KernelCase& work) {
  EXPECT_EQ(compare_on_all_targets(work), "");
  const Outcome out = execute_reference(work);
  EXPECT_EQ(out.error, "");
  return out;
}

OuterMessage host_message() {
  OuterMessage m{};
  m.delta_sum = -1;
  m.loss = 2.5;
  m.tokens = 4096;
  m.anchor_hash = 0x123456789abcdef0;
  m.gap = m.inner_norm = -1;
  m.weight = 1;
  m.flags = 77;
  m.step_us = 1000;
  m.network_us = 2000;
  m.votes = 5;
  m.version = kOuterMessageVersion;
  return m;
}

KernelCase tell_case(const std::vector<float>& sums, uint32_t flags, const double* inner, float gap,
                     float weight = 1) {
  KernelCase work(KernelId::kOuterTell);
  work.set_args(OuterMessageArgs{sums.size()});
  auto& o = work.named<kernels::OuterTell>();
  o.sums = work.flat(sums);
  o.flags = work.flat(std::vector<uint32_t>{flags});
  o.segments = work.flat(std::vector<OuterSegment>{{3, gap, 0.5f}, {4, 9, 9}});
  if (inner != nullptr) o.inner_sum = work.flat(std::vector<double>{*inner});
  OuterMessage host = host_message();
  host.weight = weight;
  o.host = work.flat(std::vector<OuterMessage>{host});
  o.message = work.flat(std::vector<uint8_t>(sizeof(OuterMessage), 0xee));
  o.word = work.flat(std::vector<uint32_t>{0});
  return work;
}

TEST(KernelsOuterBoundary, MessagesTellWhatTheHostGivesAndWhatTheDeviceKnows) {
  Random random(70);
  for (const uint64_t blocks : {0u, 1u, 3u, 1500u}) {
    for (const bool flagged : {false, true}) {
      for (const bool measured : {false, true}) {
        std::vector<float> sums = random.positive(blocks, 3, 0.1f);
        if (flagged && blocks != 0) sums[0] = std::numeric_limits<float>::infinity();
        const double inner = 6.25;
        KernelCase work =
            tell_case(sums, flagged ? kFlagNonfinite : 0, measured ? &inner : nullptr, 0.75f);
        const auto& o = work.named<kernels::OuterTell>();
        const Outcome out = run(work);
        const OuterMessage m = first<OuterMessage>(out, o.message);
        double sum = 0;
        for (const float s : sums) sum += s;
        EXPECT_EQ(m.delta_sum, sum);
        EXPECT_EQ(m.gap, 0.75f);
        EXPECT_EQ(m.inner_norm, measured ? 2.5f : 0.0f);
        EXPECT_EQ(m.weight, flagged ? 0.0f : 1.0f);
        EXPECT_EQ(m.flags, flagged ? kFlagNonfinite : 0u);
        EXPECT_EQ(first<uint32_t>(out, o.word), flagged ? kSkipNonfinite : kCommit);
        OuterMessage given = host_message();
        given.delta_sum = m.delta_sum;
        given.gap = m.gap;
        given.inner_norm = m.inner_norm;
        given.weight = m.weight;
        given.flags = m.flags;
        EXPECT_EQ(std::memcmp(&m, &given, sizeof m), 0);
      }
    }
  }
}

TEST(KernelsOuterBoundary, ARankThatTheHostLeavesOutTakesNoPart) {
  KernelCase work = tell_case({1, 2}, 0, nullptr, 0, 0);
  const auto& o = work.named<kernels::OuterTell>();
  const Outcome out = run(work);
  EXPECT_EQ(first<OuterMessage>(out, o.message).weight, 0.0f);
  EXPECT_EQ(first<OuterMessage>(out, o.message).flags, 0u);
  EXPECT_EQ(first<uint32_t>(out, o.word), kSkipNonfinite);
}

TEST(KernelsOuterBoundary, SumsAreAddedInOrder) {
  Random random(71);
  for (const uint64_t blocks : {0u, 1u, 33u, 2100u}) {
    std::vector<float> sums = random.positive(blocks, 3, 0.1f);
    for (float& s : sums) s = std::ldexp(s, static_cast<int>(random.below(90)) - 45);
    KernelCase work(KernelId::kOuterSum);
    work.set_args(OuterMessageArgs{blocks});
    auto& o = work.named<kernels::OuterSum>();
    o.sums = work.flat(sums);
    o.sum = work.flat(std::vector<double>{-1});
    double sum = 0;
    for (const float s : sums) sum += s;
    EXPECT_EQ(first<double>(run(work), o.sum), sum);
  }
}

// Segments with their block sums, of which some are long.
struct Segments {
  explicit Segments(Random* random) {
    uint64_t block = 0;
    for (const uint64_t count : {100u, 8192u, 50000u, 1u}) {
      NormRange range;
      range.first_block = block;
      range.blocks = (count + kNormBlock - 1) / kNormBlock;
      range.count = count;
      ranges.push_back(range);
      block += range.blocks;
    }
    sums = random->positive(block, 3, 0.1f);
    clipped.resize(block);
    for (float& n : clipped) n = static_cast<float>(random->below(8193));
    state = {{0, 0.5f, 0.9f}, {0.25, 0.75f, 0}, {2, 0, 0}, {0, 0, 0}};
  }
  std::vector<NormRange> ranges;
  std::vector<float> sums, clipped;
  std::vector<OuterSegment> state;
};

std::vector<OuterMessage> messages_of_ranks(uint32_t world) {
  std::vector<OuterMessage> all(world, host_message());
  for (uint32_t r = 0; r < world; ++r) {
    all[r].gap = 0.3f + 0.1f * static_cast<float>(r);
    all[r].inner_norm = 0.01f * static_cast<float>(r + 1);
    all[r].weight = r % 3 == 1 ? 0.0f : 1.0f;
    all[r].flags = 0;
  }
  return all;
}

struct FactorsCase {
  FactorsCase(const Segments& s, const OuterFactorsArgs& given, std::vector<OuterMessage> from,
              const OuterInputs& inputs)
      : args(given), messages(std::move(from)), in(inputs), work(KernelId::kOuterFactors) {
    args.ranges = s.ranges.data();
    args.n = s.ranges.size();
    args.world = static_cast<uint32_t>(messages.size());
    work.set_args(args);
    auto& o = work.named<kernels::OuterFactors>();
    o.messages = work.flat(messages);
    o.inputs = work.flat(std::vector<OuterInputs>{in});
    if (args.penalty.kind == OuterPenalty::kGapRel) o.sums = work.flat(s.sums);
    o.segments = work.flat(s.state);
    o.factors = work.flat(std::vector<OuterFactor>(args.n, {9, 9, 9, 9, 9, 9}));
    o.numbers = work.flat(std::vector<OuterNumbers>(1));
    o.word = work.flat(std::vector<uint32_t>{0});
  }
  OuterFactorsArgs args;
  std::vector<OuterMessage> messages;
  OuterInputs in;
  KernelCase work;
};

// The unit of a segment, and in *average what the segment keeps.
double unit_of(const Segments& s, const FactorsCase& c, size_t k, double gap, double* average) {
  switch (c.args.penalty.kind) {
    case OuterPenalty::kGapEma:
      *average = *average == 0 ? gap : 0.9 * *average + 0.1 * gap;
      return *average;
    case OuterPenalty::kGapRel: {
      double sum = 0;
      for (uint64_t b = 0; b < s.ranges[k].blocks; ++b) sum += s.sums[s.ranges[k].first_block + b];
      return static_cast<float>(std::sqrt(sum));
    }
    case OuterPenalty::kGapInner: {
      float total = 0;
      for (size_t g = 0; g < c.messages.size(); g += 8) {
        float eight = 0;
        for (size_t r = g; r < std::min(g + 8, c.messages.size()); ++r)
          eight += c.messages[r].weight != 0 ? c.messages[r].inner_norm : 0.0f;
        total += eight;
      }
      const auto ranks = std::count_if(c.messages.begin(), c.messages.end(),
                                       [](const OuterMessage& m) { return m.weight != 0; });
      total *= ranks == 0 ? 0.0f : static_cast<float>(1.0 / static_cast<double>(ranks));
      return c.in.period * static_cast<double>(total);
    }
    default: return 0;
  }
}

void expect_segment(const Segments& s, const FactorsCase& c, size_t k, bool commits,
                    const OuterSegment& segment, const OuterFactor& factor) {
  const bool alone = std::ranges::all_of(c.messages, [](const auto& m) { return m.weight == 0; });
  const OuterPenaltyArgs p = alone ? OuterPenaltyArgs{} : c.args.penalty;
  const double gap = !p.stale ? 0 : p.consensus ? c.messages[0].gap : s.state[k].gap;
  double average = s.state[k].average_gap, unit = 0, lambda = 1;
  const bool compares = p.kind != OuterPenalty::kNone && p.kind != OuterPenalty::kConst;
  if (!p.element && p.kind == OuterPenalty::kConst) lambda = 2;
  if (!p.element && compares) {
    unit = unit_of(s, c, k, gap, &average);
    const double eps = 1e-3 * std::sqrt(static_cast<double>(s.ranges[k].count));
    if (gap != 0) lambda = std::min(std::max(1 + gap / (unit + eps), 1.0), 1.75);
  }
  if (!p.element && !alone) lambda = std::max(lambda, 1.125);
  EXPECT_EQ(factor.gap, gap);
  EXPECT_EQ(factor.unit, unit);
  EXPECT_EQ(factor.lambda, lambda);
  EXPECT_EQ(factor.inv_lambda,
            static_cast<float>(c.args.normalised ? 1 / (c.in.gamma * lambda) : 1 / lambda));
  EXPECT_EQ(factor.clipped, 0.0);
  EXPECT_EQ(factor.change, 0.0f);
  const float alpha = static_cast<float>(c.args.normalised ? 0.7 * c.in.gamma : 0.7);
  EXPECT_EQ(segment.average_gap, commits ? average : s.state[k].average_gap);
  EXPECT_EQ(segment.gap, commits ? s.state[k].gap : 0);
  EXPECT_EQ(segment.alpha, !commits ? 0 : k == 0 ? alpha : s.state[k].alpha);
}

void expect_factors(const Segments& s, FactorsCase c) {
  const auto& o = c.work.named<kernels::OuterFactors>();
  const Outcome out = run(c.work);
  uint32_t ranks = 0;
  bool flagged = false;
  for (const OuterMessage& m : c.messages) {
    ranks += m.weight != 0 ? 1 : 0;
    flagged = flagged || m.flags != 0;
  }
  const bool some = ranks != 0 || c.args.freshness > 0;
  const bool commits = some && !(flagged && c.args.fails);
  EXPECT_EQ(first<uint32_t>(out, o.word), commits ? kCommit : kSkipNonfinite);
  const OuterNumbers n = first<OuterNumbers>(out, o.numbers);
  EXPECT_EQ(n.phi, c.args.clip_by_gamma ? 0.35 * c.in.gamma : 0.35);
  EXPECT_EQ(n.gamma, c.args.normalised ? c.in.gamma : 1.0);
  EXPECT_EQ(n.mean, c.args.divided == 0 ? 1.0f
                    : ranks == 0        ? 0.0f
                                        : static_cast<float>(1.0 * c.args.divided / ranks));
  EXPECT_EQ(n.alpha, static_cast<float>(c.args.normalised ? 0.7 * c.in.gamma : 0.7));
  EXPECT_EQ(n.last_alpha, 0.9f);
  EXPECT_EQ(n.beta, static_cast<float>(0.2));
  EXPECT_EQ(n.freshness, static_cast<float>(c.args.freshness));
  EXPECT_EQ(n.limit, static_cast<float>(c.args.clip_by_gamma ? 0.35 * c.in.gamma : 0.35));
  EXPECT_EQ(n.shrink, 1.0f);
  EXPECT_EQ(n.ranks, ranks);
  for (size_t k = 0; k < s.ranges.size(); ++k)
    expect_segment(s, c, k, commits, out.as<OuterSegment>(o.segments.at())[k],
                   out.as<OuterFactor>(o.factors.at())[k]);
}

OuterFactorsArgs factors_args(OuterPenalty kind, uint32_t bits) {
  OuterFactorsArgs a;
  a.penalty.kind = kind;
  a.penalty.stale = (bits & 1) != 0;
  a.penalty.consensus = (bits & 2) != 0;
  a.penalty.element = (bits & 4) != 0;
  a.normalised = (bits & 8) != 0;
  a.clip_by_gamma = (bits & 16) != 0;
  if ((bits & 32) != 0) a.divided = (bits & 128) != 0 ? 7 : 0;
  a.fails = (bits & 64) != 0;
  a.alpha = 0.7;
  a.beta = 0.2;
  a.freshness = (bits & 3) == 1 ? 0 : 0.1;
  a.penalty.constant = 2;
  a.penalty.lambda_max = 1.75;
  a.penalty.floor = 1.125;
  a.penalty.eps = 1e-3;
  return a;
}

TEST(KernelsOuterBoundary, FactorsFollowTheFormulas) {
  Random random(72);
  const Segments segments(&random);
  for (const OuterPenalty kind : {OuterPenalty::kNone, OuterPenalty::kConst, OuterPenalty::kGapRel,
                                  OuterPenalty::kGapEma, OuterPenalty::kGapInner}) {
    for (uint32_t bits = 0; bits < 256; ++bits) {
      SCOPED_TRACE(std::to_string(static_cast<int>(kind)) + " " + std::to_string(bits));
      std::vector<OuterMessage> messages = messages_of_ranks(bits % 2 == 0 ? 3 : 19);
      if (random.below(2) != 0) messages.back().flags = kFlagNonfinite;
      if (random.below(8) == 0) {
        for (OuterMessage& m : messages) m.weight = 0;
      }
      expect_factors(segments,
                     FactorsCase(segments, factors_args(kind, bits), messages, {0.3, 0.35, 48}));
    }
  }
}

// Sums of more norm blocks than one warp adds, and messages of more ranks than a block has threads.
TEST(KernelsOuterBoundary, FactorsOfLongSegmentsAndManyRanks) {
  Random random(73);
  Segments segments(&random);
  segments.ranges.resize(2);
  segments.state.resize(2);
  segments.ranges[0].blocks = segments.ranges[1].first_block = 1100;
  segments.ranges[1].blocks = 40;
  segments.sums = random.positive(1140, 3, 0.1f);
  for (float& s : segments.sums) s = std::ldexp(s, static_cast<int>(random.below(90)) - 45);
  for (const OuterPenalty kind : {OuterPenalty::kGapRel, OuterPenalty::kGapInner})
    expect_factors(segments, FactorsCase(segments, factors_args(kind, 1), messages_of_ranks(1030),
                                         {0.3, 0.35, 12}));
}

OuterNumbers limited(OuterClip clip, const std::vector<float>& sums, uint64_t elements) {
  KernelCase work(KernelId::kOuterLimit);
  work.set_args(OuterLimitArgs{sums.size(), elements, clip});
  OuterNumbers n;
  n.phi = 2.5;
  n.limit = 1.25f;
  n.shrink = 1;
  auto& o = work.named<kernels::OuterLimit>();
  o.m_sums = work.flat(sums);
  o.numbers = work.flat(std::vector<OuterNumbers>{n});
  const OuterNumbers after = first<OuterNumbers>(run(work), o.numbers);
  EXPECT_EQ(after.phi, 2.5);
  EXPECT_EQ(after.alpha, 1.0f);
  return after;
}

TEST(KernelsOuterBoundary, LimitsOfWholeFragments) {
  const std::vector<float> sums = {9, 7, 0, 48};  // norm 8
  EXPECT_EQ(limited(OuterClip::kRms, sums, 16).limit, 5.0f);
  EXPECT_EQ(limited(OuterClip::kRms, sums, 16).shrink, 1.0f);
  EXPECT_EQ(limited(OuterClip::kRms, {}, 0).limit, 0.0f);
  EXPECT_EQ(limited(OuterClip::kNorm, sums, 16).shrink, 2.5f / 8.0f);
  EXPECT_EQ(limited(OuterClip::kNorm, sums, 16).limit, 1.25f);
  EXPECT_EQ(limited(OuterClip::kNorm, {1, 0.25f}, 16).shrink, 1.0f);
  EXPECT_EQ(limited(OuterClip::kNorm, {0}, 16).shrink, 1.0f);
  for (const OuterClip clip : {OuterClip::kNone, OuterClip::kCoordinate}) {
    EXPECT_EQ(limited(clip, sums, 16).limit, 1.25f);
    EXPECT_EQ(limited(clip, sums, 16).shrink, 1.0f);
  }
  Random random(74);
  const std::vector<float> many = random.positive(3000, 3, 0.1f);
  double sum = 0;
  for (const float s : many) sum += s;
  EXPECT_EQ(limited(OuterClip::kRms, many, 1000).limit,
            static_cast<float>(2.5 * static_cast<float>(std::sqrt(sum / 1000))));
}

TEST(KernelsOuterBoundary, GapsAreTheLengthsOfUpdates) {
  Random random(75);
  const Segments s(&random);
  for (const bool counted : {false, true}) {
    KernelCase work(KernelId::kOuterGap);
    work.set_args(OuterGapArgs{s.ranges.data(), s.ranges.size()});
    const std::vector<OuterFactor> before(s.ranges.size(), {2, 3, 4, 5, 0.5f, 6});
    auto& o = work.named<kernels::OuterGap>();
    o.step_sums = work.flat(s.sums);
    if (counted) o.clipped = work.flat(s.clipped);
    o.segments = work.flat(s.state);
    o.factors = work.flat(before);
    const Outcome out = run(work);
    const auto segments = out.as<OuterSegment>(o.segments.at());
    const auto factors = out.as<OuterFactor>(o.factors.at());
    for (size_t k = 0; k < s.ranges.size(); ++k) {
      double sum = 0, clipped = 0;
      for (uint64_t b = 0; b < s.ranges[k].blocks; ++b) {
        sum += s.sums[s.ranges[k].first_block + b];
        clipped += s.clipped[s.ranges[k].first_block + b];
      }
      EXPECT_EQ(factors[k].change, static_cast<float>(std::sqrt(sum)));
      EXPECT_EQ(factors[k].clipped, counted ? clipped : 0.0);
      EXPECT_EQ(factors[k].lambda, 2.0);
      EXPECT_EQ(factors[k].unit, 3.0);
      EXPECT_EQ(factors[k].gap, 4.0);
      EXPECT_EQ(factors[k].inv_lambda, 0.5f);
      EXPECT_EQ(segments[k].gap, factors[k].change);
      EXPECT_EQ(segments[k].average_gap, s.state[k].average_gap);
      EXPECT_EQ(segments[k].alpha, s.state[k].alpha);
    }
  }
}

}  // namespace
}  // namespace sotto::test
