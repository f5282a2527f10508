// Outer steps of an optimizer by their own handle (sotto_optim_outer), beside the optimizer's
// steps.
#include <string>

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

}  // namespace
}  // namespace sotto::test
