// Outer steps of an optimizer by their own handle (sotto_optim_outer), beside the optimizer's
// steps.
#include <cmath>
#include <string>
#include <utility>

#include "tests/ranks/capi_optim_outer_model.h"

namespace sotto::test {
namespace {

// Without a thread of the library's own a step goes on in calls that wait, and in no other. Step 3
// is one with an average.
TEST(CapiOptimOuterHandle, FlushAndSwapAreBusyWhileAStepIsInFlight) {
  const std::string json = file(kAdamW, R"({"preset": "local_sgd", "period": 3})");
  const sotto_call later = call_with([](auto& c) { c.priority = -5; });
  const sotto_call urgent = call_with([](auto& c) { c.priority = 5; });
  for (const int size : {1, 2}) {
    EXPECT_EQ(run_world(size, {.progress_thread = false},
                        [&](Member& self) {
                          Model plain(self.rank), model(self.rank);
                          sotto_optim* const undisturbed = new_optim(self, json.c_str(), plain);
                          sotto_optim* const optim = new_optim(self, json.c_str(), model);
                          sotto_outer* const outer = outer_of(optim);
                          for (int n = 1; n <= 7; ++n) {
                            draw(plain, self.rank, n);
                            draw(model, self.rank, n);
                            train(undisturbed);
                            sotto_op *op = nullptr, *none = nullptr;
                            OK(sotto_optim_step(optim, &later, &op));
                            FAILS(sotto_outer_flush(outer, &urgent, &none), SOTTO_E_BUSY, "flight");
                            FAILS(sotto_outer_swap(outer, &urgent, &none), SOTTO_E_BUSY, "flight");
                            require(none == nullptr, "an operation of a refused call");
                            OK(sotto_op_wait(op, -1));
                            OK(sotto_op_release(op));
                            expect_same(model, plain, "step " + std::to_string(n));
                            for (int k = 0; k < 2; ++k)
                              OK(sotto_outer_swap(outer, &urgent, nullptr));
                            expect_same(model, plain, "swapped twice, " + std::to_string(n));
                          }
                          OK(sotto_outer_destroy(outer));
                          OK(sotto_optim_destroy(optim));
                          OK(sotto_optim_destroy(undisturbed));
                        }),
              "");
  }
}

// It goes on in calls that wait alone, and destroying the handle is one.
TEST(CapiOptimOuterHandle, TheEndOfTheHandleWaitsForItsSwap) {
  const std::string json = file(kAdamW, R"({"preset": "local_sgd", "period": 3})");
  EXPECT_EQ(run_world(1, {.progress_thread = false},
                      [&](Member& self) {
                        const Model anchor(self.rank);
                        Model model(self.rank);
                        sotto_optim* const optim = new_optim(self, json.c_str(), model);
                        sotto_outer* const outer = outer_of(optim);
                        draw(model, self.rank, 1);
                        train(optim);
                        OK(sotto_optim_destroy(optim));
                        sotto_op* op = nullptr;
                        OK(sotto_outer_swap(outer, nullptr, &op));
                        OK(sotto_op_release(op));
                        OK(sotto_outer_destroy(outer));
                        expect_same(model, anchor, "in the place of the parameters");
                      }),
            "");
}

// A boundary is refused at rate 0, and the flush has the last rate that was not 0.
TEST(CapiOptimOuterHandle, AFlushEndsAScheduleThatEndsAtZero) {
  const std::string json =
      file(R"({"type": "SGD", "params": {"lr": 0.1}})", R"({"preset": "slowmo", "period": 4})",
           R"(, "scheduler": {"type": "WarmupDecayLR", "params": {
                                     "warmup_min_lr": 0, "warmup_max_lr": 0.1,
                                     "warmup_num_steps": 2, "total_num_steps": 8}})");
  EXPECT_EQ(run_world(2, {},
                      [&](Member& self) {
                        Model model(self.rank);
                        model.weights[0].assign(1000, 1.0f);
                        model.gradients[0].assign(1000, static_cast<float>(1 + self.rank));
                        sotto_optim* const optim = new_optim(self, json.c_str(), model);
                        sotto_outer* const outer = outer_of(optim);
                        double anchor = 1, momentum = 0, moved = 0, last = 0;
                        const auto average = [&] {
                          momentum = 0.5 * momentum + std::exchange(moved, 0) / last;
                          anchor -= last * momentum;
                        };
                        const auto expect_anchor = [&](const std::string& what) {
                          for (const float v : model.weights[0])
                            require(std::abs(v - anchor) < 1e-6, what + ": " + std::to_string(v) +
                                                                     " instead of " +
                                                                     std::to_string(anchor));
                        };
                        for (int n = 1; n <= 11; ++n) {
                          sotto_optim_info info = SOTTO_OPTIM_INFO_INIT;
                          OK(sotto_optim_get_info(optim, &info));
                          require((info.lr == 0) == (n <= 2 || n >= 10),
                                  "lr is 0 in steps 1, 2, 10, 11");
                          if (info.lr > 0) last = info.lr;
                          moved += 1.5 * info.lr;  // the gradient is 1 on rank 0 and 2 on rank 1
                          train(optim);
                          if (n % 4 != 0) continue;
                          average();
                          expect_anchor("step " + std::to_string(n));
                        }
                        FAILS(sotto_optim_step(optim, nullptr, nullptr), SOTTO_E_INVALID_STATE,
                              "lr is 0", "sotto.outer.lr_normalised");
                        average();
                        OK(sotto_outer_flush(outer, nullptr, nullptr));
                        expect_anchor("the flush");
                        OK(sotto_outer_destroy(outer));
                        OK(sotto_optim_destroy(optim));
                      }),
            "");
}

// What precedes outer steps averages gradients alone: votes wait for the first launch, in step 7.
TEST(CapiOptimOuterHandle, VotesWaitWhileGradientsAreAveraged) {
  const std::string json = file(kAdamW, R"({"preset": "local_sgd", "period": 3, "warmup_steps": 4,
                                            "every_step": "gradients"})");
  EXPECT_EQ(run_world(2, {},
                      [&](Member& self) {
                        Model model(self.rank);
                        sotto_optim* const optim = new_optim(self, json.c_str(), model);
                        sotto_outer* const outer = outer_of(optim);
                        OK(sotto_outer_vote(outer, 1u << self.rank));
                        for (int n = 1; n <= 10; ++n) {
                          draw(model, self.rank, n);
                          train(optim);
                          sotto_outer_info info = SOTTO_OUTER_INFO_INIT;
                          OK(sotto_outer_get_info(outer, &info));
                          require(info.votes == (n >= 7 && n < 10 ? 3 : 0),
                                  "votes of step " + std::to_string(n) + " are " +
                                      std::to_string(info.votes));
                        }
                        OK(sotto_outer_destroy(outer));
                        OK(sotto_optim_destroy(optim));
                      }),
            "");
}

}  // namespace
}  // namespace sotto::test
