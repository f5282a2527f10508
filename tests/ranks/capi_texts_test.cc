// What errors at the C ABI say: what the caller called, whom it concerns and what can be done.
#include <array>
#include <functional>
#include <mutex>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "core/base/text.h"
#include "tests/ranks/capi_outer_model.h"
#include "tests/ranks/capi_support.h"

namespace sotto::test {
namespace {

void lacks(const std::string& text, const std::string& word) {
  require(text.find(word) == std::string::npos, "the text has \"" + word + "\": " + text);
}

constexpr const char* kAdam = R"({"optimizer": {"type": "Adam", "params": {"lr": 0.1}}})";

sotto_status create_optim(const Member& self, const char* json, std::vector<float>* memory,
                          sotto_optim** out) {
  memory->assign(16, 0.0f);
  sotto_param param = SOTTO_PARAM_INIT;
  param.param = buffer(memory->data(), 8);
  param.grad = buffer(memory->data() + 8, 8);
  return sotto_optim_create(self.comm, json, &param, 1, out);
}

class CapiTexts : public testing::TestWithParam<const char*> {
 protected:
  std::string world(int32_t size, const std::function<void(Member&)>& body,
                    int64_t timeout_us = 20'000'000) const {
    WorldOptions options;
    options.transport = GetParam();
    options.timeout_us = timeout_us;
    return run_world(size, options, body);
  }
};

// One rank splits or creates, the other reduces: both texts name the function that was called.
TEST_P(CapiTexts, SplitAndCreateAreNamedAsTheyWereCalled) {
  for (const bool split : {true, false}) {
    EXPECT_EQ(world(2,
                    [&](Member& self) {
                      std::vector<float> x(8), memory;
                      sotto_comm* half = nullptr;
                      sotto_optim* optim = nullptr;
                      sotto_status status = SOTTO_OK;
                      if (self.rank == 1) {
                        const sotto_buffer b = buffer(x);
                        status = sotto_all_reduce(self.comm, &b, &b, 1, nullptr, nullptr);
                      } else if (split) {
                        status = sotto_comm_split(self.comm, 0, 0, &half);
                      } else {
                        status = create_optim(self, kAdam, &memory, &optim);
                      }
                      FAILS(status, SOTTO_E_PROTOCOL,
                            split ? "called sotto_comm_split" : "called sotto_optim_create",
                            "called all_reduce(sum, fp32, 8 elements");
                      lacks(sotto_last_error(), "all_gather");
                      lacks(sotto_last_error(), "uint8");
                    }),
              "");
  }
}

TEST_P(CapiTexts, ASplitThatTimesOutIsNamed) {
  EXPECT_EQ(world(
                2,
                [&](Member& self) {
                  sotto_comm* half = nullptr;
                  if (self.rank == 0) {
                    const sotto_status status = sotto_comm_split(self.comm, 0, 0, &half);
                    FAILS(status, SOTTO_E_TIMEOUT, "sotto_comm_split");
                    lacks(sotto_last_error(), "all_gather");
                  } else {
                    while (sotto_comm_error(self.comm, nullptr) == SOTTO_OK)
                      OK(sotto_context_poll(self.context, 10'000));
                  }
                },
                10'000'000),
            "");
}

TEST_P(CapiTexts, SendAndReceiveHaveNoInternalNumbers) {
  EXPECT_EQ(world(2,
                  [&](Member& self) {
                    std::vector<float> x(100'000);
                    const sotto_buffer b = buffer(x);
                    const sotto_call call = call_with([](auto& c) { c.timeout_us = 300'000; });
                    if (self.rank == 0) {
                      FAILS(sotto_recv(self.comm, &b, 1, 1, &call, nullptr), SOTTO_E_TIMEOUT,
                            "send/recv 0 from rank 1 to rank 0");
                      lacks(sotto_last_error(), "operation 140737488");
                      lacks(sotto_last_error(), "operation 9223372036");
                    } else {
                      while (sotto_comm_error(self.comm, nullptr) == SOTTO_OK)
                        OK(sotto_context_poll(self.context, 10'000));
                    }
                  }),
            "");
}

// Whatever the bytes of a reason: texts and reports are UTF-8, and the same on all ranks.
TEST_P(CapiTexts, AReasonToAbortMayHoldAnyBytes) {
  std::string euros = "a";
  while (euros.size() < 75'000) euros += "\xe2\x82\xac";
  for (const std::string& reason :
       {std::string("caf\xe9"), euros, "a" + euros, std::string(30'000, '\xff')}) {
    std::array<std::string, 2> causes;
    EXPECT_EQ(world(2,
                    [&](Member& self) {
                      OK(sotto_barrier(self.comm, nullptr, nullptr));
                      if (self.rank == 0) OK(sotto_comm_abort(self.comm, reason.c_str()));
                      FAILS(sotto_barrier(self.comm, nullptr, nullptr), SOTTO_E_ABORTED, "aborted");
                      const char* cause = nullptr;
                      FAILS(sotto_comm_error(self.comm, &cause), SOTTO_E_ABORTED, "aborted");
                      causes[static_cast<size_t>(self.rank)] = cause;
                      const auto report = [&](char* text, uint64_t room, uint64_t* length) {
                        return sotto_comm_report(self.comm, nullptr, text, room, length);
                      };
                      require(nlohmann::json::parse(read_all(report))["cause"] == cause, "cause");
                    }),
              "");
    EXPECT_TRUE(is_utf8(causes[0]));
    EXPECT_EQ(causes[0], causes[1]);
  }
}

// A root of these receives nothing, and may have completed when it hears of another root. Then the
// next call says so, with both sides of the one that differs.
TEST_P(CapiTexts, DifferingRootsAreNamedAtTheLatestInTheNextCall) {
  for (const int32_t size : {2, 4}) {
    for (const bool scatters : {false, true}) {
      EXPECT_EQ(world(size,
                      [&](Member& self) {
                        const int32_t root = self.rank % 2;
                        std::vector<float> one(8), all(8 * static_cast<size_t>(size));
                        const sotto_buffer a = buffer(one), b = buffer(all);
                        sotto_status status =
                            scatters
                                ? sotto_scatter(self.comm, &b, &a, 1, root, nullptr, nullptr)
                                : sotto_broadcast(self.comm, &a, &a, 1, root, nullptr, nullptr);
                        if (status == SOTTO_OK) status = sotto_barrier(self.comm, nullptr, nullptr);
                        FAILS(status, SOTTO_E_PROTOCOL, scatters ? "scatter(" : "broadcast(",
                              "root 0", "root 1");
                      }),
                "")
          << size << " ranks, scatter " << scatters;
    }
  }
}

TEST_P(CapiTexts, DifferingConfigurationsNameTheKeyAndBothValues) {
  struct Pair {
    std::string first, second;
    std::vector<std::string> words;
  };
  const auto groups = [](int n, const char* last) {
    std::string list;
    for (int i = 0; i < n; ++i) list += "{}, ";
    return R"("sotto": {"param_groups": [)" + list + last + "]}";
  };
  const std::vector<Pair> pairs = {
      {R"("gradient_clipping": 1.0)",
       R"("gradient_clipping": 2.5)",
       {"gradient_clipping is 1 on rank 0", "and 2.5 on rank 1"}},
      {R"("sotto": {"gradient_codec": {"type": "int8"}})",
       R"("sotto": {"gradient_codec": {"type": "int4"}})",
       {"sotto.gradient_codec.type is int8 on rank 0 and int4 on rank 1"}},
      {R"("sotto": {"param_groups": [{"weight_decay": 0.5}]})",
       R"("bf16": {"enabled": false})",
       {"optimizer.params.weight_decay of parameter group 0 is 0.5 on rank 0 and 0 on rank 1"}},
      {groups(1, "{}"),
       groups(2, "{}"),
       {"number of parameter groups (sotto.param_groups) is 2 on rank 0 and 3 on rank 1"}},
      {groups(400, R"({"betas": [0.9, 0.99]}, {}, {"lr": 1})"),
       groups(400, R"({"betas": [0.9, 0.999]}, {}, {"lr": 2})"),
       {"optimizer.params.betas[1] of parameter group 400 is 0.99 on rank 0 and 0.999 on rank 1"}},
      {R"("scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}})",
       R"("scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 20}})",
       {"scheduler.params.warmup_num_steps is 10 on rank 0 and 20 on rank 1"}}};
  for (const Pair& pair : pairs) {
    EXPECT_EQ(world(2,
                    [&](Member& self) {
                      const std::string json =
                          R"({"optimizer": {"type": "Adam", "params": {"lr": 0.1}}, )" +
                          (self.rank == 0 ? pair.first : pair.second) + "}";
                      std::vector<float> memory;
                      sotto_optim* optim = nullptr;
                      fails(create_optim(self, json.c_str(), &memory, &optim), SOTTO_E_PROTOCOL,
                            pair.words, "create");
                      // Nothing was lost: the comm is healthy.
                      OK(create_optim(self, kAdam, &memory, &optim));
                      OK(sotto_optim_destroy(optim));
                    }),
              "");
  }
}

// A state of other ranks: what can be done with it.
TEST_P(CapiTexts, StateOfAnotherWorldSize) {
  constexpr const char* kOnebit =
      R"({"optimizer": {"type": "OneBitAdam", "params": {"lr": 0.1, "freeze_step": 1}}})";
  std::vector<char> exact;
  EXPECT_EQ(world(3,
                  [&](Member& self) {
                    std::vector<float> memory;
                    sotto_optim* optim = nullptr;
                    OK(create_optim(self, kOnebit, &memory, &optim));
                    for (int i = 0; i < 4; ++i) OK(sotto_optim_step(optim, nullptr, nullptr));
                    uint64_t length = 0;
                    OK(sotto_optim_state_export(optim, SOTTO_STATE_EXACT, nullptr, 0, &length));
                    if (self.rank == 1) {
                      exact.resize(length);
                      OK(sotto_optim_state_export(optim, SOTTO_STATE_EXACT, exact.data(), length,
                                                  &length));
                    }
                    OK(sotto_optim_destroy(optim));
                  }),
            "");
  EXPECT_EQ(world(2,
                  [&](Member& self) {
                    std::vector<float> memory;
                    sotto_optim* optim = nullptr;
                    OK(create_optim(self, kOnebit, &memory, &optim));
                    const auto take = [&](sotto_state_mode mode) {
                      return sotto_optim_state_import(optim, mode, exact.data(), exact.size());
                    };
                    FAILS(take(SOTTO_STATE_EXACT), SOTTO_E_INVALID_ARGUMENT,
                          "of rank 1 of 3, this is rank", "in mode reset",
                          "have the 3 ranks export it in mode mean");
                    for (const sotto_state_mode mode : {SOTTO_STATE_MEAN, SOTTO_STATE_CONFIGURED}) {
                      FAILS(take(mode), SOTTO_E_INVALID_ARGUMENT, "in mode exact on rank 1 of 3",
                            "in mode reset", "have the 3 ranks export it in mode mean");
                    }
                    OK(take(SOTTO_STATE_RESET));
                    OK(sotto_optim_destroy(optim));
                  }),
            "");
}

// Outer steps have no mode mean for error feedback, and none is advised.
TEST_P(CapiTexts, OuterStateOfAnotherWorldSize) {
  const std::string json = mean_json(R"("period": 1, "codec": "onebit")");
  std::string exact;
  EXPECT_EQ(
      world(3,
            [&](Member& self) {
              OuterModel model;
              sotto_outer* outer = new_outer(self, json, model);
              OK(sotto_outer_step(outer, nullptr, nullptr));
              const std::string state = read_all([&](char* buf, uint64_t cap, uint64_t* out_len) {
                return sotto_outer_state_export(outer, SOTTO_STATE_EXACT, buf, cap, out_len);
              });
              if (self.rank == 1) exact = state;
              OK(sotto_outer_destroy(outer));
            }),
      "");
  EXPECT_EQ(
      world(2,
            [&](Member& self) {
              OuterModel model;
              sotto_outer* outer = new_outer(self, json, model);
              FAILS(sotto_outer_state_import(outer, SOTTO_STATE_EXACT, exact.data(), exact.size()),
                    SOTTO_E_INVALID_ARGUMENT, "of rank 1 of 3", "in mode reset");
              lacks(sotto_last_error(), "mode mean");
              OK(sotto_outer_destroy(outer));
            }),
      "");
}

INSTANTIATE_TEST_SUITE_P(Transports, CapiTexts, testing::Values("inproc", "tcp"),
                         [](const auto& instance) { return std::string(instance.param); });

TEST(CapiTextsOfSetUp, AUniqueIdThatWasUsed) {
  for (const char* transport : {"tcp", "inproc"}) {
    setenv("SOTTO_TRANSPORT", transport, 1);
    sotto_context* first = new_context();
    sotto_unique_id id;
    OK(sotto_unique_id_create(first, &id));
    unsetenv("SOTTO_TRANSPORT");
    EXPECT_EQ(run_ranks(2,
                        [&](int rank) {
                          sotto_context* context = rank == 0 ? first : new_context();
                          sotto_comm_config config = SOTTO_COMM_CONFIG_INIT;
                          config.rank = rank;
                          config.size = 2;
                          config.id = &id;
                          config.timeout_us = 20'000'000;
                          sotto_comm *comm = nullptr, *again = nullptr;
                          OK(sotto_comm_create(context, &config, &comm));
                          for (int i = 0; i < 2; ++i) {
                            FAILS(sotto_comm_create(context, &config, &again),
                                  SOTTO_E_INVALID_ARGUMENT, "the unique id has been used before",
                                  "One id makes one comm", "sotto_unique_id_create");
                          }
                          OK(sotto_barrier(comm, nullptr, nullptr));
                          OK(sotto_comm_destroy(comm));
                          FAILS(sotto_comm_create(context, &config, &again),
                                SOTTO_E_INVALID_ARGUMENT, "has been used before");
                          OK(sotto_context_destroy(context));
                        }),
              "");
  }
}

TEST(CapiTextsOfSetUp, TwoRanksOfOneContext) {
  for (const char* transport : {"tcp", "inproc"}) {
    setenv("SOTTO_TRANSPORT", transport, 1);
    sotto_context* context = new_context();
    sotto_unique_id id;
    OK(sotto_unique_id_create(context, &id));
    unsetenv("SOTTO_TRANSPORT");
    std::mutex mutex;
    std::string words;
    EXPECT_EQ(run_ranks(2,
                        [&](int rank) {
                          sotto_comm_config config = SOTTO_COMM_CONFIG_INIT;
                          config.rank = rank;
                          config.size = 2;
                          config.id = &id;
                          config.timeout_us = 2'000'000;
                          sotto_comm* comm = nullptr;
                          require(sotto_comm_create(context, &config, &comm) != SOTTO_OK, "made");
                          const std::lock_guard lock(mutex);
                          words += sotto_last_error();
                        }),
              "");
    EXPECT_NE(words.find("ranks that are threads need a context each"), std::string::npos) << words;
    OK(sotto_context_destroy(context));
  }
}

// The rank that made the id no longer listens when its meeting has failed.
TEST(CapiTextsOfSetUp, AUniqueIdWhoseMeetingFailed) {
  setenv("SOTTO_TRANSPORT", "tcp", 1);
  sotto_context* context = new_context();
  sotto_unique_id id;
  OK(sotto_unique_id_create(context, &id));
  unsetenv("SOTTO_TRANSPORT");
  sotto_comm_config config = SOTTO_COMM_CONFIG_INIT;
  config.size = 2;
  config.id = &id;
  config.timeout_us = 200'000;
  sotto_comm* comm = nullptr;
  FAILS(sotto_comm_create(context, &config, &comm), SOTTO_E_TIMEOUT, "1");
  FAILS(sotto_comm_create(context, &config, &comm), SOTTO_E_INVALID_ARGUMENT,
        "has been used before", "its ranks did not come together");
  OK(sotto_context_destroy(context));
}

TEST(CapiTextsOfSetUp, ARankOutOfRangeIsNamedWithoutAnId) {
  sotto_context* context = new_context();
  sotto_comm* comm = nullptr;
  for (const int32_t rank : {2, 7, -1}) {
    sotto_comm_config config = SOTTO_COMM_CONFIG_INIT;
    config.rank = rank;
    config.size = 2;
    FAILS(sotto_comm_create(context, &config, &comm), SOTTO_E_INVALID_ARGUMENT,
          "rank is " + std::to_string(rank), "0 to 1");
  }
  OK(sotto_context_destroy(context));
}

// Who has set the variables is not known.
TEST(CapiTextsOfSetUp, VariablesWithoutARendezvous) {
  setenv("SOTTO_RANK", "1", 1);
  setenv("SOTTO_WORLD_SIZE", "3", 1);
  sotto_context* context = new_context();
  sotto_comm* comm = nullptr;
  FAILS(sotto_comm_create(context, nullptr, &comm), SOTTO_E_INVALID_ARGUMENT,
        "the environment says 3 ranks (SOTTO_RANK=1, SOTTO_WORLD_SIZE=3)", "no rendezvous is known",
        "SOTTO_RENDEZVOUS=tcp://");
  lacks(sotto_last_error(), "started");
  unsetenv("SOTTO_RANK");
  unsetenv("SOTTO_WORLD_SIZE");
  OK(sotto_context_destroy(context));
}

// Requests that are no files: the text does not quote them.
TEST(CapiTextsOfJson, NestedTooDeeply) {
  const auto nested = [](const std::string& before, size_t levels, const std::string& behind) {
    return before + std::string(levels, '[') + std::string(levels, ']') + behind;
  };
  EXPECT_EQ(
      run_world(
          1, {},
          [&](Member& self) {
            std::vector<float> x(4), memory;
            const sotto_buffer b = buffer(x);
            sotto_optim* optim = nullptr;
            OK(create_optim(self, kAdam, &memory, &optim));
            struct Request {
              const char* name;
              std::string before, behind;  // of lists that are one level deep themselves
              std::function<sotto_status(const char*)> call;
            };
            sotto_codec* codec = nullptr;
            sotto_overlap* overlap = nullptr;
            uint64_t length = 0;
            const std::vector<Request> requests{
                {"plan", R"({"kind": "all_reduce", "counts": )", "}",
                 [&](const char* json) {
                   return sotto_plan_report(self.comm, json, nullptr, 0, &length);
                 }},
                {"codec", R"({"type": "onebit", "scale": )", "}",
                 [&](const char* json) {
                   return sotto_codec_create(self.comm, json, &b, 1, &codec);
                 }},
                {"predict", R"({"ranks": 2, "bandwidth_mbit": 100, "params": )", "}",
                 [&](const char* json) { return sotto_predict_report(json, nullptr, 0, &length); }},
                {"values", R"({"optimizer.params.lr": )", "}",
                 [&](const char* json) {
                   return sotto_config_resolve(kAdam, json, nullptr, 0, &length);
                 }},
                {"overlap", R"({"bucket_bytes": )", "}",
                 [&](const char* json) {
                   return sotto_overlap_create(self.comm, json, &b, 1, &overlap);
                 }},
                {"overlap of steps", R"({"unused": )", "}",
                 [&](const char* json) {
                   return sotto_overlap_create_step(optim, json, &overlap);
                 }},
            };
            for (const Request& r : requests) {
              for (const size_t levels : {64, 1000, 300'000}) {
                const std::string json = nested(r.before, levels, r.behind);
                fails(r.call(json.c_str()), SOTTO_E_INVALID_ARGUMENT,
                      {"nested more than 64 levels deep"}, r.name);
                lacks(sotto_last_error(), "[[");
              }
              // Allowed, and a value that is refused or not.
              const std::string json = nested(r.before, 63, r.behind);
              (void)r.call(json.c_str());
              lacks(sotto_last_error(), "nested");
              // Never closed.
              const std::string open = r.before + std::string(300'000, '[');
              require(r.call(open.c_str()) == SOTTO_E_INVALID_ARGUMENT, r.name);
              require(std::string(sotto_last_error()).size() < 1000, "a long text");
            }
            require(codec == nullptr && overlap == nullptr, "a handle of what was refused");
            OK(sotto_optim_destroy(optim));
          }),
      "");
}

}  // namespace
}  // namespace sotto::test
