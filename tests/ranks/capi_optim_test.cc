// Codecs, optimizers and plans at the C ABI: what is refused and how, and that states survive a
// round trip.
#include <cmath>
#include <string>
#include <vector>

#include "tests/ranks/capi_optim_model.h"

namespace sotto::test {
namespace {

constexpr const char* kScaled = R"({"optimizer": {"type": "Lamb", "params": {"lr": 0.01}},
                                    "fp16": {"enabled": true}})";

std::string export_of(const sotto_optim* optim, sotto_state_mode mode) {
  uint64_t length = 0;
  OK(sotto_optim_state_export(optim, mode, nullptr, 0, &length));
  std::string blob(length, '\0');
  OK(sotto_optim_state_export(optim, mode, blob.data(), blob.size(), &length));
  require(length == blob.size(), "length of an export");
  return blob;
}

sotto_status import_to(sotto_optim* optim, const std::string& blob,
                       sotto_state_mode mode = SOTTO_STATE_EXACT) {
  return sotto_optim_state_import(optim, mode, blob.data(), blob.size());
}

TEST(CapiOptim, ParametersThatAreRefused) {
  EXPECT_EQ(
      run_world(1, kDefault,
                [](Member& self) {
                  std::vector<uint8_t> mask(36, 1);
                  const auto with =
                      [&](const std::function<void(std::vector<sotto_param>&)>& change) {
                        Model model(0);
                        change(model.params);
                        sotto_optim* optim = nullptr;
                        return sotto_optim_create(self.comm, kLamb, model.params.data(),
                                                  model.params.size(), &optim);
                      };
                  FAILS(with([](auto& p) { p[0].struct_size = 12; }), SOTTO_E_INVALID_ARGUMENT,
                        "params[0].struct_size is 12");
                  FAILS(with([](auto& p) { p[1].struct_size = 160; }), SOTTO_E_INVALID_ARGUMENT,
                        "params[1].struct_size is 160", "152");
                  FAILS(with([](auto& p) { p[1].grad.count = 36; }), SOTTO_E_INVALID_ARGUMENT,
                        "params[1].grad.count is 36", "37");
                  FAILS(with([](auto& p) { p[1].grad = {}; }), SOTTO_E_INVALID_ARGUMENT,
                        "params[1].grad is missing");
                  FAILS(with([](auto& p) { p[0].param.dtype = p[0].grad.dtype = SOTTO_BFLOAT16; }),
                        SOTTO_E_UNSUPPORTED, "params[0].param is bf16");
                  FAILS(with([](auto& p) { p[0].param.device_type = 7; }), SOTTO_E_UNSUPPORTED,
                        "params[0].param.device_type is 7");
                  FAILS(with([](auto& p) { p[0].grad.device_type = SOTTO_DEVICE_CUDA; }),
                        SOTTO_E_INVALID_ARGUMENT, "params[0].param is on cpu",
                        "params[0].grad is on cuda:0");
                  FAILS(with([](auto& p) { p[1].grad = p[1].param; }), SOTTO_E_INVALID_ARGUMENT,
                        "overlap");
                  FAILS(with([](auto& p) { p[1].name = "w"; }), SOTTO_E_INVALID_ARGUMENT, "\"w\"",
                        "twice");
                  FAILS(with([](auto& p) { p[1].models = 2; }), SOTTO_E_UNSUPPORTED,
                        "params[1].models is 2");
                  FAILS(with([](auto& p) { p[1].model_copy = p[1].param; }), SOTTO_E_UNSUPPORTED,
                        "params[1].model_copy");
                  FAILS(with([&](auto& p) { p[1].mask = buffer(mask); }), SOTTO_E_INVALID_ARGUMENT,
                        "params[1].mask.count is 36");
                  FAILS(with([](auto& p) { p.clear(); }), SOTTO_E_INVALID_ARGUMENT, "n is 0");
                  OK(sotto_barrier(self.comm, nullptr, nullptr));
                }),
      "");
}

TEST(CapiOptim, ConfigurationsThatAreRefused) {
  EXPECT_EQ(
      run_world(1, kDefault,
                [](Member& self) {
                  const Model model(0);
                  const auto with = [&](const char* json) {
                    sotto_optim* optim = nullptr;
                    return sotto_optim_create(self.comm, json, model.params.data(),
                                              model.params.size(), &optim);
                  };
                  FAILS(with("{"), SOTTO_E_INVALID_ARGUMENT, "line 1");
                  FAILS(with(R"({"optimizer": {"type": "Lamb", "params": {"max_cooeff": 1}}})"),
                        SOTTO_E_INVALID_ARGUMENT, "max_cooeff", "max_coeff");
                  FAILS(with(R"({"optimiser": {"type": "Lamb"}})"), SOTTO_E_INVALID_ARGUMENT,
                        "optimiser", "optimizer");
                  FAILS(with(R"({"optimizer": {"type": "OneBitAdam"},
                           "sotto": {"mode": "compat", "chunk_align": 512}})"),
                        SOTTO_E_INVALID_ARGUMENT, "sotto.chunk_align", "compat");
                  FAILS(
                      with(R"({"optimizer": {"type": "Lamb"}, "zero_optimization": {"stage": 1}})"),
                      SOTTO_E_UNSUPPORTED, "zero_optimization.stage");
                  FAILS(with(R"({"optimizer": {"type": "Lamb"}, "fp16": {"enabled": true},
                             "bf16": {"enabled": true}})"),
                        SOTTO_E_INVALID_ARGUMENT, "fp16", "bf16");
                  FAILS(with("{}"), SOTTO_E_INVALID_ARGUMENT, "optimizer");
                }),
      "");
}

// bf16 gradients times the loss scale, and bf16 copies of the parameters.
TEST(CapiOptim, HalfGradientsAndModelCopies) {
  EXPECT_EQ(run_world(2, kDefault,
                      [](Member& self) {
                        Model model(self.rank);
                        std::vector<uint16_t> gradients[2], copies[2];
                        for (size_t t = 0; t < 2; ++t) {
                          gradients[t].assign(model.weights[t].size(), 0x4180);  // 16 = scale * 1
                          copies[t].assign(model.weights[t].size(), 0);
                          model.params[t].grad = buffer(gradients[t]);
                          model.params[t].model_copy = buffer(copies[t]);
                        }
                        sotto_optim* optim = new_optim(
                            self, R"({"optimizer": {"type": "SGD", "params": {"lr": 0.25}}, "fp16":
                               {"enabled": true, "initial_scale_power": 4}})",
                            model);
                        sotto_optim_info info = {};
                        info.struct_size = sizeof info;
                        OK(sotto_optim_get_info(optim, &info));
                        require(info.loss_scale == 16, "loss scale");
                        const std::vector<float> before = model.weights[0];
                        OK(sotto_optim_step(optim, nullptr, nullptr));
                        for (size_t i = 0; i < before.size(); ++i) {
                          require(model.weights[0][i] == before[i] - 0.25f, "parameter");
                          uint32_t bits = 0;
                          std::memcpy(&bits, &model.weights[0][i], 4);
                          bits += 0x7fffu + ((bits >> 16) & 1u);
                          require(copies[0][i] == bits >> 16, "model copy");
                        }
                        gradients[1][3] = 0x7f80;  // infinity: the step is left out, on both ranks
                        const std::vector<float> stepped = model.weights[0];
                        OK(sotto_optim_step(optim, nullptr, nullptr));
                        OK(sotto_optim_get_info(optim, &info));
                        require(info.loss_scale == 8 && info.step == 1 && info.skipped_steps == 1,
                                "overflow");
                        require(model.weights[0] == stepped, "nothing is updated");
                        // An import writes the copies too.
                        const std::string state = export_of(optim, SOTTO_STATE_EXACT);
                        const std::vector<uint16_t> copied = copies[0];
                        copies[0].assign(copied.size(), 0);
                        OK(import_to(optim, state));
                        require(copies[0] == copied, "model copy after an import");
                        OK(sotto_optim_destroy(optim));
                      }),
            "");
}

// Two micro-batches are a step with their mean, and no part of a state.
class CapiOptimMicroBatches : public testing::TestWithParam<const char*> {};
std::string name_of_type(const testing::TestParamInfo<const char*>& info) {
  return info.index == 0 ? "lamb" : info.index == 1 ? "adam" : "zeroone";
}
INSTANTIATE_TEST_SUITE_P(Types, CapiOptimMicroBatches,
                         testing::Values(kOneBitLamb, kOneBitAdam, kZeroOneAdam), name_of_type);

TEST_P(CapiOptimMicroBatches, AreAStepWithTheirMean) {
  const char* const json = GetParam();
  EXPECT_EQ(run_world(2, kDefault,
                      [json](Member& self) {
                        Model whole(self.rank), parts(self.rank);
                        for (size_t t = 0; t < 2; ++t) {
                          for (float& g : whole.gradients[t]) g = std::round(g * 64) / 64;
                          parts.gradients[t] = whole.gradients[t];
                        }
                        sotto_optim* const a = new_optim(self, json, whole);
                        sotto_optim* const b = new_optim(self, json, parts);
                        const auto states = [](const sotto_optim* optim) {
                          std::string all;
                          for (const sotto_state_mode mode :
                               {SOTTO_STATE_EXACT, SOTTO_STATE_MEAN, SOTTO_STATE_RESET})
                            all += export_of(optim, mode);
                          return all;
                        };
                        const auto move = [&](float by) {
                          for (std::vector<float>& tensor : parts.gradients) {
                            for (size_t i = 0; i < tensor.size(); ++i)
                              tensor[i] += i % 2 == 0 ? by : -by;
                          }
                        };
                        for (int k = 0; k < 9; ++k) {
                          const std::string before = states(b);
                          OK(sotto_optim_step(a, nullptr, nullptr));
                          move(0.25f);
                          sotto_op* op = nullptr;
                          OK(sotto_optim_accumulate(b, nullptr, &op));
                          OK(sotto_op_wait(op, -1));
                          OK(sotto_op_release(op));
                          sotto_optim_info info = {};
                          info.struct_size = sizeof info;
                          OK(sotto_optim_get_info(b, &info));
                          require(info.micro_batches == 1 && info.step == static_cast<uint64_t>(k),
                                  "one micro-batch");
                          require(states(b) == before, "the state of before");
                          if (k % 3 == 2) {  // an import drops it
                            OK(import_to(b, export_of(b, SOTTO_STATE_EXACT)));
                            OK(sotto_optim_accumulate(b, nullptr, nullptr));
                          }
                          move(-0.5f);
                          OK(sotto_optim_step(b, nullptr, nullptr));
                          move(0.25f);
                          for (size_t t = 0; t < 2; ++t)
                            require(whole.weights[t] == parts.weights[t], "equal parameters");
                        }
                        OK(sotto_optim_destroy(a));
                        OK(sotto_optim_destroy(b));
                      }),
            "");
}

// Gradients that lie elsewhere give what they give in their first place.
TEST(CapiOptim, GradientsThatMove) {
  EXPECT_EQ(
      run_world(2, kDefault,
                [](Member& self) {
                  Model fixed(self.rank), moving(self.rank);
                  sotto_optim* const a = new_optim(self, kOneBitLamb, fixed);
                  sotto_optim* const b = new_optim(self, kOneBitLamb, moving);
                  std::vector<float> places[2];
                  for (int k = 0; k < 6; ++k) {
                    OK(sotto_optim_step(a, nullptr, nullptr));
                    std::vector<float> next[2] = {moving.gradients[0], moving.gradients[1]};
                    for (std::vector<float>& old : places) old.assign(old.size(), 1e30f);
                    const sotto_buffer grads[] = {buffer(next[0]), buffer(next[1])};
                    OK(sotto_optim_set_grads(b, grads, 2));
                    OK(sotto_optim_step(b, nullptr, nullptr));
                    for (size_t t = 0; t < 2; ++t) {
                      require(fixed.weights[t] == moving.weights[t], "equal parameters");
                      places[t].swap(next[t]);
                    }
                  }
                  sotto_buffer grads[] = {buffer(places[0]), buffer(places[1])};
                  FAILS(sotto_optim_set_grads(b, grads, 1), SOTTO_E_INVALID_ARGUMENT,
                        "n is 1; it has to be 2");
                  FAILS(sotto_optim_set_grads(b, nullptr, 2), SOTTO_E_INVALID_ARGUMENT, "grads");
                  grads[1].count = 36;
                  FAILS(
                      sotto_optim_set_grads(b, grads, 2), SOTTO_E_INVALID_ARGUMENT,
                      "grads[1], of parameter \"b\", has 36 elements of fp32; registered were 37");
                  grads[1].count = 37;
                  grads[1].dtype = SOTTO_BFLOAT16;
                  FAILS(sotto_optim_set_grads(b, grads, 2), SOTTO_E_INVALID_ARGUMENT, "bf16");
                  grads[1] = buffer(moving.weights[0].data() + 1, 37);
                  FAILS(sotto_optim_set_grads(b, grads, 2), SOTTO_E_INVALID_ARGUMENT,
                        "grads[1] (148 bytes at ", ") and params.param[0] (", "overlap");
                  grads[1] = buffer(places[1]);
                  grads[1].device_type = SOTTO_DEVICE_CUDA;
                  FAILS(sotto_optim_set_grads(b, grads, 2), SOTTO_E_INVALID_ARGUMENT,
                        "grads[1], of parameter \"b\", is on cuda:0; the optimizer is on cpu");
                  OK(sotto_optim_destroy(a));
                  OK(sotto_optim_destroy(b));
                }),
      "");
}

TEST(CapiOptim, RanksThatRegisterDifferentTensors) {
  EXPECT_EQ(
      run_world(2, kDefault,
                [](Member& self) {
                  const Model model(self.rank, {1000, self.rank == 0 ? size_t{37} : size_t{38}});
                  sotto_optim* optim = nullptr;
                  FAILS(sotto_optim_create(self.comm, kLamb, model.params.data(),
                                           model.params.size(), &optim),
                        SOTTO_E_PROTOCOL, "1037", "1038");
                }),
      "");
}

TEST(CapiOptim, RanksWithOtherConfigurations) {
  const std::pair<const char*, const char*> cases[] = {
      {R"("outer": {"preset": "co2"})", "sotto.outer is none on rank 0 and co2 on rank 1"},
      {R"("state_dtype": "bf16")", "sotto.state_dtype is fp32 on rank 0 and bf16 on rank 1"},
      {R"("gradient_codec": {"type": "int8"})",
       "sotto.gradient_codec.type is none on rank 0 and int8 on rank 1"}};
  for (const auto& [section, text] : cases) {
    EXPECT_EQ(
        run_world(2, kDefault,
                  [&](Member& self) {
                    const std::string json = R"({"optimizer": {"type": "AdamW"}, "sotto": {)" +
                                             std::string(self.rank == 1 ? section : "") + "}}";
                    const Model model(self.rank);
                    sotto_optim* optim = nullptr;
                    FAILS(
                        sotto_optim_create(self.comm, json.c_str(), model.params.data(), 2, &optim),
                        SOTTO_E_PROTOCOL, text);
                  }),
        "");
  }
}

TEST(CapiOptim, SettersAndInfo) {
  EXPECT_EQ(
      run_world(
          2, kDefault,
          [](Member& self) {
            Model model(self.rank);
            sotto_optim* optim = new_optim(self, kLamb, model);
            sotto_optim* scaled = new_optim(self, kScaled, model);
            FAILS(sotto_optim_set(optim, "momentum", -1, 0.5), SOTTO_E_INVALID_ARGUMENT,
                  "momentum");
            FAILS(sotto_optim_set(optim, "lr", 4, 0.5), SOTTO_E_INVALID_ARGUMENT, "4");
            FAILS(sotto_optim_set(optim, "lr", -1, -0.5), SOTTO_E_INVALID_ARGUMENT, "-0.5");
            FAILS(sotto_optim_set(optim, "lr", -1, 1e300), SOTTO_E_INVALID_ARGUMENT,
                  "lr is 1e+300, inf in float32");
            FAILS(sotto_optim_set(optim, "eps", -1, 1e-60), SOTTO_E_INVALID_ARGUMENT,
                  "eps is 1e-60, 0 in float32");
            FAILS(sotto_optim_set(optim, nullptr, -1, 0.5), SOTTO_E_INVALID_ARGUMENT,
                  "name is NULL");
            for (const double value : {0.0, 1e-40, 1e39, std::nan("")}) {
              FAILS(sotto_optim_set(scaled, "loss_scale", -1, value), SOTTO_E_INVALID_ARGUMENT,
                    "allowed: 1e-37 to 1e+38");
            }
            OK(sotto_optim_set(scaled, "loss_scale", -1, 1e-37));
            OK(sotto_optim_destroy(scaled));
            for (const double value : {-0.1, 1.0})
              FAILS(sotto_optim_set(optim, "beta1", -1, value), SOTTO_E_INVALID_ARGUMENT, "beta1");
            FAILS(sotto_optim_set(optim, "min_coeff", -1, 11), SOTTO_E_INVALID_ARGUMENT,
                  "min_coeff of group 0 is 11");
            for (const char* name : {"beta1", "beta2", "eps", "min_coeff", "max_coeff"})
              OK(sotto_optim_set(optim, name, 0, 0.5));
            OK(sotto_optim_set(optim, "lr", -1, 0.25));
            sotto_optim_info info = {};
            FAILS(sotto_optim_get_info(optim, &info), SOTTO_E_INVALID_ARGUMENT,
                  "out_info.struct_size is 0");
            info.struct_size = sizeof info;
            OK(sotto_optim_get_info(optim, &info));
            require(info.lr == 0.25 && info.step == 0 && info.stage == 0, "info");
            const sotto_call mean = call_with([](auto& c) { c.reduce = SOTTO_REDUCE_MEAN; });
            FAILS(sotto_optim_step(optim, &mean, nullptr), SOTTO_E_INVALID_ARGUMENT, "call.reduce");
            OK(sotto_group_begin(self.comm));
            FAILS(sotto_optim_step(optim, nullptr, nullptr), SOTTO_E_INVALID_STATE, "open group");
            OK(sotto_group_end(self.comm, nullptr, nullptr));
            const uint64_t planned = info.payload_bytes_next_step;
            sotto_comm_counters before = {}, after = {};
            before.struct_size = after.struct_size = sizeof before;
            OK(sotto_comm_get_counters(self.comm, &before));
            OK(sotto_optim_step(optim, nullptr, nullptr));
            OK(sotto_comm_get_counters(self.comm, &after));
            require(after.payload_bytes_sent - before.payload_bytes_sent == planned,
                    "bytes of a step");
            uint64_t length = 0;
            FAILS(sotto_optim_report(optim, "everything", nullptr, 0, &length),
                  SOTTO_E_INVALID_ARGUMENT, "everything");
            OK(sotto_optim_destroy(optim));
          }),
      "");
}

TEST(CapiOptim, NonfiniteGradientChangesNothing) {
  EXPECT_EQ(run_world(2, kDefault,
                      [](Member& self) {
                        Model model(self.rank);
                        sotto_optim* optim = new_optim(self, kOneBitLamb, model);
                        for (int step = 0; step < 5; ++step) {
                          const std::vector<float> before = model.weights[0];
                          const float kept = model.gradients[0][3];
                          if (self.rank == 1) model.gradients[0][3] = INFINITY;
                          // Rank 0 reduces the chunk of that element.
                          FAILS(sotto_optim_step(optim, nullptr, nullptr), SOTTO_E_NONFINITE,
                                step < 2 ? "NaN or Inf in the averaged gradient"
                                         : "NaN or Inf met by rank 1",
                                self.rank == 1 ? "gradient of \"w\", element 3 is inf" : "");
                          require(model.weights[0] == before, "nothing was updated");
                          model.gradients[0][3] = kept;
                          OK(sotto_optim_step(optim, nullptr, nullptr));
                          require(model.weights[0] != before, "the next step updates");
                        }
                        sotto_optim_info info = {};
                        info.struct_size = sizeof info;
                        OK(sotto_optim_get_info(optim, &info));
                        require(info.step == 5 && info.skipped_steps == 5 && info.stage == 1,
                                "counters");
                        OK(sotto_optim_destroy(optim));
                      }),
            "");
}

TEST(CapiOptim, StateGoesOnBitForBitAndBadBlobsHarmNothing) {
  EXPECT_EQ(
      run_world(2, kDefault,
                [](Member& self) {
                  Model model(self.rank), other(self.rank, {1000, 36});
                  sotto_optim* optim = new_optim(self, kOneBitLamb, model);
                  for (int step = 0; step < 5; ++step)
                    OK(sotto_optim_step(optim, nullptr, nullptr));
                  const std::string blob = export_of(optim, SOTTO_STATE_EXACT);

                  uint64_t length = 0;
                  FAILS(sotto_optim_state_export(optim, 9, nullptr, 0, &length),
                        SOTTO_E_INVALID_ARGUMENT, "mode is 9");
                  FAILS(sotto_optim_state_import(optim, SOTTO_STATE_EXACT, nullptr, 5),
                        SOTTO_E_INVALID_ARGUMENT, "buf is NULL");
                  for (const size_t cut :
                       {size_t{0}, size_t{7}, size_t{24}, blob.size() / 2, blob.size() - 1}) {
                    FAILS(import_to(optim, blob.substr(0, cut)), SOTTO_E_INVALID_ARGUMENT);
                  }
                  std::string damaged = blob;
                  damaged[damaged.size() / 2] = static_cast<char>(damaged[damaged.size() / 2] ^ 1);
                  FAILS(import_to(optim, damaged), SOTTO_E_INVALID_ARGUMENT);
                  sotto_optim* smaller = new_optim(self, kOneBitLamb, other);
                  FAILS(import_to(smaller, blob), SOTTO_E_INVALID_ARGUMENT,
                        "parameter 1 of the state is \"b\" with 37 elements, of this optimizer "
                        "\"b\" with 36");
                  Model first(self.rank);
                  first.params.pop_back();
                  sotto_optim* fewer = new_optim(self, kOneBitLamb, first);
                  FAILS(import_to(fewer, blob), SOTTO_E_INVALID_ARGUMENT,
                        "parameter 1 of the state is \"b\" with 37 elements, of this optimizer "
                        "not there; they have 2 and 1 parameter");
                  FAILS(import_to(optim, export_of(fewer, SOTTO_STATE_EXACT)),
                        SOTTO_E_INVALID_ARGUMENT, "parameter 1 of the state is not there");
                  OK(sotto_optim_destroy(fewer));
                  sotto_optim* lamb = new_optim(self, kLamb, other);
                  FAILS(import_to(lamb, blob), SOTTO_E_INVALID_ARGUMENT, "OneBitLamb");
                  require(export_of(optim, SOTTO_STATE_EXACT) == blob,
                          "failed imports change nothing");

                  for (int step = 0; step < 3; ++step)
                    OK(sotto_optim_step(optim, nullptr, nullptr));
                  const std::vector<float> straight = model.weights[0];
                  OK(import_to(optim, blob));
                  require(model.weights[0] != straight, "the import restores the parameters");
                  for (int step = 0; step < 3; ++step)
                    OK(sotto_optim_step(optim, nullptr, nullptr));
                  require(model.weights[0] == straight, "a restored run is bit-identical");
                  OK(import_to(optim, export_of(optim, SOTTO_STATE_RESET), SOTTO_STATE_RESET));
                  for (sotto_optim* o : {optim, smaller, lamb}) OK(sotto_optim_destroy(o));
                }),
      "");
}

TEST(CapiCodec, WhatIsRefused) {
  EXPECT_EQ(
      run_world(2, kDefault,
                [](Member& self) {
                  std::vector<float> a(100), b(50);
                  std::vector<double> d(100);
                  const sotto_buffer like = buffer(a), other = buffer(b), wide = buffer(d);
                  sotto_call call = SOTTO_CALL_INIT;
                  const auto make = [&](const char* json, const sotto_buffer& tensor) {
                    return sotto_codec_create(self.comm, json, &tensor, 1, &call.codec);
                  };
                  FAILS(make("[]", like), SOTTO_E_INVALID_ARGUMENT);
                  FAILS(make(R"({"type": "2bit"})", like), SOTTO_E_INVALID_ARGUMENT, "2bit",
                        "onebit");
                  FAILS(make(R"({"type": "1bit", "skale": "l1"})", like), SOTTO_E_INVALID_ARGUMENT,
                        "skale");
                  FAILS(make(R"({"type": "1bit"})", wide), SOTTO_E_UNSUPPORTED, "fp64");
                  FAILS(sotto_codec_create(self.comm, R"({"type": "1bit"})", &like, 0, &call.codec),
                        SOTTO_E_INVALID_ARGUMENT, "n is 0");
                  OK(make(R"({"type": "1bit"})", like));
                  FAILS(sotto_all_reduce(self.comm, &other, &other, 1, &call, nullptr),
                        SOTTO_E_INVALID_ARGUMENT, "50", "100");
                  FAILS(sotto_all_reduce(self.comm, &wide, &wide, 1, &call, nullptr),
                        SOTTO_E_INVALID_ARGUMENT, "fp64");
                  call.reduce = SOTTO_REDUCE_MAX;
                  FAILS(sotto_all_reduce(self.comm, &like, &like, 1, &call, nullptr),
                        SOTTO_E_INVALID_ARGUMENT, "call.reduce is 4");
                  call.reduce = SOTTO_REDUCE_MEAN;
                  FAILS(sotto_barrier(self.comm, &call, nullptr), SOTTO_E_INVALID_ARGUMENT,
                        "call.reduce");
                  OK(sotto_all_reduce(self.comm, &like, &like, 1, &call, nullptr));
                  OK(sotto_codec_destroy(call.codec));
                }),
      "");
}

// Three ranks export their mean, a codec of another type takes it; sizes are asked without a word
// to the others.
TEST(CapiCodec, TheMeanStateIsACollective) {
  EXPECT_EQ(
      run_world(3, kDefault,
                [](Member& self) {
                  std::vector<float> x(5000), y(5000);
                  for (size_t i = 0; i < x.size(); ++i)
                    x[i] = static_cast<float>((i * 7 + static_cast<size_t>(self.rank) * 3) % 11);
                  const sotto_buffer in = buffer(x), out = buffer(y);
                  sotto_call call = SOTTO_CALL_INIT;
                  sotto_codec* other = nullptr;
                  OK(sotto_codec_create(self.comm, R"({"type": "int4"})", &in, 1, &call.codec));
                  OK(sotto_codec_create(self.comm, R"({"type": "onebit"})", &in, 1, &other));
                  OK(sotto_all_reduce(self.comm, &in, &out, 1, &call, nullptr));
                  uint64_t length = 0;
                  if (self.rank == 1) {
                    OK(sotto_codec_state_export(call.codec, SOTTO_STATE_MEAN, nullptr, 0, &length));
                  }
                  std::vector<char> blob(60000), again(60000);
                  uint64_t written = 0;
                  OK(sotto_codec_state_export(call.codec, SOTTO_STATE_MEAN, blob.data(),
                                              blob.size(), &written));
                  require(self.rank != 1 || written == length, "the length is known before");
                  require(written > 40000 && written < 41000, "8 bytes per element");
                  FAILS(sotto_codec_state_import(other, SOTTO_STATE_EXACT, blob.data(), written),
                        SOTTO_E_INVALID_ARGUMENT, "mean");
                  FAILS(sotto_codec_state_import(other, 4, blob.data(), written),
                        SOTTO_E_INVALID_ARGUMENT, "SOTTO_STATE_MEAN");
                  OK(sotto_codec_state_import(other, SOTTO_STATE_MEAN, blob.data(), written));
                  OK(sotto_codec_state_export(other, SOTTO_STATE_MEAN, again.data(), again.size(),
                                              &length));
                  require(length == written, "the mean of another codec has the same size");
                  OK(sotto_codec_destroy(call.codec));
                  OK(sotto_codec_destroy(other));
                }),
      "");
}

TEST(CapiPlan, RequestsAndWhatIsSent) {
  EXPECT_EQ(
      run_world(3, kDefault,
                [](Member& self) {
                  const auto plan = [&](const std::string& request) {
                    return read_all([&](char* buf, uint64_t cap, uint64_t* out_len) {
                      return sotto_plan_report(self.comm, request.c_str(), buf, cap, out_len);
                    });
                  };
                  uint64_t length = 0;
                  const auto bad = [&](const char* request) {
                    return sotto_plan_report(self.comm, request, nullptr, 0, &length);
                  };
                  FAILS(bad("no json"), SOTTO_E_INVALID_ARGUMENT, "not a JSON object");
                  FAILS(bad("{}"), SOTTO_E_INVALID_ARGUMENT, "request.kind is missing");
                  FAILS(bad(R"({"kind": "reduced"})"), SOTTO_E_INVALID_ARGUMENT, "request.kind",
                        "all_reduce");
                  FAILS(bad(R"({"kind": "all_reduce", "count": [1]})"), SOTTO_E_INVALID_ARGUMENT,
                        "\"count\"", "\"counts\"");
                  FAILS(bad(R"({"kind": "all_reduce", "counts": [-1]})"), SOTTO_E_INVALID_ARGUMENT,
                        "request.counts");
                  FAILS(bad(R"({"kind": "all_reduce", "counts": [17179869185]})"),
                        SOTTO_E_INVALID_ARGUMENT, "request.counts has 17179869185", "0 to");
                  FAILS(bad(R"({"kind": "all_reduce", "counts": [17179869184, 1]})"),
                        SOTTO_E_INVALID_ARGUMENT, "17179869185 elements, all buffers");
                  FAILS(bad(R"({"kind": "all_gather", "counts": [8589934592]})"),
                        SOTTO_E_INVALID_ARGUMENT, "25769803776 elements");
                  FAILS(bad(R"({"kind": "all_reduce", "counts": [1], "counts": [2]})"),
                        SOTTO_E_INVALID_ARGUMENT, "request.counts is there twice");
                  FAILS(bad(R"({"kind": "all_reduce", "counts": [1], "dtype": "fp8"})"),
                        SOTTO_E_INVALID_ARGUMENT, "fp8", "fp16");
                  FAILS(bad(R"({"kind": "broadcast", "counts": [1], "root": 3})"),
                        SOTTO_E_INVALID_ARGUMENT, "request.root is 3");
                  FAILS(bad(R"({"kind": "all_reduce", "counts": [1], "reduce": "bit_or"})"),
                        SOTTO_E_INVALID_ARGUMENT, "bit_or", "fp32");
                  FAILS(bad(R"({"kind": "send", "counts": [1]})"), SOTTO_E_INVALID_ARGUMENT,
                        "request.peer");
                  FAILS(bad(R"({"kind": "barrier", "codec": {"type": "1bit"}})"),
                        SOTTO_E_INVALID_ARGUMENT, "codec");

                  // The prediction is what the operation then sends.
                  std::vector<float> a(30000);
                  const sotto_buffer b = buffer(a);
                  sotto_call call = SOTTO_CALL_INIT;
                  sotto_comm_counters before = {}, after = {};
                  before.struct_size = after.struct_size = sizeof before;
                  for (const std::string codec :
                       {"", R"({"type": "1bit"})",
                        R"({"type": "onebit", "granularity": "bucket",)"
                        R"( "bucket_elements": 8192})",
                        R"({"type": "bf16"})", R"({"type": "int8"})", R"({"type": "int4"})"}) {
                    if (!codec.empty())
                      OK(sotto_codec_create(self.comm, codec.c_str(), &b, 1, &call.codec));
                    const std::string report =
                        plan(std::string(
                                 R"({"kind": "all_reduce", "counts": [30000], "in_place": true)") +
                             (codec.empty() ? "}" : R"(, "codec": )" + codec + "}"));
                    OK(sotto_comm_get_counters(self.comm, &before));
                    OK(sotto_all_reduce(self.comm, &b, &b, 1, &call, nullptr));
                    OK(sotto_comm_get_counters(self.comm, &after));
                    const std::string expected =
                        "\"payload_bytes_sent\":" +
                        std::to_string(after.payload_bytes_sent - before.payload_bytes_sent) + ",";
                    require(report.find(expected) != std::string::npos,
                            expected + " is not in " + report);
                    OK(sotto_codec_destroy(call.codec));
                    call.codec = nullptr;
                  }
                }),
      "");
}

}  // namespace
}  // namespace sotto::test
