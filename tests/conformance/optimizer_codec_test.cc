// Optimizers whose gradients' average is compressed by configuration (sotto.gradient_codec).
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>

#include "core/codec/codec.h"
#include "core/optim/optimizer.h"
#include "core/state/optim_state.h"
#include "tests/support/core_ranks.h"
#include "tests/support/random_bits.h"
#include "tests/support/sanitized.h"
#include "tests/support/small_model.h"

namespace sotto::test {
namespace {

constexpr const char* kDense[] = {
    R"({"type": "SGD", "params": {"lr": 0.01, "momentum": 0.9}})",
    R"({"type": "AdamW", "params": {"lr": 0.01}})",
    R"({"type": "Lamb", "params": {"lr": 0.01, "weight_decay": 0.01}})"};
constexpr const char* kCodecs[] = {
    R"({"type": "onebit"})",
    R"({"type": "onebit", "scale": "l1", "granularity": "tensor"})",
    R"({"type": "onebit", "granularity": "bucket", "bucket_elements": 8192, "chunk_align": 64})",
    R"({"type": "bf16"})",
    R"({"type": "fp16", "residual": true})",
    R"({"type": "int8"})",
    R"({"type": "int4", "block": 32, "residual": false})",
    R"({"type": "topk", "block": 128, "k": 16, "dense_below": 20})",
    R"({"type": "topk", "block": 32, "k": 4, "dense_below": 20, "exchange": "two_phase"})"};

std::string config(const char* optimizer, const std::string& codec, const std::string& rest = "") {
  return fmt::format(R"({{"optimizer": {}, "sotto": {{"gradient_codec": {}}}{}}})", optimizer,
                     codec, rest);
}

struct Model : SmallModel {
  using SmallModel::SmallModel;
  // Values that 16 bits hold, in `half` times `scale`.
  void gradients(uint64_t step, float scale = 1) {
    RandomBits random(static_cast<uint32_t>(step * 16 + static_cast<uint64_t>(rank)));
    std::normal_distribution<float> normal;
    for (size_t i = 0; i < g.size(); ++i) {
      const float value = 0.1f * std::cos(static_cast<float>(i)) + 0.05f * normal(random);
      g[i] = bf16_to_f32(f32_to_bf16(value));
      half[i] = f32_to_bf16(g[i] * scale);
    }
  }
  // The order of the flat space: by group, then by number.
  std::vector<uint64_t> grouped_counts() const {
    return {counts[0], counts[2], counts[4], counts[1], counts[3]};
  }
  std::vector<void*> grouped(std::vector<float>& values) const {
    std::vector<void*> of;
    uint64_t at = 0;
    for (const uint64_t count : counts) {
      of.push_back(values.data() + at);
      at += count;
    }
    return {of[0], of[2], of[4], of[1], of[3]};
  }
};

Status train(Optimizer& optimizer, Model& model, uint64_t from, uint64_t to) {
  for (uint64_t k = from; k < to; ++k) {
    model.gradients(k);
    SOTTO_TRY(do_step(optimizer).with_prefix(fmt::format("step {}", k)));
  }
  return ok_status();
}

class OptimizerCodec : public ::testing::TestWithParam<std::string> {};

// The step is the codec's all-reduce, and then what one rank does with the mean.
TEST_P(OptimizerCodec, IsTheCodecAndThenTheOptimizer) {
  for (const char* optimizer : kDense) {
    if (kSanitized && optimizer != kDense[2]) continue;
    for (const char* codec : kCodecs) {
      for (const char* clip : {"", R"(, "gradient_clipping": 0.5)"}) {
        const Status status =
            run_world(world_of(GetParam(), 3), [&](const std::shared_ptr<Comm>& comm) -> Status {
              Model a(comm->rank()), b(comm->rank());
              SOTTO_ASSIGN(const auto whole,
                           Optimizer::create(comm, config(optimizer, codec, clip), a.specs()));
              SOTTO_ASSIGN(const std::shared_ptr<Comm> alone, comm->split(comm->rank(), 0));
              SOTTO_ASSIGN(
                  const auto plain,
                  Optimizer::create(alone, fmt::format(R"({{"optimizer": {}{}}})", optimizer, clip),
                                    b.specs()));
              const std::vector<uint64_t> counts = b.grouped_counts();
              SOTTO_ASSIGN(const auto reducer,
                           Codec::create(comm, codec, counts,
                                         std::vector<Dtype>(counts.size(), Dtype::kF32)));
              for (uint64_t k = 0; k < 5; ++k) {
                a.gradients(k);
                b.gradients(k);
                SOTTO_TRY(do_step(*whole));
                const std::vector<void*> g = b.grouped(b.g);
                SOTTO_TRY(comm->finish(reducer->all_reduce(g, g, {})));
                SOTTO_TRY(do_step(*plain));
                if (bytes_of(a.p) != bytes_of(b.p))
                  return error(Code::kInternal, "step {}: parameters differ", k);
              }
              return ok_status();
            });
        EXPECT_TRUE(status.ok()) << optimizer << codec << clip << ": " << status.text();
      }
    }
  }
}

// Stopped anywhere and restored exactly, a run goes on bit for bit.
TEST_P(OptimizerCodec, ExactRestoreContinuesBitForBit) {
  for (const char* codec : kCodecs) {
    const std::string json = config(kDense[1], codec);
    const Status status =
        run_world(world_of(GetParam(), 2), [&](const std::shared_ptr<Comm>& comm) -> Status {
          Model whole(comm->rank()), second(comm->rank());
          SOTTO_ASSIGN(const auto a, Optimizer::create(comm, json, whole.specs()));
          SOTTO_TRY(train(*a, whole, 0, 3));
          SOTTO_ASSIGN(const std::vector<std::byte> blob, export_state(*a, StateMode::kExact));
          SOTTO_TRY(train(*a, whole, 3, 7));
          SOTTO_ASSIGN(const auto b, Optimizer::create(comm, json, second.specs()));
          SOTTO_TRY(import_state(*b, StateMode::kExact, blob));
          SOTTO_TRY(train(*b, second, 3, 7));
          if (bytes_of(second.p) != bytes_of(whole.p))
            return error(Code::kInternal, "parameters differ");
          SOTTO_TRY(import_state(*b, StateMode::kReset, blob));
          return train(*b, second, 3, 5);
        });
    EXPECT_TRUE(status.ok()) << codec << ": " << status.text();
  }
}

// NaN on one rank: no rank updates anything, its error feedback included, and all know which it
// was.
TEST_P(OptimizerCodec, NonfiniteGradientsChangeNothing) {
  for (const char* codec : kCodecs) {
    const std::string json = config(kDense[2], codec, R"(, "gradient_clipping": 1.0)");
    const Status status =
        run_world(world_of(GetParam(), 3), [&](const std::shared_ptr<Comm>& comm) -> Status {
          Model a(comm->rank());
          SOTTO_ASSIGN(const auto optimizer, Optimizer::create(comm, json, a.specs()));
          SOTTO_TRY(train(*optimizer, a, 0, 2));
          const std::string before = bytes_of(a.p);
          a.gradients(2);
          if (comm->rank() == 1) a.g[1500] = std::nanf("");
          const Status bad = do_step(*optimizer);
          if (bad.code() != Code::kNonfinite ||
              bad.text().find("met by rank 1") == std::string::npos)
            return error(Code::kInternal, "got {}", bad.text());
          if (bytes_of(a.p) != before) return error(Code::kInternal, "parameters have changed");
          SOTTO_ASSIGN(const OptimInfo info, optimizer->info());
          if (info.step != 2) return error(Code::kInternal, "step is {}", info.step);
          return train(*optimizer, a, 2, 4);
        });
    EXPECT_TRUE(status.ok()) << codec << ": " << status.text();
  }
}

// A norm that overflows is found after everything has been exchanged: server residuals stay, worker
// residuals are taken back, and a run without this step gives the same bits.
TEST_P(OptimizerCodec, OverflowOfTheNormIsTakenBack) {
  const std::string json = config(kDense[1], R"({"type": "int8"})", R"(, "gradient_clipping": 1)");
  const Status status =
      run_world(world_of(GetParam(), 2), [&](const std::shared_ptr<Comm>& comm) -> Status {
        Model a(comm->rank()), b(comm->rank());
        SOTTO_ASSIGN(const auto hurt, Optimizer::create(comm, json, a.specs()));
        SOTTO_ASSIGN(const auto spared, Optimizer::create(comm, json, b.specs()));
        a.gradients(0);
        for (float& g : a.g) g = 1e30f;
        const Status bad = do_step(*hurt);
        if (bad.code() != Code::kNonfinite) return error(Code::kInternal, "got {}", bad.text());
        SOTTO_TRY(train(*hurt, a, 0, 4));
        SOTTO_TRY(train(*spared, b, 0, 4));
        return bytes_of(a.p) == bytes_of(b.p) ? ok_status()
                                              : error(Code::kInternal, "parameters differ");
      });
  EXPECT_TRUE(status.ok()) << status.text();
}

// Error feedback does not depend on the loss scale: 16-bit gradients times a power of two give the
// same bits as float32 gradients of the same values.
TEST_P(OptimizerCodec, LossScaleLeavesNoTrace) {
  for (const char* codec : kCodecs) {
    const Status status =
        run_world(world_of(GetParam(), 2), [&](const std::shared_ptr<Comm>& comm) -> Status {
          Model a(comm->rank()), b(comm->rank());
          const std::string scaled = R"(, "fp16": {"enabled": true, "loss_scale": 1024})";
          SOTTO_ASSIGN(const auto plain,
                       Optimizer::create(comm, config(kDense[1], codec), a.specs()));
          SOTTO_ASSIGN(const auto halves,
                       Optimizer::create(comm, config(kDense[1], codec, scaled),
                                         b.specs({.gradients = Dtype::kBF16, .copies = true})));
          for (uint64_t k = 0; k < 4; ++k) {
            a.gradients(k);
            b.gradients(k, halves->info()->loss_scale == 1024 ? 1024.0f : 0.0f);
            SOTTO_TRY(do_step(*plain));
            SOTTO_TRY(do_step(*halves));
            if (bytes_of(a.p) != bytes_of(b.p))
              return error(Code::kInternal, "step {}: parameters differ", k);
          }
          return halves->set("loss_scale", -1, 4096);
        });
    EXPECT_TRUE(status.ok()) << codec << ": " << status.text();
  }
}

// Two micro-batches are their mean.
TEST_P(OptimizerCodec, TakesTheMeanOfMicroBatches) {
  for (const char* codec : {kCodecs[0], kCodecs[5]}) {
    const Status status =
        run_world(world_of(GetParam(), 2), [&](const std::shared_ptr<Comm>& comm) -> Status {
          Model a(comm->rank()), b(comm->rank());
          SOTTO_ASSIGN(const auto once,
                       Optimizer::create(comm, config(kDense[0], codec), a.specs()));
          SOTTO_ASSIGN(const auto twice,
                       Optimizer::create(comm, config(kDense[0], codec), b.specs()));
          for (uint64_t k = 0; k < 3; ++k) {
            a.gradients(k);
            b.gradients(k);
            for (float& g : b.g) g *= 2;
            SOTTO_TRY(comm->finish(twice->accumulate({})));
            std::fill(b.g.begin(), b.g.end(), 0.0f);
            SOTTO_TRY(do_step(*once));
            SOTTO_TRY(do_step(*twice));
            if (bytes_of(a.p) != bytes_of(b.p))
              return error(Code::kInternal, "step {}: parameters differ", k);
          }
          return ok_status();
        });
    EXPECT_TRUE(status.ok()) << codec << ": " << status.text();
  }
}

// Masked elements take no part: neither in the scale nor in the update.
TEST_P(OptimizerCodec, MaskedElementsHaveNoShareInTheScale) {
  const Status status =
      run_world(world_of(GetParam(), 2), [&](const std::shared_ptr<Comm>& comm) -> Status {
        Model a(comm->rank());
        std::vector<uint8_t> mask(17, 0);
        mask[3] = mask[16] = 1;
        // Every gradient that counts is 1 or -1, so a scale is exactly 1.
        for (size_t i = 0; i < a.g.size(); ++i) a.g[i] = i % 3 == 0 ? -1.0f : 1.0f;
        for (size_t i = 0; i < 17; ++i) {
          if (mask[i] == 0) a.g[1000 + i] = 50;
        }
        const std::vector<float> before = a.p;
        SOTTO_ASSIGN(const auto optimizer,
                     Optimizer::create(comm,
                                       config(R"({"type": "SGD", "params": {"lr": 0.5}})",
                                              R"({"type": "onebit", "granularity": "tensor"})"),
                                       a.specs({.mask = mask.data()})));
        SOTTO_TRY(do_step(*optimizer));
        for (size_t i = 0; i < a.p.size(); ++i) {
          const bool masked = i >= 1000 && i < 1017 && mask[i - 1000] == 0;
          const float want = masked ? before[i] : before[i] - 0.5f * a.g[i];
          if (a.p[i] != want)
            return error(Code::kInternal, "element {} is {}, want {}", i, a.p[i], want);
        }
        return ok_status();
      });
  EXPECT_TRUE(status.ok()) << status.text();
}

// Bytes are those of the codec, counted and foretold.
TEST_P(OptimizerCodec, SendsWhatTheCodecSends) {
  for (const char* codec : kCodecs) {
    const Status status =
        run_world(world_of(GetParam(), 3), [&](const std::shared_ptr<Comm>& comm) -> Status {
          Model a(comm->rank());
          SOTTO_ASSIGN(const auto optimizer,
                       Optimizer::create(comm, config(kDense[1], codec), a.specs()));
          const std::vector<uint64_t> counts = a.grouped_counts();
          SOTTO_ASSIGN(
              const auto reducer,
              Codec::create(comm, codec, counts, std::vector<Dtype>(counts.size(), Dtype::kF32)));
          SOTTO_ASSIGN(const auto plan, reducer->plan(std::vector<uint8_t>(counts.size(), 0)));
          SOTTO_ASSIGN(const OptimInfo info, optimizer->info());
          const uint64_t before = comm->counters().moved.payload_bytes_sent;
          SOTTO_TRY(train(*optimizer, a, 0, 1));
          const uint64_t sent = comm->counters().moved.payload_bytes_sent - before;
          const uint64_t want = plan->plan().traffic.total.payload_bytes_sent;
          if (sent != want || info.payload_bytes_next_step != want)
            return error(Code::kInternal, "{} bytes, {} foretold, the codec sends {}", sent,
                         info.payload_bytes_next_step, want);
          return ok_status();
        });
    EXPECT_TRUE(status.ok()) << codec << ": " << status.text();
  }
}

INSTANTIATE_TEST_SUITE_P(Worlds, OptimizerCodec, ::testing::ValuesIn(world_kinds()),
                         [](const auto& p) { return p.param; });

// The mean state carries error feedback to another number of ranks.
TEST(OptimizerCodecState, MeanRestoresOnAnotherWorld) {
  const std::string json = config(kDense[1], R"({"type": "int4"})");
  std::vector<std::byte> blob;
  MeanErrorFeedback mean;
  Status status =
      run_world(world_of("inproc", 3), [&](const std::shared_ptr<Comm>& comm) -> Status {
        Model a(comm->rank());
        SOTTO_ASSIGN(const auto optimizer, Optimizer::create(comm, json, a.specs()));
        SOTTO_TRY(train(*optimizer, a, 0, 4));
        SOTTO_ASSIGN(const std::vector<std::byte> mine, export_state(*optimizer, StateMode::kMean));
        if (comm->rank() != 0) return ok_status();
        blob = mine;
        SOTTO_ASSIGN(const OptimSnapshot s, decode_optim(mine));
        mean = *s.mean;
        return ok_status();
      });
  ASSERT_TRUE(status.ok()) << status.text();
  EXPECT_NE(bytes_of(mean.worker), bytes_of(std::vector<float>(mean.worker.size())));
  for (const int32_t size : {1, 2, 4}) {
    status = run_world(world_of("inproc", size), [&](const std::shared_ptr<Comm>& comm) -> Status {
      Model a(comm->rank());
      SOTTO_ASSIGN(const auto optimizer, Optimizer::create(comm, json, a.specs()));
      SOTTO_TRY(import_state(*optimizer, StateMode::kMean, blob));
      SOTTO_ASSIGN(const std::vector<std::byte> again, export_state(*optimizer, StateMode::kMean));
      SOTTO_ASSIGN(const OptimSnapshot s, decode_optim(again));
      for (size_t i = 0; size > 1 && i < mean.worker.size(); ++i) {
        if (std::abs(s.mean->worker[i] - mean.worker[i]) > 1e-6 ||
            s.mean->server[i] != mean.server[i])
          return error(Code::kInternal, "element {} was not restored", i);
      }
      return train(*optimizer, a, 4, 6);
    });
    EXPECT_TRUE(status.ok()) << size << ": " << status.text();
  }
}

// Ranks with other codecs, or one without, are told at creation.
TEST(OptimizerCodecState, DifferentCodecsAreRefused) {
  for (const char* other : {kCodecs[1], kCodecs[5], ""}) {
    const Status status =
        run_world(world_of("inproc", 2), [&](const std::shared_ptr<Comm>& comm) -> Status {
          Model a(comm->rank());
          const std::string json = comm->rank() == 0 || *other != 0
                                       ? config(kDense[1], comm->rank() == 0 ? kCodecs[0] : other)
                                       : fmt::format(R"({{"optimizer": {}}})", kDense[1]);
          const Status made = Optimizer::create(comm, json, a.specs()).status();
          return made.code() == Code::kProtocol ? ok_status()
                                                : error(Code::kInternal, "got {}", made.text());
        });
    EXPECT_TRUE(status.ok()) << other << ": " << status.text();
  }
}

}  // namespace
}  // namespace sotto::test
