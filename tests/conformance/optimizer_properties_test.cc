// Properties of the optimizers (specification 13.10): P1, P4, P5, P6, P7, P8, P11, and what happens
// to bad input.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <tuple>

#include "core/base/hash.h"
#include "core/cpu/cpu_device.h"
#include "core/plan/layout.h"
#include "core/state/optim_state.h"
#include "tests/support/core_ranks.h"
#include "tests/support/random_bits.h"
#include "tests/support/small_model.h"

namespace sotto::test {
namespace {

// An optimizer with a compressed stage that starts within a few updates.
struct Subject {
  const char* name;
  const char* optimizer;  // "optimizer" section
  bool zeroone = false;
  const char* sotto = R"("chunk_align": 64)";  // "sotto" section
  uint64_t align = 64;
  bool compat = false;
};
// Else gtest prints the bytes of every case, whichever runs.
void PrintTo(const Subject& subject, std::ostream* out) { *out << subject.name; }
constexpr Subject kLamb{"lamb", R"({"type": "OneBitLamb", "params": {"lr": 0.01,
    "weight_decay": 0.01, "freeze_step": 5, "betas": [0.9, 0.99]}})"};
constexpr Subject kAdam{"adam", R"({"type": "OneBitAdam", "params": {"lr": 0.01,
    "weight_decay": 0.01, "freeze_step": 5, "betas": [0.9, 0.99]}})"};
constexpr Subject kZeroOne{"zeroone", R"({"type": "ZeroOneAdam", "params": {"lr": 0.01,
    "weight_decay": 0.01, "var_freeze_step": 5, "var_update_scaler": 2, "local_step_scaler": 3,
    "local_step_clipper": 4, "betas": [0.9, 0.99]}})",
                           true};

std::string json_of(const Subject& subject, double clip = 1.0) {
  return fmt::format(
      R"({{"optimizer": {}, "gradient_clipping": {}, "scheduler": {{"type": "WarmupDecayLR",
      "params": {{"warmup_max_lr": 0.01, "warmup_num_steps": 3, "warmup_type": "linear",
      "total_num_steps": 40}}}}, "sotto": {{{}}}}})",
      subject.optimizer, clip, subject.sotto);
}
// Two buckets.
constexpr const char* kBuckets =
    R"("chunk_align": 64, "granularity": "bucket", "bucket_elements": 8192)";
constexpr Subject kLambBuckets{"lamb_buckets", kLamb.optimizer, false, kBuckets};
constexpr Subject kZeroOneBuckets{"zeroone_buckets", kZeroOne.optimizer, true, kBuckets};
// The published arithmetic; chunk_align is lcm(W, 8), here with 4 ranks.
constexpr const char* kMode = R"("mode": "compat")";
constexpr Subject kLambCompat{"lamb_compat", kLamb.optimizer, false, kMode, 8, true};
constexpr Subject kAdamCompat{"adam_compat", kAdam.optimizer, false, kMode, 8, true};
constexpr Subject kZeroOneCompat{"zeroone_compat", kZeroOne.optimizer, true, kMode, 8, true};
// Group 1 is never compressed.
constexpr Subject kAdamPartly{"adam_partly", kAdam.optimizer, false,
                              R"("chunk_align": 64, "param_groups": [{}, {"non_freeze": true}])"};
const std::string kOnebitJson = json_of(kLamb);

struct Model : SmallModel {
  using SmallModel::SmallModel;
  void gradients(uint64_t step) {
    RandomBits random(static_cast<uint32_t>(step * 16 + static_cast<uint64_t>(rank)));
    std::normal_distribution<float> normal;
    for (size_t i = 0; i < g.size(); ++i)
      g[i] = 0.1f * p[i] + 0.05f * normal(random) * (1 + static_cast<float>(i % 5));
    for (const size_t i : unused) g[i] = 0;
  }
  std::vector<size_t> unused;  // never have a gradient
};

Status train(Optimizer& optimizer, Model& model, uint64_t from, uint64_t to) {
  for (uint64_t k = from; k < to; ++k) {
    model.gradients(k);
    const std::vector<float> gradients = model.g;
    SOTTO_TRY(do_step(optimizer).with_prefix(fmt::format("step {}", k)));
    if (std::memcmp(model.g.data(), gradients.data(), 4 * gradients.size()) != 0)
      return error(Code::kInternal, "step {} wrote the caller's gradients", k);
  }
  return ok_status();
}

// 0/1 Adam: ranks have summed up updates of their own.
bool moved(const OptimSnapshot& s) {
  const std::span<const double> sums = s.values<double>("lr_sums");
  return std::any_of(sums.begin(), sums.end(), [](double sum) { return sum > 0; });
}

class OptimizerProperties : public ::testing::TestWithParam<std::tuple<std::string, Subject>> {
 protected:
  WorldOptions world(int32_t size) const { return world_of(std::get<0>(GetParam()), size); }
  const Subject& subject() const { return std::get<1>(GetParam()); }
  std::string json(double clip = 1.0) const { return json_of(subject(), clip); }
};

// P4: everything that is not error feedback is the same on all ranks, byte for byte, after every
// step. P5 on the way.
TEST_P(OptimizerProperties, StateIsEqualOnAllRanksAfterEveryStep) {
  for (int32_t size : {1, 2, 3, 4}) {
    const Status status = run_world(world(size), [&](const std::shared_ptr<Comm>& comm) -> Status {
      Model model(comm->rank());
      SOTTO_ASSIGN(const std::shared_ptr<Optimizer> optimizer,
                   Optimizer::create(comm, json(), model.specs()));
      std::vector<double> last(model.counts.size(), 1.0);
      uint64_t compared = 0;
      for (uint64_t k = 0; k < 16; ++k) {
        SOTTO_TRY(train(*optimizer, model, k, k + 1));
        SOTTO_ASSIGN(OptimSnapshot s, optimizer->snapshot(false));
        if (moved(s)) continue;
        ++compared;
        // As published, parameters of 0/1 Adam drift apart by rounding.
        if (subject().compat && subject().zeroone) s.remove("params");
        for (size_t t = 0; t < last.size(); ++t) {
          const double f = s.values<TensorState>("tensor_states")[t].last_factor;
          if (std::abs(f - last[t]) > 0.1 * last[t] + 1e-12)
            return error(Code::kInternal, "factor {} moved to {}", last[t], f);
          last[t] = f;
        }
        const std::vector<std::byte> blob = encode_optim(s);
        const uint64_t hash[] = {hash64(blob.data(), blob.size())};
        SOTTO_ASSIGN(const std::vector<std::string> all,
                     comm->exchange(std::string(reinterpret_cast<const char*>(hash), 8)));
        for (const std::string& other : all) {
          if (other != all[0])
            return error(Code::kInternal, "state differs between ranks after step {}", k);
        }
      }
      SOTTO_ASSIGN(const OptimInfo info, optimizer->info());
      if (info.stage != 1 || info.step != 16 || info.state_step != 17)
        return error(Code::kInternal, "stage {} step {}", info.stage, info.step);
      return compared >= 9 ? ok_status() : error(Code::kInternal, "{} compared", compared);
    });
    EXPECT_TRUE(status.ok()) << size << ": " << status.text();
  }
}

// P6: stopped anywhere and restored exactly, a run goes on bit for bit.
TEST_P(OptimizerProperties, ExactRestoreContinuesBitForBit) {
  const Status status = run_world(world(3), [&](const std::shared_ptr<Comm>& comm) -> Status {
    Model whole(comm->rank());
    SOTTO_ASSIGN(const std::shared_ptr<Optimizer> optimizer,
                 Optimizer::create(comm, json(), whole.specs()));
    SOTTO_TRY(train(*optimizer, whole, 0, 18));
    for (const uint64_t stop : {2, 4, 5, 6, 9, 11, 12}) {
      Model first(comm->rank());
      SOTTO_ASSIGN(const std::shared_ptr<Optimizer> a,
                   Optimizer::create(comm, json(), first.specs()));
      SOTTO_TRY(train(*a, first, 0, stop));
      SOTTO_ASSIGN(const std::vector<std::byte> blob, export_state(*a, StateMode::kExact));
      Model second(comm->rank());
      for (float& v : second.p) v = -7;
      SOTTO_ASSIGN(const std::shared_ptr<Optimizer> b,
                   Optimizer::create(comm, json(), second.specs()));
      SOTTO_TRY(import_state(*b, StateMode::kExact, blob));
      SOTTO_TRY(train(*b, second, stop, 18));
      if (bytes_of(second.p) != bytes_of(whole.p))
        return error(Code::kInternal, "stopped after {}: parameters differ", stop);
      SOTTO_ASSIGN(const OptimSnapshot s, decode_optim(blob));
      const Status reset = import_state(*b, StateMode::kReset, blob);
      if (reset.ok() == moved(s)) return error(Code::kInternal, "reset: {}", reset.text());
      if (reset.ok()) SOTTO_TRY(train(*b, second, stop, stop + 2));
    }
    return ok_status();
  });
  EXPECT_TRUE(status.ok()) << status.text();
}

// A second phase with a larger freeze_step starts the average trust ratios again, and they are
// divided by what that many updates give.
TEST(OptimizerPhases, AveragesStartAgain) {
  const auto json = [](int freeze_step) {
    return fmt::format(R"({{"optimizer": {{"type": "OneBitLamb", "params": {{"lr": 0.01,
        "freeze_step": {}}}}}, "sotto": {{"coeff_debias": true}}}})",
                       freeze_step);
  };
  const Status status =
      run_world(world_of("inproc", 2), [&](const std::shared_ptr<Comm>& comm) -> Status {
        Model model(comm->rank());
        SOTTO_ASSIGN(const auto first, Optimizer::create(comm, json(5), model.specs()));
        SOTTO_TRY(train(*first, model, 0, 8));
        SOTTO_ASSIGN(const std::vector<std::byte> blob, export_state(*first, StateMode::kMean));
        SOTTO_ASSIGN(const auto second, Optimizer::create(comm, json(14), model.specs()));
        SOTTO_TRY(import_state(*second, StateMode::kMean, blob));
        SOTTO_TRY(train(*second, model, 8, 13));  // state step 14: the last of the warm-up
        SOTTO_ASSIGN(const OptimSnapshot before, second->snapshot(false));
        SOTTO_TRY(train(*second, model, 13, 14));
        SOTTO_ASSIGN(const OptimSnapshot after, second->snapshot(false));
        const double divisor = 1 - std::pow(0.9, 5);
        for (size_t t = 0; t < model.counts.size(); ++t) {
          const double got = after.values<TensorState>("tensor_states")[t].c_avg;
          const double want = before.values<TensorState>("tensor_states")[t].c_avg / divisor;
          if (model.counts[t] != 0 && (want == 0 || std::abs(got - want) > 1e-12 * want))
            return error(Code::kInternal, "tensor {}: {}, want {}", t, got, want);
        }
        return ok_status();
      });
  EXPECT_TRUE(status.ok()) << status.text();
}

// P1: before freeze_step 1-bit LAMB is LAMB without bias correction.
TEST(OptimizerWarmUp, OfOnebitLambIsLamb) {
  const Status status =
      run_world(world_of("inproc", 2), [](const std::shared_ptr<Comm>& comm) -> Status {
        Model a(comm->rank()), b(comm->rank());
        SOTTO_ASSIGN(
            const std::shared_ptr<Optimizer> lamb,
            Optimizer::create(
                comm, R"({"optimizer": {"type": "Lamb", "params": {"bias_correction": false}}})",
                a.specs()));
        SOTTO_ASSIGN(
            const std::shared_ptr<Optimizer> onebit,
            Optimizer::create(
                comm, R"({"optimizer": {"type": "OneBitLamb", "params": {"freeze_step": 100}}})",
                b.specs()));
        SOTTO_TRY(train(*lamb, a, 0, 6));
        SOTTO_TRY(train(*onebit, b, 0, 6));
        return bytes_of(a.p) == bytes_of(b.p) ? ok_status()
                                              : error(Code::kInternal, "parameters differ");
      });
  EXPECT_TRUE(status.ok()) << status.text();
}

// P1, P2: before they compress, 1-bit Adam and 0/1 Adam are AdamW without bias correction.
TEST(OptimizerWarmUp, OfOnebitAdamAndZeroOneAdamIsAdamW) {
  const Status status =
      run_world(world_of("inproc", 2), [](const std::shared_ptr<Comm>& comm) -> Status {
        std::vector<std::string> results;
        for (const char* optimizer :
             {R"({"type": "AdamW", "params": {"weight_decay": 0.1, "bias_correction": false}})",
              R"({"type": "OneBitAdam", "params": {"weight_decay": 0.1, "freeze_step": 100}})",
              R"({"type": "ZeroOneAdam", "params": {"weight_decay": 0.1, "var_freeze_step": 100,
                  "var_update_scaler": 100}})"}) {
          Model model(comm->rank());
          SOTTO_ASSIGN(const std::shared_ptr<Optimizer> o,
                       Optimizer::create(comm, fmt::format(R"({{"optimizer": {}}})", optimizer),
                                         model.specs()));
          SOTTO_TRY(train(*o, model, 0, 6));
          results.push_back(bytes_of(model.p));
        }
        return results[0] == results[1] && results[0] == results[2]
                   ? ok_status()
                   : error(Code::kInternal, "parameters differ");
      });
  EXPECT_TRUE(status.ok()) << status.text();
}

// P6 for mode mean: from three ranks to two, one and four. The sum over steps of what is applied
// keeps what was still owed (I5): errors are the mean over ranks, and equal on every number of
// them.
TEST(OptimizerMeanState, RestoresOnAnotherNumberOfRanks) {
  for (const Subject& subject : {kLamb, kAdam, kZeroOne, kLambBuckets}) {
    std::vector<std::byte> blob;
    const std::string json = json_of(subject);
    const Status saved =
        run_world(world_of("inproc", 3), [&](const std::shared_ptr<Comm>& comm) -> Status {
          Model model(comm->rank());
          SOTTO_ASSIGN(const std::shared_ptr<Optimizer> optimizer,
                       Optimizer::create(comm, json, model.specs()));
          SOTTO_TRY(train(*optimizer, model, 0, 12));
          SOTTO_ASSIGN(const uint64_t size, state_bytes(*optimizer, StateMode::kMean));
          SOTTO_ASSIGN(std::vector<std::byte> mine, export_state(*optimizer, StateMode::kMean));
          if (mine.size() != size) return error(Code::kInternal, "{} not {}", mine.size(), size);
          SOTTO_ASSIGN(const std::vector<std::string> all,
                       comm->exchange(fmt::format("{:016x}", hash64(mine.data(), mine.size()))));
          if (all[1] != all[0] || all[2] != all[0]) return error(Code::kInternal, "blobs differ");
          if (comm->rank() == 0) blob = std::move(mine);
          return ok_status();
        });
    ASSERT_TRUE(saved.ok()) << subject.name << ": " << saved.text();
    for (const int32_t size : {1, 2, 4}) {
      const Status status =
          run_world(world_of("inproc", size), [&](const std::shared_ptr<Comm>& comm) -> Status {
            Model model(comm->rank());
            SOTTO_ASSIGN(const std::shared_ptr<Optimizer> optimizer,
                         Optimizer::create(comm, json, model.specs()));
            SOTTO_TRY(import_state(*optimizer, StateMode::kMean, blob));
            SOTTO_ASSIGN(const OptimSnapshot want, decode_optim(blob));
            if (size > 1) {
              SOTTO_ASSIGN(const std::vector<std::byte> again,
                           export_state(*optimizer, StateMode::kMean));
              SOTTO_ASSIGN(const OptimSnapshot now, decode_optim(again));
              for (size_t i = 0; i < model.p.size(); ++i) {
                const float worker = now.mean->worker[i] - want.mean->worker[i];
                if (std::abs(worker) > 1e-7f || now.mean->server[i] != want.mean->server[i])
                  return error(Code::kInternal, "element {}: errors are not kept", i);
              }
            }
            SOTTO_TRY(train(*optimizer, model, 12, 18));
            EXPECT_EQ(import_state(*optimizer, StateMode::kExact, blob).ok(), size == 1);
            return ok_status();
          });
      EXPECT_TRUE(status.ok()) << subject.name << " on " << size << ": " << status.text();
    }
  }
}

// 0/1 Adam: a state for any ranks is synchronised, and equal on all of them.
TEST(OptimizerZeroOne, PortableStateIsSynchronised) {
  for (const std::string& kind : world_kinds()) {
    const Status status =
        run_world(world_of(kind, 3), [](const std::shared_ptr<Comm>& comm) -> Status {
          Model model(comm->rank());
          SOTTO_ASSIGN(const std::shared_ptr<Optimizer> optimizer,
                       Optimizer::create(comm, json_of(kZeroOne), model.specs()));
          SOTTO_TRY(train(*optimizer, model, 0, 12));
          SOTTO_ASSIGN(const OptimSnapshot before, optimizer->snapshot(false));
          if (!moved(before)) return error(Code::kInternal, "nothing to synchronise");
          SOTTO_ASSIGN(const std::vector<std::byte> blob,
                       export_state(*optimizer, StateMode::kReset));
          const uint64_t hash[] = {hash64(blob.data(), blob.size())};
          SOTTO_ASSIGN(const std::vector<std::string> all,
                       comm->exchange(std::string(reinterpret_cast<const char*>(hash), 8)));
          for (const std::string& other : all) {
            if (other != all[0]) return error(Code::kInternal, "states differ");
          }
          SOTTO_TRY(train(*optimizer, model, 12, 14));
          SOTTO_TRY(import_state(*optimizer, StateMode::kReset, blob));
          return train(*optimizer, model, 12, 17);
        });
    EXPECT_TRUE(status.ok()) << kind << ": " << status.text();
  }
}

// An element without variance is masked by policy "mask" alone, also where the caller has masks.
TEST(OptimizerZeroOne, PolicyEpsMasksNothing) {
  for (const char* policy : {"mask", "eps"}) {
    const std::string more = fmt::format(R"("zero_variance_policy": "{}")", policy);
    Subject subject = kZeroOne;
    subject.sotto = more.c_str();
    const Status status =
        run_world(world_of("inproc", 2), [&](const std::shared_ptr<Comm>& comm) -> Status {
          Model model(comm->rank());
          model.unused = {1005};
          std::vector<uint8_t> mask(17, 1);
          mask[3] = 0;
          SOTTO_ASSIGN(
              const std::shared_ptr<Optimizer> optimizer,
              Optimizer::create(comm, json_of(subject), model.specs({.mask = mask.data()})));
          SOTTO_TRY(train(*optimizer, model, 0, 13));
          SOTTO_ASSIGN(const OptimSnapshot s, optimizer->snapshot(false));
          const bool masked = s.values<float>("m")[1005] == 0.0f;
          return masked == (policy == std::string_view("mask")) &&
                         s.values<float>("m")[1003] == 0.0f
                     ? ok_status()
                     : error(Code::kInternal, "policy {}: momentum {}", policy,
                             s.values<float>("m")[1005]);
        });
    EXPECT_TRUE(status.ok()) << status.text();
  }
}

// 0/1 Adam, silent steps without clipping: a rank that meets a NaN leaves its gradient out, and the
// ranks stay together.
TEST(OptimizerZeroOne, SilentStepWithNonfiniteGradient) {
  const Status status =
      run_world(world_of("inproc", 3), [](const std::shared_ptr<Comm>& comm) -> Status {
        Model model(comm->rank());
        SOTTO_ASSIGN(const std::shared_ptr<Optimizer> optimizer,
                     Optimizer::create(comm, json_of(kZeroOne, 0), model.specs()));
        SOTTO_TRY(train(*optimizer, model, 0, 9));
        model.gradients(9);  // state step 11: local
        if (comm->rank() == 1) model.g[1003] = std::numeric_limits<float>::quiet_NaN();
        SOTTO_ASSIGN(const OptimSnapshot before, optimizer->snapshot(false));
        const Status met = do_step(*optimizer);
        if (met.code() != (comm->rank() == 1 ? Code::kNonfinite : Code::kOk))
          return error(Code::kInternal, "{} {}", code_name(met.code()), met.text());
        SOTTO_ASSIGN(const OptimSnapshot after, optimizer->snapshot(false));
        if (comm->rank() == 1 && (after.floats("m") != before.floats("m") ||
                                  after.floats("local_sum") != before.floats("local_sum")))
          return error(Code::kInternal, "state was written");
        if (after.step != before.step + 1 ||
            after.copy_of<double>("lr_sums") == before.copy_of<double>("lr_sums"))
          return error(Code::kInternal, "counters did not move");
        SOTTO_TRY(train(*optimizer, model, 10, 11));  // synchronisation
        SOTTO_ASSIGN(
            const std::vector<std::string> all,
            comm->exchange(fmt::format("{:x}", hash64(model.p.data(), model.p.size() * 4))));
        return all[0] == all[1] && all[0] == all[2] ? ok_status()
                                                    : error(Code::kInternal, "ranks differ");
      });
  EXPECT_TRUE(status.ok()) << status.text();
}

// P7: masked elements change by weight decay alone and have no momentum.
TEST_P(OptimizerProperties, MaskedElementsTakeNoPart) {
  const Status status = run_world(world(2), [&](const std::shared_ptr<Comm>& comm) -> Status {
    Model model(comm->rank());
    std::vector<uint8_t> mask(17, 1);
    mask[3] = mask[16] = 0;
    // In mode compat masks act on averages alone.
    if (subject().compat) model.unused = {1003, 1016};
    std::string text = json();
    for (size_t at; (at = text.find("\"weight_decay\": 0.01")) != std::string::npos;)
      text.replace(at, 20, "\"weight_decay\": 0.0");
    SOTTO_ASSIGN(const std::shared_ptr<Optimizer> optimizer,
                 Optimizer::create(comm, text, model.specs({.mask = mask.data()})));
    const std::vector<float> start = model.p;
    SOTTO_TRY(train(*optimizer, model, 0, 13));
    SOTTO_ASSIGN(const OptimSnapshot s, optimizer->snapshot(true));
    for (const size_t i : {size_t{3}, size_t{16}}) {
      if (model.p[1000 + i] != start[1000 + i])
        return error(Code::kInternal, "masked element {} moved", i);
      if (s.values<float>("m")[1000 + i] != 0.0f)
        return error(Code::kInternal, "masked element {} has momentum {}", i,
                     s.values<float>("m")[1000 + i]);
      if (!subject().compat && s.residual->worker[1000 + i] != 0.0f)
        return error(Code::kInternal, "masked element {} has an error", i);
    }
    if (model.p[1000 + 4] == start[1000 + 4])
      return error(Code::kInternal, "the others did not move");
    return ok_status();
  });
  EXPECT_TRUE(status.ok()) << status.text();
}

// P8: a NaN on one rank updates nothing on any, in both stages; the run goes on.
TEST_P(OptimizerProperties, NonfiniteGradientUpdatesNothing) {
  const uint64_t steps = subject().zeroone ? 12 : 7;
  for (const double clip : {0.0, 1.0}) {
    if (subject().zeroone && clip == 0.0) continue;  // silent steps: a test of their own
    const Status status = run_world(world(3), [&](const std::shared_ptr<Comm>& comm) -> Status {
      Model model(comm->rank());
      SOTTO_ASSIGN(const std::shared_ptr<Optimizer> optimizer,
                   Optimizer::create(comm, json(clip), model.specs()));
      for (uint64_t k = 0; k < steps; ++k) {
        SOTTO_TRY(train(*optimizer, model, k, k + 1));
        SOTTO_ASSIGN(OptimSnapshot before, optimizer->snapshot(true));
        model.gradients(100 + k);
        if (comm->rank() == 1) model.g[1003] = std::numeric_limits<float>::infinity();
        const Status met = do_step(*optimizer);
        if (met.code() != Code::kNonfinite)
          return error(Code::kInternal, "step {}: {} {}", k, code_name(met.code()), met.text());
        SOTTO_ASSIGN(OptimSnapshot after, optimizer->snapshot(true));
        // 0/1 Adam empties its error feedback when the variance is frozen, in any case.
        const bool emptied = before.flag("zeroone.frozen") && !before.flag("stage_started");
        if (emptied) after.residual = before.residual;
        if (before.residual) {
          for (size_t i = 0; i < model.p.size(); ++i) {
            const float difference =
                std::abs(after.residual->worker[i] - before.residual->worker[i]);
            if (!(difference <= 1e-5f))
              return error(Code::kInternal, "step {}: residual {} moved by {}", k, i, difference);
          }
          after.residual->worker = before.residual->worker;
        }
        ++before.skipped_steps;
        if (encode_optim(after) != encode_optim(before))
          return error(Code::kInternal, "step {} changed the state", k);
      }
      SOTTO_ASSIGN(const OptimInfo info, optimizer->info());
      return info.skipped_steps == steps
                 ? ok_status()
                 : error(Code::kInternal, "{} skipped steps", info.skipped_steps);
    });
    EXPECT_TRUE(status.ok()) << "clip " << clip << ": " << status.text();
  }
}

// P11: what was sent equals what was planned, in both stages.
TEST_P(OptimizerProperties, BytesSentEqualBytesPlanned) {
  const Status status = run_world(world(4), [&](const std::shared_ptr<Comm>& comm) -> Status {
    Model model(comm->rank());
    SOTTO_ASSIGN(const std::shared_ptr<Optimizer> optimizer,
                 Optimizer::create(comm, json(), model.specs()));
    uint64_t compressed = 0, nothing = 0;
    for (uint64_t k = 0; k < 14; ++k) {
      SOTTO_TRY(comm->barrier());
      const CommCounters before = comm->counters();
      SOTTO_ASSIGN(const OptimInfo info, optimizer->info());
      SOTTO_TRY(train(*optimizer, model, k, k + 1));
      const CommCounters after = comm->counters();
      const uint64_t payload = after.moved.payload_bytes_sent - before.moved.payload_bytes_sent;
      const uint64_t header = after.moved.header_bytes_sent - before.moved.header_bytes_sent;
      if (payload != info.payload_bytes_next_step || header != info.header_bytes_next_step) {
        return error(Code::kInternal, "step {}: sent {} + {}, planned {} + {}", k, payload, header,
                     info.payload_bytes_next_step, info.header_bytes_next_step);
      }
      const uint64_t align = subject().align;
      const auto chunk_of = [&](uint64_t n) { return align * ((n + 4 * align - 1) / (4 * align)); };
      // Of all instances: groups of the Adams (in compat tensors), buckets, or everything.
      uint64_t chunk = 0;
      if (subject().sotto == kBuckets) {
        chunk = chunk_of(8192) + chunk_of(model.p.size() - 8192);
      } else if (subject().sotto == kAdamPartly.sotto) {
        chunk = chunk_of(1000 + 0 + 1);
      } else if (subject().optimizer == kLamb.optimizer) {
        chunk = chunk_of(model.p.size());
      } else if (subject().compat) {
        chunk = chunk_of(1000) + chunk_of(1) + chunk_of(17) + chunk_of(8193);
      } else {
        chunk = chunk_of(1000 + 0 + 1) + chunk_of(17 + 8193);
      }
      // Group 1: the shares of the others, and the own one to each of them.
      const uint64_t n = 17 + 8193;
      const uint64_t own = share_of(n, 4, static_cast<uint32_t>(comm->rank()), 16).count;
      const uint64_t dense = subject().sotto == kAdamPartly.sotto ? 4 * (n - own + 3 * own) : 0;
      compressed += payload == 6 * chunk / 8 + dense;
      nothing += payload == 0;
      if (info.stage == 1 && payload != 6 * chunk / 8 + dense &&
          !(subject().zeroone && payload == 0))
        return error(Code::kInternal, "compressed payload {}", payload);
    }
    // State steps 2 .. 15. 0/1 Adam: v v v 1 v s s s s - s - - -.
    const uint64_t want = subject().zeroone ? 6 : 10;
    return compressed == want && nothing == (subject().zeroone ? 4 : 0)
               ? ok_status()
               : error(Code::kInternal, "{} compressed, {} silent", compressed, nothing);
  });
  EXPECT_TRUE(status.ok()) << status.text();
}

INSTANTIATE_TEST_SUITE_P(
    Worlds, OptimizerProperties,
    ::testing::Combine(::testing::ValuesIn(world_kinds()),
                       ::testing::Values(kLamb, kAdam, kZeroOne, kLambBuckets, kZeroOneBuckets)),
    [](const auto& p) { return std::get<0>(p.param) + "_" + std::get<1>(p.param).name; });
INSTANTIATE_TEST_SUITE_P(
    Variants, OptimizerProperties,
    ::testing::Combine(::testing::Values("tcp", "device_memory", "ordered_async"),
                       ::testing::Values(kLambCompat, kAdamCompat, kZeroOneCompat, kAdamPartly)),
    [](const auto& p) { return std::get<0>(p.param) + "_" + std::get<1>(p.param).name; });

// The same run gives the same bits on every transport, device, thread count, SIMD level and segment
// size.
class OptimizerIdentity : public ::testing::TestWithParam<Subject> {};

TEST_P(OptimizerIdentity, SameBitsEverywhere) {
  const std::string json = json_of(GetParam());
  const auto run = [&](WorldOptions world) {
    std::string result;
    const Status status = run_world(world, [&](const std::shared_ptr<Comm>& comm) -> Status {
      Model model(comm->rank());
      SOTTO_ASSIGN(const std::shared_ptr<Optimizer> optimizer,
                   Optimizer::create(comm, json, model.specs()));
      SOTTO_TRY(train(*optimizer, model, 0, 14));
      if (comm->rank() == 0) result = bytes_of(model.p);
      return ok_status();
    });
    EXPECT_TRUE(status.ok()) << status.text();
    return result;
  };
  const std::string want = run(world_of("inproc", 3));
  for (const std::string& kind : world_kinds())
    EXPECT_EQ(run(world_of(kind, 3)) == want, true) << kind;
  for (const SimdLevel level :
       {SimdLevel::kScalar, SimdLevel::kSse4, SimdLevel::kAvx2, SimdLevel::kAvx512}) {
    for (const uint32_t threads : {1u, 3u}) {
      WorldOptions world = world_of("inproc", 3);
      world.device = [&](int32_t) { return std::make_shared<CpuDevice>(threads, level); };
      EXPECT_EQ(run(world) == want, true) << static_cast<int>(level) << " " << threads;
    }
  }
  WorldOptions small = world_of("inproc", 3);
  small.params.segment_bytes = 8192;
  EXPECT_EQ(run(small) == want, true) << "segments";
}

constexpr Subject kSgd{"sgd", R"({"type": "SGD", "params": {"lr": 0.01, "momentum": 0.9,
    "nesterov": true, "weight_decay": 0.01}})"};
constexpr Subject kLion{"lion", R"({"type": "Lion", "params": {"lr": 0.01, "weight_decay": 0.1}})"};
constexpr Subject kPlainLamb{"plain_lamb", R"({"type": "Lamb", "params": {"lr": 0.01}})"};
constexpr Subject kPlainAdam{"plain_adam", R"({"type": "AdamW", "params": {"lr": 0.01}})"};
INSTANTIATE_TEST_SUITE_P(Optimizers, OptimizerIdentity,
                         ::testing::Values(kLamb, kAdam, kZeroOne, kLambBuckets, kZeroOneBuckets,
                                           kLambCompat, kZeroOneCompat, kAdamPartly, kSgd,
                                           kPlainLamb, kPlainAdam, kLion),
                         [](const auto& p) { return std::string(p.param.name); });

}  // namespace
}  // namespace sotto::test
