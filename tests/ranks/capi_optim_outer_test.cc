// Optimizers whose file has "sotto": {"outer": ...}: the same as an optimizer of one rank and an
// outer optimizer that are called one after the other; their states; what they refuse.
#include <unistd.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "tests/ranks/capi_optim_outer_model.h"
#include "tests/ranks/capi_outer_model.h"

namespace sotto::test {
namespace {

std::vector<char> export_of(sotto_optim* optim, sotto_state_mode mode) {
  uint64_t n = 0;
  OK(sotto_optim_state_export(optim, mode, nullptr, 0, &n));
  std::vector<char> blob(n);
  OK(sotto_optim_state_export(optim, mode, blob.data(), n, &n));
  return blob;
}

void import_into(sotto_optim* optim, sotto_state_mode mode, const std::vector<char>& blob) {
  OK(sotto_optim_state_import(optim, mode, blob.data(), blob.size()));
}

std::vector<float> all_of(const Member& self, const std::vector<float>& mine) {
  std::vector<float> from = mine, all(mine.size() * static_cast<size_t>(self.size));
  const sotto_buffer in = buffer(from), out = buffer(all);
  OK(sotto_all_gather(self.comm, &in, &out, 1, nullptr, nullptr));
  return all;
}

// Every rank has the first one's.
void expect_alike(const Member& self, const Model& model, const std::string& what) {
  for (const std::vector<float>& w : model.weights) {
    const std::vector<float> all = all_of(self, w);
    for (size_t i = 0; i < all.size(); ++i)
      require(all[i] == all[i % w.size()], what + ": ranks differ in element " + std::to_string(i));
  }
}

// ---- the same as calling both ----

void compare_with_both(const Member& self, const std::string& optimizer, const std::string& outer) {
  Model one(self.rank), two(self.rank);
  sotto_optim* composed = new_optim(self, file(optimizer, outer).c_str(), one);
  Member alone = self;
  OK(sotto_comm_split(self.comm, self.rank, 0, &alone.comm));
  sotto_optim* inner = new_optim(alone, (R"({"optimizer": )" + optimizer + "}").c_str(), two);
  std::vector<sotto_param> averaged = two.params;
  for (sotto_param& p : averaged) p.grad = {};
  sotto_outer* by_hand = nullptr;
  OK(sotto_outer_create(self.comm, outer.c_str(), averaged.data(), averaged.size(), &by_hand));
  for (int n = 1; n <= 14; ++n) {
    draw(one, self.rank, n);
    draw(two, self.rank, n);
    train(composed);
    sotto_optim_info info = {};
    info.struct_size = sizeof info;
    OK(sotto_optim_get_info(inner, &info));
    OK(sotto_outer_set(by_hand, "lr", info.lr));
    train(inner);
    step(by_hand);
    expect_same(one, two, optimizer + outer + ", step " + std::to_string(n));
  }
  sotto_outer* handle = outer_of(composed);
  OK(sotto_outer_flush(handle, nullptr, nullptr));
  OK(sotto_outer_flush(by_hand, nullptr, nullptr));
  expect_same(one, two, optimizer + outer + ", flush");
  expect_alike(self, one, optimizer + outer);
  const sotto_outer_info info = info_of(handle);
  same(info.step, 14, "step");
  OK(sotto_outer_destroy(handle));
  OK(sotto_optim_destroy(composed));
  OK(sotto_outer_destroy(by_hand));
  OK(sotto_optim_destroy(inner));
  OK(sotto_comm_destroy(alone.comm));
}

TEST(CapiOptimOuter, IsAnOptimizerOfOneRankAndOuterSteps) {
  const char* const optimizers[] = {
      kAdamW, R"({"type": "Lamb", "params": {"lr": 0.02}})",
      R"({"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}})",
      R"({"type": "OneBitLamb", "params": {"lr": 0.02, "freeze_step": 4}})",
      R"({"type": "OneBitAdam", "params": {"lr": 0.02, "freeze_step": 4}})"};
  const char* const outers[] = {kCo2, R"({"preset": "slowmo", "period": 4})",
                                R"({"preset": "co2", "period": 2, "codec": "onebit"})",
                                R"({"preset": "local_sgd", "period": 4, "warmup_steps": 3})",
                                R"({"preset": "streaming_diloco", "period": 4, "delay": 1,)"
                                R"( "fragments": 2})"};
  for (const int size : {1, 2, 3}) {
    EXPECT_EQ(run_world(size, {},
                        [&](Member& self) {
                          for (const char* optimizer : optimizers) {
                            for (const char* outer : outers)
                              compare_with_both(self, optimizer, outer);
                          }
                        }),
              "");
  }
}

// ---- steps before outer steps begin, which average gradients ----

constexpr int kSynchronous = 4;

// Up to the last of them the same as an optimizer of the group without outer steps; then the same
// as one of this rank alone that has its state, and outer steps by hand that begin with its
// parameters.
void compare_with_group(const Member& self, const std::string& optimizer, const std::string& outer,
                        const std::string& more) {
  const std::string plain = R"({"optimizer": )" + optimizer + more + "}";
  const std::string switched = "{" + outer + R"(, "warmup_steps": )" +
                               std::to_string(kSynchronous) + R"(, "every_step": "gradients"})";
  const std::string what = optimizer + outer + more;
  Model one(self.rank), two(self.rank);
  sotto_optim* composed = new_optim(self, file(optimizer, switched, more).c_str(), one);
  sotto_optim* inner = new_optim(self, plain.c_str(), two);
  Member alone = self;
  OK(sotto_comm_split(self.comm, self.rank, 0, &alone.comm));
  sotto_outer* by_hand = nullptr;
  sotto_outer* handle = outer_of(composed);
  for (int n = 1; n <= 14; ++n) {
    draw(one, self.rank, n);
    draw(two, self.rank, n);
    if (n == kSynchronous + 1) {
      const std::vector<char> state = export_of(inner, SOTTO_STATE_RESET);
      OK(sotto_optim_destroy(inner));
      inner = new_optim(alone, plain.c_str(), two);
      import_into(inner, SOTTO_STATE_RESET, state);
      std::vector<sotto_param> averaged = two.params;
      for (sotto_param& p : averaged) p.grad = {};
      OK(sotto_outer_create(self.comm, ("{" + outer + "}").c_str(), averaged.data(),
                            averaged.size(), &by_hand));
    }
    train(composed);
    sotto_optim_info info = {};
    info.struct_size = sizeof info;
    OK(sotto_optim_get_info(inner, &info));
    train(inner);
    if (by_hand != nullptr) {
      OK(sotto_outer_set(by_hand, "lr", info.lr));
      step(by_hand);
    }
    expect_same(one, two, what + ", step " + std::to_string(n));
    const Model live = one;
    OK(sotto_outer_swap(handle, nullptr, nullptr));
    expect_alike(self, one, what + ", the anchor");
    if (n <= kSynchronous) expect_same(one, live, what + ": the anchor follows");
    OK(sotto_outer_swap(handle, nullptr, nullptr));
  }
  OK(sotto_outer_flush(handle, nullptr, nullptr));
  OK(sotto_outer_flush(by_hand, nullptr, nullptr));
  expect_same(one, two, what + ", flush");
  OK(sotto_outer_destroy(handle));
  OK(sotto_optim_destroy(composed));
  OK(sotto_outer_destroy(by_hand));
  OK(sotto_optim_destroy(inner));
  OK(sotto_comm_destroy(alone.comm));
}

TEST(CapiOptimOuter, StepsBeforeOuterStepsAverageGradients) {
  const char* const optimizers[] = {kAdamW, R"({"type": "Lamb", "params": {"lr": 0.02}})",
                                    R"({"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}})"};
  const char* const outers[] = {R"("preset": "co2", "period": 3)",
                                R"("preset": "slowmo", "period": 4)",
                                R"("preset": "streaming_diloco", "period": 4, "delay": 1,)"
                                R"( "fragments": 2)"};
  const char* const more[] = {"", R"(, "gradient_clipping": 0.5)",
                              R"(, "communication_data_type": "fp16")"};
  for (const int size : {1, 2, 3}) {
    EXPECT_EQ(run_world(size, {},
                        [&](Member& self) {
                          for (size_t i = 0; i < 9; ++i)
                            compare_with_group(self, optimizers[i / 3], outers[i % 3],
                                               more[(i + i / 3) % 3]);
                        }),
              "");
  }
}

// Nobody updates, every call says who it was, and the step counts on all ranks.
TEST(CapiOptimOuter, ANanBeforeOuterStepsConcernsAllRanks) {
  const std::string json = file(
      kAdamW, R"({"preset": "co2", "period": 3, "switch_step": 4, "every_step": "gradients"})");
  for (const int bad : {1, 2, kSynchronous}) {
    EXPECT_EQ(run_world(2, {},
                        [&](Member& self) {
                          Model model(self.rank);
                          sotto_optim* optim = new_optim(self, json.c_str(), model);
                          for (int n = 1; n <= 9; ++n) {
                            draw(model, self.rank, n);
                            const Model before = model;
                            if (n == bad && self.rank == 1)
                              model.gradients[1][3] = std::numeric_limits<float>::quiet_NaN();
                            const sotto_status status = sotto_optim_step(optim, nullptr, nullptr);
                            if (n != bad) {
                              ok(status, "step");
                              continue;
                            }
                            fails(status, SOTTO_E_NONFINITE, {"nothing was updated"}, "step");
                            expect_same(model, before, "a step with NaN");
                          }
                          sotto_optim_info info = {};
                          info.struct_size = sizeof info;
                          OK(sotto_optim_get_info(optim, &info));
                          same(info.step, 8, "updates");
                          sotto_outer* outer = outer_of(optim);
                          same(info_of(outer).step, 9, "inner steps");
                          OK(sotto_outer_flush(outer, nullptr, nullptr));
                          expect_alike(self, model, "flush");
                          OK(sotto_outer_destroy(outer));
                          OK(sotto_optim_destroy(optim));
                        }),
              "")
        << "NaN in step " << bad;
  }
}

TEST(CapiOptimOuter, GradientsByHandAreRefused) {
  EXPECT_EQ(run_world(2, {},
                      [&](Member& self) {
                        const Model model(self.rank);
                        std::vector<sotto_param> params = model.params;
                        for (sotto_param& p : params) p.grad = {};
                        sotto_outer* outer = nullptr;
                        FAILS(sotto_outer_create(
                                  self.comm, R"({"warmup_steps": 2, "every_step": "gradients"})",
                                  params.data(), params.size(), &outer),
                              SOTTO_E_INVALID_ARGUMENT, "every_step: found gradients",
                              "create an optimizer with");
                      }),
            "");
}

TEST(CapiOptimOuter, RanksAverageTheSame) {
  EXPECT_EQ(
      run_world(2, {},
                [&](Member& self) {
                  const Model model(self.rank);
                  const std::string every = self.rank == 0 ? "gradients" : "parameters";
                  const std::string json =
                      file(kAdamW, R"({"warmup_steps": 2, "every_step": ")" + every + "\"}");
                  sotto_optim* optim = nullptr;
                  FAILS(sotto_optim_create(self.comm, json.c_str(), model.params.data(), 2, &optim),
                        SOTTO_E_PROTOCOL, "sotto.outer.every_step", "rank 1");
                }),
      "");
}

// ---- states ----

// A new optimizer that has the state of step k goes on as the old one, whose average is pending.
TEST(CapiOptimOuter, ContinuesFromEveryStepBitForBit) {
  for (const char* settings : {R"({"preset": "co2", "period": 3, "codec": "onebit"})",
                               R"({"preset": "slowmo", "period": 3})",
                               R"({"preset": "co2", "period": 3, "clip_units": "grad"})",
                               R"({"preset": "co2", "period": 3, "warmup_steps": 4,)"
                               R"( "every_step": "gradients"})"}) {
    const std::string json = file(R"({"type": "Lamb", "params": {"lr": 0.02}})", settings,
                                  R"(, "scheduler": {"type": "WarmupLR",)"
                                  R"( "params": {"warmup_min_lr": 0.001, "warmup_max_lr": 0.02}})");
    EXPECT_EQ(run_world(2, {},
                        [&](Member& self) {
                          constexpr int kSteps = 10;
                          Model whole(self.rank);
                          sotto_optim* undisturbed = new_optim(self, json.c_str(), whole);
                          std::vector<std::vector<char>> blobs;
                          for (int n = 0; n < kSteps; ++n) {
                            blobs.push_back(export_of(undisturbed, SOTTO_STATE_EXACT));
                            draw(whole, self.rank, n);
                            train(undisturbed);
                          }
                          const Model before = whole;
                          blobs.push_back(export_of(undisturbed, SOTTO_STATE_EXACT));
                          sotto_outer* last = outer_of(undisturbed);
                          OK(sotto_outer_flush(last, nullptr, nullptr));
                          for (int k = 0; k <= kSteps; ++k) {
                            const std::string from = "from step " + std::to_string(k);
                            Model model(self.rank);
                            sotto_optim* resumed = new_optim(self, json.c_str(), model);
                            import_into(resumed, SOTTO_STATE_EXACT, blobs[static_cast<size_t>(k)]);
                            for (int n = k; n < kSteps; ++n) {
                              draw(model, self.rank, n);
                              train(resumed);
                            }
                            expect_same(model, before, from);
                            sotto_outer* outer = outer_of(resumed);
                            OK(sotto_outer_flush(outer, nullptr, nullptr));
                            expect_same(model, whole, from + ", flush");
                            OK(sotto_outer_destroy(outer));
                            OK(sotto_optim_destroy(resumed));
                          }
                          OK(sotto_outer_destroy(last));
                          OK(sotto_optim_destroy(undisturbed));
                        }),
              "");
  }
}

// A rank's state on three ranks: parameters are the anchor on all of them, and they go on alike.
TEST(CapiOptimOuter, AnyRanksLoadACommonState) {
  const std::string json = file(kAdamW, kCo2);
  std::vector<char> blob, reset;
  std::vector<float> anchor;
  EXPECT_EQ(run_world(2, {},
                      [&](Member& self) {
                        Model model(self.rank);
                        sotto_optim* optim = new_optim(self, json.c_str(), model);
                        for (int n = 0; n < 7; ++n) {
                          draw(model, self.rank, n);
                          train(optim);
                        }
                        const std::vector<char> mine = export_of(optim, SOTTO_STATE_COMMON);
                        const std::vector<char> other = export_of(optim, SOTTO_STATE_RESET);
                        sotto_outer* outer = outer_of(optim);
                        OK(sotto_outer_swap(outer, nullptr, nullptr));
                        expect_alike(self, model, "the anchor");
                        if (self.rank == 1) {
                          blob = mine;
                          reset = other;
                          anchor = model.weights[0];
                        }
                        OK(sotto_outer_destroy(outer));
                        OK(sotto_optim_destroy(optim));
                      }),
            "");
  EXPECT_EQ(run_world(3, {},
                      [&](Member& self) {
                        for (const bool common : {true, false}) {
                          Model model(self.rank);
                          sotto_optim* optim = new_optim(self, json.c_str(), model);
                          import_into(optim, common ? SOTTO_STATE_COMMON : SOTTO_STATE_RESET,
                                      common ? blob : reset);
                          require(model.weights[0] == anchor, "parameters are not the anchor");
                          FAILS(sotto_optim_state_import(optim, SOTTO_STATE_EXACT, blob.data(),
                                                         blob.size()),
                                SOTTO_E_INVALID_ARGUMENT, "rank 1 of 2");
                          for (int n = 7; n < 13; ++n) {
                            draw(model, self.rank, n);
                            train(optim);
                          }
                          sotto_outer* outer = outer_of(optim);
                          OK(sotto_outer_flush(outer, nullptr, nullptr));
                          expect_alike(self, model, "after the import");
                          require(model.weights[0] != anchor, "nothing was trained");
                          OK(sotto_outer_destroy(outer));
                          OK(sotto_optim_destroy(optim));
                        }
                      }),
            "");
}

// A rank that has loaded another state than the others is named by the next step.
TEST(CapiOptimOuter, RanksWithOtherAnchorsAreFound) {
  const std::string json = file(kAdamW, kCo2);
  EXPECT_EQ(run_world(2, {},
                      [&](Member& self) {
                        Model model(self.rank);
                        sotto_optim* optim = new_optim(self, json.c_str(), model);
                        const std::vector<char> first = export_of(optim, SOTTO_STATE_EXACT);
                        for (int n = 0; n < 4; ++n) {
                          draw(model, self.rank, n);
                          train(optim);
                        }
                        const std::vector<char> later = export_of(optim, SOTTO_STATE_EXACT);
                        import_into(optim, SOTTO_STATE_EXACT, self.rank == 0 ? first : later);
                        FAILS(sotto_optim_step(optim, nullptr, nullptr), SOTTO_E_PROTOCOL,
                              "has restored the state of step");
                        OK(sotto_optim_destroy(optim));
                      }),
            "");
}

// ---- failures of one rank ----

// At every step of a round: that rank's call says so, it takes part in everything else, and the
// others do not notice.
TEST(CapiOptimOuter, ANanConcernsItsRankAlone) {
  const std::string json = file(kAdamW, kCo2);
  for (int bad = 1; bad <= 7; ++bad) {
    EXPECT_EQ(run_world(2, {},
                        [&](Member& self) {
                          Model model(self.rank);
                          sotto_optim* optim = new_optim(self, json.c_str(), model);
                          for (int n = 1; n <= 9; ++n) {
                            draw(model, self.rank, n);
                            if (n == bad && self.rank == 1)
                              model.gradients[1][3] = std::numeric_limits<float>::quiet_NaN();
                            const sotto_status status = sotto_optim_step(optim, nullptr, nullptr);
                            if (n == bad && self.rank == 1) {
                              fails(status, SOTTO_E_NONFINITE,
                                    {"\"b\"", "takes no part in this local step"}, "step");
                            } else {
                              ok(status, "step");
                            }
                          }
                          sotto_optim_info info = {};
                          info.struct_size = sizeof info;
                          OK(sotto_optim_get_info(optim, &info));
                          same(info.step, self.rank == 1 ? 8 : 9, "updates");
                          same(info.skipped_steps, self.rank == 1 ? 1 : 0, "skipped");
                          sotto_outer* outer = outer_of(optim);
                          same(info_of(outer).step, 9, "inner steps");
                          OK(sotto_outer_flush(outer, nullptr, nullptr));
                          expect_alike(self, model, "flush");
                          OK(sotto_outer_destroy(outer));
                          OK(sotto_optim_destroy(optim));
                        }),
              "")
        << "NaN in step " << bad;
  }
}

// ---- figures and refusals ----

// What is announced is what is sent, in the counters of the user's own comm.
TEST(CapiOptimOuter, BytesAreAnnouncedAndCounted) {
  for (const int synchronous : {0, 3}) {
    const std::string json = file(
        kAdamW,
        R"({"preset": "co2", "period": 3, "codec": "onebit", "every_step": "gradients", "warmup_steps": )" +
            std::to_string(synchronous) + "}");
    EXPECT_EQ(
        run_world(
            3, {},
            [&](Member& self) {
              Model model(self.rank);
              sotto_optim* optim = new_optim(self, json.c_str(), model);
              const sotto_comm_counters before = counters_of(self);
              uint64_t announced = 0;
              for (int n = 1; n <= 9; ++n) {
                sotto_optim_info info = {};
                info.struct_size = sizeof info;
                OK(sotto_optim_get_info(optim, &info));
                require((info.payload_bytes_next_step != 0) == (n <= synchronous || n % 3 == 0),
                        "bytes are announced for another step");
                require(info.state_bytes > 4 * 1037 * 5, "state_bytes lacks the anchor");
                announced += info.payload_bytes_next_step;
                draw(model, self.rank, n);
                train(optim);
              }
              (void)export_of(optim, SOTTO_STATE_EXACT);  // waits for the average
              const sotto_comm_counters after = counters_of(self);
              same(after.payload_bytes_sent - before.payload_bytes_sent, announced, "bytes sent");
              same(after.payload_bytes_planned - before.payload_bytes_planned, announced,
                   "bytes planned");
              OK(sotto_optim_destroy(optim));
            }),
        "");
  }
}

TEST(CapiOptimOuter, RefusalsNameTheRemedy) {
  EXPECT_EQ(
      run_world(
          2, {},
          [&](Member& self) {
            Model model(self.rank);
            sotto_optim* optim = nullptr;
            const std::string zeroone = file(R"({"type": "ZeroOneAdam", "params": {}})", kCo2);
            FAILS(sotto_optim_create(self.comm, zeroone.c_str(), model.params.data(), 2, &optim),
                  SOTTO_E_INVALID_ARGUMENT, "optimizer.type", "found ZeroOneAdam with sotto.outer");
            optim = new_optim(self, kLamb, model);
            sotto_outer* outer = nullptr;
            FAILS(sotto_optim_outer(optim, &outer), SOTTO_E_INVALID_STATE, "has no outer steps");
            const std::vector<char> plain = export_of(optim, SOTTO_STATE_EXACT);
            OK(sotto_optim_destroy(optim));
            optim = new_optim(self, file(R"({"type": "Lamb"})", kCo2).c_str(), model);
            outer = outer_of(optim);
            FAILS(sotto_outer_step(outer, nullptr, nullptr), SOTTO_E_INVALID_STATE,
                  "sotto_optim_step");
            FAILS(sotto_outer_set(outer, "lr", 1), SOTTO_E_INVALID_STATE, "sotto_optim_set");
            FAILS(sotto_outer_set_params(outer, &model.params[0].param, nullptr, 1),
                  SOTTO_E_INVALID_STATE, "sotto_optim_set_params");
            uint64_t n = 0;
            FAILS(sotto_outer_state_export(outer, SOTTO_STATE_EXACT, nullptr, 0, &n),
                  SOTTO_E_INVALID_STATE, "sotto_optim_state_export");
            FAILS(sotto_outer_state_import(outer, SOTTO_STATE_EXACT, plain.data(), plain.size()),
                  SOTTO_E_INVALID_STATE, "sotto_optim_state_import");
            OK(sotto_outer_set(outer, "weight", 1));
            OK(sotto_outer_vote(outer, 2));
            // While the anchor is in the place of the parameters.
            OK(sotto_outer_swap(outer, nullptr, nullptr));
            FAILS(sotto_optim_step(optim, nullptr, nullptr), SOTTO_E_INVALID_STATE,
                  "sotto_outer_swap");
            OK(sotto_outer_swap(outer, nullptr, nullptr));
            // States with outer steps, and without.
            const std::vector<char> composed = export_of(optim, SOTTO_STATE_EXACT);
            import_into(optim, SOTTO_STATE_EXACT, plain);
            same(info_of(outer).step, 0, "outer steps of a state without any");
            train(optim);
            OK(sotto_optim_destroy(optim));
            OK(sotto_outer_flush(outer, nullptr, nullptr));  // lives longer than the optimizer
            OK(sotto_outer_destroy(outer));
            optim = new_optim(self, kLamb, model);
            FAILS(sotto_optim_state_import(optim, SOTTO_STATE_EXACT, composed.data(),
                                           composed.size()),
                  SOTTO_E_INVALID_ARGUMENT, "sotto.outer");
            OK(sotto_optim_destroy(optim));
          }),
      "");
}

// The deadline of the file is that of averages, too.
TEST(CapiOptimOuter, TheDeadlineOfTheFile) {
  const std::string limited = R"({"optimizer": )" + std::string(kAdamW) +
                              R"(, "sotto": {"timeout_ms": 300, "outer": )" + kCo2 + "}}";
  EXPECT_EQ(run_world(2, kDefault,
                      [&](Member& self) {
                        Model model(self.rank);
                        sotto_optim* const optim = new_optim(self, limited.c_str(), model);
                        sotto_status status = SOTTO_OK;
                        for (int k = 0; k < 9 && self.rank == 0 && status == SOTTO_OK; ++k)
                          status = sotto_optim_step(optim, nullptr, nullptr);
                        if (self.rank == 0)
                          fails(status, SOTTO_E_TIMEOUT, {"outer step", "(limit 0.3 s)"}, "step");
                        const char* cause = nullptr;
                        while (sotto_comm_error(self.comm, &cause) == SOTTO_OK) usleep(1000);
                        sotto_optim_destroy(optim);
                      }),
            "");
}

}  // namespace
}  // namespace sotto::test
