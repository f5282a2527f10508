// Kernels of outer optimizers, put together as rounds of a training: the exact sequences of the
// specification co2-overlap, section 15.1, problem T. Two ranks have one element each, of which
// rank i minimises (x - c_i)^2 / 2 with c = (-1, 3), learning rate 1/2 and 2 inner steps a round.
#include <gtest/gtest.h>

#include <cmath>
#include <optional>

#include "tests/support/kernel_cases.h"

namespace sotto::test {
namespace {

constexpr uint32_t kRanks = 2;
constexpr double kGamma = 0.5;

struct Settings {
  OuterRule rule = OuterRule::kHeavyBall;
  double alpha = 1, beta = 0, freshness = 0;
  bool late = true;  // averages are consumed a round after their launch
  bool anchor_diff = false;
  OuterPenaltyArgs penalty = {};
  OuterClip clip = OuterClip::kNone;
  double phi = 0;
  bool params = false;
  bool normalised = false;

  bool in_two_passes() const { return clip == OuterClip::kNorm || clip == OuterClip::kRms; }
};

// A call for one element, which is compared on all targets.
template <class K>
class Call {
 public:
  Call() : work_(kKernelId<K>), operands(work_.named<K>()) { work_.pieces = {one_element()}; }

  template <class T>
  OperandMemory value(const T& x) {
    return work_.flat(std::vector<T>{x});
  }
  template <class T>
  OperandMemory values(const std::vector<T>& x) {
    return work_.flat(x);
  }
  OperandMemory tensor(float x) { return work_.list(std::vector<std::vector<float>>{{x}}); }
  void run(const typename K::Args& args) {
    work_.set_args(args);
    EXPECT_EQ(compare_on_all_targets(work_), "");
    outcome_ = execute_reference(work_);
    EXPECT_EQ(outcome_.error, "");
  }
  template <class T>
  T result(const OperandMemory& operand) const {
    return outcome_.as<T>(operand.at())[0];
  }

 private:
  static Piece one_element() {
    Piece piece;
    piece.count = 1;
    return piece;
  }
  KernelCase work_;
  Outcome outcome_;

 public:
  typename K::template Operands<OperandMemory>& operands;
};

const NormRange& whole() {
  static const NormRange range{0, 1, 1, 0, 0};
  return range;
}

// What all ranks have sent.
struct Average {
  float sum = 0;
  std::vector<OuterMessage> messages;
};

struct Rank {
  float x = 5, anchor = 5, m = 0, last_step = 0;
  float launched = 0;       // the difference that was sent last
  float launch_anchor = 5;  // of that launch
  OuterSegment segment;
};

class Training {
 public:
  explicit Training(const Settings& settings) : s_(settings) { s_.penalty.stale = s_.late; }

  // Two inner steps, and a boundary. Returns the anchors.
  std::vector<float> round() {
    constexpr float kCenters[kRanks] = {-1, 3};
    for (uint32_t r = 0; r < kRanks; ++r) {
      for (int k = 0; k < 2; ++k) ranks_[r].x -= 0.5f * (ranks_[r].x - kCenters[r]);
    }
    return boundary();
  }
  std::vector<float> boundary() {
    Average next;
    std::vector<float> fresh;
    for (Rank& rank : ranks_) fresh.push_back(send(rank, &next));
    if (!s_.late) pending_ = next;
    for (uint32_t r = 0; r < kRanks; ++r) {
      Rank& rank = ranks_[r];
      if (!s_.late) rank.launch_anchor = rank.anchor;
      const float launch_anchor = rank.anchor;
      if (pending_ || s_.freshness > 0) consume(rank, fresh[r]);
      rank.x = rank.anchor;
      rank.launched = fresh[r];
      rank.launch_anchor = launch_anchor;
    }
    pending_ = next;
    std::vector<float> anchors;
    for (const Rank& rank : ranks_) anchors.push_back(rank.anchor);
    return anchors;
  }

 private:
  // Returns the difference of the round.
  float send(const Rank& rank, Average* to) {
    Call<kernels::OuterDelta> delta;
    auto& d = delta.operands;
    d.x = delta.tensor(rank.x);
    d.anchor = delta.value(rank.anchor);
    d.y = delta.value(0.0f);
    d.sums = delta.value(0.0f);
    d.flags = delta.value(uint32_t{0});
    delta.run({s_.params});
    to->sum += delta.result<float>(d.y);
    Call<kernels::OuterTell> tell;
    auto& t = tell.operands;
    t.sums = tell.value(delta.result<float>(d.sums));
    t.flags = tell.value(delta.result<uint32_t>(d.flags));
    t.segments = tell.value(rank.segment);
    OuterMessage told{};
    told.weight = 1;
    t.host = tell.value(told);
    t.message = tell.value(OuterMessage{});
    t.word = tell.value(uint32_t{0});
    tell.run({1});
    EXPECT_EQ(tell.result<uint32_t>(t.word), kCommit);
    to->messages.push_back(tell.result<OuterMessage>(t.message));
    const float moved = rank.anchor - rank.x;
    EXPECT_EQ(to->messages.back().delta_sum, double{moved * moved});
    return moved;
  }

  // What "gap_rel" compares with: the norm of the average, or of what is left of it.
  float norm_of_average(const Rank& rank) {
    Call<kernels::OuterNorm> norm;
    auto& o = norm.operands;
    o.sum = norm.value(pending_->sum);
    if (s_.params) o.anchor = norm.value(s_.anchor_diff ? rank.anchor : rank.launch_anchor);
    o.messages = norm.values(pending_->messages);
    o.sums = norm.value(0.0f);
    norm.run({kRanks});
    return norm.result<float>(o.sums);
  }

  void decide(Rank& rank, OuterNumbers* numbers, OuterFactor* factor) {
    Call<kernels::OuterFactors> call;
    auto& o = call.operands;
    OuterMessage taking_part{};
    taking_part.weight = 1;
    o.messages =
        call.values(pending_ ? pending_->messages : std::vector<OuterMessage>(kRanks, taking_part));
    o.inputs = call.value(OuterInputs{kGamma, s_.phi});
    if (s_.penalty.needs_norms()) o.sums = call.value(pending_ ? norm_of_average(rank) : 0.0f);
    o.segments = call.value(rank.segment);
    o.factors = call.value(OuterFactor{});
    o.numbers = call.value(OuterNumbers{});
    o.word = call.value(uint32_t{0});
    OuterFactorsArgs args;
    args.ranges = &whole();
    args.n = 1;
    args.world = kRanks;
    args.penalty = s_.penalty;
    args.normalised = s_.normalised;
    args.alpha = s_.alpha;
    args.beta = s_.beta;
    args.freshness = s_.freshness;
    call.run(args);
    EXPECT_EQ(call.result<uint32_t>(o.word), kCommit);
    rank.segment = call.result<OuterSegment>(o.segments);
    *numbers = call.result<OuterNumbers>(o.numbers);
    *factor = call.result<OuterFactor>(o.factors);
  }

  // Returns the sum of squares that the pass makes.
  float step(OuterPass pass, Rank& rank, float fresh, const OuterNumbers& numbers,
             const OuterFactor& factor) {
    Call<kernels::OuterStep> call;
    auto& o = call.operands;
    if (pending_) {
      o.sum = call.value(pending_->sum);
      o.factors = call.value(factor);
    }
    if (s_.params && !s_.anchor_diff) o.launch_anchor = call.value(rank.launch_anchor);
    const bool keeps_step = s_.rule != OuterRule::kHeavyBall;
    if (keeps_step) o.last_step = call.value(rank.last_step);
    if (s_.freshness > 0) o.fresh = call.value(fresh);
    if (s_.freshness > 0 && pending_) o.previous = call.value(rank.launched);
    o.numbers = call.value(numbers);
    if (s_.rule != OuterRule::kNone) o.m = call.value(rank.m);
    o.anchor = call.value(rank.anchor);
    o.x = call.tensor(rank.x);
    o.step_sums = call.value(0.0f);
    o.m_sums = call.value(0.0f);
    OuterStepArgs args;
    args.pass = pass;
    args.rule = s_.rule;
    args.clip = s_.clip;
    args.anchor_diff = s_.anchor_diff && !s_.params;  // the anchor of now has it already
    args.params = s_.params;
    args.penalty = s_.penalty;
    call.run(args);
    if (s_.rule != OuterRule::kNone) rank.m = call.result<float>(o.m);
    if (keeps_step) rank.last_step = call.result<float>(o.last_step);
    rank.anchor = call.result<float>(o.anchor);
    return call.result<float>(pass == OuterPass::kMomentum ? o.m_sums : o.step_sums);
  }

  OuterNumbers limit(float m_sum, const OuterNumbers& numbers) {
    Call<kernels::OuterLimit> call;
    call.operands.m_sums = call.value(m_sum);
    call.operands.numbers = call.value(numbers);
    call.run({1, 1, s_.clip});
    return call.result<OuterNumbers>(call.operands.numbers);
  }

  void consume(Rank& rank, float fresh) {
    OuterNumbers numbers;
    OuterFactor factor;
    decide(rank, &numbers, &factor);
    OuterPass last = OuterPass::kWhole;
    if (s_.in_two_passes()) {
      numbers = limit(step(OuterPass::kMomentum, rank, fresh, numbers, factor), numbers);
      last = OuterPass::kUpdate;
    }
    const float step_sum = step(last, rank, fresh, numbers, factor);
    Call<kernels::OuterGap> gap;
    gap.operands.step_sums = gap.value(step_sum);
    gap.operands.segments = gap.value(rank.segment);
    gap.operands.factors = gap.value(factor);
    gap.run({&whole(), 1});
    rank.segment = gap.result<OuterSegment>(gap.operands.segments);
  }

  Settings s_;
  std::vector<Rank> ranks_ = std::vector<Rank>(kRanks);
  std::optional<Average> pending_;
};

// Both ranks have these anchors.
void expect_sequence(const Settings& settings, const std::vector<double>& anchors,
                     double tolerance = 0) {
  Training training(settings);
  for (size_t t = 1; t < anchors.size(); ++t) {
    for (const float anchor : training.round()) {
      if (tolerance == 0) {
        ASSERT_EQ(anchor, anchors[t]) << t;
      } else {
        ASSERT_NEAR(anchor, anchors[t], tolerance * std::fabs(anchors[t])) << t;
      }
    }
  }
}
// Also with averages of parameters.
void expect_of_both_payloads(Settings settings, const std::vector<double>& anchors) {
  for (const bool params : {false, true}) {
    SCOPED_TRACE(params ? "parameters" : "differences");
    settings.params = params;
    expect_sequence(settings, anchors);
  }
}

const std::vector<double> kS0 = {
    5, 2, 1.25, 1.0625, 1.015625, 1.00390625, 1.0009765625, 1.000244140625, 1.00006103515625};
const std::vector<double> kS1 = {
    5, 2, -0.25, -0.4375, 0.546875, 1.37890625, 1.5107421875, 1.193603515625, 0.88983154296875};
const std::vector<double> kC2 = {5, 5, 3.5, 2, 1.0625, 0.6875, 0.6640625, 0.78125, 0.9072265625};
const std::vector<double> kC3 = {5, 5, 4, 3, 2, 1, 0.25, 0.25, 0.8125};

TEST(KernelsOuterSequences, S0LocalSgd) {
  expect_of_both_payloads({.late = false}, kS0);
  expect_of_both_payloads({.rule = OuterRule::kNone, .late = false}, kS0);
}

TEST(KernelsOuterSequences, S1SlowMo) {
  expect_of_both_payloads({.beta = 0.5, .late = false}, kS1);
  expect_of_both_payloads({.beta = 0.5, .late = false, .normalised = true}, kS1);
}

TEST(KernelsOuterSequences, S2DiLoCo) {
  const double p14 = 1 << 14, p18 = 1 << 18, p22 = 1 << 22;
  const std::vector<double> anchors = {5,           2.75,         1.390625,     0.8193359375,
                                       11609 / p14, 205319 / p18, 3723929 / p22};
  expect_of_both_payloads({.rule = OuterRule::kNesterov, .alpha = 0.5, .beta = 0.5, .late = false},
                          anchors);
}

TEST(KernelsOuterSequences, C0AndC1Late) {
  expect_of_both_payloads({}, {5, 5, 2, -1, -1.75, -0.25, 1.8125, 2.75, 2.140625});
  expect_of_both_payloads(
      {.alpha = 0.5, .beta = 0.25},
      {5, 5, 3.5, 1.625, 0.21875, -0.3671875, -113 / 512.0, 673 / 2048.0, 7567 / 8192.0});
  Training training({});
  for (int t = 0; t < 8; ++t) training.round();
  EXPECT_EQ(training.boundary(), std::vector<float>(2, 0.828125f));
}

TEST(KernelsOuterSequences, C2ConstantPenalty) {
  OuterPenaltyArgs penalty;
  penalty.kind = OuterPenalty::kConst;
  penalty.constant = 2;
  expect_of_both_payloads({.penalty = penalty}, kC2);
  expect_of_both_payloads({.alpha = 0.5}, kC2);
  // The floor takes the penalty's place.
  penalty.kind = OuterPenalty::kNone;
  penalty.floor = 2;
  expect_of_both_payloads({.penalty = penalty}, kC2);
}

TEST(KernelsOuterSequences, C3Clips) {
  expect_of_both_payloads({.clip = OuterClip::kCoordinate, .phi = 1}, kC3);
  // Of one element the norm is the absolute value.
  expect_sequence({.clip = OuterClip::kNorm, .phi = 1}, kC3, 1e-6);
  // Half of it is what the constant penalty 2 leaves, too.
  expect_sequence({.clip = OuterClip::kRms, .phi = 0.5}, kC2, 1e-6);
}

TEST(KernelsOuterSequences, C4AndC5AnchorDifferences) {
  expect_of_both_payloads({.anchor_diff = true},
                          {5, 5, 2, 2, 1.25, 1.25, 1.0625, 1.0625, 1.015625});
  expect_of_both_payloads({.beta = 0.5, .anchor_diff = true},
                          {5, 5, 2, 0.5, 0.5, 0.875, 1.0625, 1.0625, 1.015625});
  expect_sequence({.beta = -0.5}, {5, 5, 2, 0.5, 0.5, 0.875, 1.0625, 1.0625, 1.015625});
}

TEST(KernelsOuterSequences, C6LateNesterov) {
  const double p18 = 1 << 18;
  expect_of_both_payloads(
      {.rule = OuterRule::kNesterov, .alpha = 0.5, .beta = 0.25},
      {5, 5, 3.125, 1.15625, 11 / 256.0, -7 / 64.0, 2587 / 8192.0, 27931 / 32768.0, 315425 / p18});
}

TEST(KernelsOuterSequences, C7PenaltyOfTheGap) {
  OuterPenaltyArgs penalty;
  penalty.kind = OuterPenalty::kGapRel;
  penalty.eps = 0;
  const std::vector<double> exact = {5, 5, 2, 0.5, 0.25},
                            rounded = {5, 5, 2, 0.5, 0.25, 0.475, 491 / 560.0};
  for (const bool element : {false, true}) {
    penalty.element = element;
    expect_of_both_payloads({.penalty = penalty}, exact);
    expect_sequence({.penalty = penalty}, rounded, 1e-6);
    expect_sequence({.penalty = penalty, .normalised = true}, rounded, 1e-6);
  }
  penalty.element = false;
  // Nothing has moved: the penalty is none.
  penalty.kind = OuterPenalty::kGapEma;
  expect_of_both_payloads({.late = false, .penalty = penalty}, kS0);
}

void expect_ranks(const Settings& settings, const std::vector<double>& rank0,
                  const std::vector<double>& rank1, std::optional<float> flushed) {
  Training training(settings);
  for (size_t t = 1; t < rank0.size(); ++t) {
    const std::vector<float> anchors = training.round();
    ASSERT_EQ(anchors[0], rank0[t]) << t;
    ASSERT_EQ(anchors[1], rank1[t]) << t;
  }
  if (!flushed) return;
  Training short_one(settings);
  for (int t = 0; t < 4; ++t) short_one.round();
  EXPECT_EQ(short_one.boundary(), std::vector<float>(2, *flushed));
}

TEST(KernelsOuterSequences, E1AndE2FreshDifferences) {
  expect_ranks({.freshness = 1}, {5, 0.5, 7 / 8.0, -5 / 32.0, 55 / 128.0, -29 / 512.0},
               {5, 3.5, 13 / 8.0, 73 / 32.0, 205 / 128.0, 1057 / 512.0}, 65 / 64.0f);
  expect_ranks({.freshness = 0.5}, {5, 11 / 4.0, 19 / 32.0, -121 / 256.0, -245 / 2048.0},
               {5, 17 / 4.0, 49 / 32.0, 173 / 256.0, 1945 / 2048.0}, 385 / 512.0f);
}

TEST(KernelsOuterSequences, E3AndE4FreshDifferencesWithMomentum) {
  Training training({.alpha = 0.5, .beta = 0.5, .freshness = 1});
  for (const double mean : {3.5, 1.8125, 0.6640625, 0.2158203125}) {
    const std::vector<float> anchors = training.round();
    EXPECT_EQ((anchors[0] + anchors[1]) / 2, mean);
  }
  const double p14 = 1 << 14;
  expect_ranks({.rule = OuterRule::kNesterov, .alpha = 0.5, .beta = 0.5, .freshness = 0.5},
               {5, 53 / 16.0, 643 / 512.0, -3595 / p14}, {5, 71 / 16.0, 1153 / 512.0, 13991 / p14},
               {});
}

}  // namespace
}  // namespace sotto::test
