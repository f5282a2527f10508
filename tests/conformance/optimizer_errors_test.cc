// What the optimizer refuses, and that nothing is lost by it.
#include <gtest/gtest.h>

#include <cstdio>
#include <span>

#include "core/state/optim_state.h"
#include "tests/support/core_ranks.h"
#include "tests/support/small_model.h"

namespace sotto::test {
namespace {

constexpr const char* kOnebitJson =
    R"({"optimizer": {"type": "OneBitLamb", "params": {"lr": 0.01, "freeze_step": 5}}})";

TEST(OptimizerErrors, NameWhatIsWrong) {
  const Status status =
      run_world(world_of("inproc", 2), [](const std::shared_ptr<Comm>& comm) -> Status {
        SmallModel model(comm->rank());
        const auto code = [&](const char* json) {
          return Optimizer::create(comm, json, model.specs()).status();
        };
        EXPECT_EQ(
            code(R"({"optimizer": {"type": "OneBitLamb", "params": {"freeze_stop": 4}}})").code(),
            Code::kInvalidArgument);
        EXPECT_EQ(code(R"({"optimizer": {"type": "OneBitAdam"},
                           "sotto": {"mode": "compat", "granularity": "bucket"}})")
                      .code(),
                  Code::kInvalidArgument);
        auto twice = model.specs();
        twice[1].name = twice[0].name;
        EXPECT_NE(Optimizer::create(comm, kOnebitJson, twice).status().text().find("used twice"),
                  std::string::npos);
        auto other = model.specs();
        if (comm->rank() == 1) other[3].name = "renamed";
        const Status differs = Optimizer::create(comm, kOnebitJson, other).status();
        EXPECT_EQ(differs.code(), Code::kProtocol) << differs.text();
        for (const char* more :
             {R"(, "sotto": {"param_groups": [{}, {"lr": %g}]})",
              R"(, "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": %g}})",
              R"(, "gradient_clipping": %g)"}) {
          char rest[256];
          std::snprintf(rest, sizeof rest, more, comm->rank() == 1 ? 0.5 : 0.25);
          const Status met =
              Optimizer::create(comm, fmt::format(R"({{"optimizer": {{"type": "Adam"}}{}}})", rest),
                                model.specs())
                  .status();
          EXPECT_EQ(met.code(), Code::kProtocol) << rest << ": " << met.text();
        }
        SOTTO_ASSIGN(const std::shared_ptr<Optimizer> good,
                     Optimizer::create(comm, kOnebitJson, model.specs()));
        for (int k = 0; k < 6; ++k) {
          for (size_t i = 0; i < model.g.size(); ++i)
            model.g[i] = 0.1f * model.p[i] + 0.01f * static_cast<float>(comm->rank());
          SOTTO_TRY(do_step(*good));
        }
        SOTTO_ASSIGN(std::vector<std::byte> blob, export_state(*good, StateMode::kExact));
        const std::vector<float> before = model.p;
        for (size_t cut = 0; cut < blob.size(); cut += 997) {
          EXPECT_FALSE(import_state(*good, StateMode::kExact, std::span(blob).first(cut)).ok());
        }
        blob[blob.size() / 2] ^= std::byte{4};
        EXPECT_EQ(import_state(*good, StateMode::kExact, blob).code(), Code::kInvalidArgument);
        EXPECT_EQ(bytes_of(model.p) == bytes_of(before), true);
        return ok_status();
      });
  EXPECT_TRUE(status.ok()) << status.text();
}

TEST(OptimizerErrors, RanksInOtherModes) {
  const Status status =
      run_world(world_of("inproc", 2), [](const std::shared_ptr<Comm>& comm) -> Status {
        for (const char* type : {"OneBitAdam", "OneBitLamb", "ZeroOneAdam"}) {
          SmallModel model(comm->rank());
          const Status met =
              Optimizer::create(comm,
                                fmt::format(R"({{"optimizer": {{"type": "{}"}},
                                                "sotto": {{"mode": "{}"}}}})",
                                            type, comm->rank() == 1 ? "compat" : "strict"),
                                model.specs())
                  .status();
          if (met.code() != Code::kProtocol) return error(Code::kInternal, "{}", met.text());
        }
        return ok_status();
      });
  EXPECT_TRUE(status.ok()) << status.text();
}

}  // namespace
}  // namespace sotto::test
