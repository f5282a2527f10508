// Outer optimizers at the C ABI: what they do with numbers that are not finite, what their figures
// say, and how they live beside other operations of the comm.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <limits>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "tests/ranks/capi_outer_model.h"

namespace sotto::test {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

std::string json_of(const char* delay, const std::string& more = "") {
  return mean_json(std::string(R"("period": 2, "delay": )") + delay + more);
}

// ---- Numbers that are not finite ----

// Two steps; returns what the second one says. One element of ranks `bad` is not finite then.
sotto_status round_with(sotto_outer* outer, OuterModel& model, int32_t rank,
                        const std::vector<int32_t>& bad, float value = kNan) {
  model.add(static_cast<float>(1 + rank));
  step(outer);
  model.add(static_cast<float>(1 + rank));
  if (std::find(bad.begin(), bad.end(), rank) != bad.end()) model.weights[1][7] = value;
  return sotto_outer_step(outer, nullptr, nullptr);
}

// All ranks are told how many were left out; those that were are warned.
TEST(CapiOuterNonfinite, SkipRank) {
  const Warnings warnings;
  EXPECT_EQ(run_world(3, {},
                      [](Member& self) {
                        OuterModel model;
                        sotto_outer* outer = new_outer(self, json_of("0"), model);
                        OK(round_with(outer, model, self.rank, {1}));
                        same(model.read(), 1 + 4, "ranks 0 and 2");
                        same(info_of(outer).not_finite, 1, "rank 1");
                        OK(round_with(outer, model, self.rank, {0, 2}, kInf));
                        same(model.read(), 5 + 4, "rank 1");
                        same(info_of(outer).not_finite, 2, "ranks 0 and 2");
                        OK(round_with(outer, model, self.rank, {0, 1, 2}, -kInf));
                        same(model.read(), 9, "nobody");
                        same(info_of(outer).not_finite, 3, "all ranks");
                        same(info_of(outer).round, 3, "round");
                        step(outer);
                        same(info_of(outer).not_finite, 3, "there was no average since");
                        step(outer);
                        same(info_of(outer).not_finite, 0, "nobody");
                        OK(round_with(outer, model, self.rank, {}));
                        same(model.read(), 9 + 4, "all ranks");
                        barrier(self);
                        OK(sotto_outer_destroy(outer));
                      }),
            "");
  EXPECT_EQ(warnings.with("parameters of this rank, which the average has left out"), 6u);
  EXPECT_EQ(warnings.with("outer step 4: NaN or Inf"), 2u);
}

// Until the next average.
TEST(CapiOuterNonfinite, SkipRankIsToldBesideSwaps) {
  EXPECT_EQ(run_world(2, {},
                      [](Member& self) {
                        OuterModel model;
                        sotto_outer* outer = new_outer(self, json_of("0"), model);
                        OK(round_with(outer, model, self.rank, {1}));
                        for (const char* what : {"swapped", "swapped back"}) {
                          OK(sotto_outer_swap(outer, nullptr, nullptr));
                          same(info_of(outer).not_finite, 1, what);
                          same(info_of(outer).events & SOTTO_OUTER_CONSUMED, SOTTO_OUTER_CONSUMED,
                               "events");
                        }
                        OK(round_with(outer, model, self.rank, {}));
                        same(info_of(outer).not_finite, 0, "nobody");
                        OK(sotto_outer_destroy(outer));
                      }),
            "");
}

// The average is late: a rank that was left out goes on from the anchor, as all others.
TEST(CapiOuterNonfinite, SkipRankLate) {
  EXPECT_EQ(run_world(2, {},
                      [](Member& self) {
                        OuterModel model;
                        sotto_outer* outer = new_outer(self, json_of("2"), model);
                        OK(round_with(outer, model, self.rank, {0}));
                        same(model.read(), 1, "held");
                        OK(round_with(outer, model, self.rank, {1}));
                        same(model.read(), 1 + 4, "rank 1 in the first average");
                        same(info_of(outer).not_finite, 1, "rank 0 in the first average");
                        OK(round_with(outer, model, self.rank, {0, 1}));
                        same(model.read(), 5 + 2, "rank 0 in the second average");
                        OK(round_with(outer, model, self.rank, {}));
                        same(model.read(), 7, "nobody in the third average");
                        OK(sotto_outer_flush(outer, nullptr, nullptr));
                        same(model.read(), 7 + 3, "all in the last one");
                        OK(sotto_outer_destroy(outer));
                      }),
            "");
}

TEST(CapiOuterNonfinite, Error) {
  EXPECT_EQ(
      run_world(
          3, {},
          [](Member& self) {
            OuterModel model;
            sotto_outer* outer = new_outer(self, json_of("0", R"(, "nonfinite": "error")"), model);
            OK(round_with(outer, model, self.rank, {}));
            same(model.read(), 5, "all ranks");
            for (const std::vector<int32_t>& bad :
                 std::vector<std::vector<int32_t>>{{1}, {0, 2}, {0, 1, 2}}) {
              std::string who;
              for (const int32_t r : bad) who += (who.empty() ? "" : ", ") + std::to_string(r);
              const uint64_t done = info_of(outer).step;
              fails(round_with(outer, model, self.rank, bad), SOTTO_E_NONFINITE,
                    {"outer step " + std::to_string(done + 2) +
                     ": NaN or Inf in the parameters of rank " + who + "; nothing was updated"},
                    "step");
              same(info_of(outer).step, done + 2, "step");
              same(info_of(outer).not_finite, bad.size(), who);
              // Parameters are the rank's own.
              same(model.weights[0][0], 5 + 2 * static_cast<float>(1 + self.rank), "own");
              barrier(self);
              model.write(5);
            }
            OK(round_with(outer, model, self.rank, {}));
            same(model.read(), 5 + 4, "the next round");
            OK(sotto_outer_destroy(outer));
          }),
      "");
}

// A rank that does not count is left out of the average, and its numbers are still an error. That
// no rank counts is none.
TEST(CapiOuterNonfinite, ErrorBesideWeights) {
  EXPECT_EQ(
      run_world(
          2, {},
          [](Member& self) {
            OuterModel model;
            sotto_outer* outer = new_outer(self, json_of("0", R"(, "nonfinite": "error")"), model);
            if (self.rank == 1) OK(sotto_outer_set(outer, "weight", 0));
            OK(round_with(outer, model, self.rank, {}));
            same(model.read(), 1 + 2, "rank 0");
            fails(round_with(outer, model, self.rank, {1}), SOTTO_E_NONFINITE,
                  {"outer step 4: NaN or Inf in the parameters of rank 1; nothing was updated"},
                  "step");
            barrier(self);
            model.write(3);
            OK(sotto_outer_set(outer, "weight", 0));
            OK(round_with(outer, model, self.rank, {}));
            same(model.read(), 3 + 2 * static_cast<float>(1 + self.rank), "own");
            OK(sotto_outer_set(outer, "weight", 1));
            OK(round_with(outer, model, self.rank, {}));
            same(model.read(), 3 + 6, "both rounds of all ranks");
            OK(sotto_outer_destroy(outer));
          }),
      "");
}

// Also of an average that is followed by another operation in the same call.
TEST(CapiOuterNonfinite, ErrorOfAFlush) {
  for (const char* delay : {"0", "1", "2"}) {
    for (const char* fragments : {"1", "2"}) {
      SCOPED_TRACE(std::string("delay ") + delay + ", fragments " + fragments);
      const std::string json =
          json_of(delay, std::string(R"(, "nonfinite": "error", "fragments": )") + fragments);
      EXPECT_EQ(run_world(2, {},
                          [&](Member& self) {
                            OuterModel model;
                            sotto_outer* outer = new_outer(self, json, model);
                            step(outer);
                            if (self.rank == 1) model.weights[0][3] = model.weights[1][3] = kNan;
                            const std::string text =
                                "in the parameters of rank 1; nothing was updated";
                            fails(sotto_outer_flush(outer, nullptr, nullptr), SOTTO_E_NONFINITE,
                                  {text}, "flush");
                            same(info_of(outer).in_flight, 0, "in_flight");
                            model.write(1);
                            step(outer);
                            step(outer);
                            OK(sotto_outer_flush(outer, nullptr, nullptr));
                            same(model.read(), 1, "after a flush of numbers");
                            barrier(self);
                            OK(sotto_outer_destroy(outer));
                          }),
                "");
    }
  }
}

// The average that was under way is the one that is refused.
TEST(CapiOuterNonfinite, ErrorOfAFlushWithAnAverageUnderWay) {
  EXPECT_EQ(run_world(2, {},
                      [](Member& self) {
                        OuterModel model;
                        sotto_outer* outer =
                            new_outer(self, json_of("2", R"(, "nonfinite": "error")"), model);
                        step(outer);
                        if (self.rank == 0) model.weights[0][3] = kNan;
                        step(outer);  // launches, and is refused when it is consumed
                        model.write(1);
                        step(outer);
                        FAILS(sotto_outer_flush(outer, nullptr, nullptr), SOTTO_E_NONFINITE,
                              "outer step 3: NaN or Inf in the parameters of rank 0;");
                        OK(sotto_outer_destroy(outer));
                        barrier(self);
                      }),
            "");
}

TEST(CapiOuterNonfinite, Pass) {
  EXPECT_EQ(run_world(2, {},
                      [](Member& self) {
                        OuterModel model;
                        sotto_outer* outer =
                            new_outer(self, json_of("0", R"(, "nonfinite": "pass")"), model);
                        OK(round_with(outer, model, self.rank, {1}));
                        require(std::isnan(model.weights[1][7]), "NaN does not pass");
                        same(model.weights[0][0], 1 + 3, "other elements");
                        same(model.weights[1][6], 1 + 3, "other elements");
                        OK(sotto_outer_destroy(outer));
                        // A rank without weight is left out whatever its numbers.
                        model.write(4);
                        outer = new_outer(self, json_of("0", R"(, "nonfinite": "pass")"), model);
                        const float at = model.read();
                        OK(sotto_outer_set(outer, "weight", self.rank == 1 ? 0 : 1));
                        OK(round_with(outer, model, self.rank, {1}));
                        same(model.read(), at + 2, "rank 0 alone");
                        barrier(self);
                        OK(sotto_outer_destroy(outer));
                      }),
            "");
}

// ---- Figures ----

// A sum of two ranks sends half of the elements twice. The first launch is without the codec.
TEST(CapiOuterFigures, BytesOfTheNextLaunch) {
  for (const int size : {1, 2}) {
    EXPECT_EQ(run_world(size, {},
                        [&](Member& self) {
                          OuterModel model(1, 0, {20'000, 36});
                          sotto_outer* dense = new_outer(self, json_of("0"), model);
                          sotto_outer* coded =
                              new_outer(self, json_of("0", R"(, "codec": "onebit")"), model);
                          const uint64_t all = size == 1 ? 0 : 4 * model.elements();
                          const auto sent = [](sotto_outer* outer) {
                            return info_of(outer).payload_bytes_next_launch;
                          };
                          for (int n = 0; n < 5; ++n) {
                            const uint64_t beside = n < 2 || size == 1 ? 0 : 1;
                            require(sent(dense) >= all && sent(dense) <= all + 200, "dense");
                            require(beside == 0 ? sent(coded) >= all && sent(coded) <= all + 200
                                                : sent(coded) > all / 32 && sent(coded) < all / 16,
                                    "onebit: " + std::to_string(sent(coded)));
                            require((info_of(dense).header_bytes_next_launch != 0) == (size == 2),
                                    "headers");
                            step(dense);
                            step(coded);
                          }
                          OK(sotto_outer_destroy(dense));
                          OK(sotto_outer_destroy(coded));
                        }),
              "");
  }
}

TEST(CapiOuterFigures, Norms) {
  EXPECT_EQ(run_world(2, {},
                      [](Member& self) {
                        OuterModel model;
                        sotto_outer* outer = new_outer(self, json_of("0"), model);
                        const sotto_outer_info first = info_of(outer);
                        same(first.delta_norm, 0.0, "delta_norm");
                        same(first.step_norm, 0.0, "step_norm");
                        same(first.lambda, 1.0, "lambda");
                        same(first.overlap_ratio, 1.0, "overlap_ratio");
                        same(first.network_ns, -1, "network_ns");
                        same(first.exposed_ns, -1, "exposed_ns");
                        same(first.gain, 1.0, "gain");
                        for (int n = 0; n < 2; ++n) {
                          model.add(self.rank == 0 ? 0.25f : -1.0f);
                          step(outer);
                        }
                        const sotto_outer_info info = info_of(outer);
                        const double elements = static_cast<double>(model.elements());
                        const double delta = std::sqrt(elements * (0.5 * 0.5 + 2.0 * 2.0) / 2);
                        const double moved = std::sqrt(elements) * 0.75;
                        require(std::abs(info.delta_norm / delta - 1) < 1e-6,
                                "delta_norm is " + std::to_string(info.delta_norm) + ", not " +
                                    std::to_string(delta));
                        require(std::abs(info.step_norm / moved - 1) < 1e-6,
                                "step_norm is " + std::to_string(info.step_norm) + ", not " +
                                    std::to_string(moved));
                        OK(sotto_outer_destroy(outer));
                      }),
            "");
}

TEST(CapiOuterFigures, LossesAreThoseThatRanksHaveSet) {
  EXPECT_EQ(run_world(3, {},
                      [](Member& self) {
                        OuterModel model;
                        sotto_outer* outer = new_outer(self, json_of("0"), model);
                        const auto of_average = [&] {
                          for (int n = 0; n < 2; ++n) {
                            model.add(1);
                            step(outer);
                          }
                          return info_of(outer).loss;
                        };
                        require(std::isnan(info_of(outer).loss), "before the first average");
                        require(std::isnan(of_average()), "nobody has set one");
                        if (self.rank == 1) OK(sotto_outer_set(outer, "loss", 5));
                        same(of_average(), 5.0, "of rank 1");
                        if (self.rank != 1) OK(sotto_outer_set(outer, "loss", self.rank));
                        same(of_average(), 7.0 / 3, "of all ranks");
                        OK(sotto_outer_destroy(outer));
                      }),
            "");
}

void sleep_ms(int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

// An average that has ended before it is asked for is hidden.
TEST(CapiOuterFigures, NothingIsExposedWhereTheAverageHasEnded) {
  EXPECT_EQ(run_world(2, {},
                      [](Member& self) {
                        OuterModel model;
                        sotto_outer* outer = new_outer(self, json_of("2"), model);
                        for (int n = 1; n <= 8; ++n) {
                          model.add(1);
                          step(outer);
                          if (n % 2 != 0) continue;
                          barrier(self);  // both have launched
                          sleep_ms(100);
                        }
                        const sotto_outer_info info = info_of(outer);
                        same(info.events, SOTTO_OUTER_LAUNCHED | SOTTO_OUTER_CONSUMED, "events");
                        same(info.overlap_ratio, 1.0, "overlap_ratio");
                        same(info.exposed_ns, 0, "exposed_ns");
                        require(info.network_ns > 0, "network_ns");
                        OK(sotto_outer_destroy(outer));
                      }),
            "");
}

// Rank 1 launches late, so rank 0 waits for its average.
TEST(CapiOuterFigures, ALatePeerIsExposed) {
  constexpr int kLateMs = 60;
  EXPECT_EQ(run_world(2, {},
                      [](Member& self) {
                        OuterModel model;
                        sotto_outer* outer = new_outer(self, json_of("1"), model);
                        step(outer);
                        barrier(self);
                        if (self.rank == 1) sleep_ms(kLateMs);
                        step(outer);
                        step(outer);
                        const sotto_outer_info info = info_of(outer);
                        if (self.rank == 0) {
                          same(info.events, SOTTO_OUTER_CONSUMED | SOTTO_OUTER_WAITED, "events");
                          require(info.exposed_ns > int64_t{kLateMs} * 1'000'000 / 2,
                                  "exposed_ns is " + std::to_string(info.exposed_ns));
                          require(info.overlap_ratio < 0.5,
                                  "overlap_ratio is " + std::to_string(info.overlap_ratio));
                        }
                        require(info.exposed_ns <= info.network_ns,
                                "more was exposed than there is");
                        OK(sotto_outer_destroy(outer));
                      }),
            "");
}

// ---- Beside other operations ----

// Two outer optimizers and a reduction per step, which every rank starts in an order of its own.
TEST(CapiOuterBeside, AnyOrderOfCalls) {
  for (const char* transport : {"inproc", "tcp"}) {
    SCOPED_TRACE(transport);
    EXPECT_EQ(run_world(3, {.transport = transport},
                        [](Member& self) {
                          OuterModel first, second(5);
                          sotto_outer* a = new_outer(self, json_of("2"), first);
                          sotto_outer* b =
                              new_outer(self, mean_json(R"("period": 3, "delay": 1)"), second);
                          std::vector<float> sum(3000);
                          const sotto_buffer all = buffer(sum);
                          std::mt19937 random(static_cast<uint32_t>(7 + self.rank));
                          for (int n = 1; n <= 60; ++n) {
                            first.add(static_cast<float>(self.rank));
                            second.add(static_cast<float>(2 * self.rank));
                            std::fill(sum.begin(), sum.end(), static_cast<float>(n + self.rank));
                            sotto_op* ops[3] = {};
                            std::vector<int> order{0, 1, 2};
                            std::shuffle(order.begin(), order.end(), random);
                            for (const int i : order) {
                              if (i == 0) OK(sotto_outer_step(a, nullptr, &ops[0]));
                              if (i == 1) OK(sotto_outer_step(b, nullptr, &ops[1]));
                              if (i == 2)
                                OK(sotto_all_reduce(self.comm, &all, &all, 1, nullptr, &ops[2]));
                            }
                            OK(sotto_op_wait_all(ops, 3, -1));
                            for (sotto_op* op : ops) OK(sotto_op_release(op));
                            same(sum[2999], 3 * n + 3, "the sum of step " + std::to_string(n));
                          }
                          OK(sotto_outer_flush(a, nullptr, nullptr));
                          OK(sotto_outer_flush(b, nullptr, nullptr));
                          same(first.read(), 1 + 60, "the first model");
                          // The step between a launch and its consumption is lost (merge "reset").
                          same(second.read(), 5 + 2 * (3 + 2 * 19), "the second model");
                          OK(sotto_outer_destroy(a));
                          OK(sotto_outer_destroy(b));
                        }),
              "");
  }
}

// ---- Memory ----

TEST(CapiOuterMemory, StateBytesAreFlat) {
  for (const char* json :
       {R"({"preset": "co2", "period": 1})", R"({"preset": "co2", "period": 1, "codec": "onebit"})",
        R"({"preset": "eager_diloco", "period": 1})", R"({"preset": "slowmo", "period": 1})",
        R"({"preset": "sparse_loco", "period": 1})"}) {
    SCOPED_TRACE(json);
    EXPECT_EQ(run_world(2, {},
                        [&](Member& self) {
                          OuterModel model;
                          sotto_outer* outer = new_outer(self, json, model);
                          const auto some = [&](int steps) {
                            for (int k = 0; k < steps; ++k) {
                              model.add(0.01f * static_cast<float>(self.rank));
                              step(outer);
                            }
                            OK(sotto_outer_flush(outer, nullptr, nullptr));
                            OK(sotto_outer_swap(outer, nullptr, nullptr));
                            OK(sotto_outer_swap(outer, nullptr, nullptr));
                          };
                          some(4);
                          some(4);
                          const uint64_t bytes = info_of(outer).state_bytes;
                          require(bytes > 3 * 4 * model.elements(), "state_bytes");
                          some(200);
                          same(info_of(outer).state_bytes, bytes, "state_bytes");
                          OK(sotto_outer_destroy(outer));
                        }),
              "");
  }
}

}  // namespace
}  // namespace sotto::test
