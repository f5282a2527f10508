// Period "auto" at the C ABI: figures, states, the handle of an optimizer's outer steps.
#include <string>
#include <vector>

#include "tests/ranks/capi_optim_model.h"
#include "tests/ranks/capi_outer_model.h"

namespace sotto::test {
namespace {

constexpr char kAuto[] = R"({"preset": "co2", "period": "auto"})";

bool measures(const sotto_outer* outer) {
  return (info_of(outer).events & SOTTO_OUTER_MEASURING) != 0;
}

void expect_period_is_common(const Member& self, const sotto_outer* outer) {
  std::vector<float> mine{static_cast<float>(info_of(outer).period)};
  const float own = mine[0];
  const sotto_buffer b = buffer(mine);
  sotto_call call = SOTTO_CALL_INIT;
  call.reduce = SOTTO_REDUCE_MAX;
  OK(sotto_all_reduce(self.comm, &b, &b, 1, &call, nullptr));
  same(mine[0], own, "the period of all ranks");
}

TEST(CapiOuterPeriod, IsMeasuredAndKept) {
  EXPECT_EQ(run_world(3, {},
                      [&](Member& self) {
                        OuterModel model;
                        sotto_outer* outer = new_outer(self, kAuto, model);
                        same(info_of(outer).period, 4, "period");
                        same(info_of(outer).delay, 4, "delay");
                        for (int k = 0; k < 24; ++k) {
                          require(measures(outer), "the period is there already");
                          model.add(0.25f * static_cast<float>(self.rank));
                          step(outer);
                        }
                        require(!measures(outer), "the period is not there");
                        const sotto_outer_info info = info_of(outer);
                        same(info.delay, info.period, "delay");
                        same(info.next_boundary, info.period, "next_boundary");
                        expect_period_is_common(self, outer);
                        uint64_t n = 0;
                        OK(sotto_outer_state_export(outer, SOTTO_STATE_EXACT, nullptr, 0, &n));
                        std::vector<char> blob(n);
                        OK(sotto_outer_state_export(outer, SOTTO_STATE_EXACT, blob.data(), n, &n));
                        OK(sotto_outer_destroy(outer));
                        outer = new_outer(self, kAuto, model);
                        OK(sotto_outer_state_import(outer, SOTTO_STATE_EXACT, blob.data(), n));
                        require(!measures(outer), "the period of a state is measured again");
                        same(info_of(outer).period, info.period, "period of the state");
                        OK(sotto_outer_set(outer, "retune", 1));
                        for (uint64_t k = 0; k < 2 * info.period; ++k) step(outer);
                        require(measures(outer), "nothing is measured again");
                        OK(sotto_outer_flush(outer, nullptr, nullptr));
                        OK(sotto_outer_destroy(outer));
                        outer = new_outer(self, R"({"preset": "co2", "period": 4})", model);
                        FAILS(sotto_outer_state_import(outer, SOTTO_STATE_EXACT, blob.data(), n),
                              SOTTO_E_INVALID_ARGUMENT,
                              "the first that differs is sotto.outer.period=auto in the state and "
                              "sotto.outer.period=4 here");
                        FAILS(sotto_outer_set(outer, "retune", 1), SOTTO_E_INVALID_STATE,
                              "retune measures a period \"auto\" anew; the period here is 4");
                        OK(sotto_outer_destroy(outer));
                      }),
            "");
}

TEST(CapiOuterPeriod, OfAnOptimizersFile) {
  EXPECT_EQ(run_world(2, {},
                      [&](Member& self) {
                        Model model(0);
                        const std::string json =
                            R"({"optimizer": {"type": "AdamW"}, "sotto": {"outer": )" +
                            std::string(kAuto) + "}}";
                        sotto_optim* optim = new_optim(self, json.c_str(), model);
                        sotto_outer* outer = nullptr;
                        OK(sotto_optim_outer(optim, &outer));
                        for (int k = 0; k < 24; ++k) {
                          require(measures(outer), "the period is there already");
                          OK(sotto_optim_step(optim, nullptr, nullptr));
                        }
                        require(!measures(outer), "the period is not there");
                        expect_period_is_common(self, outer);
                        OK(sotto_outer_set(outer, "retune", 1));
                        OK(sotto_outer_destroy(outer));
                        OK(sotto_optim_destroy(optim));
                      }),
            "");
}

}  // namespace
}  // namespace sotto::test
