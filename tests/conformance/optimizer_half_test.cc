// 16-bit gradients, model copies, loss scaling, and how gradients are averaged.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <tuple>

#include "core/optim/optimizer.h"
#include "core/state/optim_state.h"
#include "tests/support/core_ranks.h"
#include "tests/support/random_bits.h"
#include "tests/support/sanitized.h"
#include "tests/support/small_model.h"

namespace sotto::test {
namespace {

constexpr uint64_t kElements = 9211;

uint16_t half_of(Dtype type, float x) {
  return type == Dtype::kF16 ? f32_to_f16(x) : f32_to_bf16(x);
}
float float_of(Dtype type, uint16_t x) { return float_at(type, &x, 0); }

// Gradients in float32 and, of the same values, in 16 bits.
struct Model : SmallModel {
  using SmallModel::SmallModel;
  // Values of the 16-bit type `rounded`, times `scale`.
  void gradients(uint64_t step, Dtype rounded, float scale = 1) {
    RandomBits random(static_cast<uint32_t>(step * 16 + static_cast<uint64_t>(rank)));
    std::normal_distribution<float> normal;
    for (uint64_t i = 0; i < kElements; ++i) {
      half[i] = half_of(rounded,
                        (0.1f * std::cos(static_cast<float>(i)) + 0.05f * normal(random)) * scale);
      g[i] = float_of(rounded, half[i]);
    }
  }
};

Result<std::shared_ptr<Optimizer>> make(const std::shared_ptr<Comm>& comm, Model& model,
                                        const char* optimizer, const std::string& rest, Dtype type,
                                        bool copies = false) {
  return Optimizer::create(comm, fmt::format(R"({{"optimizer": {}{}}})", optimizer, rest),
                           model.specs({.gradients = type, .copies = copies}));
}

class OptimizerHalf : public ::testing::TestWithParam<std::string> {};

// Gradients of 16 bits give the same bits as float32 gradients of the same values when averages are
// made in float32.
TEST_P(OptimizerHalf, SameAsFloatGradientsOfTheSameValues) {
  for (const char* optimizer : kOptimizers) {
    for (const auto& pair :
         {std::pair(Dtype::kF16, 2), {Dtype::kBF16, 2}, {Dtype::kF16, 1}, {Dtype::kBF16, 1}}) {
      const Dtype type = pair.first;
      const int size = pair.second;
      if (kSanitized && size == 1) continue;
      const Status status =
          run_world(world_of(GetParam(), size), [&](const std::shared_ptr<Comm>& comm) -> Status {
            Model a(comm->rank()), b(comm->rank());
            const std::string rest =
                R"(, "gradient_clipping": 0.5, "communication_data_type": "fp32")";
            SOTTO_ASSIGN(const auto with_floats, make(comm, a, optimizer, rest, Dtype::kF32));
            SOTTO_ASSIGN(const auto with_halves, make(comm, b, optimizer, rest, type, true));
            for (uint64_t k = 0; k < 12; ++k) {
              a.gradients(k, type);
              b.gradients(k, type);
              SOTTO_TRY(do_step(*with_floats));
              SOTTO_TRY(do_step(*with_halves));
              if (bytes_of(a.p) != bytes_of(b.p))
                return error(Code::kInternal, "step {}: parameters differ", k);
              for (uint64_t i = 0; i < kElements; ++i) {
                const bool has_copy = i < 1000 || i >= 1017;
                if (b.copy[i] != (has_copy ? f32_to_bf16(b.p[i]) : 0))
                  return error(Code::kInternal, "step {}: model copy {} differs", k, i);
              }
            }
            return ok_status();
          });
      EXPECT_TRUE(status.ok()) << optimizer << " " << dtype_name(type) << ", " << size
                               << " ranks: " << status.text();
    }
  }
}

// Averages of 16 bits that are read where they lie give the same bits as those that a factor has
// made float32: with two ranks, divided by 4 before and multiplied by 2 afterwards, nothing is
// rounded in another way.
TEST_P(OptimizerHalf, AveragesOf16BitsAreWidenedExactly) {
  for (const char* optimizer : kOptimizers) {
    for (const char* clip : {"", R"(, "gradient_clipping": 0.5)"}) {
      const Status status =
          run_world(world_of(GetParam(), 2), [&](const std::shared_ptr<Comm>& comm) -> Status {
            Model a(comm->rank()), b(comm->rank());
            const std::string factor = R"(, "gradient_predivide_factor": 4.0)";
            SOTTO_ASSIGN(const auto widened, make(comm, a, optimizer, factor + clip, Dtype::kBF16));
            SOTTO_ASSIGN(const auto narrow, make(comm, b, optimizer, clip, Dtype::kBF16));
            for (uint64_t k = 0; k < 6; ++k) {
              a.gradients(k, Dtype::kBF16);
              b.gradients(k, Dtype::kBF16);
              SOTTO_TRY(do_step(*widened));
              SOTTO_TRY(do_step(*narrow));
              if (bytes_of(a.p) != bytes_of(b.p))
                return error(Code::kInternal, "step {}: parameters differ", k);
            }
            return ok_status();
          });
      EXPECT_TRUE(status.ok()) << optimizer << clip << ": " << status.text();
    }
  }
}

// Averages travel in the gradients' type or in communication_data_type: bytes and accuracy.
TEST_P(OptimizerHalf, AveragesTravelInTheirType) {
  const Status status =
      run_world(world_of(GetParam(), 3), [&](const std::shared_ptr<Comm>& comm) -> Status {
        struct Case {
          Dtype gradients;
          const char* rest;
          uint64_t element;
          float tolerance;
        };
        const Case cases[] = {{Dtype::kF32, R"(, "gradient_predivide_factor": 2.0)", 4, 1e-6f},
                              {Dtype::kF32, R"(, "prescale_gradients": true)", 4, 1e-6f},
                              {Dtype::kBF16, "", 2, 8e-3f},
                              {Dtype::kBF16, R"(, "gradient_predivide_factor": 2.0)", 2, 2e-2f},
                              {Dtype::kF32, R"(, "communication_data_type": "bf16")", 2, 1.2e-2f},
                              {Dtype::kF32, R"(, "communication_data_type": "fp16")", 2, 1.5e-3f},
                              {Dtype::kBF16, R"(, "communication_data_type": "fp32")", 4, 1e-6f}};
        Model reference(comm->rank());
        const char* sgd = R"({"type": "SGD", "params": {"lr": 1.0}})";
        SOTTO_ASSIGN(const auto plain, make(comm, reference, sgd, "", Dtype::kF32));
        reference.gradients(3, Dtype::kBF16);
        SOTTO_TRY(do_step(*plain));
        const Model start(comm->rank());
        SOTTO_ASSIGN(const OptimInfo whole, plain->info());
        for (const Case& c : cases) {
          Model model(comm->rank());
          SOTTO_ASSIGN(const auto optimizer, make(comm, model, sgd, c.rest, c.gradients));
          model.gradients(3, Dtype::kBF16);
          SOTTO_ASSIGN(const OptimInfo info, optimizer->info());
          if (info.payload_bytes_next_step * 4 != whole.payload_bytes_next_step * c.element)
            return error(Code::kInternal, "{}: {} bytes", c.rest, info.payload_bytes_next_step);
          SOTTO_TRY(do_step(*optimizer));
          for (uint64_t i = 0; i < kElements; ++i) {
            const float want = start.p[i] - reference.p[i], got = start.p[i] - model.p[i];
            if (std::abs(want - got) > c.tolerance * (std::abs(want) + 0.1f) + 3e-7f)
              return error(Code::kInternal, "{}: average {} is {}, want {}", c.rest, i, got, want);
          }
        }
        return ok_status();
      });
  EXPECT_TRUE(status.ok()) << status.text();
}

// A static loss scale that is a power of two changes no bit.
TEST_P(OptimizerHalf, StaticLossScaleIsTakenOut) {
  for (const char* optimizer : kOptimizers) {
    for (const double clip : {0.0, 0.5}) {
      const Status status =
          run_world(world_of(GetParam(), 2), [&](const std::shared_ptr<Comm>& comm) -> Status {
            Model a(comm->rank()), b(comm->rank());
            const std::string rest = fmt::format(R"(, "gradient_clipping": {})", clip);
            SOTTO_ASSIGN(const auto plain, make(comm, a, optimizer, rest, Dtype::kF32));
            SOTTO_ASSIGN(
                const auto scaled,
                make(comm, b, optimizer,
                     rest + R"(, "fp16": {"enabled": true, "loss_scale": 1024})", Dtype::kF32));
            for (uint64_t k = 0; k < 12; ++k) {
              a.gradients(k, Dtype::kBF16);
              b.gradients(k, Dtype::kBF16, 1024);
              SOTTO_TRY(do_step(*plain));
              SOTTO_TRY(do_step(*scaled));
              if (bytes_of(a.p) != bytes_of(b.p))
                return error(Code::kInternal, "step {}: parameters differ", k);
            }
            b.g[5] = std::numeric_limits<float>::infinity();
            const Status met = do_step(*scaled);
            if (met.code() != Code::kNonfinite) return error(Code::kInternal, "{}", met.text());
            SOTTO_ASSIGN(const OptimInfo info, scaled->info());
            return info.loss_scale == 1024 && info.skipped_steps == 1
                       ? ok_status()
                       : error(Code::kInternal, "scale {}", info.loss_scale);
          });
      EXPECT_TRUE(status.ok()) << optimizer << ", clip " << clip << ": " << status.text();
    }
  }
}

// An overflow on one rank: all leave the step out, nothing changes but the scale, which grows again
// after its window.
TEST_P(OptimizerHalf, DynamicLossScale) {
  for (const char* optimizer : kOptimizers) {
    const Status status =
        run_world(world_of(GetParam(), 3), [&](const std::shared_ptr<Comm>& comm) -> Status {
          Model model(comm->rank());
          const char* rest =
              R"(, "fp16": {"enabled": true, "initial_scale_power": 4, "loss_scale_window": 3,
                   "min_loss_scale": 2}, "sotto": {"max_consecutive_skips": 4})";
          SOTTO_ASSIGN(const auto o, make(comm, model, optimizer, rest, Dtype::kF16));
          const auto expect = [&](double scale, uint64_t skipped, uint64_t step) -> Status {
            SOTTO_ASSIGN(const OptimInfo info, o->info());
            if (info.loss_scale == scale && info.skipped_steps == skipped && info.step == step)
              return ok_status();
            return error(Code::kInternal, "scale {}, {} skipped, step {}; want {}, {}, {}",
                         info.loss_scale, info.skipped_steps, info.step, scale, skipped, step);
          };
          SOTTO_TRY(expect(16, 0, 0));
          uint64_t step = 0, skipped = 0;
          for (const uint64_t good : {2, 3, 6}) {  // at every kind of step
            for (uint64_t i = 0; i < good; ++i, ++step) {
              model.gradients(step, Dtype::kF16);
              SOTTO_TRY(do_step(*o));
            }
            SOTTO_ASSIGN(OptimSnapshot before, o->snapshot(false));
            SOTTO_ASSIGN(const OptimInfo at, o->info());
            model.gradients(step, Dtype::kF16);
            if (comm->rank() == 1) model.half[1003] = 0x7c00;  // infinity
            SOTTO_TRY(do_step(*o));
            SOTTO_TRY(expect(std::max(at.loss_scale / 2, 2.0), ++skipped, step));
            SOTTO_ASSIGN(OptimSnapshot after, o->snapshot(false));
            before.loss_scale = after.loss_scale = {};
            if (before.skipped_steps++ != skipped - 1)
              return error(Code::kInternal, "{} skipped steps", before.skipped_steps);
            if (encode_optim(before) != encode_optim(after))
              return error(Code::kInternal, "step {} changed the state", step);
          }
          // For ever: an error after a limited number (the last attempt above counts).
          for (int i = 2; i <= 4; ++i) {
            model.gradients(step, Dtype::kF16);
            model.half[3] = 0x7e00;
            const Status met = do_step(*o);
            if (met.ok() != (i < 4)) return error(Code::kInternal, "attempt {}: {}", i, met.text());
            if (i == 4 && met.text().find("max_consecutive_skips") == std::string::npos)
              return error(Code::kInternal, "{}", met.text());
          }
          model.gradients(step, Dtype::kF16);
          return do_step(*o);
        });
    EXPECT_TRUE(status.ok()) << optimizer << ": " << status.text();
  }
}

INSTANTIATE_TEST_SUITE_P(Worlds, OptimizerHalf, ::testing::ValuesIn(world_kinds()),
                         [](const auto& p) { return p.param; });

// The published rule, attempt by attempt.
TEST(LossScale, GrowsAfterItsWindowAndHalvesOnOverflow) {
  Fp16Config config;
  config.enabled = true;
  config.initial_scale_power = 3;
  config.loss_scale_window = 2;
  LossScaler scaler(config);
  std::vector<double> scales;
  for (const bool overflow : {false, false, false, false, false, true, false, false, false, true,
                              true, true, true, true}) {
    scaler.advance(overflow);
    scales.push_back(scaler.scale());
  }
  EXPECT_EQ(scales, (std::vector<double>{8, 8, 16, 16, 32, 16, 16, 16, 32, 16, 8, 4, 2, 1}));
}

// Of a state whose checksum is right: the next attempt would count beyond the numbers there are.
TEST(OptimizerHalfErrors, CountersOfAStateAreInRange) {
  constexpr uint64_t kMost = uint64_t{1} << 53;
  constexpr int64_t kLeast = std::numeric_limits<int64_t>::min();
  struct Case {
    uint64_t iteration;
    int64_t last_overflow;
    bool allowed;
  };
  constexpr Case kCases[] = {
      {6, kLeast, false},      {6, -2, false},          {6, 6, false},
      {6, INT64_MAX, false},   {0, 0, false},           {kMost + 1, -1, false},
      {1ull << 63, -1, false}, {UINT64_MAX, -1, false}, {6, 5, true},
      {6, -1, true},           {0, -1, true},           {kMost, kMost - 1, true}};
  const Status status =
      run_world(world_of("inproc", 1), [&](const std::shared_ptr<Comm>& comm) -> Status {
        Model model(0);
        const char* rest = R"(, "fp16": {"enabled": true}, "scheduler": {"type": "WarmupLR"})";
        SOTTO_ASSIGN(const auto o, make(comm, model, R"({"type": "Adam"})", rest, Dtype::kF32));
        model.gradients(0, Dtype::kF16);
        SOTTO_TRY(do_step(*o));
        SOTTO_ASSIGN(OptimSnapshot s, o->snapshot(true));
        const std::vector<std::byte> whole = encode_optim(s);
        for (const Case& c : kCases) {
          s.loss_scale.iteration = c.iteration;
          s.loss_scale.last_overflow = c.last_overflow;
          const Status restored = o->restore(s, true);
          const std::string text = fmt::format(
              "the state's loss scaler has counted {} attempts, the last overflow was attempt {}",
              c.iteration, c.last_overflow);
          EXPECT_EQ(restored.code(), c.allowed ? Code::kOk : Code::kInvalidArgument) << text;
          if (c.allowed) {
            SOTTO_TRY(do_step(*o));
            continue;
          }
          EXPECT_NE(restored.text().find(text), std::string::npos) << restored.text();
          SOTTO_ASSIGN(const OptimSnapshot kept, o->snapshot(true));
          EXPECT_EQ(encode_optim(kept), whole) << "a refused import has changed the state";
        }
        SOTTO_ASSIGN(s, o->snapshot(true));
        s.loss_scale.iteration = 6;  // the last case and a step are beyond the range
        s.loss_scale.last_overflow = -1;
        for (const int64_t iteration : {(int64_t{1} << 53) + 1, INT64_MAX, int64_t{-2}}) {
          s.scheduler_iteration = iteration;
          const Status restored = o->restore(s, true);
          EXPECT_EQ(restored.code(), Code::kInvalidArgument) << iteration;
          const std::string text = fmt::format("scheduler iteration is {}", iteration);
          EXPECT_NE(restored.text().find(text), std::string::npos) << restored.text();
        }
        return do_step(*o);
      });
  EXPECT_TRUE(status.ok()) << status.text();
}

TEST(OptimizerHalfErrors, NameWhatIsWrong) {
  const Status status =
      run_world(world_of("inproc", 1), [](const std::shared_ptr<Comm>& comm) -> Status {
        Model model(0);
        const char* adam = R"({"type": "Adam"})";
        const auto text = [&](std::vector<ParamSpec> specs, const std::string& rest) {
          return Optimizer::create(comm, fmt::format(R"({{"optimizer": {}{}}})", adam, rest),
                                   std::move(specs))
              .status()
              .text();
        };
        auto mixed = model.specs();
        mixed[3].grad_dtype = Dtype::kF16;
        EXPECT_NE(text(mixed, "").find("\"t3\""), std::string::npos) << text(mixed, "");
        auto copies = model.specs({.copies = true});
        copies[3].copy_dtype = Dtype::kF16;
        EXPECT_NE(text(copies, "").find("model copy"), std::string::npos) << text(copies, "");
        const std::string wanted =
            text(model.specs(), R"(, "data_types": {"grad_accum_dtype": "bf16"})");
        EXPECT_NE(wanted.find("grad_accum_dtype"), std::string::npos) << wanted;
        SOTTO_ASSIGN(const auto plain, make(comm, model, adam, "", Dtype::kF32));
        EXPECT_NE(plain->set("loss_scale", -1, 2).text().find("fp16.enabled"), std::string::npos);
        SOTTO_ASSIGN(const auto scaled,
                     make(comm, model, adam, R"(, "fp16": {"enabled": true})", Dtype::kF32));
        EXPECT_TRUE(scaled->set("loss_scale", -1, 512).ok());
        EXPECT_FALSE(scaled->set("loss_scale", 0, 512).ok());
        EXPECT_FALSE(scaled->set("loss_scale", -1, 0).ok());
        SOTTO_ASSIGN(const OptimInfo info, scaled->info());
        EXPECT_EQ(info.loss_scale, 512);
        return ok_status();
      });
  EXPECT_TRUE(status.ok()) << status.text();
}

}  // namespace
}  // namespace sotto::test
