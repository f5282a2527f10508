// NCCL's own collectives in optimizer steps (SOTTO_NCCL_NATIVE=all): full-precision averages are
// made by them, and what a step promises stays true.
#include <algorithm>
#include <cmath>
#include <limits>

#include "tests/nccl/native_world.h"

namespace sotto::test {
namespace {

constexpr int kSteps = 4;
constexpr size_t kCounts[] = {70'001, 17, 8'193, 1};

struct Training {
  const char* json;
  bool half = false;  // bfloat16 gradients: NCCL rounds each sum
  float tolerance = 1e-5f;
  int averages = kSteps;  // steps with an average in full precision
};
constexpr Training kTrainings[] = {
    {R"({"optimizer": {"type": "SGD", "params": {"lr": 0.01, "momentum": 0.9}}})"},
    {R"({"optimizer": {"type": "AdamW", "params": {"lr": 0.01}}, "gradient_clipping": 0.5})"},
    {R"({"optimizer": {"type": "AdamW", "params": {"lr": 0.01}}})"},
    {R"({"optimizer": {"type": "SGD", "params": {"lr": 0.01}}})", true, 1e-3f},
    {R"({"optimizer": {"type": "AdamW", "params": {"lr": 0.01}}, "prescale_gradients": true})"},
    {R"({"optimizer": {"type": "Lamb", "params": {"lr": 0.01}}})"},
    {R"({"optimizer": {"type": "OneBitAdam", "params": {"lr": 0.01, "freeze_step": 3}}})", false,
     1e-5f, 2},
    {R"({"optimizer": {"type": "OneBitLamb", "params": {"lr": 0.01, "freeze_step": 3}},
         "gradient_clipping": 1.0})",
     false, 1e-5f, 2},
};

// Four tensors and an optimizer of them.
class Model {
 public:
  Model(Member& self, Where where, const Training& training)
      : Model(self, where, training, self.rank) {}
  // The comm is a split's.
  Model(Member& self, Where where, const Training& training, int device)
      : rank_(self.rank), tensors_(where, device) {
    std::vector<sotto_param> params(std::size(kCounts));
    for (size_t t = 0; t < params.size(); ++t) {
      p_[t].resize(kCounts[t]);
      for (size_t i = 0; i < kCounts[t]; ++i)
        p_[t][i] = static_cast<float>(std::sin(0.37 * static_cast<double>(i + t)));
      g_[t].resize(kCounts[t]);
      half_[t].resize(kCounts[t]);
      params[t].struct_size = sizeof(sotto_param);
      params[t].param = tensors_.add(p_[t]);
      params[t].grad = training.half ? tensors_.add(half_[t]) : tensors_.add(g_[t]);
    }
    OK(sotto_optim_create(self.comm, training.json, params.data(), params.size(), &optim_));
  }
  ~Model() { (void)sotto_optim_destroy(optim_); }

  // not_finite: an element of the last but one tensor has no value here.
  sotto_status step(int number, bool not_finite = false) {
    tensors_.download();
    for (size_t t = 0; t < std::size(kCounts); ++t) {
      for (size_t i = 0; i < kCounts[t]; ++i)
        put(t, i, static_cast<float>(std::cos(0.7 * static_cast<double>(i) + rank_ + number)));
    }
    if (not_finite) put(2, 8'000, std::numeric_limits<float>::quiet_NaN());
    tensors_.upload();
    const sotto_call call = tensors_.call();
    return sotto_optim_step(optim_, &call, nullptr);
  }
  std::string parameters() {
    tensors_.download();
    std::string all;
    for (const auto& p : p_) all += bytes_of(p);
    return all;
  }

 private:
  void put(size_t t, size_t i, float x) {
    uint32_t bits = 0;
    std::memcpy(&bits, &x, 4);
    g_[t][i] = x;
    half_[t][i] = static_cast<uint16_t>(bits >> 16);
  }

  const int rank_;
  Tensors tensors_;
  std::vector<float> p_[std::size(kCounts)], g_[std::size(kCounts)];
  std::vector<uint16_t> half_[std::size(kCounts)];
  sotto_optim* optim_ = nullptr;
};

std::string train(Member& self, Where where, const Training& training) {
  Model model(self, where, training);
  for (int step = 0; step < kSteps; ++step) OK(model.step(step));
  return model.parameters();
}

float largest_difference(const std::string& a, const std::string& b) {
  float most = 0;
  for (size_t at = 0; at + 4 <= a.size(); at += 4) {
    float x = 0, y = 0;
    std::memcpy(&x, &a[at], 4);
    std::memcpy(&y, &b[at], 4);
    most = std::max(most, std::isfinite(x - y) ? std::abs(x - y) : HUGE_VALF);
  }
  return most;
}

// Each average is a reduce-scatter and an all-gather; what only `exact` calls is not of the steps.
// (Compressed steps behind another warm-up may differ in signs.)
void averages_are_nccls(int32_t size) {
  for (const Training& training : kTrainings) {
    SCOPED_TRACE(training.json);
    const Body body = [&](Member& self, Where where) { return train(self, where, training); };
    const NativeRun exact = run_native(size, "exact", body);
    const NativeRun all = run_native(size, "all", body);
    ASSERT_EQ(exact.failure, "");
    ASSERT_EQ(all.failure, "");
    const auto averages = static_cast<uint64_t>(training.averages);
    const Calls more = each(size, {averages, 0, averages, 0});
    for (size_t i = 0; i < more.size(); ++i)
      EXPECT_EQ(all.calls[i] - exact.calls[i], more[i]) << kNativeNames[i];
    EXPECT_EQ(exact.calls[2] + exact.calls[3], 0u);
    for (int32_t rank = 0; rank < size; ++rank) {
      const auto r = static_cast<size_t>(rank);
      EXPECT_TRUE(all.results[r] == all.results[0]) << "rank " << rank;
      ASSERT_EQ(all.results[r].size(), exact.results[r].size());
      EXPECT_LE(largest_difference(all.results[r], exact.results[r]), training.tolerance)
          << "rank " << rank;
    }
  }
}

TEST(NcclNativeOptimizers, AveragesAreNcclsWhereAllowed) { averages_are_nccls(2); }

TEST(NcclNativeOptimizers, AveragesAreNcclsWhereAllowedFourRanks) { averages_are_nccls(4); }

// Whichever rank it comes from and whoever adds it up: no rank commits, and the next step is whole.
TEST(NcclNativeOptimizers, NoRankCommitsWhatIsNotFinite) {
  for (const Training& training : kTrainings) {
    SCOPED_TRACE(training.json);
    for (const int32_t source : {0, 2}) {
      const NativeRun run = run_native(3, "all", [&](Member& self, Where where) {
        Model model(self, where, training);
        OK(model.step(0));
        const std::string before = model.parameters();
        FAILS(model.step(1, self.rank == source), SOTTO_E_NONFINITE);
        require(model.parameters() == before, "parameters have changed");
        OK(model.step(2));
        require(model.parameters() != before, "no step");
        return model.parameters();
      });
      EXPECT_EQ(run.failure, "");
      EXPECT_TRUE(run.results[0] == run.results[1] && run.results[0] == run.results[2]);
    }
  }
}

// A split has a communicator of its own for them; another order of ranks is another comm.
TEST(NcclNativeOptimizers, OnSplits) {
  const Training& training = kTrainings[0];
  const Body body = [&](Member& self, Where where) {
    Member child{0, 0, self.context, nullptr};
    OK(sotto_comm_split(self.comm, self.rank % 2, -self.rank, &child.comm));
    OK(sotto_comm_rank(child.comm, &child.rank));
    OK(sotto_comm_size(child.comm, &child.size));
    std::string all;
    {
      Model model(child, where, training, self.rank);
      for (int step = 0; step < kSteps; ++step) OK(model.step(step));
      all = model.parameters();
    }
    OK(sotto_comm_destroy(child.comm));
    return all;
  };
  const NativeRun exact = run_native(4, "exact", body);
  const NativeRun all = run_native(4, "all", body);
  EXPECT_EQ(exact.failure, "");
  EXPECT_EQ(all.failure, "");
  EXPECT_EQ(all.calls[2], 4u * kSteps);
  EXPECT_TRUE(all.results[0] == all.results[2] && all.results[1] == all.results[3]);
  EXPECT_LE(largest_difference(all.results[0], exact.results[0]), 1e-5f);
}

}  // namespace
}  // namespace sotto::test
