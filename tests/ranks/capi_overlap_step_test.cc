// Rounds at the C ABI that are steps of an optimizer.
#include <string>
#include <thread>
#include <vector>

#include "tests/ranks/capi_overlap_model.h"

namespace sotto::test {
namespace {

// Two optimizers of the same parameters and gradients: one by sotto_optim_step, one by rounds.
struct Steps {
  std::vector<std::vector<float>> params;
  Gradients gradients;
  sotto_optim* optim = nullptr;

  Steps(const Member& self, const char* json) {
    std::vector<sotto_param> specs;
    for (size_t t = 0; t < gradients.size(); ++t)
      params.emplace_back(gradients.data[t].size(), 1.0f);
    static const char* const kNames[] = {"a", "b", "c", "d", "e", "f"};
    for (size_t t = 0; t < gradients.size(); ++t) {
      sotto_param spec = SOTTO_PARAM_INIT;
      spec.name = kNames[t];
      spec.param = buffer(params[t]);
      spec.grad = gradients.buffers[t];
      specs.push_back(spec);
    }
    OK(sotto_optim_create(self.comm, json, specs.data(), specs.size(), &optim));
  }
};

constexpr const char* kLamb =
    R"({"optimizer": {"type": "OneBitLamb", "params": {"lr": 0.1, "freeze_step": 2}},
        "sotto": {"granularity": "bucket", "bucket_elements": 8192, "overlap": {"unused": "zero"}}})";

TEST(CapiOverlapStep, RoundsAreSteps) {
  EXPECT_EQ(run_world(3, {},
                      [](Member& self) {
                        Steps plain(self, kLamb), rounds(self, kLamb);
                        sotto_overlap* overlap = nullptr;
                        OK(sotto_overlap_create_step(rounds.optim, nullptr, &overlap));
                        for (int step = 0; step < 5; ++step) {
                          const float x = static_cast<float>((self.rank + 2) * (step + 1)) / 8;
                          plain.gradients.write(x);
                          OK(sotto_optim_step(plain.optim, nullptr, nullptr));
                          Gradients moved;
                          moved.write(x);
                          sotto_op* op = begin(overlap);
                          const uint64_t all[] = {5, 4, 3, 2, 1, 0};
                          std::vector<sotto_buffer> places(moved.buffers.rbegin(),
                                                           moved.buffers.rend());
                          OK(sotto_overlap_ready(overlap, all, places.data(), 6, nullptr));
                          finish(overlap, op);
                          moved.expect(x, "a gradient that was read");
                          require(plain.params == rounds.params, "parameters differ");
                        }
                        const sotto_overlap_info info = info_of(overlap);
                        require(info.rounds == 5 && info.payload_bytes_per_round > 0, "figures");
                        OK(sotto_overlap_destroy(overlap));
                        OK(sotto_optim_destroy(rounds.optim));
                        OK(sotto_optim_destroy(plain.optim));
                      }),
            "");
}

TEST(CapiOverlapStep, WrongCallsAreNamed) {
  EXPECT_EQ(
      run_world(2, {},
                [](Member& self) {
                  Steps steps(self, kLamb);
                  sotto_overlap* overlap = nullptr;
                  FAILS(sotto_overlap_create_step(steps.optim, R"({"bucket_bytes": 7})", &overlap),
                        SOTTO_E_INVALID_ARGUMENT, "set sotto.bucket_elements");
                  OK(sotto_overlap_create_step(steps.optim, "{}", &overlap));
                  const sotto_call sum =
                      call_with([](sotto_call& c) { c.reduce = SOTTO_REDUCE_SUM; });
                  sotto_op* op = nullptr;
                  FAILS(sotto_overlap_begin(overlap, &sum, &op), SOTTO_E_INVALID_ARGUMENT,
                        "rounds of this overlap are steps");
                  op = begin(overlap);
                  FAILS(sotto_optim_step(steps.optim, nullptr, nullptr), SOTTO_E_BUSY, "in flight");
                  FAILS(sotto_optim_set(steps.optim, "lr", -1, 0.5), SOTTO_E_BUSY, "in flight");
                  sotto_overlap* second = nullptr;
                  FAILS(sotto_overlap_create_step(steps.optim, "{}", &second), SOTTO_E_BUSY,
                        "a step of this optimizer is in flight");
                  FAILS(sotto_overlap_finish(overlap), SOTTO_E_INVALID_STATE,
                        "6 of 6 gradients are missing");
                  const uint64_t number = 1;
                  const sotto_buffer inside = buffer(steps.params[1]);
                  FAILS(sotto_overlap_ready(overlap, &number, &inside, 1, nullptr),
                        SOTTO_E_INVALID_ARGUMENT, "grads[0] (", "overlap");
                  FAILS(sotto_overlap_finish(overlap), SOTTO_E_INVALID_STATE,
                        "6 of 6 gradients are missing");
                  OK(sotto_overlap_withdraw(overlap, "no"));
                  FAILS(sotto_op_wait(op, -1), SOTTO_E_CANCELLED,
                        "withdrawn: no; nothing was updated, the group is healthy");
                  OK(sotto_op_release(op));
                  for (const std::vector<float>& p : steps.params)
                    require(p == std::vector<float>(p.size(), 1.0f), "a parameter has changed");
                  uint64_t n = 0;
                  FAILS(sotto_overlap_state_export(overlap, SOTTO_STATE_EXACT, nullptr, 0, &n),
                        SOTTO_E_INVALID_STATE, "sotto_optim_state_export");
                  OK(sotto_overlap_destroy(overlap));
                  OK(sotto_optim_destroy(steps.optim));
                  FAILS(sotto_overlap_create_step(nullptr, nullptr, &overlap),
                        SOTTO_E_INVALID_ARGUMENT, "optim");
                }),
      "");
}

// Steps and rounds take turns, through both stages of the optimizer; a round that comes too early
// changes nothing, and reads nothing of what the step is changing.
TEST(CapiOverlapStep, ARoundIsBusyWhileAStepIsInFlight) {
  for (const bool progress_thread : {false, true}) {
    EXPECT_EQ(run_world(2, {.progress_thread = progress_thread},
                        [&](Member& self) {
                          Steps plain(self, kLamb), mixed(self, kLamb);
                          sotto_overlap* overlap = nullptr;
                          OK(sotto_overlap_create_step(mixed.optim, nullptr, &overlap));
                          for (int k = 0; k < 6; ++k) {
                            const float x = static_cast<float>((self.rank + 2) * (k + 1)) / 8;
                            plain.gradients.write(x);
                            mixed.gradients.write(x);
                            for (int n = 0; n < 2; ++n)
                              OK(sotto_optim_step(plain.optim, nullptr, nullptr));
                            sotto_op *step = nullptr, *round = nullptr;
                            OK(sotto_optim_step(mixed.optim, nullptr, &step));
                            if (!progress_thread) {  // it goes on in calls that wait
                              FAILS(sotto_overlap_begin(overlap, nullptr, &round), SOTTO_E_BUSY,
                                    "in flight");
                              OK(sotto_op_wait(step, -1));
                            }
                            sotto_status status = SOTTO_E_BUSY;
                            while ((status = sotto_overlap_begin(overlap, nullptr, &round)) ==
                                   SOTTO_E_BUSY)
                              std::this_thread::yield();
                            ok(status, "begin");
                            mark(overlap, {0, 1, 2, 3, 4, 5});
                            finish(overlap, round);
                            OK(sotto_op_wait(step, -1));
                            OK(sotto_op_release(step));
                            require(plain.params == mixed.params, "parameters differ");
                          }
                          require(info_of(overlap).rounds == 6, "rounds");
                          OK(sotto_overlap_destroy(overlap));
                          OK(sotto_optim_destroy(mixed.optim));
                          OK(sotto_optim_destroy(plain.optim));
                        }),
              "");
  }
}

// The step in flight waits for gradients, and for those it has no deadline.
TEST(CapiOverlapStep, DestroyingTheOptimizerWithdraws) {
  EXPECT_EQ(run_world(2, {},
                      [](Member& self) {
                        Steps steps(self, kLamb);
                        sotto_overlap* overlap = nullptr;
                        OK(sotto_overlap_create_step(steps.optim, nullptr, &overlap));
                        sotto_op* op = begin(overlap);
                        if (self.rank == 0) {
                          mark(overlap, {2});
                          OK(sotto_optim_destroy(steps.optim));
                        } else {
                          mark(overlap, {0, 1, 2, 3, 4, 5});
                          OK(sotto_overlap_finish(overlap));
                        }
                        FAILS(sotto_op_wait(op, -1), SOTTO_E_CANCELLED,
                              "rank 0 has withdrawn: it has destroyed the optimizer");
                        OK(sotto_op_release(op));
                        if (self.rank == 0)
                          FAILS(sotto_overlap_begin(overlap, nullptr, &op), SOTTO_E_INVALID_STATE,
                                "the optimizer of this overlap has been destroyed");
                        OK(sotto_overlap_destroy(overlap));
                        if (self.rank == 1) OK(sotto_optim_destroy(steps.optim));
                        OK(sotto_barrier(self.comm, nullptr, nullptr));
                      }),
            "");
}

}  // namespace
}  // namespace sotto::test
