// P12 of the specification: on a noisy quadratic the compressed optimizers end near where the
// uncompressed one ends.
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

// Final loss over initial loss, mean over five seeds.
double shrinks_to(const std::string& optimizer) {
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
                       Optimizer::create(comm, fmt::format(R"({{"optimizer": {}}})", optimizer),
                                         {{"x", kColumns, 0, x.data(), g.data(), nullptr}}));
          for (uint64_t k = 0; k < kSteps; ++k) {
            SOTTO_TRY(o->set("lr", -1, 0.01 * (1 - static_cast<double>(k) / kSteps)));
            problem.gradient(x, noise, &g);
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

}  // namespace
}  // namespace sotto::test
