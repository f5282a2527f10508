// States of outer optimizers at the C ABI: what other numbers of ranks go on from, and what a flush
// behind an import averages. Settings are those of mean_json, or say otherwise.
#include <string>
#include <utility>
#include <vector>

#include "tests/ranks/capi_outer_model.h"

namespace sotto::test {
namespace {

// Of one rank of two, on three: parameters become the anchor, and the next averages are of three.
TEST(CapiOuterState, AnyRanksLoadAStateWithoutErrorFeedback) {
  std::vector<char> blob;
  EXPECT_EQ(run_world(2, {},
                      [&](Member& self) {
                        OuterModel model;
                        sotto_outer* outer =
                            new_outer(self, mean_json(R"("period": 2, "delay": 2)"), model);
                        for (int n = 0; n < 5; ++n) {
                          model.add(static_cast<float>(self.rank));
                          step(outer);
                        }
                        uint64_t n = 0;
                        OK(sotto_outer_state_export(outer, SOTTO_STATE_RESET, nullptr, 0, &n));
                        std::vector<char> mine(n);
                        OK(sotto_outer_state_export(outer, SOTTO_STATE_RESET, mine.data(), n, &n));
                        if (self.rank == 1) blob = mine;
                        OK(sotto_outer_destroy(outer));
                      }),
            "");
  EXPECT_EQ(
      run_world(
          3, {},
          [&](Member& self) {
            OuterModel model(9);
            sotto_outer* outer = new_outer(self, mean_json(R"("period": 2, "delay": 2)"), model);
            FAILS(sotto_outer_state_import(outer, SOTTO_STATE_EXACT, blob.data(), blob.size()),
                  SOTTO_E_INVALID_ARGUMENT, "rank 1 of 2; this is rank");
            OK(sotto_outer_state_import(outer, SOTTO_STATE_RESET, blob.data(), blob.size()));
            same(model.read(), 2, "1 and the mean of the first average, 0 and 2");
            same(info_of(outer).step, 5, "step");
            same(info_of(outer).in_flight, 0, "averages");
            for (int n = 5; n < 8; ++n) {  // hold at 6, consumed at 8
              model.add(static_cast<float>(self.rank));
              step(outer);
            }
            same(model.read(), 3, "with the mean of one inner step, 0, 1 and 2");
            OK(sotto_outer_destroy(outer));
          }),
      "");
}

// A state from between launch and consumption: its average is lost with the ranks that made it, and
// no inner step behind the import is.
TEST(CapiOuterState, OtherRanksFlushSoonBehindTheImport) {
  const std::string json = mean_json(R"("period": 8, "delay": 4)");
  std::string blob;
  EXPECT_EQ(run_world(1, {},
                      [&](Member& self) {
                        OuterModel model;
                        sotto_outer* outer = new_outer(self, json, model);
                        for (int n = 0; n < 9; ++n) {
                          model.add(1);
                          step(outer);
                        }
                        same(info_of(outer).in_flight, 1, "in_flight");
                        blob = read_all([&](char* buf, uint64_t cap, uint64_t* need) {
                          return sotto_outer_state_export(outer, SOTTO_STATE_RESET, buf, cap, need);
                        });
                        OK(sotto_outer_destroy(outer));
                      }),
            "");
  // Step 12 is the boundary that has nothing to consume, step 16 launches.
  for (int last = 9; last <= 15; ++last) {
    SCOPED_TRACE(last);
    EXPECT_EQ(run_world(2, {},
                        [&](Member& self) {
                          OuterModel model(7);
                          sotto_outer* outer = new_outer(self, json, model);
                          OK(sotto_outer_state_import(outer, SOTTO_STATE_RESET, blob.data(),
                                                      blob.size()));
                          same(model.read(), 1, "the anchor");
                          for (int n = 9; n < last; ++n) {
                            model.add(static_cast<float>(1 + self.rank));
                            step(outer);
                            same(info_of(outer).events, 0, "events");
                          }
                          OK(sotto_outer_flush(outer, nullptr, nullptr));
                          same(model.read(), 1 + 1.5f * static_cast<float>(last - 9),
                               "the steps of both ranks");
                          OK(sotto_outer_destroy(outer));
                        }),
              "");
  }
}

// A flush behind an import has the rate of the last step, unless the trainer has set another.
TEST(CapiOuterState, AStateHasTheLearningRate) {
  EXPECT_EQ(
      run_world(2, {},
                [](Member& self) {
                  const auto flushed = [&](const std::string& blob, double before, double behind) {
                    OuterModel model;
                    const std::string json = R"({"preset": "slowmo", "period": 2})";
                    sotto_outer* outer = new_outer(self, json, model);
                    if (before != 0) OK(sotto_outer_set(outer, "lr", before));
                    if (blob.empty()) {
                      for (int k = 0; k < 3; ++k) {
                        model.add(static_cast<float>(1 + self.rank));
                        step(outer);
                      }
                    } else {
                      OK(sotto_outer_state_import(outer, SOTTO_STATE_EXACT, blob.data(),
                                                  blob.size()));
                    }
                    if (behind != 0) OK(sotto_outer_set(outer, "lr", behind));
                    uint64_t n = 0;
                    OK(sotto_outer_state_export(outer, SOTTO_STATE_EXACT, nullptr, 0, &n));
                    std::string state(n, ' ');
                    OK(sotto_outer_state_export(outer, SOTTO_STATE_EXACT, state.data(), n, &n));
                    OK(sotto_outer_flush(outer, nullptr, nullptr));
                    const float found = model.read();
                    barrier(self);
                    OK(sotto_outer_destroy(outer));
                    return std::pair(found, state);
                  };
                  const auto [whole, state] = flushed("", 0.05, 0);
                  same(flushed(state, 0, 0).first, whole, "the rate of the state");
                  const float other = flushed("", 0.05, 0.4).first;
                  require(other != whole, "the rate takes part");
                  same(flushed(state, 0, 0.4).first, other, "set behind the import");
                  same(flushed(state, 0.4, 0).first, other, "set before the import");
                }),
      "");
}

// SlowMo with momentum 0.5: d = 6 at rate 0.5, then d = 3 of inner steps at rate 0.25. The anchor
// moves by rate * (0.5 * momentum + d / rate): 1 + 6, then 7 + 0.25 * (0.5 * 6 / 0.5 + 3 / 0.25).
TEST(CapiOuterState, AFlushHasTheLastRateThatWasNotZero) {
  const std::string json = R"({"preset": "slowmo", "period": 4})";
  EXPECT_EQ(
      run_world(2, {},
                [&](Member& self) {
                  OuterModel model;
                  sotto_outer* outer = new_outer(self, json, model);
                  for (int n = 1; n <= 7; ++n) {
                    OK(sotto_outer_set(outer, "lr", n <= 4 ? 0.5 : n <= 6 ? 0.25 : 0.0));
                    if (n <= 6) model.add(static_cast<float>(1 + self.rank));
                    step(outer);
                  }
                  const std::string state = read_all([&](char* buf, uint64_t cap, uint64_t* need) {
                    return sotto_outer_state_export(outer, SOTTO_STATE_EXACT, buf, cap, need);
                  });
                  OK(sotto_outer_flush(outer, nullptr, nullptr));
                  same(model.read(), 11.5f, "flushed at rate 0.25");
                  OK(sotto_outer_destroy(outer));

                  // A state has that rate, beside the one of its last step.
                  OuterModel other;
                  sotto_outer* resumed = new_outer(self, json, other);
                  OK(sotto_outer_state_import(resumed, SOTTO_STATE_EXACT, state.data(),
                                              state.size()));
                  same(other.read(), 7 + 2 * static_cast<float>(1 + self.rank), "imported");
                  same(info_of(resumed).step, 7, "step");
                  OK(sotto_outer_flush(resumed, nullptr, nullptr));
                  same(other.read(), 11.5f, "flushed behind the import");
                  OK(sotto_outer_destroy(resumed));
                }),
      "");
}

}  // namespace
}  // namespace sotto::test
