// Optimizers whose averages have two levels (sotto.hierarchy), on every kind of world: state that
// continues bit for bit, values that are not finite wherever they are, steps by rounds of late
// gradients, and what is refused. That parameters are the right ones is the numpy model's to say
// (tests/model).
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

#include "core/optim/optimizer.h"
#include "core/overlap/overlap.h"
#include "core/state/optim_state.h"
#include "tests/support/core_ranks.h"
#include "tests/support/random_bits.h"
#include "tests/support/small_model.h"

namespace sotto::test {
namespace {

constexpr const char* kTypes[] = {
    R"({"type": "OneBitAdam", "params": {"lr": 0.01, "freeze_step": 3}})",
    R"({"type": "OneBitLamb", "params": {"lr": 0.01, "freeze_step": 3}})",
    R"({"type": "AdamW", "params": {"lr": 0.01}})",
    R"({"type": "ZeroOneAdam", "params": {"lr": 0.01, "var_freeze_step": 3, "var_update_scaler": 1}})"};

// Ranks synchronise in the even steps, behind the first two.
constexpr const char* kLocalSteps =
    R"({"type": "ZeroOneAdam", "params": {"lr": 0.01, "var_freeze_step": 3, "var_update_scaler": 1,
        "local_step_scaler": 2, "local_step_clipper": 2}})";

WorldOptions two_hosts(const std::string& kind) {
  WorldOptions world = world_of(kind, 4);
  world.rank_params = [](int32_t rank, Params* params) {
    params->host_id = rank == 0 || rank == 3 ? "a" : "b";
  };
  return world;
}

// codec: of the types that are not 1-bit.
std::string config(const char* optimizer, const char* hierarchy, const std::string& own = "",
                   const std::string& rest = "") {
  const bool dense = std::string_view(optimizer).find("AdamW") != std::string_view::npos;
  return fmt::format(
      R"({{"optimizer": {}{}, "sotto": {{"hierarchy": "{}", "chunk_align": 64{}{}}}}})", optimizer,
      rest, hierarchy, dense ? R"(, "gradient_codec": {"type": "int8"})" : "", own);
}

struct Model : SmallModel {
  using SmallModel::SmallModel;
  void gradients(uint64_t step) {
    RandomBits random(static_cast<uint32_t>(step * 16 + static_cast<uint64_t>(rank)));
    std::normal_distribution<float> normal(0, 0.3f);
    for (float& value : g) value = normal(random);
  }
};

Status train(Optimizer& optimizer, Model& model, uint64_t from, uint64_t to) {
  for (uint64_t k = from; k < to; ++k) {
    model.gradients(k);
    SOTTO_TRY(do_step(optimizer).with_prefix(fmt::format("step {}", k)));
  }
  return ok_status();
}

Status same_everywhere(Comm& comm, const Model& model) {
  SOTTO_ASSIGN(const std::vector<std::string> all, comm.exchange(bytes_of(model.p)));
  for (const std::string& other : all) {
    if (other != all[0]) return error(Code::kInternal, "parameters differ between ranks");
  }
  return ok_status();
}

class OptimizerHierarchy : public ::testing::TestWithParam<std::string> {
 protected:
  using Body = std::function<Status(const std::shared_ptr<Comm>&, const char* optimizer,
                                    const char* hierarchy)>;
  void each(const Body& body) {
    for (const char* optimizer : kTypes) expect(optimizer, body);
  }
  void each_and_local_steps(const Body& body) {
    each(body);
    expect(kLocalSteps, body);
  }

 private:
  void expect(const char* optimizer, const Body& body) {
    for (const char* hierarchy : {"sharded", "leader"}) {
      const Status status = run_world(
          two_hosts(GetParam()),
          [&](const std::shared_ptr<Comm>& comm) { return body(comm, optimizer, hierarchy); });
      EXPECT_TRUE(status.ok()) << optimizer << hierarchy << ": " << status.text();
    }
  }
};

// Stopped before, at and behind the switch. The mean state goes to one level and on.
TEST_P(OptimizerHierarchy, ExactRestoreContinuesBitForBit) {
  each_and_local_steps([](const std::shared_ptr<Comm>& comm, const char* optimizer,
                          const char* hierarchy) -> Status {
    const std::string json = config(optimizer, hierarchy);
    Model whole(comm->rank());
    SOTTO_ASSIGN(const auto a, Optimizer::create(comm, json, whole.specs()));
    for (const uint64_t at : {uint64_t{2}, uint64_t{3}, uint64_t{6}}) {
      SOTTO_TRY(train(*a, whole, a->info()->step, at));
      SOTTO_ASSIGN(const std::vector<std::byte> blob, export_state(*a, StateMode::kExact));
      Model second(comm->rank()), third(comm->rank());
      SOTTO_ASSIGN(const auto b, Optimizer::create(comm, json, second.specs()));
      SOTTO_TRY(import_state(*b, StateMode::kExact, blob));
      SOTTO_TRY(train(*b, second, at, at + 2));
      SOTTO_TRY(train(*a, whole, at, at + 2));
      if (bytes_of(second.p) != bytes_of(whole.p))
        return error(Code::kInternal, "parameters differ behind step {}", at);
      if (optimizer != kLocalSteps) SOTTO_TRY(same_everywhere(*comm, whole));
      SOTTO_TRY(import_state(*a, StateMode::kExact, blob));
      SOTTO_ASSIGN(const std::vector<std::byte> mean, export_state(*a, StateMode::kMean));
      SOTTO_ASSIGN(const auto flat,
                   Optimizer::create(comm, config(optimizer, "flat"), third.specs()));
      SOTTO_TRY(import_state(*flat, StateMode::kMean, mean));
      SOTTO_TRY(train(*flat, third, at, at + 2));
      if (optimizer != kLocalSteps) SOTTO_TRY(same_everywhere(*comm, third));
      if (at == 6) {
        const Status met = import_state(*flat, StateMode::kExact, blob);
        if (met.text().find("is of the hierarchy") == std::string::npos)
          return error(Code::kInternal, "status is {}", met.text());
      }
    }
    return ok_status();
  });
}

// Of any rank and tensor, with tensors that are never compressed: no rank updates anything.
// Tensors that are never compressed have no error, and are no part of a shard.
TEST_P(OptimizerHierarchy, ExactRestoreOfAModelThatIsPartlyCompressed) {
  each([](const std::shared_ptr<Comm>& comm, const char* optimizer,
          const char* hierarchy) -> Status {
    if (optimizer != kTypes[0]) return ok_status();
    const std::string json =
        config(optimizer, hierarchy, R"(, "param_groups": [{}, {"non_freeze": true}])");
    Model whole(comm->rank()), second(comm->rank());
    SOTTO_ASSIGN(const auto a, Optimizer::create(comm, json, whole.specs()));
    SOTTO_ASSIGN(const auto b, Optimizer::create(comm, json, second.specs()));
    SOTTO_TRY(train(*a, whole, 0, 6));
    SOTTO_ASSIGN(const std::vector<std::byte> blob, export_state(*a, StateMode::kExact));
    SOTTO_TRY(import_state(*b, StateMode::kExact, blob));
    SOTTO_TRY(train(*a, whole, 6, 8));
    SOTTO_TRY(train(*b, second, 6, 8));
    if (bytes_of(second.p) != bytes_of(whole.p)) return error(Code::kInternal, "parameters differ");
    return same_everywhere(*comm, whole);
  });
}

TEST_P(OptimizerHierarchy, NonfiniteGradientsChangeNothing) {
  each([](const std::shared_ptr<Comm>& comm, const char* optimizer,
          const char* hierarchy) -> Status {
    const bool adam = std::string_view(optimizer).find("OneBitAdam") != std::string_view::npos;
    const std::string own = adam ? R"(, "param_groups": [{}, {"non_freeze": true}])" : "";
    Model model(comm->rank()), undisturbed(comm->rank());
    SOTTO_ASSIGN(const auto a,
                 Optimizer::create(comm, config(optimizer, hierarchy, own), model.specs()));
    SOTTO_TRY(train(*a, model, 0, 5));
    for (const int32_t who : {0, 1, 2, 3}) {
      for (const size_t at : {size_t{0}, model.g.size() / 2, model.g.size() - 1}) {
        const std::string before = bytes_of(model.p);
        model.gradients(5);
        if (comm->rank() == who) model.g[at] = std::numeric_limits<float>::quiet_NaN();
        const Status met = do_step(*a);
        if (met.code() != Code::kNonfinite)
          return error(Code::kInternal, "rank {}, element {}: status is {}", who, at, met.text());
        if (bytes_of(model.p) != before) return error(Code::kInternal, "parameters were written");
      }
    }
    SOTTO_TRY(train(*a, model, 5, 7));
    return same_everywhere(*comm, model);
  });
}

// Gradients that become ready one after the other give the bits of a step.
TEST_P(OptimizerHierarchy, RoundsOfLateGradientsAreSteps) {
  each_and_local_steps([](const std::shared_ptr<Comm>& comm, const char* optimizer,
                          const char* hierarchy) -> Status {
    const std::string json = config(optimizer, hierarchy);
    Model plain(comm->rank()), late(comm->rank());
    SOTTO_ASSIGN(const auto a, Optimizer::create(comm, json, plain.specs()));
    SOTTO_ASSIGN(const auto b, Optimizer::create(comm, json, late.specs()));
    SOTTO_ASSIGN(const auto overlap,
                 Overlap::create_step(b, R"({"first_bucket_bytes": 1, "bucket_bytes": 3000})"));
    for (uint64_t k = 0; k < 6; ++k) {
      plain.gradients(k);
      late.gradients(k);
      SOTTO_TRY(do_step(*a));
      SOTTO_ASSIGN(const OpRef op, overlap->begin({}, ReduceOp::kMean));
      for (uint64_t i = late.counts.size(); i > 0; --i) {
        const uint64_t t = (i + k + static_cast<uint64_t>(comm->rank())) % late.counts.size();
        SOTTO_TRY(overlap->ready({&t, 1}, {}, std::nullopt));
      }
      SOTTO_TRY(overlap->finish());
      SOTTO_TRY(comm->engine().wait(op, -1));
      if (bytes_of(plain.p) != bytes_of(late.p))
        return error(Code::kInternal, "parameters differ behind step {}", k);
    }
    overlap->close();
    return ok_status();
  });
}

// Nothing is compressed there, but ranks make local steps of their own, which the others do not
// wait for.
TEST_P(OptimizerHierarchy, OnOneHostValuesThatAreNotFinite) {
  WorldOptions world = world_of(GetParam(), 3);
  world.rank_params = [](int32_t, Params* params) { params->host_id = "a"; };
  const Status status = run_world(world, [](const std::shared_ptr<Comm>& comm) -> Status {
    Model model(comm->rank());
    SOTTO_ASSIGN(const auto a,
                 Optimizer::create(comm, config(kLocalSteps, "sharded"), model.specs()));
    bool alone = false, together = false;
    for (uint64_t k = 0; k < 14; ++k) {
      model.gradients(k);
      const bool disturbed = k == 7 || k == 8;  // a local step, a synchronisation
      if (disturbed && comm->rank() == 1) model.g[5] = std::numeric_limits<float>::quiet_NaN();
      const std::string before = bytes_of(model.p);
      const Status met = do_step(*a);
      SOTTO_ASSIGN(const std::vector<std::string> all, comm->exchange(met.ok() ? "1" : "0"));
      const bool one = all[0] == "1" && all[1] == "0" && all[2] == "1";
      const bool every = all[0] == "0" && all[1] == "0" && all[2] == "0";
      if (disturbed ? !one && !every : !met.ok())
        return error(Code::kInternal, "step {}: status is {}", k, met.text());
      if (!met.ok() && (met.code() != Code::kNonfinite || bytes_of(model.p) != before))
        return error(Code::kInternal, "step {}: {}, or parameters written", k, met.text());
      alone |= disturbed && one;
      together |= disturbed && every;
    }
    if (!alone || !together)
      return error(Code::kInternal, "local {}, together {}", alone, together);
    SOTTO_ASSIGN(const std::vector<std::byte> blob, export_state(*a, StateMode::kMean));
    SOTTO_TRY(import_state(*a, StateMode::kMean, blob));
    return same_everywhere(*comm, model);
  });
  EXPECT_TRUE(status.ok()) << status.text();
}

INSTANTIATE_TEST_SUITE_P(Worlds, OptimizerHierarchy, ::testing::ValuesIn(world_kinds()),
                         [](const auto& p) { return p.param; });

TEST(OptimizerHierarchyConfig, WhatHasNoLevelsIsRefusedByName) {
  const std::pair<const char*, const char*> cases[] = {
      {R"({"optimizer": {"type": "OneBitAdam"}, "sotto": {"mode": "compat", "hierarchy": "leader"}})",
       "sotto.hierarchy: found leader with sotto.mode compat, which is the published arithmetic, "
       "in one level; allowed is flat"},
      {R"({"optimizer": {"type": "Adam"}, "sotto": {"hierarchy": "sharded", "outer": {"preset": "sparse_loco"}}})",
       "sotto.hierarchy: found sharded with sotto.outer.codec of type topk, which has one level; "
       "allowed is flat"},
      {R"({"sotto": {"outer": {"codec": {"type": "int8", "hierarchy": "leader"}}}})",
       "sotto.outer.codec.hierarchy: found leader, allowed here is flat; sotto.hierarchy is for "
       "all "
       "averages"},
      {R"({"optimizer": {"type": "Adam"}, "sotto": {"hierarchy": "auto", "gradient_codec": {"type": "topk"}}})",
       "sotto.hierarchy: found auto with sotto.gradient_codec of type topk, which has one level; "
       "allowed is flat"},
      {R"({"optimizer": {"type": "Adam"}, "sotto": {"gradient_codec": {"type": "int8", "hierarchy": "leader"}}})",
       "sotto.gradient_codec.hierarchy: found leader, allowed here is flat; sotto.hierarchy is for "
       "all averages"},
  };
  for (const auto& [json, text] : cases) {
    const Status met = parse_config(json).status();
    EXPECT_NE(met.text().find(text), std::string::npos) << met.text();
  }
}

}  // namespace
}  // namespace sotto::test
