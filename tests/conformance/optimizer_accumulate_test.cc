// Gradient accumulation (specification P9 and 11.1): a step over micro-batches is a step with their
// mean, in every stage.
#include <gtest/gtest.h>

#include <random>

#include "core/state/optim_state.h"
#include "tests/support/core_ranks.h"
#include "tests/support/random_bits.h"
#include "tests/support/sanitized.h"
#include "tests/support/small_model.h"

namespace sotto::test {
namespace {

constexpr uint64_t kMicroBatches = 4;

// A model whose gradients are multiples of 2^-8 with 8 significant bits, so that sums of a few are
// exact in float32 and each fits a bfloat16.
struct Model : SmallModel {
  explicit Model(int32_t rank_in, Dtype type_in = Dtype::kF32)
      : SmallModel(rank_in), type(type_in) {}
  // The gradient of micro-batch `micro` of a step; kMicroBatches: their mean.
  void gradients(uint64_t step, uint64_t micro) {
    RandomBits random(static_cast<uint32_t>(step * 16 + static_cast<uint64_t>(rank)));
    std::uniform_int_distribution<int> mean(-96, 96), apart(0, 31);
    constexpr int kSigns[] = {1, -1, -1, 1, 0};
    for (size_t i = 0; i < g.size(); ++i) {
      const int middle = mean(random), distance = apart(random);
      g[i] = static_cast<float>(middle + kSigns[micro] * distance) / 256.0f;
      half[i] = f32_to_bf16(g[i]);
    }
  }
  Dtype type;  // of the registered gradients
};

Status accumulate(Optimizer& optimizer) {
  SOTTO_ASSIGN(const OpRef op, optimizer.accumulate({}));
  return optimizer.comm()->engine().wait(op, -1);
}

Result<std::shared_ptr<Optimizer>> make(const std::shared_ptr<Comm>& comm, Model& model,
                                        const char* optimizer, const std::string& rest) {
  return Optimizer::create(comm, fmt::format(R"({{"optimizer": {}{}}})", optimizer, rest),
                           model.specs({.gradients = model.type}));
}

class OptimizerAccumulate : public ::testing::TestWithParam<std::string> {};

TEST_P(OptimizerAccumulate, IsAStepWithTheMean) {
  for (const char* optimizer : kOptimizers) {
    for (const auto& pair :
         {std::pair(Dtype::kF32, 3), {Dtype::kBF16, 2}, {Dtype::kF32, 1}, {Dtype::kBF16, 1}}) {
      const Dtype type = pair.first;
      const int size = pair.second;
      if (kSanitized && size == 1) continue;
      const Status status =
          run_world(world_of(GetParam(), size), [&](const std::shared_ptr<Comm>& comm) -> Status {
            Model whole(comm->rank()), parts(comm->rank(), type);
            const std::string rest =
                R"(, "gradient_clipping": 0.5, "communication_data_type": "fp32")";
            SOTTO_ASSIGN(const auto a, make(comm, whole, optimizer, rest));
            SOTTO_ASSIGN(const auto b, make(comm, parts, optimizer,
                                            rest + R"(, "train_micro_batch_size_per_gpu": 2,
                                                      "gradient_accumulation_steps": 4)"));
            for (uint64_t k = 0; k < 12; ++k) {
              whole.gradients(k, kMicroBatches);
              SOTTO_TRY(do_step(*a));
              for (uint64_t micro = 0; micro + 1 < kMicroBatches; ++micro) {
                parts.gradients(k, micro);
                SOTTO_TRY(accumulate(*b));
                SOTTO_ASSIGN(const OptimInfo info, b->info());
                if (info.micro_batches != micro + 1)
                  return error(Code::kInternal, "{} micro-batches", info.micro_batches);
              }
              parts.gradients(k, kMicroBatches - 1);
              SOTTO_TRY(do_step(*b));
              if (bytes_of(whole.p) != bytes_of(parts.p))
                return error(Code::kInternal, "step {}: parameters differ", k);
            }
            return ok_status();
          });
      EXPECT_TRUE(status.ok()) << optimizer << " " << dtype_name(type) << " on " << size << ": "
                               << status.text();
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Worlds, OptimizerAccumulate, ::testing::ValuesIn(world_kinds()),
                         [](const auto& p) { return p.param; });

TEST(OptimizerAccumulateErrors, NameWhatIsWrong) {
  const Status status =
      run_world(world_of("inproc", 2), [](const std::shared_ptr<Comm>& comm) -> Status {
        Model model(comm->rank());
        model.gradients(0, 0);
        SOTTO_ASSIGN(const auto optimizer, make(comm, model, kOptimizers[3],
                                                R"(, "train_micro_batch_size_per_gpu": 2,
                             "gradient_accumulation_steps": 3,
                             "fp16": {"enabled": true, "loss_scale": 2})"));
        SOTTO_ASSIGN(const auto exact, export_state(*optimizer, StateMode::kExact));
        SOTTO_ASSIGN(const auto reset, export_state(*optimizer, StateMode::kReset));
        SOTTO_TRY(accumulate(*optimizer));
        EXPECT_NE(do_step(*optimizer).text().find("is 3, but the step has 2"), std::string::npos);
        // States are those of before.
        SOTTO_ASSIGN(const auto exact_now, export_state(*optimizer, StateMode::kExact));
        SOTTO_ASSIGN(const auto reset_now, export_state(*optimizer, StateMode::kReset));
        EXPECT_EQ(exact_now, exact);
        EXPECT_EQ(reset_now, reset);
        EXPECT_EQ(optimizer->set("loss_scale", -1, 4).code(), Code::kInvalidState);
        SOTTO_TRY(accumulate(*optimizer));
        const Status more = accumulate(*optimizer);
        EXPECT_EQ(more.code(), Code::kInvalidState);
        EXPECT_NE(more.text().find("gradient_accumulation_steps is 3"), std::string::npos);
        SOTTO_TRY(do_step(*optimizer));
        SOTTO_TRY(do_step(*optimizer));  // averaged by the caller
        return export_state(*optimizer, StateMode::kExact).status();
      });
  EXPECT_TRUE(status.ok()) << status.text();
}

// A NaN in any micro-batch leaves the step out, on all ranks, and is gone with it.
TEST(OptimizerAccumulateErrors, NonfiniteMicroBatch) {
  for (const char* kind : kOptimizers) {
    const Status status =
        run_world(world_of("inproc", 2), [&](const std::shared_ptr<Comm>& comm) -> Status {
          Model model(comm->rank());
          SOTTO_ASSIGN(const auto optimizer,
                       make(comm, model, kind, R"(, "gradient_clipping": 1)"));
          for (uint64_t k = 0; k < 8; ++k) {
            const std::vector<float> before = model.p;
            for (const bool bad : {true, false}) {
              model.gradients(k, 0);
              if (bad && comm->rank() == 1) model.g[3] = std::numeric_limits<float>::quiet_NaN();
              SOTTO_TRY(accumulate(*optimizer));
              model.gradients(k, 1);
              const Status met = do_step(*optimizer);
              if (met.code() != (bad ? Code::kNonfinite : Code::kOk))
                return error(Code::kInternal, "step {}: {}", k, met.text());
              if (bad && model.p != before) return error(Code::kInternal, "step {} updated", k);
            }
            if (model.p == before) return error(Code::kInternal, "step {} did nothing", k);
          }
          return ok_status();
        });
    EXPECT_TRUE(status.ok()) << kind << ": " << status.text();
  }
}

TEST(OptimizerAccumulateErrors, RanksWithOtherNumbersOfMicroBatches) {
  WorldOptions world = world_of("inproc", 2);
  world.timeout_us = 60'000'000;
  const Status status = run_world(world, [&](const std::shared_ptr<Comm>& comm) -> Status {
    Model model(comm->rank());
    SOTTO_ASSIGN(const auto optimizer, make(comm, model, kOptimizers[1], ""));
    if (comm->rank() == 1) SOTTO_TRY(accumulate(*optimizer));
    const Status met = do_step(*optimizer);
    return met.code() == Code::kProtocol ? ok_status() : error(Code::kInternal, "{}", met.text());
  });
  EXPECT_TRUE(status.ok()) << status.text();
}

}  // namespace
}  // namespace sotto::test
