// Outer optimizers at the C ABI: averages that codecs cannot encode, and first inner steps that are
// not finite.
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "tests/ranks/capi_outer_model.h"

namespace sotto::test {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kBeyondFp16 = 1e5f;

std::string coded_json(const std::string& delay, const std::string& codec,
                       const std::string& more = "") {
  return mean_json(R"("period": 2, "dense_rounds": 0, "delay": )" + delay + R"(, "codec": )" +
                   codec + more);
}

std::string exported(const sotto_outer* outer) {
  return read_all([&](char* buffer, uint64_t size, uint64_t* length) {
    return sotto_outer_state_export(outer, SOTTO_STATE_EXACT, buffer, size, length);
  });
}

// ---- What all ranks end with ----

// Two steps; returns what the second one says. One element of rank 1 is `bad` in it, unless 0.
sotto_status round_with(sotto_outer* outer, OuterModel& model, int32_t rank, float bad) {
  model.add(static_cast<float>(rank));
  step(outer);
  model.add(static_cast<float>(rank));
  if (rank == 1 && bad != 0) model.weights[0][5] = bad;
  return sotto_outer_step(outer, nullptr, nullptr);
}

void expect_round(const sotto_outer* outer, uint64_t round, uint32_t not_finite, uint32_t votes) {
  const std::string of = " of round " + std::to_string(round);
  const sotto_outer_info info = info_of(outer);
  same(info.round, round, "round" + of);
  same(info.not_finite, not_finite, "not_finite" + of);
  same(info.votes, votes, "votes" + of);
}

TEST(CapiOuterNonfinite, WhatACodecCannotEncodeLeavesOutAllRanks) {
  for (const char* codec : {R"("fp16")", R"({"type": "fp16", "residual": true})"}) {
    SCOPED_TRACE(codec);
    const Warnings warnings;
    EXPECT_EQ(run_world(3, {},
                        [&](Member& self) {
                          OuterModel model;
                          sotto_outer* outer = new_outer(self, coded_json("0", codec), model);
                          OK(round_with(outer, model, self.rank, 0));
                          same(model.read(), 3, "the first average");
                          OK(sotto_outer_vote(outer, 1u << self.rank));
                          OK(round_with(outer, model, self.rank, kBeyondFp16));
                          same(model.read(), 3, "the anchor");
                          expect_round(outer, 2, 3, 7);
                          same(info_of(outer).step_norm, 0.0, "step_norm");
                          OK(round_with(outer, model, self.rank, 0));
                          same(model.read(), 5, "the third average");
                          expect_round(outer, 3, 0, 0);
                          model.add(static_cast<float>(self.rank));
                          if (self.rank == 1) model.weights[1][3] = -kBeyondFp16;
                          step(outer);
                          OK(sotto_outer_flush(outer, nullptr, nullptr));
                          same(model.read(), 5, "a flush");
                          expect_round(outer, 4, 3, 0);
                          OK(sotto_outer_destroy(outer));
                        }),
              "");
    EXPECT_EQ(warnings.with("the average has left out all ranks"), 6u);
    EXPECT_EQ(warnings.with("outer step 4: "), 3u);
    EXPECT_EQ(warnings.with("outer step 7: "), 3u);
  }
}

// The next average is launched in the step that consumes this one.
TEST(CapiOuterNonfinite, WhatACodecCannotEncodeComesLate) {
  for (const char* codec : {R"("fp16")", R"({"type": "fp16", "residual": true})"}) {
    SCOPED_TRACE(codec);
    EXPECT_EQ(run_world(2, {},
                        [&](Member& self) {
                          OuterModel model;
                          sotto_outer* outer = new_outer(self, coded_json("2", codec), model);
                          OK(round_with(outer, model, self.rank, 0));
                          same(model.read(), 1, "held");
                          OK(sotto_outer_vote(outer, 1u << self.rank));
                          OK(round_with(outer, model, self.rank, kBeyondFp16));
                          same(model.read(), 2, "the first average");
                          expect_round(outer, 1, 0, 0);
                          OK(sotto_outer_vote(outer, 4u << self.rank));
                          OK(round_with(outer, model, self.rank, 0));
                          same(model.read(), 2, "the anchor");
                          expect_round(outer, 2, 2, 3);
                          OK(round_with(outer, model, self.rank, 0));
                          same(model.read(), 3, "the third average");
                          expect_round(outer, 3, 0, 12);
                          OK(sotto_outer_flush(outer, nullptr, nullptr));
                          same(model.read(), 4, "the last one");
                          OK(sotto_outer_destroy(outer));
                        }),
              "");
  }
}

TEST(CapiOuterNonfinite, WhatACodecCannotEncodeIsAnError) {
  for (const char* codec : {R"("fp16")", R"({"type": "fp16", "residual": true})"}) {
    SCOPED_TRACE(codec);
    const std::string json = coded_json("0", codec, R"(, "nonfinite": "error")");
    EXPECT_EQ(run_world(2, {},
                        [&](Member& self) {
                          OuterModel model;
                          sotto_outer* outer = new_outer(self, json, model);
                          OK(round_with(outer, model, self.rank, 0));
                          same(model.read(), 2, "the first average");
                          OK(sotto_outer_vote(outer, 1u << self.rank));
                          fails(round_with(outer, model, self.rank, kBeyondFp16), SOTTO_E_NONFINITE,
                                {"outer step 4: ", "; nothing was updated"}, "step");
                          expect_round(outer, 2, 2, 3);
                          same(model.weights[1][0], 2 + 2 * static_cast<float>(self.rank), "own");
                          OK(sotto_outer_swap(outer, nullptr, nullptr));
                          same(model.read(), 2, "the anchor");
                          OK(sotto_outer_swap(outer, nullptr, nullptr));
                          model.write(2);
                          OK(round_with(outer, model, self.rank, 0));
                          same(model.read(), 3, "the next average");
                          expect_round(outer, 3, 0, 0);
                          OK(sotto_outer_destroy(outer));
                        }),
              "");
  }
}

// ---- Error feedback ----

struct Coded {
  const char* codec;
  float bad;  // a number that it cannot encode, or whose scale it cannot
};
const Coded kHalf{R"({"type": "fp16", "residual": true})", kBeyondFp16};
const Coded kOnebit{R"("onebit")", 3e38f};

// Multiples of 2^-14: codecs drop a part of their sums, float32 nothing.
void inner_step(OuterModel& model, int32_t rank, uint32_t n) {
  std::mt19937 random(100 * n + static_cast<uint32_t>(rank));
  for (std::vector<float>& w : model.weights) {
    for (float& v : w) v += std::ldexp(static_cast<float>(random() % 16384), -14);
  }
}

// Inner steps 2 n and 2 n + 1.
void draw_round(sotto_outer* outer, OuterModel& model, int32_t rank, uint32_t n, float bad = 0) {
  for (uint32_t k = 0; k < 2; ++k) {
    inner_step(model, rank, 2 * n + k);
    if (k == 1 && rank == 1 && bad != 0) model.weights[0][5] = bad;
    step(outer);
  }
}

// The elements that differ by more than `most`.
size_t differing(const OuterModel& found, const OuterModel& wanted, float most) {
  size_t n = 0;
  for (size_t t = 0; t < 2; ++t) {
    for (size_t i = 0; i < wanted.weights[t].size(); ++i)
      n += std::abs(found.weights[t][i] - wanted.weights[t][i]) <= most ? 0 : 1;
  }
  return n;
}

void expect_alike(const OuterModel& found, const OuterModel& wanted, const std::string& what) {
  same(differing(found, wanted, 0), 0, what + ": elements that differ");
}

// All ranks have the parameters of rank 0.
void expect_common(const Member& self, const OuterModel& model, const std::string& what) {
  std::vector<float> most = model.weights[0], least = model.weights[0];
  const sotto_buffer up = buffer(most), down = buffer(least);
  const sotto_call max = call_with([](auto& c) { c.reduce = SOTTO_REDUCE_MAX; });
  const sotto_call min = call_with([](auto& c) { c.reduce = SOTTO_REDUCE_MIN; });
  OK(sotto_all_reduce(self.comm, &up, &up, 1, &max, nullptr));
  OK(sotto_all_reduce(self.comm, &down, &down, 1, &min, nullptr));
  require(most == least, what + ": ranks differ");
}

// Rounds around one that cannot be encoded give what they give without it.
TEST(CapiOuterNonfinite, ErrorFeedbackIsThatOfBefore) {
  const std::string json = coded_json("0", kHalf.codec);
  EXPECT_EQ(run_world(2, {},
                      [&](Member& self) {
                        OuterModel plain, model;
                        sotto_outer* a = new_outer(self, json, plain);
                        sotto_outer* b = new_outer(self, json, model);
                        for (uint32_t n = 0; n < 6; ++n) {
                          draw_round(a, plain, self.rank, n);
                          draw_round(b, model, self.rank, n);
                          expect_alike(model, plain, "round " + std::to_string(n));
                          if (n != 1 && n != 3) continue;
                          draw_round(b, model, self.rank, 100 + n, kHalf.bad);
                          expect_alike(model, plain, "the anchor");
                          same(info_of(b).not_finite, 2, "not_finite");
                        }
                        OK(sotto_outer_destroy(a));
                        OK(sotto_outer_destroy(b));
                      }),
            "");
}

// Up to the rounding of what its encoder takes back, and the element that was too large.
TEST(CapiOuterNonfinite, ErrorFeedbackOfOnebitIsNearlyThatOfBefore) {
  const std::string json = coded_json("0", kOnebit.codec);
  EXPECT_EQ(run_world(2, {},
                      [&](Member& self) {
                        OuterModel plain, model;
                        sotto_outer* a = new_outer(self, json, plain);
                        sotto_outer* b = new_outer(self, json, model);
                        for (uint32_t n = 0; n < 3; ++n) {
                          draw_round(a, plain, self.rank, n);
                          draw_round(b, model, self.rank, n);
                          expect_alike(model, plain, "round " + std::to_string(n));
                        }
                        draw_round(b, model, self.rank, 100, kOnebit.bad);
                        expect_alike(model, plain, "the anchor");
                        same(info_of(b).not_finite, 2, "not_finite");
                        draw_round(a, plain, self.rank, 3);
                        draw_round(b, model, self.rank, 3);
                        const size_t far = differing(model, plain, 1e-3f);
                        require(far <= 10, std::to_string(far) + " elements differ");
                        OK(sotto_outer_destroy(a));
                        OK(sotto_outer_destroy(b));
                      }),
            "");
}

// The next average begins before the failing one has ended.
TEST(CapiOuterNonfinite, ErrorFeedbackOfTheNextAverageIsThatOfBefore) {
  const std::string json = coded_json("2", kHalf.codec);
  EXPECT_EQ(run_world(2, {},
                      [&](Member& self) {
                        OuterModel plain, model;
                        sotto_outer* a = new_outer(self, json, plain);
                        sotto_outer* b = new_outer(self, json, model);
                        for (uint32_t n = 0; n < 6; ++n) {
                          draw_round(a, plain, self.rank, n);
                          draw_round(b, model, self.rank, n);
                          if (n == 1 || n == 3) draw_round(b, model, self.rank, 100, kHalf.bad);
                        }
                        OK(sotto_outer_flush(a, nullptr, nullptr));
                        OK(sotto_outer_flush(b, nullptr, nullptr));
                        expect_alike(model, plain, "flushed");
                        same(info_of(b).round, info_of(a).round + 2, "round");
                        OK(sotto_outer_destroy(a));
                        OK(sotto_outer_destroy(b));
                      }),
            "");
}

// States of the steps from the launch of such an average on.
void expect_states(const Coded& coded, uint32_t delay) {
  SCOPED_TRACE(std::string(coded.codec) + ", delay " + std::to_string(delay));
  const std::string json = coded_json(std::to_string(delay), coded.codec);
  constexpr uint32_t kLaunch = 4, kLast = 8;
  EXPECT_EQ(run_world(2, {},
                      [&](Member& self) {
                        const auto train = [&](sotto_outer* outer, OuterModel& m, uint32_t n) {
                          inner_step(m, self.rank, n);
                          if (n == kLaunch && self.rank == 1) m.weights[0][5] = coded.bad;
                          step(outer);
                        };
                        OuterModel model, other;
                        sotto_outer* outer = new_outer(self, json, model);
                        std::vector<std::string> states;
                        for (uint32_t n = 1; n <= kLast; ++n) {
                          train(outer, model, n);
                          if (n >= kLaunch && n < kLast) states.push_back(exported(outer));
                          if (n != kLaunch + delay) continue;
                          same(info_of(outer).not_finite, 2, "not_finite");
                          expect_common(self, model, "the anchor");
                        }
                        OK(sotto_outer_flush(outer, nullptr, nullptr));
                        expect_common(self, model, "flushed");
                        sotto_outer* resumed = new_outer(self, json, other);
                        for (uint32_t k = 0; k < states.size(); ++k) {
                          OK(sotto_outer_state_import(resumed, SOTTO_STATE_EXACT, states[k].data(),
                                                      states[k].size()));
                          for (uint32_t n = kLaunch + k + 1; n <= kLast; ++n)
                            train(resumed, other, n);
                          OK(sotto_outer_flush(resumed, nullptr, nullptr));
                          expect_alike(other, model,
                                       "from step " + std::to_string(kLaunch + k) + " on");
                        }
                        OK(sotto_outer_destroy(outer));
                        OK(sotto_outer_destroy(resumed));
                      }),
            "");
}

TEST(CapiOuterNonfinite, StatesGoOnBehindWhatACodecCannotEncode) {
  for (const uint32_t delay : {0u, 1u, 2u}) expect_states(kHalf, delay);
  expect_states(kOnebit, 2);
}

// Whatever its parameters: what the average was left without is the anchor for all.
TEST(CapiOuterNonfinite, WhatPassesAndCannotBeEncodedMerges) {
  for (const Coded& coded :
       {Coded{R"("fp16")", kBeyondFp16}, Coded{R"("onebit")", kNan}, Coded{R"("int8")", kNan}}) {
    SCOPED_TRACE(coded.codec);
    const std::string json = coded_json("0", coded.codec, R"(, "nonfinite": "pass")");
    EXPECT_EQ(run_world(2, {},
                        [&](Member& self) {
                          OuterModel model;
                          sotto_outer* outer = new_outer(self, json, model);
                          OK(round_with(outer, model, self.rank, coded.bad));
                          same(model.read(), 1, "the anchor");
                          expect_round(outer, 1, 2, 0);
                          OK(round_with(outer, model, self.rank, 0));
                          require(std::abs(model.read() - 2) < 0.02f, "the next average");
                          expect_round(outer, 2, 0, 0);
                          OK(sotto_outer_destroy(outer));
                        }),
              "");
  }
}

// ---- First inner steps ----

// Of the second average: its unit, and what parameters become. bad: ranks whose first inner step of
// that round was not finite, a bit each.
void expect_unit(uint32_t bad, double unit, double lambda, double end) {
  SCOPED_TRACE(bad);
  const std::string json = R"({"preset": "co2", "auto_floor": false, "penalty": "gap_inner",
                               "clip": "none", "beta": 0, "period": 3})";
  EXPECT_EQ(run_world(2, {},
                      [&](Member& self) {
                        OuterModel model;
                        sotto_outer* outer = new_outer(self, json, model);
                        const float x = 0.25f * static_cast<float>(1 + self.rank);
                        for (int n = 1; n <= 9; ++n) {
                          model.add(x);
                          const float kept = model.weights[0][5];
                          if (n == 4 && (bad >> self.rank & 1) != 0) model.weights[0][5] = kNan;
                          step(outer);
                          if (n == 4) model.weights[0][5] = kept;
                        }
                        const sotto_outer_info info = info_of(outer);
                        const auto near = [](double found, double wanted, const std::string& what) {
                          require(std::abs(found - wanted) <= 1e-5 * std::abs(wanted),
                                  what + " is " + std::to_string(found) + ", not " +
                                      std::to_string(wanted));
                        };
                        const double root = std::sqrt(static_cast<double>(model.elements()));
                        same(info.round, 2, "round");
                        same(info.not_finite, 0, "not_finite");
                        near(info.gap, 1.125 * root, "gap");
                        near(info.unit, unit * root, "unit");
                        near(info.lambda, lambda, "lambda");
                        near(model.read(), end, "parameters");
                        barrier(self);
                        OK(sotto_outer_destroy(outer));
                      }),
            "");
}

// Three inner steps of 0.25 and 0.5 make 1.125 per round, which the second average missed.
TEST(CapiOuterNonfinite, AFirstInnerStepThatIsNotFiniteHasNoUnit) {
  const double first = 1 + 1.125;
  expect_unit(0, 3 * 0.375, 2, first + 1.125 / 2);
  expect_unit(0b10, 3 * 0.25, 2.5, first + 1.125 / 2.5);
  expect_unit(0b01, 3 * 0.5, 1.75, first + 1.125 / 1.75);
  expect_unit(0b11, 0, 16, first + 1.125 / 16);
}

}  // namespace
}  // namespace sotto::test
