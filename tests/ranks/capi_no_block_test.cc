// Contexts with few operation slots: a call that is refused as BUSY has changed nothing, so that
// the next one is the same call, and not one more.
#include <algorithm>
#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "tests/ranks/capi_outer_model.h"
#include "tests/ranks/capi_overlap_model.h"
#include "tests/support/sanitized.h"

namespace sotto::test {
namespace {

const WorldOptions kOneSlot{.max_ops = 1};
constexpr char kNoSlot[] = "1 operation in flight";

sotto_call no_block() {
  return call_with([](auto& c) { c.flags = SOTTO_CALL_NO_BLOCK; });
}

void wait_and_release(sotto_op* op) {
  OK(sotto_op_wait(op, -1));
  OK(sotto_op_release(op));
}

// On rank 0: the only slot is taken until rank 1 sends.
sotto_op* take_the_slot(const Member& self, const sotto_buffer& into) {
  const sotto_call forever = call_with([](auto& c) { c.timeout_us = -1; });
  sotto_op* op = nullptr;
  OK(sotto_recv(self.comm, &into, 1, 1, &forever, &op));
  return op;
}

// The ranks stay in step.
TEST(CapiNoBlock, BusyIsNoCall) {
  std::atomic<bool> refused{false};
  EXPECT_EQ(run_world(2, kOneSlot,
                      [&](Member& self) {
                        std::vector<float> a(1000, 1.0f), b(10, 2.0f);
                        const sotto_buffer all = buffer(a), part = buffer(b);
                        if (self.rank == 0) {
                          sotto_op *const op = take_the_slot(self, part), *none = nullptr;
                          const sotto_call call = no_block();
                          for (int i = 0; i < 3; ++i) {
                            FAILS(sotto_all_reduce(self.comm, &all, &all, 1, &call, &none),
                                  SOTTO_E_BUSY, kNoSlot);
                            FAILS(sotto_send(self.comm, &part, 1, 1, &call, &none), SOTTO_E_BUSY,
                                  kNoSlot);
                          }
                          refused = true;
                          wait_and_release(op);
                        } else {
                          while (!refused) std::this_thread::yield();
                          OK(sotto_send(self.comm, &part, 1, 0, nullptr, nullptr));
                        }
                        OK(sotto_all_reduce(self.comm, &all, &all, 1, nullptr, nullptr));
                        require(a[999] == 2.0f, "sum");
                        if (self.rank == 0)
                          OK(sotto_send(self.comm, &part, 1, 1, nullptr, nullptr));
                        if (self.rank == 1)
                          OK(sotto_recv(self.comm, &part, 1, 0, nullptr, nullptr));
                      }),
            "");
}

// Splits are numbered, and all ranks have the same number.
TEST(CapiNoBlock, ARefusedSplitIsNoSplit) {
  std::atomic<bool> refused{false};
  WorldOptions options = kOneSlot;
  options.timeout_us = kSanitized ? 8'000'000 : 2'000'000;  // a split waits so long for a slot
  EXPECT_EQ(run_world(2, options,
                      [&](Member& self) {
                        std::vector<float> x(10, static_cast<float>(1 + self.rank)), y(10);
                        const sotto_buffer own = buffer(x), other = buffer(y);
                        sotto_comm* part = nullptr;
                        if (self.rank == 0) {
                          sotto_op* const op = take_the_slot(self, other);
                          FAILS(sotto_comm_split(self.comm, 0, 0, &part), SOTTO_E_BUSY, kNoSlot);
                          require(part == nullptr, "a comm of a refused split");
                          refused = true;
                          wait_and_release(op);
                          require(y[9] == 2, "received");
                        } else {
                          while (!refused) std::this_thread::yield();
                          OK(sotto_send(self.comm, &own, 1, 0, nullptr, nullptr));
                        }
                        for (int k = 0; k < 2; ++k) {
                          OK(sotto_comm_split(self.comm, 0, -self.rank, &part));
                          OK(sotto_all_reduce(part, &own, &other, 1, nullptr, nullptr));
                          require(y == std::vector<float>(10, 3.0f), "sum over the split");
                          OK(sotto_comm_destroy(part));
                        }
                      }),
            "");
}

// ---- optimizers with outer steps ----

// Every inner step adds the gradient with its sign changed.
struct Trained {
  std::vector<float> weights, gradients;
  sotto_optim* optim = nullptr;
  sotto_outer* outer = nullptr;

  Trained(const Member& self, size_t count) : weights(count, 0.0f), gradients(count, 0.0f) {
    sotto_param param = SOTTO_PARAM_INIT;
    param.param = buffer(weights);
    param.grad = buffer(gradients);
    const char* const json = R"({"optimizer": {"type": "SGD", "params": {"lr": 1}},
                                 "sotto": {"outer": {"preset": "local_sgd", "period": 2}}})";
    OK(sotto_optim_create(self.comm, json, &param, 1, &optim));
    OK(sotto_optim_outer(optim, &outer));
    gradients.assign(count, static_cast<float>(-1 - self.rank));
  }
  // Inner steps, and what all elements are.
  void expect(uint64_t steps, float value) const {
    sotto_optim_info info = SOTTO_OPTIM_INFO_INIT;
    OK(sotto_optim_get_info(optim, &info));
    same(info.step, steps, "steps of the optimizer");
    same(info_of(outer).step, steps, "steps of its outer steps");
    const auto wrong =
        std::find_if(weights.begin(), weights.end(), [&](float w) { return w != value; });
    if (wrong != weights.end()) same(*wrong, value, "a weight, step " + std::to_string(steps));
  }
  // All that would change it, while no slot is free.
  void expect_busy() const {
    const sotto_call call = no_block();
    sotto_op* none = nullptr;
    FAILS(sotto_optim_step(optim, &call, &none), SOTTO_E_BUSY, kNoSlot);
    FAILS(sotto_optim_step(optim, &call, nullptr), SOTTO_E_BUSY, kNoSlot);
    FAILS(sotto_outer_flush(outer, &call, nullptr), SOTTO_E_BUSY, kNoSlot);
    FAILS(sotto_outer_swap(outer, &call, &none), SOTTO_E_BUSY, kNoSlot);
    require(none == nullptr, "an operation of a refused call");
  }
  void destroy() const {
    OK(sotto_outer_destroy(outer));
    OK(sotto_optim_destroy(optim));
  }
};

// Its own operations do not get in each other's way, and none of them is refused behind another.
TEST(CapiNoBlock, AStepWithOuterStepsIsMadeOnce) {
  for (const uint32_t max_ops : {1u, 2u, 3u}) {
    SCOPED_TRACE(max_ops);
    EXPECT_EQ(
        run_world(1, {.max_ops = max_ops},
                  [](Member& self) {
                    // A step is in flight for a while.
                    const Trained trained(self, kSanitized ? 100'000 : 1'000'000);
                    const sotto_call call = no_block();
                    for (uint64_t k = 0; k < 6; ++k) {
                      sotto_op* op = nullptr;
                      sotto_status status = SOTTO_E_BUSY;
                      while ((status = sotto_optim_step(trained.optim, &call, &op)) == SOTTO_E_BUSY)
                        trained.expect(k, static_cast<float>(k));
                      ok(status, "step");
                      wait_and_release(op);
                      trained.expect(k + 1, static_cast<float>(k + 1));
                    }
                    trained.destroy();
                  }),
        "");
  }
}

// The slot is taken by a round whose gradients are missing.
TEST(CapiNoBlock, ARefusedStepWithOuterStepsIsNone) {
  EXPECT_EQ(run_world(1, kOneSlot,
                      [](Member& self) {
                        const Trained trained(self, 1000);
                        const Gradients gradients;
                        sotto_overlap* const overlap = new_overlap(self, gradients);
                        for (uint64_t k = 0; k < 5; ++k) {
                          sotto_op* const round = begin(overlap);
                          trained.expect_busy();
                          trained.expect(k, static_cast<float>(k));
                          mark(overlap, {0, 1, 2, 3, 4, 5});
                          finish(overlap, round);
                          const sotto_call call = no_block();
                          OK(sotto_optim_step(trained.optim, &call, nullptr));
                          trained.expect(k + 1, static_cast<float>(k + 1));
                        }
                        OK(sotto_outer_flush(trained.outer, nullptr, nullptr));
                        trained.expect(5, 5);
                        OK(sotto_overlap_destroy(overlap));
                        trained.destroy();
                      }),
            "");
}

// Of one rank of two: the other's averages wait for the step that is made in the end.
TEST(CapiNoBlock, OtherRanksWaitForTheStepThatIsMade) {
  std::atomic<int> refused{0};
  EXPECT_EQ(run_world(2, kOneSlot,
                      [&](Member& self) {
                        const Trained trained(self, 1000);
                        float signal = 0, before = 0;
                        const sotto_buffer b = buffer(&signal, 1);
                        for (int k = 0; k < 6; ++k) {
                          if (self.rank == 0) {
                            sotto_op* const op = take_the_slot(self, b);
                            trained.expect_busy();
                            trained.expect(static_cast<uint64_t>(k), before);
                            refused = k + 1;
                            wait_and_release(op);
                          } else {
                            while (refused <= k) std::this_thread::yield();
                            OK(sotto_send(self.comm, &b, 1, 0, nullptr, nullptr));
                          }
                          const sotto_call call = no_block();
                          sotto_op* op = nullptr;
                          OK(sotto_optim_step(trained.optim, &call, &op));
                          wait_and_release(op);
                          // The mean of 2 and 4 more, at the end of each round.
                          before = k % 2 == 1 ? 1.5f * static_cast<float>(k + 1)
                                              : before + static_cast<float>(1 + self.rank);
                          trained.expect(static_cast<uint64_t>(k) + 1, before);
                        }
                        trained.destroy();
                      }),
            "");
}

// ---- outer optimizers ----

// Step 4 launches an average, which has the only slot until rank 1 takes part in it.
TEST(CapiNoBlock, ARefusedOuterStepIsNone) {
  std::atomic<bool> refused{false};
  EXPECT_EQ(run_world(2, kOneSlot,
                      [&](Member& self) {
                        OuterModel model;
                        sotto_outer* outer =
                            new_outer(self, mean_json(R"("period": 4, "delay": 2)"), model);
                        const sotto_call call = no_block();
                        const auto refuses = [&] {
                          FAILS(sotto_outer_step(outer, &call, nullptr), SOTTO_E_BUSY, kNoSlot);
                          FAILS(sotto_outer_flush(outer, &call, nullptr), SOTTO_E_BUSY, kNoSlot);
                          FAILS(sotto_outer_swap(outer, &call, nullptr), SOTTO_E_BUSY, kNoSlot);
                          same(info_of(outer).step, 4, "step");
                          same(info_of(outer).in_flight, 1, "in_flight");
                          same(model.read(), 6, "parameters");
                        };
                        for (uint64_t n = 1; n <= 12; ++n) {
                          model.add(static_cast<float>(1 + self.rank));
                          if (self.rank == 1 && n == 4) {
                            while (!refused) std::this_thread::yield();
                          }
                          if (self.rank == 0 && n == 5) {
                            for (int i = 0; i < 3; ++i) refuses();
                            refused = true;
                          }
                          sotto_op* op = nullptr;
                          sotto_status status = SOTTO_OK;
                          while ((status = sotto_outer_step(outer, &call, &op)) == SOTTO_E_BUSY) {
                            require(self.rank == 1 || n > 4, "there was a slot for this step");
                            same(info_of(outer).step, n - 1, "step");
                          }
                          ok(status, "step");
                          wait_and_release(op);
                        }
                        same(info_of(outer).round, 2, "round");
                        OK(sotto_outer_flush(outer, nullptr, nullptr));
                        // Three averages, of four steps and twice of two: 5 and 6 went with the
                        // first one, 9 and 10 with the second.
                        same(model.read(), 1 + 1.5f * (4 + 2 + 2), "parameters");
                        OK(sotto_outer_destroy(outer));
                      }),
            "");
}

}  // namespace
}  // namespace sotto::test
