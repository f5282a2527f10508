// Test vectors 13.1, 13.2, 13.4 to 13.8 of the specification, through plans, engine and
// transport.
#include <fmt/format.h>

#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "core/optim/optimizer.h"
#include "tests/support/core_ranks.h"

namespace sotto::test {
namespace {

Status near(const char* what, size_t i, double got, double want) {
  if (std::abs(got - want) <= 2e-6 * std::abs(want) + 2e-7) return ok_status();
  return error(Code::kInternal, "{}[{}] is {:.9g}, want {:.9g}", what, i, got, want);
}

Status all_near(const char* what, const std::vector<float>& got, const std::vector<double>& want) {
  for (size_t i = 0; i < want.size(); ++i) SOTTO_TRY(near(what, i, got[i], want[i]));
  return ok_status();
}

// One step to its end.
Status do_step(Optimizer& optimizer) {
  SOTTO_ASSIGN(const OpRef op, optimizer.step({}));
  return optimizer.comm()->engine().wait(op, -1);
}

struct TwoStepCase {
  const char* json;
  std::vector<double> first, second;
};

void run_two_steps(const TwoStepCase& c) {
  WorldOptions world;
  const Status status = run_world(world, [&](const std::shared_ptr<Comm>& comm) -> Status {
    std::vector<float> p{3, 4}, g{1, -2};
    SOTTO_ASSIGN(const std::shared_ptr<Optimizer> optimizer,
                 Optimizer::create(comm, c.json, {{"p", 2, 0, p.data(), g.data(), nullptr}}));
    SOTTO_TRY(do_step(*optimizer));
    SOTTO_TRY(all_near("p after 1", p, c.first));
    g = {0.5f, 0.5f};
    SOTTO_TRY(do_step(*optimizer));
    return all_near("p after 2", p, c.second);
  });
  EXPECT_TRUE(status.ok()) << c.json << ": " << status.text();
}

TEST(OptimizerVectors, Lamb) {
  const char* base =
      R"({"optimizer": {"type": "Lamb", "params": {"lr": 0.1, "eps": 1e-6, "weight_decay": 0.01,
    "bias_correction": %s, "eps_inside_sqrt": %s}}})";
  const auto json = [&](const char* bias, const char* inside) {
    static char text[4][512];
    static int next = 0;
    char* out = text[next++ % 4];
    std::snprintf(out, sizeof text[0], base, bias, inside);
    return out;
  };
  run_two_steps({json("false", "false"), {2.6425519, 4.3496151}, {2.1854157, 4.5733309}});
  run_two_steps({json("false", "true"), {2.6426136, 4.3496785}, {2.1854930, 4.5734458}});
  run_two_steps({json("true", "false"), {2.8869650, 4.1105580}, {2.7808082, 4.1625414}});
  run_two_steps({json("true", "true"), {2.8869846, 4.1105781}, {2.7808325, 4.1625729}});
}

TEST(OptimizerVectors, Adam) {
  run_two_steps({R"({"optimizer": {"type": "AdamW", "params": {"lr": 0.1, "weight_decay": 0.1}}})",
                 {2.87, 4.06},
                 {2.7480819, 4.0663466}});
  run_two_steps(
      {R"({"optimizer": {"type": "AdamW", "params": {"lr": 0.1, "weight_decay": 0.1, "bias_correction": false}}})",
       {2.6537724, 4.276228},
       {2.2310965, 4.4329705}});
  run_two_steps(
      {R"({"optimizer": {"type": "Adam", "params": {"lr": 0.1, "weight_decay": 0.1, "adam_w_mode": false}}})",
       {2.9, 4.1},
       {2.8040874, 4.1214347}});
  run_two_steps(
      {R"({"optimizer": {"type": "Adam", "params": {"lr": 0.1, "weight_decay": 0.1, "adam_w_mode": false,
                     "bias_correction": false}}})",
       {2.6837723, 4.3162279},
       {2.2777095, 4.4030905}});
}

// Generator 13.3.
float start_value(uint64_t i) { return (static_cast<float>((3 * i) % 7) - 3.0f) / 2.0f; }
float gradient(uint64_t i, uint64_t k, uint64_t rank) {
  return (static_cast<float>((5 * i + 4 * k + 8 * rank) % 12) - 5.5f) / 8.0f;
}

class OptimizerVectorsOnAll : public ::testing::TestWithParam<std::string> {};

TEST_P(OptimizerVectorsOnAll, OnebitLamb) {
  const Status status =
      run_world(world_of(GetParam(), 2), [&](const std::shared_ptr<Comm>& comm) -> Status {
        std::vector<float> p(16), g(16);
        for (uint64_t i = 0; i < 16; ++i) p[i] = start_value(i);
        SOTTO_ASSIGN(
            const std::shared_ptr<Optimizer> optimizer,
            Optimizer::create(
                comm,
                R"({"optimizer": {"type": "OneBitLamb", "params": {"lr": 0.01, "weight_decay": 0.01,
                                       "max_coeff": 0.3, "freeze_step": 4}}, "sotto": {"chunk_align": 8}})",
                {{"a", 10, 0, p.data(), g.data(), nullptr},
                 {"b", 6, 0, p.data() + 10, g.data() + 10, nullptr}}));
        for (uint64_t k = 1; k <= 10; ++k) {
          for (uint64_t i = 0; i < 16; ++i)
            g[i] = gradient(i, k, static_cast<uint64_t>(comm->rank()));
          SOTTO_TRY(do_step(*optimizer));
          if (k == 3) {
            SOTTO_TRY(all_near("p after 3", p,
                               {-1.4736601, -0.0090225004, 1.4916911, -0.50914299, 1.0310326,
                                -0.98421085, 0.47710204, -1.5249903}));
          }
          if (k == 4) {
            SOTTO_TRY(all_near("p after 4", p,
                               {-1.4707819, -0.0053030923, 1.4879601, -0.51200402, 1.0338898,
                                -0.98048145, 0.47337714, -1.5278424}));
          }
        }
        SOTTO_TRY(all_near("p after 10", p,
                           {-1.4483747, 0.0050536226, 1.4589055, -0.53431809, 1.0561848,
                            -0.97007751, 0.4443489, -1.5501074, 0.033046484, 1.5506736, -0.52341032,
                            0.94749314, -0.95147604, 0.50367135, -1.5369331, -0.032556154}));
        SOTTO_ASSIGN(const OptimSnapshot s, optimizer->snapshot(true));
        for (size_t i = 0; i < 16; ++i) {
          const double magnitude = i < 8 ? 0.09068732 : i < 10 ? 0.099724039 : 0.097444154;
          SOTTO_TRY(near("|m|", i, std::abs(s.values<float>("m")[i]), magnitude));
        }
        SOTTO_TRY(all_near("vf", s.floats("vf"),
                           {3.6022672e-4, 8.5869972e-3, 3.8862418e-4, 3.5387685e-4}));
        SOTTO_TRY(near("scaling_coeff", 0, s.values<TensorState>("tensor_states")[0].scaling_coeff,
                       0.98856903));
        SOTTO_TRY(near("scaling_coeff", 1, s.values<TensorState>("tensor_states")[1].scaling_coeff,
                       1.0116984));
        SOTTO_TRY(near("c_avg", 0, s.values<TensorState>("tensor_states")[0].c_avg, 0.0813));
        SOTTO_TRY(near("c_avg", 1, s.values<TensorState>("tensor_states")[1].c_avg, 0.079772596));
        SOTTO_TRY(
            near("factor", 0, s.values<TensorState>("tensor_states")[0].last_factor, 0.80704564));
        SOTTO_TRY(
            near("factor", 1, s.values<TensorState>("tensor_states")[1].last_factor, 0.73975861));
        if (comm->rank() == 0) {
          SOTTO_TRY(all_near("es_0", s.residual->server,
                             {-0.025038458, 0.068628281, -0.033380605, 0.025038458}));
        }
        return ok_status();
      });
  EXPECT_TRUE(status.ok()) << status.text();
}

// One tensor of 16 elements on two ranks; `check` is called after every update.
using Check = std::function<Status(uint64_t k, const std::vector<float>& p, Optimizer& optimizer)>;
Status run_sixteen(const std::string& world, const std::string& json, uint64_t updates,
                   const Check& check) {
  return run_world(world_of(world, 2), [&](const std::shared_ptr<Comm>& comm) -> Status {
    std::vector<float> p(16), g(16);
    for (uint64_t i = 0; i < 16; ++i) p[i] = start_value(i);
    SOTTO_ASSIGN(const std::shared_ptr<Optimizer> optimizer,
                 Optimizer::create(comm, json, {{"p", 16, 0, p.data(), g.data(), nullptr}}));
    for (uint64_t k = 1; k <= updates; ++k) {
      for (uint64_t i = 0; i < 16; ++i) g[i] = gradient(i, k, static_cast<uint64_t>(comm->rank()));
      SOTTO_TRY(do_step(*optimizer));
      SOTTO_TRY(check(k, p, *optimizer).with_prefix(fmt::format("update {}", k)));
    }
    return ok_status();
  });
}

double sum(const std::vector<float>& values) {
  double total = 0;
  for (float v : values) total += v;
  return total;
}

TEST_P(OptimizerVectorsOnAll, OnebitAdam) {
  const char* json =
      R"({{"optimizer": {{"type": "OneBitAdam", "params": {{"lr": 0.01, "freeze_step": 4,
          "weight_decay": {}}}}}, "sotto": {{"chunk_align": 8}}}})";
  const auto check = [](uint64_t k, const std::vector<float>& p, Optimizer& optimizer) -> Status {
    if (k == 3) {
      return all_near("p", p,
                      {-1.4126478, -0.030077409, 1.4727521, -0.53062552, 1.1037449, -0.94766748,
                       0.42382056, -1.5837535});
    }
    if (k == 4) {
      return all_near("p", p,
                      {-1.377459, 0.015583999, 1.4270959, -0.56579995, 1.1389241, -0.90197992,
                       0.37813824, -1.6189184});
    }
    if (k == 5) {
      return all_near("p", p,
                      {-1.335217, -0.039229862, 1.3722883, -0.60802484, 1.1811547, -0.95682514,
                       0.32329932, -1.6611319});
    }
    if (k < 10) return ok_status();
    SOTTO_TRY(all_near("p", p,
                       {-1.061151, 0.16996789, 1.0166973, -0.88197935, 1.4551463, -0.74750769,
                        -0.032494992, -1.9350121, 0.37901896, 1.9644313, -0.88122571, 0.54605031,
                        -0.55934674, 0.66277134, -1.9856439, -0.38378292}));
    SOTTO_ASSIGN(const OptimSnapshot s, optimizer.snapshot(true));
    for (size_t i = 0; i < 16; ++i) {
      const double sign = i % 4 < 2 ? -1 : 1;
      SOTTO_TRY(near("m", i, s.values<float>("m")[i], sign * (i < 8 ? 0.089922413 : 0.09889219)));
    }
    SOTTO_TRY(
        all_near("v", s.floats("v"), {2.3008224e-4, 1.3664456e-4, 1.3667579e-4, 2.3026955e-4}));
    const bool first = s.residual->rank == 0;
    SOTTO_TRY(all_near(
        "ew", s.residual->worker,
        first ? std::vector<double>{-0.0052444711, -0.070201725, -0.041400697, 0.0092944801}
              : std::vector<double>{-0.075937428, 0.064999178, -0.037775047, -0.020012558}));
    SOTTO_TRY(all_near(
        "es", s.residual->server,
        first ? std::vector<double>{-0.025118411, 0.068647027, -0.033415258, 0.025118411}
              : std::vector<double>{-0.022381522, 0.035976671, -0.035976671, 0.022381522}));
    return near("sum of p", 0, sum(p), -2.274061);
  };
  const Status status = run_sixteen(GetParam(), fmt::format(fmt::runtime(json), 0), 10, check);
  EXPECT_TRUE(status.ok()) << status.text();
  const auto decayed = [](uint64_t k, const std::vector<float>& p, Optimizer&) -> Status {
    if (k < 10) return ok_status();
    SOTTO_TRY(all_near("p", p, {-1.059815, 0.16996005, 1.0153424, -0.88136846}));
    return near("sum of p", 0, sum(p), -2.272309);
  };
  const Status with_decay =
      run_sixteen(GetParam(), fmt::format(fmt::runtime(json), 0.01), 10, decayed);
  EXPECT_TRUE(with_decay.ok()) << with_decay.text();
}

TEST_P(OptimizerVectorsOnAll, ZeroOneAdam) {
  const char* json =
      R"({"optimizer": {"type": "ZeroOneAdam", "params": {"lr": 0.01, "var_freeze_step": 6,
          "var_update_scaler": 2, "local_step_scaler": 3, "local_step_clipper": 4}},
          "sotto": {"chunk_align": 8}})";
  const auto check = [](uint64_t k, const std::vector<float>& p, Optimizer& optimizer) -> Status {
    if (k == 3) {
      return all_near("p", p,
                      {-1.4126478, -0.030077409, 1.4727521, -0.53062552, 1.1037449, -0.94766748,
                       0.42382056, -1.5837535});
    }
    if (k == 4) {
      return all_near("p", p,
                      {-1.3666198, 0.00895755, 1.4354538, -0.54488945, 1.1151931, -0.91400272,
                       0.39208534, -1.6325667});
    }
    if (k == 5) {
      return all_near("p", p,
                      {-1.3296095, 0.04888864, 1.419813, -0.57568979, 1.1441214, -0.90129131,
                       0.35863325, -1.6720672});
    }
    if (k < 15) return ok_status();
    const double want[] = {-0.7062633,  0.84612885, 0.71726894, -1.0428425, 1.6096216,  -0.32162639,
                           -0.43311447, -2.297261,  0.7141797,  2.0978325,  -1.0230440, 0.22530469,
                           -0.22472447, 1.3222862,  -2.260779,  -0.5425293};
    for (size_t i = 0; i < 16; ++i) {  // absolute tolerance of the specification
      if (std::abs(p[i] - want[i]) > 1e-6 + 2e-6 * std::abs(want[i]))
        return error(Code::kInternal, "p[{}] is {:.9g}, want {:.9g}", i, p[i], want[i]);
    }
    SOTTO_ASSIGN(const OptimSnapshot s, optimizer.snapshot(true));
    for (size_t i = 0; i < 16; ++i) {
      const double sign = i % 4 < 2 ? -1 : 1;
      SOTTO_TRY(near("m", i, s.values<float>("m")[i], sign * (i < 8 ? 0.10693057 : 0.10678596)));
      if (s.values<float>("anchor")[i] != p[i] || s.values<float>("local_sum")[i] != 0)
        return error(Code::kInternal, "element {} is not synchronised", i);
    }
    SOTTO_TRY(
        all_near("v", s.floats("v"), {2.337584e-4, 1.4041417e-4, 1.7169537e-4, 4.2144553e-4}));
    if (s.residual->rank == 0) {
      SOTTO_TRY(all_near("es", s.residual->server,
                         {1.2975931e-4, 1.2975931e-4, 6.6211866e-4, -1.2975931e-4}));
    }
    return std::abs(sum(p) + 1.319562) < 5e-6
               ? ok_status()
               : error(Code::kInternal, "sum of p is {:.9g}", sum(p));
  };
  const Status status = run_sixteen(GetParam(), json, 15, check);
  EXPECT_TRUE(status.ok()) << status.text();
}

INSTANTIATE_TEST_SUITE_P(Worlds, OptimizerVectorsOnAll, ::testing::ValuesIn(world_kinds()),
                         [](const auto& p) { return p.param; });

}  // namespace
}  // namespace sotto::test
