// Very many tensors and parameter groups: the time of everything that is done once grows with their
// number, not with its square.
#include <gtest/gtest.h>

#include <cinttypes>
#include <ctime>

#include "core/config/config.h"
#include "core/state/optim_state.h"
#include "tests/support/core_ranks.h"
#include "tests/support/sanitized.h"
#include "tests/support/small_model.h"

namespace sotto::test {
namespace {

// Of processors, which other processes do not change.
double seconds_used() {
  timespec used{};
  ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &used);
  return static_cast<double>(used.tv_sec) + 1e-9 * static_cast<double>(used.tv_nsec);
}

// Seconds of work on n tensors of one element, in as many groups, 2 ranks.
double seconds_of(uint64_t n, const char* optimizer, const char* sotto) {
  std::string groups;
  for (uint64_t g = 0; g < n; ++g) groups += g == 0 ? "{}" : ",{}";
  const std::string json = fmt::format(
      R"({{"optimizer": {}, "sotto": {{{}"param_groups": [{}]}}}})", optimizer, sotto, groups);
  const double start = seconds_used();
  const Status status =
      run_world(world_of("inproc", 2), [&](const std::shared_ptr<Comm>& comm) -> Status {
        std::vector<float> p(n, 0.5f), g(n, 0.25f);
        std::vector<ParamSpec> specs;
        for (uint64_t i = 0; i < n; ++i)
          specs.push_back({fmt::format("t{}", i), 1, static_cast<uint32_t>(i), &p[i], &g[i]});
        SOTTO_ASSIGN(const std::shared_ptr<Optimizer> o,
                     Optimizer::create(comm, json, std::move(specs)));
        for (int k = 0; k < 3; ++k) SOTTO_TRY(do_step(*o));
        for (uint64_t i = 0; i < n; ++i) {
          const auto group = static_cast<int32_t>(i);
          SOTTO_TRY(o->set("lr", group, 0.02));
          SOTTO_TRY(o->set("weight_decay", group, 0.1));
        }
        SOTTO_TRY(o->report_json("all").status());
        SOTTO_ASSIGN(const std::vector<std::byte> blob, export_state(*o, StateMode::kExact));
        SOTTO_TRY(import_state(*o, StateMode::kExact, blob));
        return do_step(*o);
      });
  EXPECT_TRUE(status.ok()) << status.text();
  return seconds_used() - start;
}

TEST(OptimizerMany, TimeIsLinear) {
  if (kSanitized) GTEST_SKIP() << "times mean nothing under a sanitizer";
  struct Case {
    const char* optimizer;
    const char* sotto;
    uint64_t few = 3'000;
  };
  // LAMB's types have steps of every tensor, so their plans are larger.
  for (const Case& c :
       {Case{R"({"type": "AdamW", "params": {"lr": 0.01}})", ""},
        Case{R"({"type": "OneBitAdam", "params": {"lr": 0.01, "freeze_step": 3}})",
             R"("chunk_align": 8, )"},
        Case{R"({"type": "ZeroOneAdam", "params": {"lr": 0.01, "var_freeze_step": 2}})",
             R"("chunk_align": 8, )"},
        Case{R"({"type": "Lamb", "params": {"lr": 0.01}})", "", 1'500},
        Case{R"({"type": "OneBitLamb", "params": {"lr": 0.01, "freeze_step": 3}})",
             R"("chunk_align": 8, )", 1'500}}) {
    const double few = seconds_of(c.few, c.optimizer, c.sotto);
    const double many = seconds_of(8 * c.few, c.optimizer, c.sotto);
    std::printf("%s: %.2f s for %" PRIu64 " tensors, %.2f s for 8 times as many\n", c.optimizer,
                few, c.few, many);
    EXPECT_LT(many, 24 * few + 0.5);  // 64 times if it were the square
  }
}

// 0/1 Adam's numbers of groups from a checkpoint.
TEST(OptimizerMany, ImportOfArraysIsLinear) {
  const auto seconds = [](uint64_t n) {
    const double start = seconds_used();
    const Status status =
        run_world(world_of("inproc", 1), [&](const std::shared_ptr<Comm>& comm) -> Status {
          std::vector<float> p(n, 0.5f), g(n, 0.25f), ones(n, 1.0f), zeros(n, 0.0f);
          std::vector<ParamSpec> specs;
          for (uint64_t i = 0; i < n; ++i)
            specs.push_back({fmt::format("t{}", i), 1, static_cast<uint32_t>(i), &p[i], &g[i]});
          SOTTO_ASSIGN(const std::shared_ptr<Optimizer> o,
                       Optimizer::create(comm,
                                         R"({"optimizer": {"type": "ZeroOneAdam", "params":
                                             {"lr": 0.01, "var_freeze_step": 2}}})",
                                         std::move(specs)));
          const int64_t step = 10, one = 1, zero = 0;
          const float lrs = 0.0f;
          std::vector<NamedArray> arrays;
          for (uint64_t i = 0; i < n; ++i) {
            const auto add = [&](const char* key, const void* data, Dtype dtype) {
              arrays.push_back({fmt::format("t{}/{}", i, key), data, 1, dtype});
            };
            add("exp_avg", &zeros[i], Dtype::kF32);
            add("exp_avg_sq", &ones[i], Dtype::kF32);
            add("momentum_accumulator", &zeros[i], Dtype::kF32);
            add("lrs", &lrs, Dtype::kF32);
            add("step", &step, Dtype::kI64);
            add("var_interval", &one, Dtype::kI64);
            add("var_counter", &zero, Dtype::kI64);
            add("local_step_interval", &one, Dtype::kI64);
            add("local_step_counter", &zero, Dtype::kI64);
          }
          return o->import_arrays(arrays);
        });
    EXPECT_TRUE(status.ok()) << status.text();
    return seconds_used() - start;
  };
  const double few = seconds(2'000);
  if (kSanitized) return;  // where times mean nothing
  const double many = seconds(16'000);
  std::printf("%.2f s for 2 000 groups, %.2f s for 16 000\n", few, many);
  EXPECT_LT(many, 24 * few + 0.5);
}

TEST(OptimizerMany, AGroupNeedsItsParameter) {
  const Status status =
      run_world(world_of("inproc", 1), [](const std::shared_ptr<Comm>& comm) -> Status {
        const auto text = [&](const char* sotto, uint32_t group) {
          std::vector<float> p(4, 0.5f), g(4, 0.25f);
          std::vector<ParamSpec> specs{{"a", 2, 0, p.data(), g.data()},
                                       {"b", 2, group, p.data() + 2, g.data() + 2}};
          return Optimizer::create(
                     comm,
                     fmt::format(R"({{"optimizer": {{"type": "AdamW"}}, "sotto": {{{}}}}})", sotto),
                     specs)
              .status()
              .text();
        };
        constexpr const char* kThree = R"("param_groups": [{}, {}, {}])";
        EXPECT_NE(
            text("", 10'000'000).find("parameter 1 (\"b\"): group is 10000000; allowed: 0 to 1"),
            std::string::npos)
            << text("", 10'000'000);
        EXPECT_NE(
            text(kThree, 3).find("group is 3; allowed: 0 to 2, since sotto.param_groups has 3"),
            std::string::npos)
            << text(kThree, 3);
        EXPECT_EQ(text("", 1), "");
        EXPECT_EQ(text(kThree, 2), "");
        return ok_status();
      });
  EXPECT_TRUE(status.ok()) << status.text();
}

}  // namespace
}  // namespace sotto::test
