// Outer optimizers at the C ABI: when something happens, what is in flight, and what ranks end
// with. Settings are those of mean_json: an anchor becomes the mean of parameters.
#include <atomic>
#include <bit>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/ranks/capi_outer_model.h"

namespace sotto::test {
namespace {

// ---- Events ----

struct Schedule {
  uint64_t period, delay, fragments;
  // Fragment f begins a fragment's share of the period after fragment f - 1.
  bool launches(uint64_t n, uint64_t f) const {
    const uint64_t offset = f * period / fragments;
    return n > 0 && n >= offset && n % period == offset % period;
  }
  uint32_t events(uint64_t n) const {
    uint32_t all = 0;
    for (uint64_t f = 0; f < fragments; ++f) {
      const bool launched = launches(n, f);
      const bool consumes = n >= delay && launches(n - delay, f);
      if (launched) all |= SOTTO_OUTER_LAUNCHED;
      if (consumes) all |= SOTTO_OUTER_CONSUMED;
      if (launched && !consumes && delay == period) all |= SOTTO_OUTER_HELD;
    }
    return all;
  }
  uint64_t next(uint64_t n) const {
    uint64_t steps = 1;
    while (events(n + steps) == 0) ++steps;
    return steps;
  }
  uint32_t in_flight(uint64_t n) const {
    uint32_t all = 0;
    for (uint64_t f = 0; f < fragments; ++f) {
      for (uint64_t back = 0; back < delay; ++back)
        all += back <= n && launches(n - back, f) ? 1 : 0;
    }
    return all;
  }
  std::string json() const {
    return mean_json("\"period\": " + std::to_string(period) + ", \"delay\": " +
                     std::to_string(delay) + ", \"fragments\": " + std::to_string(fragments));
  }
};

void expect_schedule(const Member& self, const Schedule& s) {
  OuterModel model;
  sotto_outer* outer = new_outer(self, s.json(), model);
  uint64_t consumed = 0;
  const auto what = [&](const char* name, uint64_t n) {
    return s.json() + ", step " + std::to_string(n) + ": " + name;
  };
  for (uint64_t n = 0; n <= 3 * s.period; ++n) {
    if (n != 0) step(outer);
    const sotto_outer_info info = info_of(outer);
    const uint32_t wanted = s.events(n);
    consumed += (wanted & SOTTO_OUTER_CONSUMED) != 0;
    same(info.events & ~SOTTO_OUTER_WAITED, wanted, what("events", n));
    same(info.step, n, what("step", n));
    same(info.next_boundary, s.next(n), what("next_boundary", n));
    same(info.in_flight, s.in_flight(n), what("in_flight", n));
    same(info.round, consumed, what("round", n));
    same(info.fragments, s.fragments, what("fragments", n));
  }
  OK(sotto_outer_destroy(outer));
}

TEST(CapiOuter, EventsOfEveryStep) {
  const std::vector<Schedule> all{{1, 0, 1}, {3, 0, 1}, {1, 1, 1}, {3, 3, 1}, {4, 1, 1},
                                  {4, 3, 1}, {4, 0, 2}, {4, 1, 2}, {2, 2, 2}, {4, 4, 2}};
  for (const int size : {1, 2}) {
    EXPECT_EQ(run_world(size, {},
                        [&](Member& self) {
                          for (const Schedule& s : all) expect_schedule(self, s);
                        }),
              "");
  }
}

// ---- Operations ----

// Rank 1 takes part in the boundary when it is told to: until then rank 0's step is in flight.
TEST(CapiOuter, BusyWhileAStepIsInFlight) {
  std::atomic<bool> go{false};
  EXPECT_EQ(run_world(2, {},
                      [&](Member& self) {
                        OuterModel model;
                        sotto_outer* outer =
                            new_outer(self, mean_json(R"("period": 1, "delay": 0)"), model);
                        model.add(static_cast<float>(self.rank));
                        if (self.rank == 1) {
                          while (!go) std::this_thread::yield();
                          step(outer);
                        } else {
                          sotto_op *op = nullptr, *other = nullptr;
                          OK(sotto_outer_step(outer, nullptr, &op));
                          const char* const text = "a step of this outer optimizer is in flight";
                          sotto_outer_info info = SOTTO_OUTER_INFO_INIT;
                          FAILS(sotto_outer_step(outer, nullptr, &other), SOTTO_E_BUSY, text);
                          FAILS(sotto_outer_flush(outer, nullptr, nullptr), SOTTO_E_BUSY, text);
                          FAILS(sotto_outer_swap(outer, nullptr, nullptr), SOTTO_E_BUSY, text);
                          FAILS(sotto_outer_set(outer, "weight", 0), SOTTO_E_BUSY, text);
                          FAILS(sotto_outer_vote(outer, 1), SOTTO_E_BUSY, text);
                          FAILS(sotto_outer_get_info(outer, &info), SOTTO_E_BUSY, text);
                          require(other == nullptr, "an operation of a refused step");
                          require(sotto_op_test(op) == SOTTO_IN_PROGRESS,
                                  "the step has ended alone");
                          go = true;
                          OK(sotto_op_wait(op, -1));
                          OK(sotto_op_release(op));
                        }
                        same(model.read(), 1.5f, "the mean");
                        same(info_of(outer).step, 1, "step");
                        OK(sotto_outer_destroy(outer));
                      }),
            "");
}

// An average behind a step leaves the optimizer idle.
TEST(CapiOuter, NotBusyWhileAnAverageIsUnderWay) {
  std::atomic<bool> go{false};
  EXPECT_EQ(run_world(2, {},
                      [&](Member& self) {
                        OuterModel model;
                        sotto_outer* outer =
                            new_outer(self, mean_json(R"("period": 2, "delay": 2)"), model);
                        while (self.rank == 1 && !go) std::this_thread::yield();
                        for (int k = 0; k < 3; ++k) {
                          model.add(static_cast<float>(self.rank));
                          step(outer);
                        }
                        same(info_of(outer).in_flight, 1, "in_flight");
                        go = true;
                        OK(sotto_outer_flush(outer, nullptr, nullptr));
                        // Two steps of rank 1 in the first average, one in the other.
                        same(model.read(), 1 + 0.5f * (2 + 1), "after the flush");
                        same(info_of(outer).in_flight, 0, "in_flight");
                        OK(sotto_outer_destroy(outer));
                      }),
            "");
}

struct Done {
  std::atomic<int> calls{0};
  std::atomic<int> status{99};
};

// The three ways to start an operation, with the same result.
TEST(CapiOuter, WithAndWithoutAnOperation) {
  EXPECT_EQ(run_world(2, {},
                      [](Member& self) {
                        OuterModel model;
                        sotto_outer* outer =
                            new_outer(self, mean_json(R"("period": 2, "delay": 0)"), model);
                        Done done;
                        const sotto_call call = call_with([&](auto& c) {
                          c.user = &done;
                          c.flags = SOTTO_CALL_DONE_ANY_THREAD;
                          c.on_done = [](void* user, sotto_status status) {
                            static_cast<Done*>(user)->status = status;
                            ++static_cast<Done*>(user)->calls;
                          };
                        });
                        const auto by_operation = [&](auto start, const sotto_call* c) {
                          sotto_op* op = nullptr;
                          OK(start(outer, c, &op));
                          require(op != nullptr, "no operation");
                          OK(sotto_op_wait(op, -1));
                          OK(sotto_op_release(op));
                        };
                        for (int k = 0; k < 6; ++k) {
                          model.add(static_cast<float>(2 * self.rank));
                          if (k % 3 == 0) by_operation(sotto_outer_step, nullptr);
                          if (k % 3 == 1) step(outer);
                          if (k % 3 == 2) by_operation(sotto_outer_step, &call);
                        }
                        same(model.read(), 7.0f, "after three rounds");
                        by_operation(sotto_outer_swap, &call);
                        by_operation(sotto_outer_swap, &call);
                        model.add(static_cast<float>(2 * self.rank));
                        step(outer);
                        by_operation(sotto_outer_flush, &call);
                        same(model.read(), 8.0f, "after the flush");
                        while (done.calls < 5) std::this_thread::yield();
                        same(done.calls.load(), 5, "calls");
                        same(done.status.load(), SOTTO_OK, "status");
                        OK(sotto_outer_destroy(outer));
                      }),
            "");
}

// ---- Swaps and flushes ----

TEST(CapiOuter, SwapsKeepBitsWhileAnAverageIsUnderWay) {
  EXPECT_EQ(
      run_world(
          2, {},
          [](Member& self) {
            OuterModel model;
            sotto_outer* outer = new_outer(self, mean_json(R"("period": 2, "delay": 2)"), model);
            const float mine = 0.1f + 0.3f * static_cast<float>(self.rank);
            for (int k = 0; k < 3; ++k) {
              model.add(mine);
              step(outer);
            }
            model.weights[0][5] = -0.0f;  // bits that arithmetic would not keep
            model.weights[0][6] = std::bit_cast<float>(0x7fc01234u);
            std::vector<float> before[2] = {model.weights[0], model.weights[1]};
            OK(sotto_outer_swap(outer, nullptr, nullptr));
            same(model.read(), 1, "the anchor");
            FAILS(sotto_outer_step(outer, nullptr, nullptr), SOTTO_E_INVALID_STATE,
                  "the anchor is in the place of the parameters; call sotto_outer_swap before "
                  "the next inner step");
            FAILS(sotto_outer_flush(outer, nullptr, nullptr), SOTTO_E_INVALID_STATE,
                  "the anchor is in the place of the parameters; call sotto_outer_swap");
            same(info_of(outer).step, 3, "step");
            same(info_of(outer).in_flight, 1, "in_flight");
            OK(sotto_outer_swap(outer, nullptr, nullptr));
            for (size_t t = 0; t < 2; ++t) {
              require(
                  std::memcmp(before[t].data(), model.weights[t].data(), before[t].size() * 4) == 0,
                  "bits have changed");
            }
            model.write(1);
            step(outer);
            // The average that was under way: two steps of each rank.
            require(std::abs(model.read() - (1 + (0.1f + 0.4f))) < 1e-6, "after the boundary");
            same(info_of(outer).step, 4, "step");
            // Twice again, at the anchor itself.
            const float there = model.read();
            for (int k = 0; k < 2; ++k) {
              OK(sotto_outer_swap(outer, nullptr, nullptr));
              same(model.read(), there, "at the anchor");
            }
            OK(sotto_outer_destroy(outer));
          }),
      "");
}

// Averages that are consumed do not touch the anchor that is on loan.
TEST(CapiOuter, DestroyedWhileSwapped) {
  EXPECT_EQ(run_world(2, {},
                      [](Member& self) {
                        OuterModel model;
                        sotto_outer* outer =
                            new_outer(self, mean_json(R"("period": 1, "delay": 1)"), model);
                        model.add(1);
                        step(outer);
                        model.add(1);
                        OK(sotto_outer_swap(outer, nullptr, nullptr));
                        OK(sotto_outer_destroy(outer));
                        same(model.read(), 1, "the anchor");
                        barrier(self);
                      }),
            "");
}

TEST(CapiOuter, ASecondFlushDoesNothing) {
  for (const char* delay : {"0", "1", "3"}) {
    SCOPED_TRACE(delay);
    EXPECT_EQ(
        run_world(3, {},
                  [&](Member& self) {
                    OuterModel model;
                    sotto_outer* outer = new_outer(
                        self, mean_json(std::string(R"("period": 3, "delay": )") + delay), model);
                    const uint64_t created = counters_of(self).payload_bytes_planned;
                    OK(sotto_outer_flush(outer, nullptr, nullptr));
                    same(model.read(), 1, "a flush before the first step");
                    same(counters_of(self).payload_bytes_planned, created, "bytes of a flush");
                    for (int k = 0; k < 4; ++k) {
                      model.add(static_cast<float>(3 * self.rank));
                      step(outer);
                    }
                    OK(sotto_outer_flush(outer, nullptr, nullptr));
                    // With a delay of one, step 4 went when the average of the others was consumed.
                    const float flushed = std::string(delay) == "1" ? 10 : 13;
                    same(model.read(), flushed, "the steps of all ranks");
                    same(info_of(outer).events, SOTTO_OUTER_LAUNCHED | SOTTO_OUTER_CONSUMED,
                         "events");
                    const uint64_t sent = counters_of(self).payload_bytes_planned;
                    model.add(7);  // no inner step: it has not been counted
                    OK(sotto_outer_flush(outer, nullptr, nullptr));
                    same(model.read(), flushed + 7, "after a flush that does nothing");
                    same(info_of(outer).events, 0, "events");
                    same(counters_of(self).payload_bytes_planned, sent, "bytes of a second flush");
                    same(info_of(outer).in_flight, 0, "in_flight");
                    OK(sotto_outer_destroy(outer));
                  }),
        "");
  }
}

// ---- Votes and weights ----

// Rank r votes for bit r in its step r + 1, and all of them see all bits of a round at its end.
TEST(CapiOuter, VotesAreSeenAtTheSameStep) {
  EXPECT_EQ(run_world(3, {},
                      [](Member& self) {
                        OuterModel model;
                        sotto_outer* outer =
                            new_outer(self, mean_json(R"("period": 3, "delay": 3)"), model);
                        for (int n = 1; n <= 12; ++n) {
                          if (n == self.rank + 1) OK(sotto_outer_vote(outer, 1u << self.rank));
                          if (n == 2) OK(sotto_outer_vote(outer, 1u << (8 + self.rank)));
                          if (n == 7 && self.rank == 2) OK(sotto_outer_vote(outer, 1u << 31));
                          step(outer);
                          const uint32_t votes = n < 6 ? 0 : n < 9 ? 0x707 : n < 12 ? 0 : 1u << 31;
                          same(info_of(outer).votes, votes,
                               "votes after step " + std::to_string(n));
                        }
                        OK(sotto_outer_destroy(outer));
                      }),
            "");
}

// A flush takes them along, as every average.
TEST(CapiOuter, VotesTravelOnce) {
  for (const char* delay : {"0", "2"}) {
    SCOPED_TRACE(delay);
    EXPECT_EQ(run_world(2, {},
                        [&](Member& self) {
                          OuterModel model;
                          sotto_outer* outer = new_outer(
                              self, mean_json(std::string(R"("period": 2, "delay": )") + delay),
                              model);
                          for (int k = 0; k < 3; ++k) step(outer);
                          OK(sotto_outer_vote(outer, 1u << self.rank));
                          OK(sotto_outer_flush(outer, nullptr, nullptr));
                          same(info_of(outer).votes, 3, "votes of the flush");
                          for (int k = 0, seen = 3; k < 6; ++k) {
                            step(outer);
                            const sotto_outer_info info = info_of(outer);
                            if ((info.events & SOTTO_OUTER_CONSUMED) != 0) seen = 0;
                            same(info.votes, seen, "votes of step " + std::to_string(4 + k));
                          }
                          same(info_of(outer).votes, 0, "votes after the next averages");
                          OK(sotto_outer_destroy(outer));
                        }),
              "");
  }
}

// Two averages end in one flush.
TEST(CapiOuter, AFlushSeesTheVotesOfAllItsAverages) {
  EXPECT_EQ(run_world(2, {},
                      [](Member& self) {
                        OuterModel model;
                        sotto_outer* outer =
                            new_outer(self, mean_json(R"("period": 2, "delay": 2)"), model);
                        OK(sotto_outer_vote(outer, 1u << self.rank));
                        for (int k = 0; k < 3; ++k) step(outer);
                        OK(sotto_outer_vote(outer, 4u << self.rank));
                        OK(sotto_outer_flush(outer, nullptr, nullptr));
                        same(info_of(outer).votes, 15, "votes");
                        OK(sotto_outer_destroy(outer));
                      }),
            "");
}

// Fragment 1 launches at step 2, fragment 0 at step 4; the flush consumes both and sends the rest.
TEST(CapiOuter, AFlushSeesTheVotesOfAllFragments) {
  EXPECT_EQ(run_world(2, {},
                      [](Member& self) {
                        OuterModel model;
                        sotto_outer* outer = new_outer(
                            self, mean_json(R"("period": 4, "delay": 4, "fragments": 2)"), model);
                        for (int n = 1; n <= 5; ++n) {
                          if (n == 2) OK(sotto_outer_vote(outer, 1u << self.rank));
                          if (n == 4) OK(sotto_outer_vote(outer, 4u << self.rank));
                          step(outer);
                          same(info_of(outer).votes, 0, "votes of step " + std::to_string(n));
                        }
                        same(info_of(outer).in_flight, 2, "in_flight");
                        OK(sotto_outer_vote(outer, 16u << self.rank));
                        OK(sotto_outer_flush(outer, nullptr, nullptr));
                        same(info_of(outer).votes, 63, "votes");
                        OK(sotto_outer_flush(outer, nullptr, nullptr));
                        same(info_of(outer).votes, 63, "votes of a flush that does nothing");
                        for (int n = 6; n <= 12; ++n) step(outer);
                        same(info_of(outer).votes, 0, "votes after the next averages");
                        OK(sotto_outer_destroy(outer));
                      }),
            "");
}

// Up to step 5 every step averages.
TEST(CapiOuter, VotesBeforeOuterStepsTravelOnce) {
  for (const char* fragments : {"1", "2"}) {
    SCOPED_TRACE(fragments);
    const std::string json = mean_json(
        std::string(R"("period": 4, "delay": 0, "warmup_steps": 5, "fragments": )") + fragments);
    EXPECT_EQ(run_world(2, {},
                        [&](Member& self) {
                          OuterModel model;
                          sotto_outer* outer = new_outer(self, json, model);
                          for (int n = 1; n <= 13; ++n) {
                            uint32_t votes = 0;
                            for (const int at : {1, 3, 4, 5}) votes |= n == at ? 3u << at : 0;
                            if (votes != 0) OK(sotto_outer_vote(outer, 1u << (n + self.rank)));
                            step(outer);
                            const sotto_outer_info info = info_of(outer);
                            // Behind them a step without an average keeps those of the last one.
                            if (n > 5 && (info.events & SOTTO_OUTER_CONSUMED) == 0) continue;
                            same(info.votes, votes, "votes of step " + std::to_string(n));
                          }
                          OK(sotto_outer_destroy(outer));
                        }),
              "");
  }
}

// A flush between launch and consumption leaves the boundary nothing: what it has told stays.
TEST(CapiOuter, ABoundaryWithNothingToConsumeIsNone) {
  EXPECT_EQ(run_world(2, {},
                      [](Member& self) {
                        OuterModel model;
                        sotto_outer* outer =
                            new_outer(self, mean_json(R"("period": 8, "delay": 4)"), model);
                        const auto expect = [&](uint64_t n, uint32_t events, uint64_t round,
                                                uint32_t votes) {
                          const std::string at = " of step " + std::to_string(n);
                          const sotto_outer_info info = info_of(outer);
                          same(info.events & ~SOTTO_OUTER_WAITED, events, "events" + at);
                          same(info.round, round, "round" + at);
                          same(info.votes, votes, "votes" + at);
                        };
                        for (uint64_t n = 1; n <= 20; ++n) {
                          model.add(static_cast<float>(1 + self.rank));
                          if (n == 8) OK(sotto_outer_vote(outer, 1u << self.rank));
                          const float before = model.read();
                          step(outer);
                          if (n < 20) same(model.read(), before, "parameters");
                          expect(n,
                                 n % 8 == 0 ? SOTTO_OUTER_LAUNCHED
                                 : n == 20  ? SOTTO_OUTER_CONSUMED
                                            : 0,
                                 n < 9     ? 0
                                 : n == 20 ? 2
                                 : n == 9  ? 0
                                           : 1,
                                 n > 9 && n < 20 ? 3 : 0);
                          if (n != 9) continue;
                          OK(sotto_outer_flush(outer, nullptr, nullptr));
                          expect(n, SOTTO_OUTER_LAUNCHED | SOTTO_OUTER_CONSUMED, 1, 3);
                          same(model.read(), 1 + 1.5f * 8, "after the flush");
                        }
                        same(model.read(), 13 + 1.5f * 7, "after the next average");
                        OK(sotto_outer_destroy(outer));
                      }),
            "");
}

// Figures are of the fragment that was updated last.
TEST(CapiOuter, VotesOfEveryFragment) {
  EXPECT_EQ(run_world(2, {},
                      [](Member& self) {
                        OuterModel model;
                        std::vector<float> third(5, 1.0f);
                        model.params.push_back(model.params[1]);
                        model.params[2].name = "third";
                        model.params[2].param = buffer(third);
                        sotto_outer* outer = new_outer(
                            self, mean_json(R"("period": 3, "delay": 0, "fragments": 3)"), model);
                        for (uint32_t n = 1; n <= 9; ++n) {
                          OK(sotto_outer_vote(outer, n << (8 * self.rank)));
                          step(outer);
                          same(info_of(outer).votes, n | (n << 8),
                               "votes of step " + std::to_string(n));
                        }
                        OK(sotto_outer_destroy(outer));
                      }),
            "");
}

TEST(CapiOuter, WeightZeroLeavesARankOut) {
  EXPECT_EQ(run_world(3, {},
                      [](Member& self) {
                        OuterModel model;
                        sotto_outer* outer =
                            new_outer(self, mean_json(R"("period": 2, "delay": 0)"), model);
                        const auto round = [&] {
                          for (int k = 0; k < 2; ++k) {
                            model.add(static_cast<float>(1 + self.rank));
                            step(outer);
                          }
                          return model.read();
                        };
                        same(round(), 1 + 4, "all ranks");
                        OK(sotto_outer_set(outer, "weight", self.rank == 1 ? 0 : 1));
                        same(round(), 5 + 4, "ranks 0 and 2");
                        OK(sotto_outer_set(outer, "weight", self.rank == 0 ? 1 : 0));
                        same(round(), 9 + 2, "rank 0");
                        OK(sotto_outer_set(outer, "weight", 0));
                        const uint64_t rounds = info_of(outer).round;
                        same(round(), 11, "nobody: back at the anchor");
                        same(info_of(outer).round, rounds + 1, "round");
                        same(info_of(outer).step_norm, 0.0, "step_norm");
                        OK(sotto_outer_set(outer, "weight", 1));
                        same(round(), 11 + 4, "all ranks again");
                        OK(sotto_outer_destroy(outer));
                      }),
            "");
}

// ---- Model copies ----

uint16_t half_of(float x, uint32_t type) {
  if (type == SOTTO_BFLOAT16) return static_cast<uint16_t>(std::bit_cast<uint32_t>(x) >> 16);
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  return static_cast<uint16_t>((((bits >> 23) - 112) << 10) | ((bits >> 13) & 0x3ff));
}

// After everything that changes parameters. All numbers here are exact in both types.
TEST(CapiOuter, ModelCopiesAreWrittenAfterEveryChange) {
  for (const uint32_t type : {uint32_t{SOTTO_FLOAT16}, uint32_t{SOTTO_BFLOAT16}}) {
    EXPECT_EQ(run_world(2, {},
                        [&](Member& self) {
                          OuterModel model(2, type);
                          sotto_outer* outer =
                              new_outer(self, mean_json(R"("period": 2, "delay": 2)"), model);
                          const auto copied = [&](float wanted, const char* what) {
                            same(model.read(), wanted, what);
                            same(model.read_copy(), half_of(wanted, type),
                                 std::string("copy: ") + what);
                          };
                          for (int n = 1; n <= 4; ++n) {
                            model.add(static_cast<float>(1 + self.rank));
                            for (auto& c : model.copies) c.assign(c.size(), 0);
                            step(outer);
                            if (n == 2) copied(2, "held");
                            if (n == 3)
                              same(model.read_copy(), 0, "copy where nothing has changed");
                            if (n == 4) copied(5, "consumed");
                          }
                          model.add(static_cast<float>(self.rank));
                          OK(sotto_outer_swap(outer, nullptr, nullptr));
                          copied(5, "swapped");
                          OK(sotto_outer_swap(outer, nullptr, nullptr));
                          copied(5 + static_cast<float>(self.rank), "swapped back");
                          step(outer);
                          OK(sotto_outer_flush(outer, nullptr, nullptr));
                          copied(8.5, "flushed");
                          OK(sotto_outer_destroy(outer));
                        }),
              "")
        << type;
  }
}

}  // namespace
}  // namespace sotto::test
