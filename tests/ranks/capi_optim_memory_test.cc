// Parameters that move in memory or stand still, at the C ABI.
#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/ranks/capi_optim_model.h"

namespace sotto::test {
namespace {

// Parameters that lie elsewhere give what they give in their first place.
TEST(CapiOptim, ParametersThatMove) {
  EXPECT_EQ(
      run_world(
          2, kDefault,
          [](Member& self) {
            Model fixed(self.rank), moving(self.rank);
            sotto_optim* const a = new_optim(self, kOneBitLamb, fixed);
            sotto_optim* const b = new_optim(self, kOneBitLamb, moving);
            std::vector<float> places[2] = {moving.weights[0], moving.weights[1]};
            for (int k = 0; k < 6; ++k) {
              OK(sotto_optim_step(a, nullptr, nullptr));
              std::vector<float> next[2] = {places[0], places[1]};
              for (std::vector<float>& old : places) old.assign(old.size(), 1e30f);
              const sotto_buffer params[] = {buffer(next[0]), buffer(next[1])};
              OK(sotto_optim_set_params(b, params, nullptr, 2));
              OK(sotto_optim_step(b, nullptr, nullptr));
              for (size_t t = 0; t < 2; ++t) {
                require(fixed.weights[t] == next[t], "equal parameters");
                places[t].swap(next[t]);
              }
            }
            sotto_buffer params[] = {buffer(places[0]), buffer(places[1])};
            FAILS(sotto_optim_set_params(b, params, nullptr, 1), SOTTO_E_INVALID_ARGUMENT,
                  "n is 1; it has to be 2");
            FAILS(sotto_optim_set_params(b, nullptr, nullptr, 2), SOTTO_E_INVALID_ARGUMENT,
                  "params");
            FAILS(sotto_optim_set_params(b, params, params, 2), SOTTO_E_INVALID_ARGUMENT,
                  "overlap");
            params[1].count = 36;
            FAILS(sotto_optim_set_params(b, params, nullptr, 2), SOTTO_E_INVALID_ARGUMENT,
                  "params[1], of parameter \"b\", has 36 elements of fp32; registered were 37");
            params[1] = buffer(places[0].data() + 1, 37);
            FAILS(sotto_optim_set_params(b, params, nullptr, 2), SOTTO_E_INVALID_ARGUMENT,
                  "overlap");
            params[1] = buffer(places[1]);
            std::vector<float> copies(37);
            const sotto_buffer none[] = {{}, buffer(copies)};
            FAILS(sotto_optim_set_params(b, params, none, 2), SOTTO_E_INVALID_ARGUMENT,
                  "model_copies[1], of parameter \"b\", has 37 elements; none was registered");
            // Gradients are held against the new places.
            const sotto_buffer grads[] = {buffer(moving.gradients[0]), buffer(places[1])};
            FAILS(sotto_optim_set_grads(b, grads, 2), SOTTO_E_INVALID_ARGUMENT, "overlap");
            OK(sotto_optim_step(b, nullptr, nullptr));
            OK(sotto_optim_destroy(a));
            OK(sotto_optim_destroy(b));
          }),
      "");
}

// Flags may change between micro-batches, where nothing has to be synchronised.
TEST(CapiOptim, ParametersAreFrozenBetweenMicroBatches) {
  EXPECT_EQ(run_world(2, kDefault,
                      [](Member& self) {
                        Model model(self.rank);
                        sotto_optim* const optim = new_optim(self, kOneBitLamb, model);
                        const uint8_t second[] = {0, 1};
                        OK(sotto_optim_accumulate(optim, nullptr, nullptr));
                        OK(sotto_optim_set_frozen(optim, second, 2));
                        const std::vector<float> first = model.weights[0],
                                                 before = model.weights[1];
                        OK(sotto_optim_step(optim, nullptr, nullptr));
                        require(model.weights[1] == before, "the frozen parameter");
                        require(model.weights[0] != first, "the other parameter");
                        OK(sotto_optim_destroy(optim));
                      }),
            "");
}

// Trust ratios of a report are those of steps that have updated the tensor.
TEST(CapiOptim, TensorsThatTakeNoPartHaveNoTrustRatioOfTheStep) {
  const auto tensors = [](const sotto_optim* optim) {
    return nlohmann::json::parse(read_all([&](char* text, uint64_t size, uint64_t* length) {
      return sotto_optim_report(optim, "tensors", text, size, length);
    }))["tensors"];
  };
  for (const char* json : {kLamb, kOneBitLamb}) {
    EXPECT_EQ(run_world(2, kDefault,
                        [&](Member& self) {
                          Model model(self.rank), empty(self.rank, {1000, 0});
                          sotto_optim* const optim = new_optim(self, json, model);
                          const uint8_t second[] = {0, 1}, none[] = {0, 0};
                          const auto step = [&](const uint8_t* frozen) {
                            OK(sotto_optim_set_frozen(optim, frozen, 2));
                            OK(sotto_optim_step(optim, nullptr, nullptr));
                            OK(sotto_optim_set_frozen(optim, none, 2));
                            return tensors(optim)[1];
                          };
                          require(!step(second).contains("trust_ratio"), "none yet");
                          const nlohmann::json before = step(none);
                          require(before["trust_ratio"] > 0, "that of the step");
                          require(step(second)["trust_ratio"] == before["trust_ratio"],
                                  "that of the step before");
                          OK(sotto_optim_destroy(optim));
                          sotto_optim* const other = new_optim(self, json, empty);
                          OK(sotto_optim_step(other, nullptr, nullptr));
                          require(tensors(other)[0].contains("trust_ratio") &&
                                      !tensors(other)[1].contains("trust_ratio"),
                                  "a tensor without elements has none");
                          OK(sotto_optim_destroy(other));
                        }),
              "")
        << json;
  }
}

// A parameter without a gradient before compression cannot move behind it.
TEST(CapiOptim, AParameterThatIsUnfrozenTooLateIsNamed) {
  const Warnings warnings;
  EXPECT_EQ(run_world(2, kDefault,
                      [](Member& self) {
                        Model model(self.rank);
                        const std::vector<float> gradient = model.gradients[1];
                        model.gradients[1].assign(gradient.size(), 0.0f);
                        sotto_optim* const optim = new_optim(self, kOneBitLamb, model);
                        const uint8_t first[] = {1, 0}, second[] = {0, 1}, none[] = {0, 0};
                        OK(sotto_optim_set_frozen(optim, second, 2));
                        for (int k = 0; k < 6; ++k) OK(sotto_optim_step(optim, nullptr, nullptr));
                        OK(sotto_optim_set_frozen(optim, first, 2));
                        model.gradients[1] = gradient;
                        OK(sotto_optim_step(optim, nullptr, nullptr));
                        OK(sotto_optim_set_frozen(optim, none, 2));  // the first one has moved
                        OK(sotto_optim_destroy(optim));
                      }),
            "");
  EXPECT_EQ(warnings.with("parameter \"b\" is no longer frozen and still stands still"), 2u);
  EXPECT_EQ(warnings.with("is no longer frozen"), 2u);
}

// What a configuration's report says that the library holds, next to what it holds.
TEST(CapiOptim, MemoryIsWhatTheReportSays) {
  const char* const jsons[] = {
      kLamb,
      kOneBitAdam,
      kOneBitLamb,
      kZeroOneAdam,
      R"({"optimizer": {"type": "SGD", "params": {"lr": 0.01, "momentum": 0.9}}})",
      R"({"optimizer": {"type": "AdamW", "params": {"lr": 0.01}}, "sotto": {"state_dtype": "bf16"}})",
      R"({"optimizer": {"type": "Lamb", "params": {"lr": 0.01}},
          "sotto": {"gradient_codec": {"type": "int8"}}})",
      R"({"optimizer": {"type": "Adam", "params": {"lr": 0.01}},
          "sotto": {"gradient_codec": {"type": "onebit"}}})"};
  constexpr uint64_t kN = 400'000;
  for (const char* json : jsons) {
    EXPECT_EQ(run_world(2, kDefault,
                        [&](Member& self) {
                          Model model(self.rank, {kN - 37, 37});
                          sotto_optim* const optim = new_optim(self, json, model);
                          sotto_optim_info info = SOTTO_OPTIM_INFO_INIT;
                          uint64_t most = 0;
                          for (int k = 0; k < 8; ++k) {
                            OK(sotto_optim_step(optim, nullptr, nullptr));
                            OK(sotto_optim_get_info(optim, &info));
                            most = std::max(most, info.state_bytes);
                          }
                          // What the full-precision averages of the first stage needed is gone.
                          if (info.stage == 1) require(info.state_bytes + 4 * kN < most, "kept");
                          const auto text = read_all([&](char* buf, uint64_t cap, uint64_t* len) {
                            return sotto_config_report(json, self.size, kN, buf, cap, len);
                          });
                          const double said = nlohmann::json::parse(text)["memory_bytes"]["state"];
                          const double held = static_cast<double>(most);
                          require(
                              std::abs(held / said - 1) < 0.02,
                              std::to_string(held) + " held, " + std::to_string(said) + " said");
                          OK(sotto_optim_destroy(optim));
                        }),
              "")
        << json;
  }
}

// A frozen parameter stands still with its momentum, in both stages, and moves on afterwards.
TEST(CapiOptim, ParametersThatAreFrozen) {
  EXPECT_EQ(run_world(2, kDefault,
                      [](Member& self) {
                        Model model(self.rank);
                        sotto_optim* const optim = new_optim(self, kOneBitLamb, model);
                        const uint8_t second[] = {0, 1}, none[] = {0, 0}, wrong[] = {2, 0};
                        OK(sotto_optim_step(optim, nullptr, nullptr));
                        OK(sotto_optim_set_frozen(optim, second, 2));
                        const std::vector<float> before = model.weights[1];
                        for (int k = 0; k < 6; ++k) {
                          const std::vector<float> other = model.weights[0];
                          OK(sotto_optim_step(optim, nullptr, nullptr));
                          require(model.weights[1] == before, "a frozen parameter");
                          require(model.weights[0] != other, "another parameter");
                        }
                        OK(sotto_optim_set_frozen(optim, none, 2));
                        OK(sotto_optim_step(optim, nullptr, nullptr));
                        require(model.weights[1] != before, "it moves again");
                        FAILS(sotto_optim_set_frozen(optim, none, 3), SOTTO_E_INVALID_ARGUMENT,
                              "n is 3; it has to be 2");
                        FAILS(sotto_optim_set_frozen(optim, wrong, 2), SOTTO_E_INVALID_ARGUMENT,
                              "frozen[0], of parameter", "is 2; allowed: 0 or 1");
                        FAILS(sotto_optim_set_frozen(optim, nullptr, 2), SOTTO_E_INVALID_ARGUMENT,
                              "frozen is NULL");
                        if (self.rank == 1) OK(sotto_optim_set_frozen(optim, second, 2));
                        FAILS(sotto_optim_step(optim, nullptr, nullptr), SOTTO_E_PROTOCOL,
                              "ranks do not agree");
                        OK(sotto_optim_destroy(optim));
                      }),
            "");
}

// Flags are the caller's, and may come before a state or behind it: it continues to the bit.
TEST(CapiOptim, AStateContinuesWheneverFlagsOfFrozenParametersCome) {
  EXPECT_EQ(run_world(2, kDefault,
                      [](Member& self) {
                        const uint8_t second[] = {0, 1}, first[] = {1, 0};
                        for (const char* json : {kOneBitLamb, kOneBitAdam, kZeroOneAdam}) {
                          for (const int late : {0, 1, 2}) {
                            Model model(self.rank), other(self.rank);
                            sotto_optim* const a = new_optim(self, json, model);
                            sotto_optim* const b = new_optim(self, json, other);
                            for (int k = 0; k < 9; ++k) {
                              if (k == 5) OK(sotto_optim_set_frozen(a, second, 2));
                              OK(sotto_optim_step(a, nullptr, nullptr));
                            }
                            const std::string state = one_shot(a, SOTTO_STATE_EXACT);
                            if (late == 0) OK(sotto_optim_set_frozen(b, second, 2));
                            if (late == 2) OK(sotto_optim_set_frozen(b, first, 2));
                            OK(sotto_optim_state_import(b, SOTTO_STATE_EXACT, state.data(),
                                                        state.size()));
                            if (late == 1)
                              require(one_shot(b, SOTTO_STATE_EXACT) == state, "exported again");
                            if (late != 0) OK(sotto_optim_set_frozen(b, second, 2));
                            for (int k = 0; k < 6; ++k) {
                              OK(sotto_optim_step(a, nullptr, nullptr));
                              OK(sotto_optim_step(b, nullptr, nullptr));
                              for (int t : {0, 1})
                                require(model.weights[t] == other.weights[t], "weights");
                            }
                            require(
                                one_shot(b, SOTTO_STATE_EXACT) == one_shot(a, SOTTO_STATE_EXACT),
                                "states at the end");
                            OK(sotto_optim_destroy(a));
                            OK(sotto_optim_destroy(b));
                          }
                        }
                      }),
            "");
}

}  // namespace
}  // namespace sotto::test
