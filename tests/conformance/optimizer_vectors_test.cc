// Test vectors 13.1, 13.2, 13.5, 13.7 and 13.8 of the specification, through plans, engine and
// transport.
#include <gtest/gtest.h>

#include <cmath>
#include <mutex>

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
          SOTTO_TRY(near("|m|", i, std::abs(s.m[i]), magnitude));
        }
        SOTTO_TRY(all_near("vf", s.vf, {3.6022672e-4, 8.5869972e-3, 3.8862418e-4, 3.5387685e-4}));
        SOTTO_TRY(near("scaling_coeff", 0, s.tensor_states[0].scaling_coeff, 0.98856903));
        SOTTO_TRY(near("scaling_coeff", 1, s.tensor_states[1].scaling_coeff, 1.0116984));
        SOTTO_TRY(near("c_avg", 0, s.tensor_states[0].c_avg, 0.0813));
        SOTTO_TRY(near("c_avg", 1, s.tensor_states[1].c_avg, 0.079772596));
        SOTTO_TRY(near("factor", 0, s.tensor_states[0].last_factor, 0.80704564));
        SOTTO_TRY(near("factor", 1, s.tensor_states[1].last_factor, 0.73975861));
        if (comm->rank() == 0) {
          SOTTO_TRY(all_near("es_0", s.residual->server,
                             {-0.025038458, 0.068628281, -0.033380605, 0.025038458}));
        }
        return ok_status();
      });
  EXPECT_TRUE(status.ok()) << status.text();
}

INSTANTIATE_TEST_SUITE_P(Worlds, OptimizerVectorsOnAll, ::testing::ValuesIn(world_kinds()),
                         [](const auto& p) { return p.param; });

}  // namespace
}  // namespace sotto::test
