// P12 of the specification: on a noisy quadratic the compressed optimizers, and those with
// low-precision state, end near where the uncompressed one with float32 state ends.
#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "core/optim/optimizer.h"
#include "tests/support/core_ranks.h"

namespace sotto::test {
namespace {

constexpr size_t kRows = 128, kColumns = 64;
constexpr uint64_t kSteps = 600;
constexpr int32_t kRanks = 4;

// |A (x - target)|^2 / 2.
class Quadratic {
 public:
  explicit Quadratic(uint32_t seed) : random_(seed) {
    std::normal_distribution<double> normal;
    for (size_t i = 0; i < kRows; ++i) {
      for (size_t j = 0; j < kColumns; ++j) {
        const double scale = 0.5 + 1.5 * static_cast<double>(j) / (kColumns - 1);
        a_[i][j] = scale * normal(random_) / std::sqrt(double{kRows});
      }
    }
    for (double& t : target_) t = normal(random_);
  }

  double loss(const std::vector<float>& x) const {
    double sum = 0;
    for (size_t i = 0; i < kRows; ++i) sum += residual(i, x) * residual(i, x);
    return sum / 2;
  }
  void gradient(const std::vector<float>& x, std::mt19937& noise, std::vector<float>* g) const {
    std::normal_distribution<double> normal(0, 0.1);
    std::vector<double> sum(kColumns);
    for (size_t i = 0; i < kRows; ++i) {
      const double r = residual(i, x);
      for (size_t j = 0; j < kColumns; ++j) sum[j] += r * a_[i][j];
    }
    for (size_t j = 0; j < kColumns; ++j) (*g)[j] = static_cast<float>(sum[j] + normal(noise));
  }

 private:
  double residual(size_t row, const std::vector<float>& x) const {
    double sum = 0;
    for (size_t j = 0; j < kColumns; ++j) sum += a_[row][j] * (double{x[j]} - target_[j]);
    return sum;
  }
  std::mt19937 random_;
  double a_[kRows][kColumns];
  double target_[kColumns];
};

// Final loss over initial loss, mean over five seeds. spread: the gradients' sizes are made to span
// so many powers of ten, neighbours far apart.
double shrinks_to(const std::string& optimizer, const std::string& state = "fp32",
                  double spread = 0) {
  double total = 0;
  for (uint32_t seed = 1; seed <= 5; ++seed) {
    const Quadratic problem(seed);
    double ratio = 0;
    const Status status =
        run_world(world_of("inproc", kRanks), [&](const std::shared_ptr<Comm>& comm) -> Status {
          std::vector<float> x(kColumns), g(kColumns);
          const double start = problem.loss(x);
          std::mt19937 noise(seed * 100 + static_cast<uint32_t>(comm->rank()));
          SOTTO_ASSIGN(const std::shared_ptr<Optimizer> o,
                       Optimizer::create(
                           comm,
                           fmt::format(R"({{"optimizer": {}, "sotto": {{"state_dtype": "{}"}}}})",
                                       optimizer, state),
                           {{"x", kColumns, 0, x.data(), g.data(), nullptr}}));
          for (uint64_t k = 0; k < kSteps; ++k) {
            SOTTO_TRY(o->set("lr", -1, 0.01 * (1 - static_cast<double>(k) / kSteps)));
            problem.gradient(x, noise, &g);
            for (size_t j = 0; j < kColumns; ++j)
              g[j] *= static_cast<float>(
                  std::pow(10.0, -spread * static_cast<double>(j * 29 % kColumns) / kColumns));
            SOTTO_ASSIGN(const OpRef op, o->step({}));
            SOTTO_TRY(comm->engine().wait(op, -1));
          }
          SOTTO_TRY(o->synchronise());
          if (comm->rank() == 0) ratio = problem.loss(x) / start;
          return ok_status();
        });
    EXPECT_TRUE(status.ok()) << status.text();
    total += ratio;
  }
  return total / 5;
}

TEST(Convergence, CompressedOptimizersEndNearTheUncompressedOne) {
  const double plain = shrinks_to(R"({"type": "OneBitAdam", "params": {"freeze_step": 100000}})");
  EXPECT_LT(plain, 1e-3);
  EXPECT_GT(plain, 0);
  const double onebit = shrinks_to(R"({"type": "OneBitAdam", "params": {"freeze_step": 101}})");
  EXPECT_LE(onebit, 2 * plain) << "uncompressed " << plain;
  const double zeroone = shrinks_to(
      R"({"type": "ZeroOneAdam", "params": {"var_freeze_step": 100, "var_update_scaler": 8,
          "local_step_scaler": 100, "local_step_clipper": 4}})");
  EXPECT_LE(zeroone, 2 * plain) << "uncompressed " << plain;
  std::printf("final / initial loss: uncompressed %.3g, 1-bit Adam %.3g, 0/1 Adam %.3g\n", plain,
              onebit, zeroone);
}

// Adam does not see how large gradients are, and low-precision state must not either: a block of
// 8-bit state has the largest and the smallest in it.
TEST(Convergence, LowPrecisionStateEndsNearFloat32) {
  const std::string adam = R"({"type": "Adam", "params": {"eps": 1e-12}})";
  for (const double spread : {0.0, 2.0, 4.0}) {
    const double plain = shrinks_to(adam, "fp32", spread);
    const double bf16 = shrinks_to(adam, "bf16", spread);
    const double fp8 = shrinks_to(adam, "fp8", spread);
    EXPECT_LT(plain, 0.05);
    EXPECT_GT(plain, 0);
    EXPECT_LE(bf16, 1.05 * plain) << "float32 state " << plain << ", spread " << spread;
    EXPECT_LE(fp8, 1.25 * plain) << "float32 state " << plain << ", spread " << spread;
    std::printf(
        "final / initial loss, gradients of 10^-%g to 1: float32 %.3g, bf16 %.3g, fp8 %.3g\n",
        spread, plain, bf16, fp8);
  }
}

// Thousands of steps with b2 = 0.999, whose increments rounding to nearest would lose.
TEST(Convergence, LowPrecisionVarianceDoesNotStandStill) {
  constexpr size_t kCount = 1000;
  constexpr uint64_t kPhase = 4000;
  const float sizes[] = {1.0f, 0.03f, 3.0f};  // of the gradients, phase by phase
  // The same in bfloat16 to nearest: after two phases more than ten times what it should be.
  float nearest = 0, exact = 0;
  for (uint64_t k = 0; k < 2 * kPhase; ++k) {
    const float g = sizes[k / kPhase];
    exact = 0.999f * exact + 0.001f * g * g;
    nearest = bf16_to_f32(f32_to_bf16(0.999f * nearest + 0.001f * g * g));
  }
  EXPECT_GT(nearest, 10 * exact);
  // The mean of many elements has no bias. While v shrinks to a fiftieth, single elements of 8 bits
  // go astray, since nothing pulls them back; where gradients stay as they are, they return.
  for (const auto& pair : {std::pair("bf16", 2.5), {"fp8", 10.0}}) {
    const char* const state = pair.first;
    const double astray = pair.second;
    const Status status =
        run_world(world_of("inproc", 1), [&](const std::shared_ptr<Comm>& comm) -> Status {
          std::vector<float> p(kCount), g(kCount);
          SOTTO_ASSIGN(const std::shared_ptr<Optimizer> o,
                       Optimizer::create(comm,
                                         fmt::format(R"({{"optimizer": {{"type": "Adam"}},
                                  "sotto": {{"state_dtype": "{}"}}}})",
                                                     state),
                                         {{"p", kCount, 0, p.data(), g.data(), nullptr}}));
          double want = 0;
          for (const float size : sizes) {
            std::fill(g.begin(), g.end(), size);
            for (uint64_t k = 0; k < kPhase; ++k) {
              want = 0.999 * want + 0.001 * static_cast<double>(size) * size;
              SOTTO_ASSIGN(const OpRef op, o->step({}));
              SOTTO_TRY(comm->engine().wait(op, -1));
            }
            SOTTO_ASSIGN(const OptimSnapshot s, o->snapshot(false));
            double mean = 0, worst = 1;
            for (const float v : s.floats("v")) {
              mean += v / kCount;
              worst = std::max({worst, v / want, want / v});
            }
            EXPECT_NEAR(mean, want, 0.05 * want) << state << ", gradient " << size;
            EXPECT_LT(worst, size == sizes[1] ? astray : 1.5) << state << ", gradient " << size;
          }
          return ok_status();
        });
    EXPECT_TRUE(status.ok()) << status.text();
  }
}

}  // namespace
}  // namespace sotto::test
