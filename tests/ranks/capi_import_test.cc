// sotto_optim_state_import_arrays: names and forms of the arrays of a DeepSpeed checkpoint, what is
// refused and how, and that ranks import the same or nothing. How a run goes on from a checkpoint
// is compared with an independent model in tests/model.
#include <cmath>
#include <map>
#include <string>
#include <vector>

#include "tests/ranks/capi_support.h"

namespace sotto::test {
namespace {

const WorldOptions kDefault;

// Groups 0: "w", "b", "none" (no elements); 1: "layer/c", a name with a slash.
struct Model {
  std::vector<float> weights[4], gradients[4];
  std::vector<uint16_t> copies[4];
  std::vector<sotto_param> params;

  explicit Model(int32_t rank, float start = 0.5f, bool with_copies = false) {
    static const char* const kNames[] = {"w", "b", "none", "layer/c"};
    static const size_t kCounts[] = {1000, 37, 0, 20};
    for (size_t t = 0; t < 4; ++t) {
      weights[t].assign(kCounts[t], start);
      copies[t].assign(kCounts[t], 0);
      for (size_t i = 0; i < kCounts[t]; ++i)
        gradients[t].push_back(std::sin(static_cast<float>(1 + i + 7 * static_cast<size_t>(rank))));
      sotto_param p = {};
      p.struct_size = sizeof p;
      p.name = kNames[t];
      p.group = t == 3 ? 1 : 0;
      p.param = buffer(weights[t]);
      p.grad = buffer(gradients[t]);
      if (with_copies) p.model_copy = buffer(copies[t]);
      params.push_back(p);
    }
  }
};

std::string config(const std::string& type, const std::string& own = "",
                   const std::string& more = "") {
  return R"({"optimizer": {"type": ")" + type + R"(", "params": {"lr": 0.01)" +
         (own.empty() ? "" : ", " + own) + "}}" + (more.empty() ? "" : ", " + more) + "}";
}

sotto_optim* new_optim(const Member& self, const std::string& json, const Model& model) {
  sotto_optim* optim = nullptr;
  OK(sotto_optim_create(self.comm, json.c_str(), model.params.data(), model.params.size(), &optim));
  return optim;
}

std::string export_of(const sotto_optim* optim) {
  uint64_t length = 0;
  OK(sotto_optim_state_export(optim, SOTTO_STATE_EXACT, nullptr, 0, &length));
  std::string blob(length, '\0');
  OK(sotto_optim_state_export(optim, SOTTO_STATE_EXACT, blob.data(), blob.size(), &length));
  return blob;
}

sotto_optim_info info_of(const sotto_optim* optim) {
  sotto_optim_info info = {};
  info.struct_size = sizeof info;
  OK(sotto_optim_get_info(optim, &info));
  return info;
}

// Arrays by name, with their memory.
class Checkpoint {
 public:
  template <class T>
  Checkpoint& put(const std::string& name, const std::vector<T>& values,
                  sotto_dtype dtype = dtype_of<T>()) {
    Value& value = values_[name];
    value.bytes.resize(values.size() * sizeof(T));
    std::memcpy(value.bytes.data(), values.data(), value.bytes.size());
    value.count = values.size();
    value.dtype = dtype;
    return *this;
  }
  Checkpoint& put(const std::string& name, int64_t value) {
    return put(name, std::vector<int64_t>{value});
  }
  Checkpoint& number(const std::string& name, double value) {
    return put(name, std::vector<double>{value});
  }
  Checkpoint& drop(const std::string& name) {
    require(values_.erase(name) == 1, "there is no " + name);
    return *this;
  }

  std::vector<sotto_named_array> arrays() {
    std::vector<sotto_named_array> out;
    for (auto& [name, value] : values_) {
      out.push_back({sizeof(sotto_named_array),
                     0,
                     name.c_str(),
                     {value.bytes.data(), value.count, value.dtype, SOTTO_DEVICE_CPU, 0, 0}});
    }
    return out;
  }
  sotto_status import_to(sotto_optim* optim) {
    const std::vector<sotto_named_array> all = arrays();
    return sotto_optim_state_import_arrays(optim, all.data(), all.size());
  }

 private:
  struct Value {
    std::vector<char> bytes;
    uint64_t count = 0;
    sotto_dtype dtype = SOTTO_FLOAT32;
  };
  std::map<std::string, Value> values_;
};

// Multiples of 1/8 from `first`, which every type of elements has.
std::vector<float> elements(size_t count, size_t first = 0) {
  std::vector<float> out;
  for (size_t i = first; i < first + count; ++i)
    out.push_back(0.125f * static_cast<float>(1 + i % 13));
  return out;
}

const std::vector<std::string> kWithElements = {"w", "b", "layer/c"};

// What all types need, one array for a parameter. Elements of "b" go on where those of "w" end.
Checkpoint by_parameter(int64_t step, const std::vector<std::string>& more_elements = {}) {
  Checkpoint c;
  std::vector<std::string> keys = {"fp32", "exp_avg", "exp_avg_sq"};
  keys.insert(keys.end(), more_elements.begin(), more_elements.end());
  for (const std::string& key : keys) {
    c.put("w/" + key, elements(1000)).put("b/" + key, elements(37, 1000));
    c.put("layer/c/" + key, elements(20));
  }
  for (const std::string& name : kWithElements) c.put(name + "/step", step);
  return c;
}

Checkpoint by_group(int64_t step, const std::vector<std::string>& more_elements = {}) {
  Checkpoint c;
  std::vector<std::string> keys = {"fp32", "exp_avg", "exp_avg_sq"};
  keys.insert(keys.end(), more_elements.begin(), more_elements.end());
  for (const std::string& key : keys)
    c.put("group:0/" + key, elements(1037)).put("group:1/" + key, elements(20));
  return c.put("group:0/step", step).put("group:1/step", step);
}

void add_coefficients(Checkpoint& c) {
  double next = 0.25;
  for (const std::string& name : kWithElements) {
    c.number(name + "/lamb_coeff_freeze", next).number(name + "/last_factor", next + 1);
    c.number(name + "/scaling_coeff", next + 2);
    next += 0.125;
  }
}

void add_schedule(Checkpoint& c, const std::vector<std::string>& scopes) {
  for (const std::string& scope : scopes) {
    c.put(scope + "/var_interval", 4).put(scope + "/var_counter", 1);
    c.put(scope + "/local_step_interval", 2).put(scope + "/local_step_counter", 3);
    c.number(scope + "/lrs", scope == "group:1" || scope == "layer/c" ? 0.5 : 0.25);
  }
}

TEST(CapiImport, GroupsAndParametersGiveTheSameState) {
  EXPECT_EQ(
      run_world(2, kDefault,
                [](Member& self) {
                  const auto same = [&](const std::string& json, Checkpoint a, Checkpoint b) {
                    Model one(self.rank), two(self.rank, 3);
                    sotto_optim* first = new_optim(self, json, one);
                    sotto_optim* second = new_optim(self, json, two);
                    const std::string before = export_of(first);
                    OK(a.import_to(first));
                    OK(b.import_to(second));
                    require(one.weights[1] == elements(37, 1000), "parameters are the file's");
                    require(export_of(first) != before, "the import changes the state");
                    require(export_of(first) == export_of(second), "states differ: " + json);
                    for (int step = 0; step < 3; ++step) {
                      OK(sotto_optim_step(first, nullptr, nullptr));
                      OK(sotto_optim_step(second, nullptr, nullptr));
                    }
                    require(export_of(first) == export_of(second), "runs differ: " + json);
                    for (sotto_optim* o : {first, second}) OK(sotto_optim_destroy(o));
                  };
                  for (const char* type : {"Adam", "AdamW", "Lamb"})
                    same(config(type), by_parameter(5), by_group(5));
                  for (const char* freeze : {"\"freeze_step\": 3", "\"freeze_step\": 9"}) {
                    same(config("OneBitAdam", freeze), by_parameter(5), by_group(5));
                    Checkpoint a = by_parameter(5, {"exp_avg_sq_fresh"});
                    Checkpoint b = by_group(5, {"exp_avg_sq_fresh"});
                    add_coefficients(a);
                    add_coefficients(b);
                    same(config("OneBitLamb", freeze), a, b);
                  }
                  for (const char* freeze : {"\"var_freeze_step\": 3", "\"var_freeze_step\": 9"}) {
                    Checkpoint a = by_parameter(5, {"momentum_accumulator"});
                    Checkpoint b = by_group(5, {"momentum_accumulator"});
                    add_schedule(a, kWithElements);
                    add_schedule(b, {"group:0", "group:1"});
                    same(config("ZeroOneAdam", freeze), a, b);
                  }
                }),
      "");
}

// Element types and number types; the mixture of both forms.
TEST(CapiImport, TypesOfValues) {
  EXPECT_EQ(run_world(2, kDefault,
                      [](Member& self) {
                        Model model(self.rank);
                        sotto_optim* optim = new_optim(self, config("OneBitAdam"), model);
                        OK(by_parameter(7).import_to(optim));
                        const std::string wanted = export_of(optim);
                        const auto gives_the_same = [&](Checkpoint c) {
                          OK(by_parameter(9).import_to(optim));
                          OK(c.import_to(optim));
                          require(export_of(optim) == wanted, "the same values of other types");
                        };
                        std::vector<uint16_t> half, brain;
                        for (const float x : elements(1000)) {
                          uint32_t bits = 0;
                          std::memcpy(&bits, &x, 4);
                          brain.push_back(static_cast<uint16_t>(bits >> 16));
                          // Normal numbers: the exponent moves from bias 127 to 15, 13 zero bits
                          // go.
                          half.push_back(static_cast<uint16_t>((bits >> 13) - ((127 - 15) << 10)));
                        }
                        const std::vector<float> narrow = elements(37, 1000);
                        gives_the_same(by_parameter(7)
                                           .put("w/exp_avg", half, SOTTO_FLOAT16)
                                           .put("w/fp32", brain, SOTTO_BFLOAT16)
                                           .put("b/exp_avg_sq",
                                                std::vector<double>(narrow.begin(), narrow.end()))
                                           .put("w/step", std::vector<float>{7})
                                           .number("b/step", 7)
                                           .put("layer/c/step", std::vector<int32_t>{7}));
                        gives_the_same(by_parameter(7)
                                           .drop("w/exp_avg")
                                           .drop("b/exp_avg")
                                           .put("group:0/exp_avg", elements(1037)));
                        OK(sotto_optim_destroy(optim));
                      }),
            "");
}

// Counters, stage, schedule and loss scale are those of the file; model copies follow parameters.
TEST(CapiImport, CountersAndModelCopies) {
  EXPECT_EQ(
      run_world(2, kDefault,
                [](Member& self) {
                  const std::string more =
                      R"("fp16": {"enabled": true}, "scheduler": {"type": "WarmupLR", "params":
                   {"warmup_max_lr": 0.1, "warmup_num_steps": 10, "warmup_type": "linear"}})";
                  Model model(self.rank, 0.5f, true);
                  for (const bool compressed : {false, true}) {
                    sotto_optim* optim = new_optim(
                        self,
                        config("OneBitAdam",
                               compressed ? "\"freeze_step\": 6" : "\"freeze_step\": 7", more),
                        model);
                    Checkpoint c = by_parameter(6);
                    FAILS(c.import_to(optim), SOTTO_E_INVALID_ARGUMENT,
                          "\"scheduler/last_batch_iteration\"", "\"loss_scaler/cur_scale\"",
                          "\"loss_scaler/cur_iter\"",
                          "\"loss_scaler/last_overflow_iter\" are missing");
                    c.put("scheduler/last_batch_iteration", 3).number("loss_scaler/cur_scale", 32);
                    c.put("loss_scaler/cur_iter", 1009).put("loss_scaler/last_overflow_iter", 8);
                    OK(c.import_to(optim));
                    const sotto_optim_info info = info_of(optim);
                    require(info.step == 5 && info.state_step == 6, "step");
                    require(info.stage == (compressed ? 1 : 0), "stage");
                    require(std::abs(info.lr - 0.03) < 1e-12, "learning rate of iteration 3");
                    require(info.loss_scale == 32, "loss scale");
                    for (size_t t = 0; t < 4; ++t) {
                      for (size_t i = 0; i < model.weights[t].size(); ++i) {
                        uint32_t bits = 0;
                        std::memcpy(&bits, &model.weights[t][i], 4);
                        require(model.copies[t][i] == bits >> 16, "model copy");
                      }
                    }
                    // 1000 attempts after the overflow the scale doubles.
                    OK(sotto_optim_step(optim, nullptr, nullptr));
                    require(info_of(optim).loss_scale == 64, "window of the loss scale");
                    // The schedule starts again; without fp32 arrays the parameters stay.
                    c.put("scheduler/last_batch_iteration", -1);
                    for (const std::string& name : kWithElements) c.drop(name + "/fp32");
                    const std::vector<float> kept = model.weights[0];
                    OK(c.import_to(optim));
                    require(info_of(optim).lr == 0 && model.weights[0] == kept, "parameters stay");
                    OK(sotto_optim_destroy(optim));
                  }
                }),
      "");
}

TEST(CapiImport, NamesThatAreRefused) {
  EXPECT_EQ(
      run_world(
          1, kDefault,
          [](Member& self) {
            Model model(0);
            sotto_optim* lamb = new_optim(self, config("OneBitLamb", "\"freeze_step\": 3"), model);
            const std::string before = export_of(lamb);
            const auto with = [&](const std::string& name) {
              return by_parameter(2).number(name, 1).import_to(lamb);
            };
            const auto nearest = [&](const std::string& name, const std::string& suggestion) {
              FAILS(with(name), SOTTO_E_INVALID_ARGUMENT, "\"" + name + "\"",
                    "nearest name is \"" + suggestion + "\"");
            };
            nearest("w/exp_averg", "w/exp_avg");
            nearest("layer/d/exp_avg", "layer/c/exp_avg");
            nearest("group:2/exp_avg_sq", "group:0/exp_avg_sq");
            nearest("w/last_factr", "w/last_factor");
            nearest("w/var_counter", "w/last_factor");  // of another type
            nearest("scheduler/last_batch", "scheduler/last_batch_iteration");
            nearest("loss_scaler/curr_scale", "loss_scaler/cur_scale");
            nearest("exp_avg", "b/exp_avg");
            nearest("", "b/fp32");
            nearest("w/", "w/fp32");
            FAILS(by_parameter(2)
                      .put("w/worker_error", elements(9))
                      .put("w/server_error", elements(9))
                      .put("group:0/tensor_size", 1)
                      .import_to(lamb),
                  SOTTO_E_INVALID_ARGUMENT, "\"w/worker_error\"", "\"w/server_error\"",
                  "\"group:0/tensor_size\"", "rank 0 only", "leave out");
            FAILS(by_parameter(2).put("group:0/exp_avg", elements(1037)).import_to(lamb),
                  SOTTO_E_INVALID_ARGUMENT, "\"group:0/exp_avg\"", "\"b/exp_avg\"", "give one");
            FAILS(with("group:1/last_factor"), SOTTO_E_INVALID_ARGUMENT, "\"group:1/last_factor\"",
                  "\"<parameter>/last_factor\"");
            Checkpoint c = by_parameter(2);
            std::vector<sotto_named_array> twice = c.arrays();
            twice.push_back(twice[0]);
            FAILS(sotto_optim_state_import_arrays(lamb, twice.data(), twice.size()),
                  SOTTO_E_INVALID_ARGUMENT, "\"b/exp_avg\" is given twice");

            // What is missing has a name.
            FAILS(by_parameter(2).drop("layer/c/exp_avg_sq").import_to(lamb),
                  SOTTO_E_INVALID_ARGUMENT, "array \"layer/c/exp_avg_sq\" is missing");
            FAILS(by_parameter(2).drop("w/step").import_to(lamb), SOTTO_E_INVALID_ARGUMENT,
                  "\"w/step\" is missing");
            FAILS(by_parameter(2).drop("b/fp32").import_to(lamb), SOTTO_E_INVALID_ARGUMENT,
                  "\"b/fp32\" is missing");
            FAILS(by_parameter(3).import_to(lamb), SOTTO_E_INVALID_ARGUMENT,
                  "\"w/lamb_coeff_freeze\", \"b/lamb_coeff_freeze\"", "are missing");
            c = by_parameter(3);
            add_coefficients(c);
            FAILS(c.import_to(lamb), SOTTO_E_INVALID_ARGUMENT, "\"w/exp_avg_sq_fresh\"",
                  "are missing");
            FAILS(c.drop("b/scaling_coeff").import_to(lamb), SOTTO_E_INVALID_ARGUMENT,
                  "\"b/scaling_coeff\"");
            require(export_of(lamb) == before, "what is refused changes nothing");
            OK(by_parameter(2).import_to(lamb));
            OK(sotto_optim_destroy(lamb));
          }),
      "");
}

TEST(CapiImport, ValuesThatAreRefused) {
  EXPECT_EQ(
      run_world(
          1, kDefault,
          [](Member& self) {
            Model model(0);
            sotto_optim* lamb = new_optim(self, config("OneBitLamb", "\"freeze_step\": 3"), model);
            const std::string before = export_of(lamb);
            const auto complete = [] {
              Checkpoint c = by_parameter(5, {"exp_avg_sq_fresh"});
              add_coefficients(c);
              return c;
            };
            const auto bad = [&](const std::string& name, auto values,
                                 const std::vector<std::string>& words,
                                 sotto_status code = SOTTO_E_INVALID_ARGUMENT) {
              fails(complete().put(name, values).import_to(lamb), code, words, name.c_str());
            };
            bad("w/exp_avg", elements(999), {"\"w/exp_avg\" has 999 elements; allowed: 1000"});
            bad("w/step", std::vector<int64_t>{5, 5}, {"\"w/step\" has 2 elements; allowed: 1"});
            bad("none/exp_avg", elements(1), {"\"none/exp_avg\" has 1 element; allowed: 0"});
            bad("w/exp_avg", std::vector<int64_t>(1000, 1),
                {"\"w/exp_avg\" is int64", "fp32, fp16, bf16, fp64"}, SOTTO_E_UNSUPPORTED);
            bad("w/step", std::vector<uint64_t>{5}, {"\"w/step\" is uint64", "int64"},
                SOTTO_E_UNSUPPORTED);
            std::vector<float> values = elements(37);
            values[5] = -0.5f;
            bad("b/exp_avg_sq", values, {"\"b/exp_avg_sq\", element 5 is -0.5", "at least 0"});
            bad("b/exp_avg_sq_fresh", values, {"\"b/exp_avg_sq_fresh\", element 5 is -0.5"});
            values[5] = INFINITY;
            bad("b/fp32", values, {"\"b/fp32\", element 5 is inf; allowed: finite numbers"});
            values[5] = NAN;
            bad("b/exp_avg", values, {"\"b/exp_avg\", element 5 is nan"});
            bad("b/exp_avg", std::vector<double>(37, 1e39), {"element 0 is 1e+39"});
            bad("b/step", std::vector<int64_t>{6},
                {"\"b/step\" is 6, but \"w/step\" is 5; allowed: one value for all parameters"});
            bad("w/step", std::vector<double>{5.5}, {"\"b/step\" is 5, but \"w/step\" is 5.5"});
            for (const char* name : {"w/step", "b/step"})
              bad(name, std::vector<int64_t>{0}, {name, "at least 1"});
            bad("w/scaling_coeff", std::vector<double>{0}, {"\"w/scaling_coeff\" is 0"});
            bad("w/last_factor", std::vector<double>{NAN}, {"\"w/last_factor\" is nan"});
            bad("b/lamb_coeff_freeze", std::vector<double>{-1}, {"\"b/lamb_coeff_freeze\" is -1"});
            bad("scheduler/last_batch_iteration", std::vector<int64_t>{-2},
                {"\"scheduler/last_batch_iteration\" is -2", "at least -1"});
            bad("scheduler/last_batch_iteration", std::vector<double>{1.5},
                {"\"scheduler/last_batch_iteration\" is 1.5", "whole numbers"});
            bad("loss_scaler/cur_scale", std::vector<double>{0},
                {"\"loss_scaler/cur_scale\" is 0"});
            require(export_of(lamb) == before, "what is refused changes nothing");
            OK(complete().import_to(lamb));
            OK(sotto_optim_destroy(lamb));
          }),
      "");
}

TEST(CapiImport, SchedulesThatAreRefused) {
  EXPECT_EQ(
      run_world(
          1, kDefault,
          [](Member& self) {
            Model model(0);
            sotto_optim* optim =
                new_optim(self, config("ZeroOneAdam", "\"var_freeze_step\": 3"), model);
            const std::string before = export_of(optim);
            const auto complete =
                [](const std::vector<std::string>& elements = {"momentum_accumulator"}) {
                  Checkpoint c = by_group(5, elements);
                  add_schedule(c, {"group:0", "group:1"});
                  return c;
                };
            const auto bad = [&](Checkpoint c, const std::vector<std::string>& words) {
              fails(c.import_to(optim), SOTTO_E_INVALID_ARGUMENT, words, words[0].c_str());
            };
            bad(complete().drop("group:1/var_counter"), {"\"layer/c/var_counter\" is missing"});
            bad(complete({}), {"\"w/momentum_accumulator\"", "are missing"});
            bad(complete().drop("group:0/lrs"), {"\"w/lrs\", \"b/lrs\" are missing"});
            bad(complete().put("group:1/var_interval", 8),
                {"\"group:1/var_interval\" is 8, but \"group:0/var_interval\" is 4"});
            bad(complete().put("group:0/var_interval", 3).put("group:1/var_interval", 3),
                {"var_interval", "interval 3", "power of two"});
            bad(complete()
                    .put("group:0/local_step_interval", 32)
                    .put("group:1/local_step_interval", 32),
                {"local_step_interval", "interval 32", "local_step_clipper 16"});
            bad(complete().number("group:0/lrs", -1), {"\"group:0/lrs\" is -1"});
            bad(complete().number("group:0/lrs", 0),
                {"\"group:0/momentum_accumulator\" is not 0", "\"w\"", "\"group:0/lrs\" is 0"});
            bad(complete().drop("group:0/lrs").number("w/lrs", 0.25).number("b/lrs", 0.5),
                {"\"b/lrs\" is 0.5, but \"w/lrs\" is 0.25", "of a group"});
            require(export_of(optim) == before, "what is refused changes nothing");
            OK(complete().import_to(optim));
            OK(complete({}).drop("group:0/lrs").drop("group:1/lrs").import_to(optim));
            OK(sotto_optim_destroy(optim));
          }),
      "");
}

// 0/1 Adam between synchronisations: an element whose variance is 0 takes no part in later updates,
// whatever has been added to it.
TEST(CapiImport, MaskedElementsKeepTheirValue) {
  EXPECT_EQ(run_world(2, kDefault,
                      [](Member& self) {
                        Model model(self.rank);
                        sotto_optim* optim =
                            new_optim(self, config("ZeroOneAdam", "\"var_freeze_step\": 3"), model);
                        Checkpoint c = by_group(5, {"momentum_accumulator"});
                        add_schedule(c, {"group:0", "group:1"});
                        std::vector<float> variance = elements(1037);
                        variance[3] = 0;
                        OK(c.put("group:0/exp_avg_sq", variance).import_to(optim));
                        const std::vector<float> start = model.weights[0];
                        for (int step = 0; step < 3; ++step) {
                          OK(sotto_optim_step(optim, nullptr, nullptr));
                          require(model.weights[0][3] == start[3], "masked");
                          require(model.weights[0][4] != start[4], "not masked");
                        }
                        OK(sotto_optim_destroy(optim));
                      }),
            "");
}

TEST(CapiImport, ArgumentsThatAreRefused) {
  EXPECT_EQ(
      run_world(1, kDefault,
                [](Member& self) {
                  Model model(0);
                  sotto_optim* optim = new_optim(self, config("OneBitAdam"), model);
                  Checkpoint checkpoint = by_parameter(2);
                  const auto with =
                      [&](const std::function<void(std::vector<sotto_named_array>&)>& change) {
                        std::vector<sotto_named_array> arrays = checkpoint.arrays();
                        change(arrays);
                        return sotto_optim_state_import_arrays(optim, arrays.data(), arrays.size());
                      };
                  FAILS(sotto_optim_state_import_arrays(nullptr, nullptr, 0),
                        SOTTO_E_INVALID_ARGUMENT, "optim is NULL");
                  FAILS(sotto_optim_state_import_arrays(optim, nullptr, 2),
                        SOTTO_E_INVALID_ARGUMENT, "arrays[0] is NULL");
                  FAILS(with([](auto& a) { a.clear(); }), SOTTO_E_INVALID_ARGUMENT, "n is 0");
                  FAILS(with([](auto& a) { a[0].struct_size = 40; }), SOTTO_E_INVALID_ARGUMENT,
                        "arrays[0].struct_size is 40");
                  FAILS(with([](auto& a) { a[1].struct_size = 56; }), SOTTO_E_INVALID_ARGUMENT,
                        "arrays[1].struct_size is 56", "48");
                  FAILS(with([](auto& a) { a[2].reserved = 1; }), SOTTO_E_UNSUPPORTED,
                        "arrays[2].reserved is 1");
                  FAILS(with([](auto& a) { a[2].name = nullptr; }), SOTTO_E_INVALID_ARGUMENT,
                        "arrays[2].name is NULL");
                  FAILS(with([](auto& a) { a[1].values.data = nullptr; }), SOTTO_E_INVALID_ARGUMENT,
                        "arrays[1] (\"b/exp_avg_sq\"): values.data is NULL");
                  FAILS(with([](auto& a) { a[1].values.dtype = 7; }), SOTTO_E_UNSUPPORTED,
                        "b/exp_avg_sq", "dtype");
                  FAILS(with([](auto& a) { a[1].values.device_type = 2; }),
                        SOTTO_E_INVALID_ARGUMENT, "b/exp_avg_sq", "values are on cuda:0");
                  FAILS(with([](auto& a) { a[1].values.device_type = 99; }), SOTTO_E_UNSUPPORTED,
                        "b/exp_avg_sq", "device_type is 99");
                  OK(sotto_group_begin(self.comm));
                  FAILS(checkpoint.import_to(optim), SOTTO_E_INVALID_STATE, "open group");
                  OK(sotto_group_end(self.comm, nullptr, nullptr));
                  sotto_optim* sgd = new_optim(self, config("SGD"), model);
                  FAILS(checkpoint.import_to(sgd), SOTTO_E_UNSUPPORTED, "SGD", "1-bit");
                  OK(checkpoint.import_to(optim));
                  for (sotto_optim* o : {optim, sgd}) OK(sotto_optim_destroy(o));
                }),
      "");
}

// What one rank refuses no rank imports, and all of them hear of a difference.
TEST(CapiImport, RanksImportTheSameOrNothing) {
  EXPECT_EQ(
      run_world(
          3, kDefault,
          [](Member& self) {
            Model model(self.rank);
            sotto_optim* optim = new_optim(self, config("OneBitAdam", "\"freeze_step\": 3"), model);
            OK(sotto_optim_step(optim, nullptr, nullptr));
            const std::string before = export_of(optim);
            const bool odd = self.rank == 1;
            const auto differs = [&](Checkpoint mine, const std::string& what,
                                     const std::string& where) {
              FAILS(odd ? mine.import_to(optim) : by_parameter(5).import_to(optim),
                    SOTTO_E_PROTOCOL, "ranks 0 and 1", what + where + ";");
            };
            const auto refused = [&](Checkpoint mine, const std::string& text) {
              if (odd) {
                FAILS(mine.import_to(optim), SOTTO_E_INVALID_ARGUMENT, text);
              } else {
                FAILS(by_parameter(5).import_to(optim), SOTTO_E_PROTOCOL, "rank 1 refuses", text);
              }
            };
            std::vector<float> values = elements(37, 1000);
            values[36] += 1;
            differs(by_parameter(6), "(step, scheduler or loss scaler)", "");
            differs(by_parameter(5).put("b/exp_avg", values), "(exp_avg)", " of parameter \"b\"");
            differs(by_parameter(5).put("b/exp_avg_sq", values), "(exp_avg_sq)",
                    " of parameter \"b\"");
            differs(by_parameter(5).put("b/fp32", values), "(parameters)", " of parameter \"b\"");
            values[36] = NAN;
            refused(by_parameter(5).put("b/fp32", values), "\"b/fp32\", element 36 is nan");
            refused(by_parameter(5).drop("w/exp_avg"), "array \"w/exp_avg\" is missing");
            refused(Checkpoint(), "n is 0");
            require(export_of(optim) == before, "nothing is imported");
            // Parameters that stay have to be the same too.
            Checkpoint without = by_parameter(5);
            for (const std::string& name : kWithElements) without.drop(name + "/fp32");
            const float kept = model.weights[3][7];
            if (odd) model.weights[3][7] = 2;
            FAILS(without.import_to(optim), SOTTO_E_PROTOCOL, "(parameters)", "\"layer/c\"");
            model.weights[3][7] = kept;
            // Ranks may give the same values in other forms. The group is healthy.
            OK(odd ? by_group(5).import_to(optim) : by_parameter(5).import_to(optim));
            OK(sotto_optim_step(optim, nullptr, nullptr));
            require(info_of(optim).stage == 1, "compressed");
            OK(sotto_optim_destroy(optim));
          }),
      "");
}

// Only the caller drives here, so that a step stays in flight until it is waited for.
TEST(CapiImport, BusyWhileAStepIsInFlight) {
  WorldOptions options;
  options.progress_thread = false;
  EXPECT_EQ(run_world(1, options,
                      [](Member& self) {
                        Model model(0);
                        sotto_optim* optim = new_optim(self, config("OneBitAdam"), model);
                        sotto_op* op = nullptr;
                        OK(sotto_optim_step(optim, nullptr, &op));
                        FAILS(by_parameter(2).import_to(optim), SOTTO_E_BUSY, "in flight");
                        OK(sotto_op_wait(op, -1));
                        OK(sotto_op_release(op));
                        OK(by_parameter(2).import_to(optim));
                        OK(sotto_optim_destroy(optim));
                      }),
            "");
}

}  // namespace
}  // namespace sotto::test
