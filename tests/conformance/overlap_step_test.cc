// Steps of optimizers whose gradients arrive while they run: the bits of steps that begin when all
// are there, in whatever order they become ready; and steps that ranks withdraw from, or that meet
// a NaN, which leave everything as it was.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <thread>

#include "core/overlap/overlap.h"
#include "core/state/optim_state.h"
#include "tests/conformance/overlap_worlds.h"
#include "tests/support/overlap_model.h"
#include "tests/support/random_bits.h"
#include "tests/support/small_model.h"

namespace sotto::test {
namespace {

constexpr char kBuckets[] = R"({"first_bucket_bytes": 1, "bucket_bytes": 3000, "unused": "zero"})";
constexpr char kObserved[] =
    R"({"first_bucket_bytes": 1, "bucket_bytes": 3000, "order": "observed"})";

// An optimizer with its model; the second of a pair makes its steps by rounds.
struct Trained {
  // counts: of the tensors; empty: those of SmallModel.
  Trained(const std::shared_ptr<Comm>& comm, const std::string& config,
          const SmallModel::Options& options = {}, const std::vector<uint64_t>& counts = {})
      : model(comm->rank()) {
    if (!counts.empty()) model.counts = counts;
    Result<std::shared_ptr<Optimizer>> made = Optimizer::create(comm, config, model.specs(options));
    if (!made.ok()) throw RankError(made.status().text());
    optimizer = made.take();
  }

  void gradients(uint64_t step) {
    RandomBits random(static_cast<uint32_t>(step * 16) + static_cast<uint32_t>(model.rank));
    std::normal_distribution<float> value(0, 0.3f);
    for (size_t i = 0; i < model.g.size(); ++i) {
      model.g[i] = value(random);
      model.half[i] = f32_to_bf16(model.g[i]);
    }
  }
  std::vector<std::byte> state() {
    Result<std::vector<std::byte>> blob = export_state(*optimizer, StateMode::kExact);
    if (!blob.ok()) throw RankError(blob.status().text());
    return blob.take();
  }
  std::string parameters() const { return bytes_of(model.p); }

  SmallModel model;
  std::shared_ptr<Optimizer> optimizer;
};

struct Rounds : Trained {
  Rounds(const std::shared_ptr<Comm>& comm, const std::string& config, const std::string& json,
         const SmallModel::Options& options = {}, const std::vector<uint64_t>& counts = {})
      : Trained(comm, config, options, counts) {
    Result<std::shared_ptr<Overlap>> made = Overlap::create_step(optimizer, json);
    if (!made.ok()) throw RankError(made.status().text());
    overlap = made.take();
  }
  ~Rounds() { overlap->close(); }

  OpRef begin() {
    Result<OpRef> op = overlap->begin({}, ReduceOp::kMean);
    if (!op.ok()) throw RankError(op.status().text());
    return op.take();
  }
  Status wait(const OpRef& op) { return optimizer->comm()->engine().wait(op, -1); }
  static std::vector<uint64_t> order(uint32_t seed) {
    std::vector<uint64_t> out(5);
    std::iota(out.begin(), out.end(), 0);
    std::mt19937 random(seed);
    std::shuffle(out.begin(), out.end(), random);
    return out;
  }
  Status round(uint32_t seed) {
    const OpRef op = begin();
    for (const uint64_t t : order(seed)) checked(overlap->ready({&t, 1}, {}, std::nullopt));
    checked(overlap->finish());
    return wait(op);
  }

  std::shared_ptr<Overlap> overlap;
};

class OverlapSteps : public OverlapWorlds {};

void same_training(const std::shared_ptr<Comm>& comm, const std::string& optimizer,
                   const std::string& rest, const std::string& json,
                   const SmallModel::Options& options = {}) {
  const std::string config = fmt::format(R"({{"optimizer": {}{}}})", optimizer, rest);
  Trained plain(comm, config, options);
  Rounds rounds(comm, config, json, options);
  for (uint64_t step = 0; step < 9; ++step) {
    plain.gradients(step);
    rounds.gradients(step);
    checked(do_step(*plain.optimizer));
    checked(rounds.round(static_cast<uint32_t>(step * 8) + static_cast<uint32_t>(comm->rank())));
    if (plain.parameters() != rounds.parameters() || plain.model.copy != rounds.model.copy)
      throw RankError(fmt::format("{}: step {}: parameters differ", config, step));
  }
  if (plain.state() != rounds.state()) throw RankError(config + ": states differ");
  if (rounds.overlap->info().rounds != 9) throw RankError("not 9 rounds");
}

TEST_P(OverlapSteps, HaveTheBitsOfStepsWithAllGradients) {
  run([](const std::shared_ptr<Comm>& comm) {
    for (const char* optimizer : kOptimizers) {
      const bool one_bit = std::string_view(optimizer).find("One") != std::string_view::npos;
      same_training(comm, optimizer, "", kBuckets);
      same_training(comm, optimizer, R"(, "gradient_clipping": 0.7)", kObserved);
      if (!one_bit) continue;
      same_training(comm, optimizer,
                    R"(, "sotto": {"granularity": "bucket", "bucket_elements": 8192})",
                    R"({"unused": "zero"})");
      same_training(comm, optimizer, R"(, "sotto": {"granularity": "tensor"})", kObserved);
    }
  });
}

TEST_P(OverlapSteps, HaveThemWithCodecsAndHalfGradients) {
  run([](const std::shared_ptr<Comm>& comm) {
    for (const char* codec :
         {R"({"type": "onebit", "granularity": "bucket", "bucket_elements": 8192})",
          R"({"type": "onebit"})", R"({"type": "int8"})",
          R"({"type": "topk", "block": 64, "k": 8})", R"({"type": "fp16"})",
          R"({"type": "topk", "block": 64, "k": 8, "exchange": "two_phase"})"}) {
      same_training(comm, kOptimizers[1],
                    fmt::format(R"(, "sotto": {{"gradient_codec": {}}})", codec), kBuckets);
    }
    const SmallModel::Options half{.gradients = Dtype::kBF16, .copies = true};
    for (const char* optimizer : kOptimizers) {
      same_training(comm, optimizer, R"(, "fp16": {"enabled": true, "loss_scale": 4})", kBuckets,
                    half);
      same_training(comm, optimizer,
                    R"(, "prescale_gradients": true, "gradient_predivide_factor": 2)", kBuckets,
                    half);
    }
  });
}

// 20 orders of 24 gradients on every rank, each marked by 8 threads at once.
TEST_P(OverlapSteps, AreMarkedByManyThreads) {
  run([](const std::shared_ptr<Comm>& comm) {
    const std::vector<uint64_t> counts(24, 383);
    for (const auto& [optimizer, rest] :
         {std::pair(kOptimizers[1], ""),
          {kOptimizers[3], R"(, "sotto": {"granularity": "bucket", "bucket_elements": 8192})"}}) {
      const std::string config = fmt::format(R"({{"optimizer": {}{}}})", optimizer, rest);
      Trained plain(comm, config, {}, counts);
      Rounds rounds(comm, config, *rest == 0 ? kBuckets : "{}", {}, counts);
      for (uint64_t step = 0; step < 20; ++step) {
        plain.gradients(step);
        rounds.gradients(step);
        checked(do_step(*plain.optimizer));
        std::vector<uint64_t> order(24);
        std::iota(order.begin(), order.end(), 0);
        std::shuffle(
            order.begin(), order.end(),
            std::mt19937(static_cast<uint32_t>(step * 8) + static_cast<uint32_t>(comm->rank())));
        const OpRef op = rounds.begin();
        std::atomic<int> failures{0};
        std::vector<std::thread> threads;
        for (uint64_t k = 0; k < 8; ++k) {
          threads.emplace_back([&, k] {
            for (uint64_t i = k; i < 24; i += 8)
              failures += !rounds.overlap->ready({&order[i], 1}, {}, std::nullopt).ok();
          });
        }
        for (std::thread& thread : threads) thread.join();
        if (failures != 0) throw RankError("a mark was refused");
        checked(rounds.overlap->finish());
        checked(rounds.wait(op));
        if (plain.parameters() != rounds.parameters()) throw RankError(config);
      }
    }
  });
}

// Micro-batches before a round, which brings the gradients of the last one.
TEST_P(OverlapSteps, TakeMicroBatches) {
  run([](const std::shared_ptr<Comm>& comm) {
    for (const char* optimizer : kOptimizers) {
      const std::string config = fmt::format(R"({{"optimizer": {}}})", optimizer);
      Trained plain(comm, config);
      Rounds rounds(comm, config, kBuckets);
      for (uint64_t step = 0; step < 7; ++step) {
        for (Trained* trained : {&plain, static_cast<Trained*>(&rounds)}) {
          for (uint64_t micro = 0; micro < 2; ++micro) {
            trained->gradients(step * 4 + micro);
            Result<OpRef> op = trained->optimizer->accumulate({});
            checked(op.status());
            checked(comm->engine().wait(*op, -1));
          }
          trained->gradients(step * 4 + 2);
        }
        checked(do_step(*plain.optimizer));
        checked(rounds.round(static_cast<uint32_t>(step)));
        if (plain.parameters() != rounds.parameters()) throw RankError(config);
      }
    }
  });
}

// At every moment, in every stage: parameters, moments and error feedback stay, and the next step
// is that of an optimizer that has seen nothing of it.
TEST_P(OverlapSteps, LeaveEverythingWhenARankWithdrawsOrMeetsNaN) {
  run([](const std::shared_ptr<Comm>& comm) {
    for (const char* optimizer : kOptimizers) {
      for (const char* rest :
           {"", R"(, "sotto": {"granularity": "bucket", "bucket_elements": 8192})",
            R"(, "sotto": {"gradient_codec": {"type": "int8"}})"}) {
        const bool one_bit = std::string_view(optimizer).find("One") != std::string_view::npos;
        const bool buckets = std::string_view(rest).find("granularity") != std::string_view::npos;
        if (*rest != 0 && one_bit != buckets) continue;
        const std::string config = fmt::format(R"({{"optimizer": {}{}}})", optimizer, rest);
        Trained plain(comm, config);
        Rounds rounds(comm, config, buckets ? "{}" : kBuckets);
        const int32_t last = comm->size() - 1;
        for (uint64_t step = 0; step < 8; ++step) {
          const std::vector<std::byte> before = rounds.state();
          rounds.gradients(90 + step);
          const OpRef op = rounds.begin();
          const std::vector<uint64_t> order = Rounds::order(static_cast<uint32_t>(step));
          const uint64_t marks = comm->rank() == last ? step % 6 : 5;
          checked(rounds.overlap->ready(std::span(order).first(marks), {}, std::nullopt));
          checked(marks == 5 && comm->rank() != last ? rounds.overlap->finish()
                                                     : rounds.overlap->withdraw("no memory"));
          const Status ended = rounds.wait(op);
          const std::string text = fmt::format(
              "overlap round {}: rank {} has withdrawn: no memory; nothing was "
              "updated, the group is healthy",
              2 * step + 1, last);
          if (ended.code() != Code::kCancelled || ended.text() != text)
            throw RankError(fmt::format("{}: {}", code_name(ended.code()), ended.text()));
          if (rounds.state() != before) throw RankError(config + ": changed by a withdrawal");
          plain.gradients(step);
          rounds.gradients(step);
          checked(do_step(*plain.optimizer));
          checked(rounds.round(static_cast<uint32_t>(step)));
          if (plain.parameters() != rounds.parameters()) throw RankError(config + ": next step");
        }
      }
    }
  });
}

// Where the gradients of a NaN are exchanged, no rank updates.
TEST_P(OverlapSteps, LeaveEverythingWhenABucketHasNaN) {
  run([](const std::shared_ptr<Comm>& comm) {
    for (const char* optimizer : {kOptimizers[1], kOptimizers[3], kOptimizers[4]}) {
      const std::string config = fmt::format(R"({{"optimizer": {}}})", optimizer);
      Rounds rounds(comm, config, kBuckets);
      Trained plain(comm, config);
      for (uint64_t step = 0; step < 7; ++step) {
        const std::string parameters = rounds.parameters();
        rounds.gradients(90 + step);
        // The last bucket that is launched, and the first one.
        if (comm->rank() == 0)
          rounds.model.g[step % 2 == 0 ? 3 : 9210] = std::numeric_limits<float>::quiet_NaN();
        const Status ended = rounds.round(static_cast<uint32_t>(step));
        if (ended.code() != Code::kNonfinite ||
            !ended.text().starts_with(fmt::format("overlap round {}: optimizer step {}: NaN or Inf",
                                                  2 * step + 1, step + 1)))
          throw RankError(fmt::format("{}: {}", code_name(ended.code()), ended.text()));
        if (rounds.parameters() != parameters) throw RankError(config + ": changed by a NaN");
        plain.gradients(step);
        rounds.gradients(step);
        checked(do_step(*plain.optimizer));
        checked(rounds.round(static_cast<uint32_t>(step)));
        if (plain.parameters() != rounds.parameters()) throw RankError(config + ": next step");
      }
    }
  });
}

TEST_P(OverlapSteps, CountUnusedGradientsAsZeroAndLeaveTheirMemory) {
  run([](const std::shared_ptr<Comm>& comm) {
    const std::string config = fmt::format(R"({{"optimizer": {}}})", kOptimizers[4]);
    Trained plain(comm, config);
    Rounds rounds(comm, config, kBuckets);
    for (uint64_t step = 0; step < 7; ++step) {
      plain.gradients(step);
      rounds.gradients(step);
      const bool unused = comm->rank() == static_cast<int32_t>(step) % comm->size();
      if (unused) std::fill_n(plain.model.g.begin() + 1017, 8193, 0.0f);  // t3
      const std::vector<float> mine = rounds.model.g;
      checked(do_step(*plain.optimizer));
      const OpRef op = rounds.begin();
      for (const uint64_t t : {0, 1, 2, 4}) checked(rounds.overlap->ready({&t, 1}, {}, {}));
      const uint64_t t3 = 3;
      if (!unused) checked(rounds.overlap->ready({&t3, 1}, {}, {}));
      checked(rounds.overlap->finish());
      checked(rounds.wait(op));
      if (plain.parameters() != rounds.parameters()) throw RankError("other parameters");
      if (rounds.model.g != mine) throw RankError("gradients were written");
    }
  });
}

// In full precision and in one bit with buckets all messages but those of the last bucket go before
// its gradients are there; a norm that everything waits for leaves none.
TEST_P(OverlapSteps, SayWhatIsHidden) {
  run([](const std::shared_ptr<Comm>& comm) {
    const auto hidden = [&](const char* optimizer, const std::string& rest, const char* json,
                            uint64_t steps, std::string_view why) {
      const std::string config = fmt::format(R"({{"optimizer": {}{}}})", optimizer, rest);
      Rounds rounds(comm, config, json);
      for (uint64_t step = 0; step < steps; ++step) {
        rounds.gradients(step);
        checked(rounds.round(1));
      }
      const OverlapInfo info = rounds.overlap->info();
      if (info.early_payload_bytes_per_round > info.payload_bytes_per_round)
        throw RankError("more than all");
      const std::string report = *rounds.overlap->report("all");
      const std::string wanted =
          comm->size() == 1 ? "the step sends no gradients" : std::string(why);
      const bool said =
          report.find(wanted.empty() ? R"("hidden":true,"why":null)"
                                     : R"("hidden":false,"why":")" + wanted) != std::string::npos;
      if (!said) throw RankError(config + ": " + report);
    };
    const std::string buckets = R"(, "sotto": {"granularity": "bucket", "bucket_elements": 8192})";
    hidden(kOptimizers[1], "", kBuckets, 2, "");
    hidden(kOptimizers[1], "", R"({"first_bucket_bytes": 1000000})", 2,
           "all gradients are in one bucket");
    hidden(kOptimizers[2], R"(, "gradient_clipping": 1)", kBuckets, 2, "");
    hidden(kOptimizers[4], buckets, "{}", 7, "");
    hidden(kOptimizers[4], R"(, "gradient_clipping": 1)", kBuckets, 7,
           "gradient_clipping needs all gradients");
  });
}

INSTANTIATE_TEST_SUITE_P(Worlds, OverlapSteps,
                         ::testing::Combine(::testing::ValuesIn(world_kinds()),
                                            ::testing::Values(1, 3)),
                         [](const auto& named) {
                           return fmt::format("{}_{}", std::get<0>(named.param),
                                              std::get<1>(named.param));
                         });

TEST(OverlapStepErrors, NameWhatIsWrong) {
  const auto refused = [](const std::string& config, const char* json) {
    std::string text;
    const Status status =
        run_world(world_of("inproc", 2), [&](const std::shared_ptr<Comm>& comm) -> Status {
          Trained trained(comm, config);
          const Status refusal = Overlap::create_step(trained.optimizer, json).status();
          if (comm->rank() == 0) text = refusal.text();
          return ok_status();
        });
    EXPECT_TRUE(status.ok()) << status.text();
    return text;
  };
  const auto of = [](int optimizer, const std::string& rest) {
    return fmt::format(R"({{"optimizer": {}{}}})", kOptimizers[optimizer], rest);
  };
  EXPECT_NE(refused(of(3, R"(, "sotto": {"granularity": "bucket"})"), R"({"bucket_bytes": 5})")
                .find("overlap.bucket_bytes: buckets of a 1-bit optimizer are those that have "
                      "scales of their own: set sotto.bucket_elements"),
            std::string::npos);
  EXPECT_NE(refused(of(1, ""), R"({"codec": "int8"})").find("set sotto.gradient_codec"),
            std::string::npos);
  EXPECT_NE(refused(of(3, ""), R"({"codec": "int8"})").find("compresses gradients itself"),
            std::string::npos);
  EXPECT_NE(refused(of(1, ""), R"({"wire": "fp16"})").find("set communication_data_type"),
            std::string::npos);
  EXPECT_NE(refused(of(3, R"(, "sotto": {"mode": "compat"})"), "{}").find("sotto.mode is compat"),
            std::string::npos);
  EXPECT_NE(refused(of(1, ""), R"({"buckets": 1})").find("unknown key"), std::string::npos);
}

// Settings of the file; a learning rate cannot be set while a round is open, nor another step
// begin.
TEST(OverlapStepErrors, ARoundIsAStepInFlight) {
  const Status status =
      run_world(world_of("inproc", 2), [](const std::shared_ptr<Comm>& comm) -> Status {
        Rounds rounds(comm,
                      fmt::format(R"({{"optimizer": {}, "sotto": {{"overlap": {{"order":
                                  "registered", "bucket_bytes": 77}}}}}})",
                                  kOptimizers[1]),
                      "");
        EXPECT_EQ(rounds.overlap->config().bucket_bytes, 77u);
        EXPECT_EQ(rounds.overlap->config().order, OverlapOrder::kRegistered);
        const OpRef op = rounds.begin();
        EXPECT_EQ(rounds.optimizer->set("lr", -1, 0.5).code(), Code::kBusy);
        EXPECT_EQ(do_step(*rounds.optimizer).code(), Code::kBusy);
        EXPECT_EQ(rounds.overlap->begin({}, ReduceOp::kMean).status().code(), Code::kBusy);
        EXPECT_EQ(export_state(*rounds.optimizer, StateMode::kExact).status().code(), Code::kBusy);
        EXPECT_NE(rounds.overlap->finish().text().find("5 of 5 gradients are missing on rank"),
                  std::string::npos);
        SOTTO_TRY(rounds.overlap->withdraw("enough"));
        EXPECT_EQ(rounds.wait(op).code(), Code::kCancelled);
        EXPECT_EQ(rounds.overlap->snapshot().status().code(), Code::kInvalidState);
        SOTTO_TRY(do_step(*rounds.optimizer));  // both kinds of step
        return rounds.round(1);
      });
  EXPECT_TRUE(status.ok()) << status.text();
}

}  // namespace
}  // namespace sotto::test
