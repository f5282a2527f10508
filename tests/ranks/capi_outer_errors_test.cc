// Bad input of outer optimizers at the C ABI: the code, what the text names, that all ranks end
// alike, and that nothing is harmed by it.
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "tests/ranks/capi_outer_model.h"

namespace sotto::test {
namespace {

const std::string kTwo = mean_json(R"("period": 2, "delay": 0)");

// Every rank is a healthy member of its comm and can make an outer optimizer.
void works(const Member& self) {
  barrier(self);
  OuterModel model;
  sotto_outer* outer = new_outer(self, kTwo, model);
  for (int k = 0; k < 2; ++k) {
    model.add(static_cast<float>(self.rank));
    step(outer);
  }
  same(model.read(), 1 + static_cast<float>(self.size - 1), "the mean");
  OK(sotto_outer_destroy(outer));
}

TEST(CapiOuterErrors, NullArguments) {
  uint32_t calls = 0;
  sotto_outer_info info = SOTTO_OUTER_INFO_INIT;
  EXPECT_EQ(run_world(1, {},
                      [&](Member& self) {
                        OuterModel model;
                        sotto_outer* outer = nullptr;
                        const sotto_param* params = model.params.data();
                        FAILS(sotto_outer_create(nullptr, kTwo.c_str(), params, 2, &outer),
                              SOTTO_E_INVALID_ARGUMENT, "comm is NULL");
                        FAILS(sotto_outer_create(self.comm, nullptr, params, 2, &outer),
                              SOTTO_E_INVALID_ARGUMENT, "json is NULL");
                        FAILS(sotto_outer_create(self.comm, kTwo.c_str(), params, 2, nullptr),
                              SOTTO_E_INVALID_ARGUMENT, "out_outer is NULL");
                        FAILS(sotto_outer_create(self.comm, kTwo.c_str(), nullptr, 2, &outer),
                              SOTTO_E_INVALID_ARGUMENT, "params[0] is NULL");
                        FAILS(sotto_outer_create(self.comm, kTwo.c_str(), params, 0, &outer),
                              SOTTO_E_INVALID_ARGUMENT, "n is 0; allowed: 1 to");
                        outer = new_outer(self, kTwo, model);
                        FAILS(sotto_outer_set(outer, nullptr, 1), SOTTO_E_INVALID_ARGUMENT,
                              "name is NULL");
                        FAILS(sotto_outer_get_info(outer, nullptr), SOTTO_E_INVALID_ARGUMENT,
                              "out_info is NULL");
                        info.struct_size = 8;
                        FAILS(sotto_outer_get_info(outer, &info), SOTTO_E_INVALID_ARGUMENT,
                              "out_info.struct_size is 8");
                        OK(sotto_outer_destroy(outer));
                        ++calls;
                      }),
            "");
  EXPECT_EQ(calls, 1u);
  FAILS(sotto_outer_step(nullptr, nullptr, nullptr), SOTTO_E_INVALID_ARGUMENT, "NULL");
  FAILS(sotto_outer_flush(nullptr, nullptr, nullptr), SOTTO_E_INVALID_ARGUMENT, "NULL");
  FAILS(sotto_outer_swap(nullptr, nullptr, nullptr), SOTTO_E_INVALID_ARGUMENT, "NULL");
  FAILS(sotto_outer_vote(nullptr, 1), SOTTO_E_INVALID_ARGUMENT, "NULL");
  FAILS(sotto_outer_set(nullptr, "lr", 1), SOTTO_E_INVALID_ARGUMENT, "NULL");
  FAILS(sotto_outer_get_info(nullptr, &info), SOTTO_E_INVALID_ARGUMENT, "NULL");
  OK(sotto_outer_destroy(nullptr));
}

struct BadParam {
  const char* name;
  sotto_status code;
  const char* text;
  std::function<void(sotto_param*)> change;
};

// On rank 1 only: rank 0 hears of it, and both are healthy afterwards.
TEST(CapiOuterErrors, Parameters) {
  static std::vector<float> more(1000);
  static std::vector<double> wide(1000);
  static std::vector<uint8_t> mask(1000, 1);
  const std::vector<BadParam> cases{
      {"grad", SOTTO_E_INVALID_ARGUMENT,
       "params[0].grad is given; an outer optimizer needs it empty",
       [](sotto_param* p) { p[0].grad = buffer(more); }},
      {"mask", SOTTO_E_INVALID_ARGUMENT,
       "params[0].mask is given; an outer optimizer needs it empty",
       [](sotto_param* p) { p[0].mask = buffer(mask); }},
      {"group", SOTTO_E_INVALID_ARGUMENT, "params[1].group is 3; allowed: 0",
       [](sotto_param* p) { p[1].group = 3; }},
      {"models", SOTTO_E_UNSUPPORTED, "params[1].models is 2; fused arrays are not built",
       [](sotto_param* p) { p[1].models = 2; }},
      {"dtype", SOTTO_E_UNSUPPORTED, "params[0].param is fp64; allowed: fp32",
       [](sotto_param* p) { p[0].param = buffer(wide); }},
      {"copy_dtype", SOTTO_E_UNSUPPORTED, "params[0].model_copy is fp32; allowed: fp16, bf16",
       [](sotto_param* p) { p[0].model_copy = buffer(more); }},
      {"copy_count", SOTTO_E_INVALID_ARGUMENT,
       "params[1].model_copy.count is 36 but its parameter has 37 elements",
       [](sotto_param* p) {
         p[1].model_copy = buffer(more.data(), 36);
         p[1].model_copy.dtype = SOTTO_FLOAT16;
       }},
      {"overlap", SOTTO_E_INVALID_ARGUMENT, "overlap, and not as in-place operations may",
       [](sotto_param* p) {
         p[0].param = buffer(more.data(), 100);
         p[1].param = buffer(more.data() + 99, 37);
       }},
      {"null_data", SOTTO_E_INVALID_ARGUMENT, "params[1].param.data is NULL but its count is 37",
       [](sotto_param* p) { p[1].param.data = nullptr; }},
      {"name", SOTTO_E_INVALID_ARGUMENT, "parameter 1: the name \"w\" is used twice",
       [](sotto_param* p) { p[1].name = "w"; }},
      {"struct_size", SOTTO_E_INVALID_ARGUMENT, "params[1].struct_size is",
       [](sotto_param* p) { p[1].struct_size += 8; }},
  };
  EXPECT_EQ(run_world(2, {},
                      [&](Member& self) {
                        for (const BadParam& c : cases) {
                          OuterModel model;
                          sotto_outer* outer = nullptr;
                          if (self.rank == 1) c.change(model.params.data());
                          fails(create_outer(self, kTwo, model, &outer), c.code,
                                {std::string("rank 1 refuses: "), c.text}, c.name);
                          require(outer == nullptr, c.name);
                        }
                        works(self);
                      }),
            "");
}

struct BadJson {
  const char* json;
  sotto_status code;
  std::vector<std::string> words;
};

TEST(CapiOuterErrors, Settings) {
  const std::vector<BadJson> cases{
      {R"({"preset": "co2", "perid": 4})",
       SOTTO_E_INVALID_ARGUMENT,
       {"outer.perid: unknown key; the nearest one is period"}},
      {R"({"preset": "co3"})",
       SOTTO_E_INVALID_ARGUMENT,
       {"outer.preset: found \"co3\", allowed is one of co2|co2_paper|"}},
      {R"({"preset": "co2", "period": 0})",
       SOTTO_E_INVALID_ARGUMENT,
       {"outer.period: found 0, allowed is a whole number >= 1"}},
      {R"({"preset": "co2", "period": 4, "delay": 5})",
       SOTTO_E_INVALID_ARGUMENT,
       {"outer.delay: found delay 5 with period 4, allowed is 0 to the period"}},
      {R"({"preset": "co2", "beta": 1})",
       SOTTO_E_INVALID_ARGUMENT,
       {"outer.beta: found 1, allowed is a number in [0, 1)"}},
      {R"({"preset": "co2", "period": 4, "fragments": 3})",
       SOTTO_E_INVALID_ARGUMENT,
       {"outer.fragments: found 3 fragments with period 4"}},
      {R"({"preset": "co2", "period": 3, "fragments": 3})",
       SOTTO_E_INVALID_ARGUMENT,
       {"fragments", "3", "2"}},
      {R"({"preset": "sparse_loco", "codec": {"type": "topk", "k": 5000}})",
       SOTTO_E_INVALID_ARGUMENT,
       {"outer.codec.k: found 5000, allowed is a whole number in [1, 4096]"}},
      {R"({"preset": "co2", "period": "soon"})", SOTTO_E_INVALID_ARGUMENT, {"period", "auto"}},
      {R"({"optimizer": {"type": "AdamW"}})", SOTTO_E_INVALID_ARGUMENT, {"outer"}},
      {"{", SOTTO_E_INVALID_ARGUMENT, {"line 1", "the text ends before everything is closed"}},
      {"", SOTTO_E_INVALID_ARGUMENT, {}},
  };
  EXPECT_EQ(run_world(2, {},
                      [&](Member& self) {
                        for (const BadJson& c : cases) {
                          OuterModel model;
                          sotto_outer* outer = nullptr;
                          fails(create_outer(self, c.json, model, &outer), c.code, c.words, c.json);
                          require(outer == nullptr, c.json);
                        }
                        works(self);
                      }),
            "");
}

// Every rank's own input is right, but not that of all together.
TEST(CapiOuterErrors, RanksThatDiffer) {
  EXPECT_EQ(
      run_world(
          3, {},
          [](Member& self) {
            sotto_outer* outer = nullptr;
            OuterModel values(self.rank == 0 ? 1.0f : 2.0f);
            values.weights[0].assign(values.weights[0].size(), 1.0f);
            FAILS(create_outer(self, kTwo, values, &outer), SOTTO_E_PROTOCOL,
                  "parameter \"b\" has other values on rank 1, 2 than on rank 0; give all ranks "
                  "the same");
            require(std::string(sotto_last_error()).find("initial_parameters") == std::string::npos,
                    "the text has a key that outer optimizers do not know");
            OuterModel sizes(1, 0, {1000, self.rank == 2 ? size_t{38} : size_t{37}});
            FAILS(create_outer(self, kTwo, sizes, &outer), SOTTO_E_PROTOCOL,
                  "rank 0 registers 2 parameters with 1037 elements, rank 2 2 with 1038");
            OuterModel names;
            if (self.rank == 1) names.params[1].name = "c";
            FAILS(create_outer(self, kTwo, names, &outer), SOTTO_E_PROTOCOL,
                  "ranks 0 and 1 register parameters with other names");
            OuterModel model;
            FAILS(create_outer(self,
                               mean_json(self.rank == 2 ? R"("period": 4, "delay": 0)"
                                                        : R"("period": 2, "delay": 0)"),
                               model, &outer),
                  SOTTO_E_PROTOCOL, "sotto.outer.period", "rank 2");
            FAILS(create_outer(self,
                               mean_json(std::string(R"("period": 2, "nonfinite": ")") +
                                         (self.rank == 1 ? "error\"" : "pass\"")),
                               model, &outer),
                  SOTTO_E_PROTOCOL, "sotto.outer.nonfinite", "rank 1");
            require(outer == nullptr, "a handle of what was refused");
            works(self);
          }),
      "");
}

TEST(CapiOuterErrors, Set) {
  EXPECT_EQ(run_world(1, {},
                      [](Member& self) {
                        constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
                        constexpr double kInf = std::numeric_limits<double>::infinity();
                        OuterModel model;
                        sotto_outer* outer = new_outer(self, kTwo, model);
                        FAILS(sotto_outer_set(outer, "lrr", 1), SOTTO_E_INVALID_ARGUMENT,
                              R"("lrr" cannot be set; allowed: "lr", "loss", "weight", "retune")");
                        for (const double w : {0.5, -1.0, 2.0, kNan}) {
                          FAILS(sotto_outer_set(outer, "weight", w), SOTTO_E_INVALID_ARGUMENT,
                                "weight is ", "; allowed: 0 or 1");
                        }
                        FAILS(sotto_outer_set(outer, "weight", 0.5), SOTTO_E_INVALID_ARGUMENT,
                              "weight is 0.5; allowed: 0 or 1");
                        for (const double bad : {1e300, 1e-60}) {
                          FAILS(sotto_outer_set(outer, "lr", bad), SOTTO_E_INVALID_ARGUMENT,
                                "lr is 1e", "allowed: a finite number, in float32 too");
                        }
                        for (const double bad : {kNan, kInf, -kInf}) {
                          FAILS(sotto_outer_set(outer, "lr", bad), SOTTO_E_INVALID_ARGUMENT,
                                "lr is ", "allowed: a finite number");
                          FAILS(sotto_outer_set(outer, "loss", bad), SOTTO_E_INVALID_ARGUMENT,
                                "loss is ", "allowed: a finite number");
                        }
                        OK(sotto_outer_set(outer, "lr", 0));
                        OK(sotto_outer_set(outer, "loss", -3.5));
                        OK(sotto_outer_set(outer, "weight", 0));
                        OK(sotto_outer_destroy(outer));
                        outer = new_outer(self, R"({"preset": "slowmo", "period": 2})", model);
                        // A schedule may begin at 0: what counts is the step that divides by it.
                        OK(sotto_outer_set(outer, "lr", 0));
                        OK(sotto_outer_step(outer, nullptr, nullptr));
                        for (const double bad : {0.0, -0.1}) {
                          OK(sotto_outer_set(outer, "lr", bad));
                          FAILS(sotto_outer_step(outer, nullptr, nullptr), SOTTO_E_INVALID_STATE,
                                "lr is ", "sotto.outer.lr_normalised", "allowed: > 0");
                        }
                        FAILS(sotto_outer_set(outer, "lr", kNan), SOTTO_E_INVALID_ARGUMENT,
                              "lr is ");
                        OK(sotto_outer_set(outer, "lr", 0.1));
                        OK(sotto_outer_step(outer, nullptr, nullptr));
                        OK(sotto_outer_destroy(outer));
                        // Nor do the means of a warm-up.
                        outer = new_outer(
                            self, R"({"preset": "slowmo", "period": 2, "warmup_steps": 2})", model);
                        OK(sotto_outer_set(outer, "lr", 0));
                        for (int step = 0; step < 3; ++step)
                          OK(sotto_outer_step(outer, nullptr, nullptr));
                        FAILS(sotto_outer_step(outer, nullptr, nullptr), SOTTO_E_INVALID_STATE,
                              "lr is 0");
                        OK(sotto_outer_destroy(outer));
                      }),
            "");
}

struct Reentry {
  sotto_comm* comm;
  sotto_outer* outer;
  const OuterModel* model;
  std::string problem = "not called";
};

void call_everything(void* user, sotto_status status) {
  auto& r = *static_cast<Reentry*>(user);
  r.problem = status == SOTTO_OK ? "" : "status ";
  const auto refused = [&](sotto_status found, const char* what) {
    if (found != SOTTO_E_INVALID_STATE) r.problem += what;
  };
  sotto_outer* made = nullptr;
  refused(sotto_outer_create(r.comm, kTwo.c_str(), r.model->params.data(), 2, &made), "create ");
  refused(sotto_outer_step(r.outer, nullptr, nullptr), "step ");
  refused(sotto_outer_flush(r.outer, nullptr, nullptr), "flush ");
  refused(sotto_outer_swap(r.outer, nullptr, nullptr), "swap ");
  refused(sotto_outer_destroy(r.outer), "destroy ");
}

TEST(CapiOuterErrors, CallsFromACallback) {
  EXPECT_EQ(run_world(2, {},
                      [](Member& self) {
                        OuterModel model;
                        sotto_outer* outer = new_outer(self, kTwo, model);
                        Reentry reentry{self.comm, outer, &model};
                        const sotto_call call = call_with([&](auto& c) {
                          c.user = &reentry;
                          c.on_done = call_everything;
                        });
                        for (int k = 0; k < 4; ++k) {
                          reentry.problem = "not called";
                          sotto_op* op = nullptr;
                          OK(sotto_outer_step(outer, &call, &op));
                          OK(sotto_op_wait(op, -1));
                          OK(sotto_op_test(op));
                          OK(sotto_op_release(op));
                          require(reentry.problem.empty(), "in the callback: " + reentry.problem);
                        }
                        same(info_of(outer).step, 4, "step");
                        OK(sotto_outer_destroy(outer));
                        works(self);
                      }),
            "");
}

TEST(CapiOuterErrors, OpenGroup) {
  EXPECT_EQ(
      run_world(
          2, {},
          [](Member& self) {
            OuterModel model;
            sotto_outer *outer = new_outer(self, kTwo, model), *other = nullptr;
            OK(sotto_group_begin(self.comm));
            FAILS(sotto_outer_step(outer, nullptr, nullptr), SOTTO_E_INVALID_STATE,
                  "the comm has an open group; call sotto_group_end first");
            FAILS(sotto_outer_flush(outer, nullptr, nullptr), SOTTO_E_INVALID_STATE, "open group");
            FAILS(sotto_outer_swap(outer, nullptr, nullptr), SOTTO_E_INVALID_STATE, "open group");
            FAILS(create_outer(self, kTwo, model, &other), SOTTO_E_INVALID_STATE, "open group");
            OK(sotto_group_end(self.comm, nullptr, nullptr));
            same(info_of(outer).step, 0, "step");
            step(outer);
            OK(sotto_outer_destroy(outer));
            works(self);
          }),
      "");
}

TEST(CapiOuterErrors, CallOptions) {
  EXPECT_EQ(
      run_world(1, {},
                [](Member& self) {
                  OuterModel model;
                  sotto_outer* outer = new_outer(self, kTwo, model);
                  const auto each = [&](const sotto_call& call, const char* text) {
                    FAILS(sotto_outer_step(outer, &call, nullptr), SOTTO_E_INVALID_ARGUMENT, text);
                    FAILS(sotto_outer_flush(outer, &call, nullptr), SOTTO_E_INVALID_ARGUMENT, text);
                    FAILS(sotto_outer_swap(outer, &call, nullptr), SOTTO_E_INVALID_ARGUMENT, text);
                  };
                  each(call_with([](auto& c) { c.reduce = SOTTO_REDUCE_MEAN; }), "call.reduce is ");
                  sotto_codec* codec = reinterpret_cast<sotto_codec*>(&model);
                  each(call_with([&](auto& c) { c.codec = codec; }), "call.codec must be NULL");
                  same(info_of(outer).step, 0, "step");
                  OK(sotto_outer_destroy(outer));
                }),
      "");
}

TEST(CapiOuterErrors, HandleAfterDestroy) {
  EXPECT_EQ(
      run_world(1, {},
                [](Member& self) {
                  OuterModel model;
                  sotto_outer* outer = new_outer(self, kTwo, model);
                  OK(sotto_outer_destroy(outer));
                  sotto_outer_info info = SOTTO_OUTER_INFO_INIT;
                  const char* const gone = "has been destroyed before";
                  FAILS(sotto_outer_step(outer, nullptr, nullptr), SOTTO_E_INVALID_ARGUMENT, gone);
                  FAILS(sotto_outer_flush(outer, nullptr, nullptr), SOTTO_E_INVALID_ARGUMENT, gone);
                  FAILS(sotto_outer_swap(outer, nullptr, nullptr), SOTTO_E_INVALID_ARGUMENT, gone);
                  FAILS(sotto_outer_vote(outer, 1), SOTTO_E_INVALID_ARGUMENT, gone);
                  FAILS(sotto_outer_set(outer, "lr", 1), SOTTO_E_INVALID_ARGUMENT, gone);
                  FAILS(sotto_outer_get_info(outer, &info), SOTTO_E_INVALID_ARGUMENT, gone);
                  FAILS(sotto_outer_destroy(outer), SOTTO_E_INVALID_ARGUMENT, gone);
                }),
      "");
}

// A flush of one rank is not averaged with a step of another.
TEST(CapiOuterErrors, RanksWithOtherCalls) {
  EXPECT_EQ(run_world(2, {},
                      [](Member& self) {
                        OuterModel model;
                        sotto_outer* outer =
                            new_outer(self, mean_json(R"("period": 2, "delay": 0)"), model);
                        for (int k = 0; k < 3; ++k) OK(sotto_outer_step(outer, nullptr, nullptr));
                        const sotto_status status = self.rank == 0
                                                        ? sotto_outer_flush(outer, nullptr, nullptr)
                                                        : sotto_outer_step(outer, nullptr, nullptr);
                        fails(status, SOTTO_E_PROTOCOL, {"ranks do not agree"}, "flush and step");
                        sotto_outer_destroy(outer);
                      }),
            "");
}

std::string exported(const sotto_outer* outer) {
  return read_all([&](char* buffer, uint64_t size, uint64_t* length) {
    return sotto_outer_state_export(outer, SOTTO_STATE_EXACT, buffer, size, length);
  });
}

// What a rank was told of steps that an import undoes is gone, and so is what it asked for.
TEST(CapiOuterErrors, AnImportForgets) {
  EXPECT_EQ(run_world(2, {},
                      [](Member& self) {
                        OuterModel model;
                        sotto_outer* outer =
                            new_outer(self, mean_json(R"("period": 2, "delay": 0)"), model);
                        const std::string first = exported(outer);
                        OK(sotto_outer_vote(outer, 1));
                        for (int k = 0; k < 2; ++k) OK(sotto_outer_step(outer, nullptr, nullptr));
                        require(info_of(outer).votes == 1, "votes before");
                        OK(sotto_outer_swap(outer, nullptr, nullptr));
                        require(exported(outer).size() > first.size(), "swapped");
                        OK(sotto_outer_swap(outer, nullptr, nullptr));
                        require(exported(outer).size() == first.size(), "swapped back");
                        OK(sotto_outer_vote(outer, 2));
                        OK(sotto_outer_state_import(outer, SOTTO_STATE_EXACT, first.data(),
                                                    first.size()));
                        require(info_of(outer).votes == 0, "votes after the import");
                        for (int k = 0; k < 2; ++k) OK(sotto_outer_step(outer, nullptr, nullptr));
                        require(info_of(outer).votes == 0, "votes of before the import");
                        FAILS(sotto_outer_state_import(outer, 5, first.data(), first.size()),
                              SOTTO_E_INVALID_ARGUMENT, "mode is 5; allowed: 1 (SOTTO_STATE_EXACT)",
                              "4 (SOTTO_STATE_COMMON)");
                        OK(sotto_outer_destroy(outer));
                      }),
            "");
}

}  // namespace
}  // namespace sotto::test
