// Properties of the optimizers (specification 13.10): P1, P4, P5, P6, P7, P8, P11, and what happens
// to bad input.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>

#include "core/base/hash.h"
#include "core/cpu/cpu_device.h"
#include "core/state/optim_state.h"
#include "tests/support/core_ranks.h"

namespace sotto::test {
namespace {

constexpr const char* kOnebitJson =
    R"({"optimizer": {"type": "OneBitLamb", "params": {"lr": 0.01, "weight_decay": 0.01,
  "freeze_step": 5, "betas": [0.9, 0.99]}}, "gradient_clipping": 1.0,
  "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 3, "warmup_type": "linear",
  "total_num_steps": 40}}, "sotto": {"chunk_align": 64}})";

// A small model with odd shapes, one empty tensor and deterministic gradients.
struct Model {
  explicit Model(int32_t rank_in) : rank(rank_in) {
    uint64_t n = 0;
    for (uint64_t c : counts) n += c;
    p.resize(n);
    g.resize(n);
    for (uint64_t i = 0; i < n; ++i) p[i] = std::sin(static_cast<float>(i) * 0.37f);
  }
  std::vector<ParamSpec> specs(const uint8_t* mask = nullptr) {
    std::vector<ParamSpec> out;
    uint64_t at = 0;
    for (size_t t = 0; t < counts.size(); ++t) {
      out.push_back({fmt::format("t{}", t), counts[t], static_cast<uint32_t>(t % 2), p.data() + at,
                     g.data() + at, t == 1 ? mask : nullptr});
      at += counts[t];
    }
    return out;
  }
  void gradients(uint64_t step) {
    std::mt19937 random(static_cast<uint32_t>(step * 16 + static_cast<uint64_t>(rank)));
    std::normal_distribution<float> normal;
    for (size_t i = 0; i < g.size(); ++i)
      g[i] = 0.1f * p[i] + 0.05f * normal(random) * (1 + static_cast<float>(i % 5));
  }
  int32_t rank;
  std::vector<uint64_t> counts{1000, 17, 0, 8193, 1};
  std::vector<float> p, g;
};

Status do_step(Optimizer& optimizer) {
  SOTTO_ASSIGN(const OpRef op, optimizer.step({}));
  return optimizer.comm()->engine().wait(op, -1);
}

Status train(Optimizer& optimizer, Model& model, uint64_t from, uint64_t to) {
  for (uint64_t k = from; k < to; ++k) {
    model.gradients(k);
    SOTTO_TRY(do_step(optimizer).with_prefix(fmt::format("step {}", k)));
  }
  return ok_status();
}

std::string bytes_of(const std::vector<float>& v) {
  return {reinterpret_cast<const char*>(v.data()), v.size() * 4};
}

class OptimizerProperties : public ::testing::TestWithParam<std::string> {};

// P4: everything that is not error feedback is the same on all ranks, byte for byte, after every
// step. P5 on the way.
TEST_P(OptimizerProperties, StateIsEqualOnAllRanksAfterEveryStep) {
  for (int32_t size : {1, 2, 3, 4}) {
    const Status status =
        run_world(world_of(GetParam(), size), [](const std::shared_ptr<Comm>& comm) -> Status {
          Model model(comm->rank());
          SOTTO_ASSIGN(const std::shared_ptr<Optimizer> optimizer,
                       Optimizer::create(comm, kOnebitJson, model.specs()));
          std::vector<double> last(model.counts.size(), 1.0);
          for (uint64_t k = 0; k < 12; ++k) {
            SOTTO_TRY(train(*optimizer, model, k, k + 1));
            SOTTO_ASSIGN(OptimSnapshot s, optimizer->snapshot(false));
            for (size_t t = 0; t < last.size(); ++t) {
              const double f = s.tensor_states[t].last_factor;
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
          if (info.stage != 1 || info.step != 12 || info.state_step != 13)
            return error(Code::kInternal, "stage {} step {}", info.stage, info.step);
          return ok_status();
        });
    EXPECT_TRUE(status.ok()) << size << ": " << status.text();
  }
}

// P6: stopped anywhere and restored exactly, a run goes on bit for bit.
TEST_P(OptimizerProperties, ExactRestoreContinuesBitForBit) {
  const Status status =
      run_world(world_of(GetParam(), 3), [](const std::shared_ptr<Comm>& comm) -> Status {
        Model whole(comm->rank());
        SOTTO_ASSIGN(const std::shared_ptr<Optimizer> optimizer,
                     Optimizer::create(comm, kOnebitJson, whole.specs()));
        SOTTO_TRY(train(*optimizer, whole, 0, 14));
        for (const uint64_t stop : {uint64_t{2}, uint64_t{4}, uint64_t{5}, uint64_t{9}}) {
          Model first(comm->rank());
          SOTTO_ASSIGN(const std::shared_ptr<Optimizer> a,
                       Optimizer::create(comm, kOnebitJson, first.specs()));
          SOTTO_TRY(train(*a, first, 0, stop));
          SOTTO_ASSIGN(const std::vector<std::byte> blob, export_state(*a, StateMode::kExact));
          Model second(comm->rank());
          for (float& v : second.p) v = -7;
          SOTTO_ASSIGN(const std::shared_ptr<Optimizer> b,
                       Optimizer::create(comm, kOnebitJson, second.specs()));
          SOTTO_TRY(import_state(*b, StateMode::kExact, blob));
          SOTTO_TRY(train(*b, second, stop, 14));
          if (bytes_of(second.p) != bytes_of(whole.p))
            return error(Code::kInternal, "stopped after {}: parameters differ", stop);
          SOTTO_TRY(import_state(*b, StateMode::kReset, blob));
          SOTTO_TRY(train(*b, second, stop, stop + 2));
        }
        return ok_status();
      });
  EXPECT_TRUE(status.ok()) << status.text();
}

// P1: before freeze_step 1-bit LAMB is LAMB without bias correction.
TEST_P(OptimizerProperties, WarmUpIsLamb) {
  const Status status =
      run_world(world_of(GetParam(), 2), [](const std::shared_ptr<Comm>& comm) -> Status {
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

// P7: masked elements change by weight decay alone and have no momentum.
TEST_P(OptimizerProperties, MaskedElementsTakeNoPart) {
  const Status status =
      run_world(world_of(GetParam(), 2), [](const std::shared_ptr<Comm>& comm) -> Status {
        Model model(comm->rank());
        std::vector<uint8_t> mask(17, 1);
        mask[3] = mask[16] = 0;
        const std::string json =
            R"({"optimizer": {"type": "OneBitLamb", "params": {"lr": 0.01, "freeze_step": 4}},
                                 "sotto": {"chunk_align": 8}})";
        SOTTO_ASSIGN(const std::shared_ptr<Optimizer> optimizer,
                     Optimizer::create(comm, json, model.specs(mask.data())));
        const std::vector<float> start = model.p;
        SOTTO_TRY(train(*optimizer, model, 0, 10));
        SOTTO_ASSIGN(const OptimSnapshot s, optimizer->snapshot(true));
        for (const size_t i : {size_t{3}, size_t{16}}) {
          if (model.p[1000 + i] != start[1000 + i])
            return error(Code::kInternal, "masked element {} moved", i);
          if (s.m[1000 + i] != 0.0f)
            return error(Code::kInternal, "masked element {} has momentum {}", i, s.m[1000 + i]);
          if (s.residual->worker[1000 + i] != 0.0f)
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
  for (const char* clip : {"0.0", "1.0"}) {
    const Status status =
        run_world(world_of(GetParam(), 3), [&](const std::shared_ptr<Comm>& comm) -> Status {
          const std::string json = fmt::format(
              R"({{"optimizer": {{"type": "OneBitLamb", "params": {{"lr": 0.01, "freeze_step": 4}}}}, "gradient_clipping": {}}})",
              clip);
          Model model(comm->rank());
          SOTTO_ASSIGN(const std::shared_ptr<Optimizer> optimizer,
                       Optimizer::create(comm, json, model.specs()));
          for (uint64_t k = 0; k < 7; ++k) {
            SOTTO_TRY(train(*optimizer, model, k, k + 1));
            SOTTO_ASSIGN(const OptimSnapshot before, optimizer->snapshot(true));
            model.gradients(100 + k);
            if (comm->rank() == 1) model.g[1003] = std::numeric_limits<float>::infinity();
            const Status met = do_step(*optimizer);
            if (met.code() != Code::kNonfinite)
              return error(Code::kInternal, "step {}: {} {}", k, code_name(met.code()), met.text());
            SOTTO_ASSIGN(OptimSnapshot after, optimizer->snapshot(true));
            if (before.residual) {
              for (size_t i = 0; i < model.p.size(); ++i) {
                const float difference =
                    std::abs(after.residual->worker[i] - before.residual->worker[i]);
                if (!(difference <= 1e-5f))
                  return error(Code::kInternal, "step {}: residual {} moved by {}", k, i,
                               difference);
              }
              after.residual->worker = before.residual->worker;
            }
            if (encode_optim(after) != encode_optim(before))
              return error(Code::kInternal, "step {} changed the state", k);
          }
          SOTTO_ASSIGN(const OptimInfo info, optimizer->info());
          return info.skipped_steps == 7
                     ? ok_status()
                     : error(Code::kInternal, "{} skipped steps", info.skipped_steps);
        });
    EXPECT_TRUE(status.ok()) << "clip " << clip << ": " << status.text();
  }
}

// P11: what was sent equals what was planned, in both stages.
TEST_P(OptimizerProperties, BytesSentEqualBytesPlanned) {
  const Status status =
      run_world(world_of(GetParam(), 4), [](const std::shared_ptr<Comm>& comm) -> Status {
        Model model(comm->rank());
        SOTTO_ASSIGN(const std::shared_ptr<Optimizer> optimizer,
                     Optimizer::create(comm, kOnebitJson, model.specs()));
        for (uint64_t k = 0; k < 8; ++k) {
          SOTTO_TRY(comm->barrier());
          const CommCounters before = comm->counters();
          SOTTO_ASSIGN(const OptimInfo info, optimizer->info());
          SOTTO_TRY(train(*optimizer, model, k, k + 1));
          const CommCounters after = comm->counters();
          const uint64_t payload = after.moved.payload_bytes_sent - before.moved.payload_bytes_sent;
          const uint64_t header = after.moved.header_bytes_sent - before.moved.header_bytes_sent;
          if (payload != info.payload_bytes_next_step || header != info.header_bytes_next_step) {
            return error(Code::kInternal, "step {}: sent {} + {}, planned {} + {}", k, payload,
                         header, info.payload_bytes_next_step, info.header_bytes_next_step);
          }
          const uint64_t n = model.p.size();
          const uint64_t chunk = 64 * ((n + 4 * 64 - 1) / (4 * 64));
          if (info.stage == 1 && payload != 6 * chunk / 8)
            return error(Code::kInternal, "compressed payload {}", payload);
        }
        return ok_status();
      });
  EXPECT_TRUE(status.ok()) << status.text();
}

INSTANTIATE_TEST_SUITE_P(Worlds, OptimizerProperties, ::testing::ValuesIn(world_kinds()),
                         [](const auto& p) { return p.param; });

// The same run gives the same bits on every transport, device, thread count, SIMD level and segment
// size.
TEST(OptimizerIdentity, SameBitsEverywhere) {
  const auto run = [](WorldOptions world) {
    std::string result;
    const Status status = run_world(world, [&](const std::shared_ptr<Comm>& comm) -> Status {
      Model model(comm->rank());
      SOTTO_ASSIGN(const std::shared_ptr<Optimizer> optimizer,
                   Optimizer::create(comm, kOnebitJson, model.specs()));
      SOTTO_TRY(train(*optimizer, model, 0, 12));
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

TEST(OptimizerErrors, NameWhatIsWrong) {
  const Status status =
      run_world(world_of("inproc", 2), [](const std::shared_ptr<Comm>& comm) -> Status {
        Model model(comm->rank());
        const auto code = [&](const char* json) {
          return Optimizer::create(comm, json, model.specs()).status();
        };
        EXPECT_EQ(
            code(R"({"optimizer": {"type": "OneBitLamb", "params": {"freeze_stop": 4}}})").code(),
            Code::kInvalidArgument);
        EXPECT_EQ(code(R"({"optimizer": {"type": "OneBitAdam"}})").code(), Code::kUnsupported);
        auto twice = model.specs();
        twice[1].name = twice[0].name;
        EXPECT_NE(Optimizer::create(comm, kOnebitJson, twice).status().text().find("used twice"),
                  std::string::npos);
        auto other = model.specs();
        if (comm->rank() == 1) other[3].name = "renamed";
        const Status differs = Optimizer::create(comm, kOnebitJson, other).status();
        EXPECT_EQ(differs.code(), Code::kProtocol) << differs.text();
        SOTTO_ASSIGN(const std::shared_ptr<Optimizer> good,
                     Optimizer::create(comm, kOnebitJson, model.specs()));
        SOTTO_TRY(train(*good, model, 0, 6));
        SOTTO_ASSIGN(std::vector<std::byte> blob, export_state(*good, StateMode::kExact));
        const std::vector<float> before = model.p;
        for (size_t cut = 0; cut < blob.size(); cut += 997) {
          EXPECT_FALSE(import_state(*good, StateMode::kExact, std::span(blob).first(cut)).ok());
        }
        blob[blob.size() / 2] ^= std::byte{4};
        EXPECT_EQ(import_state(*good, StateMode::kExact, blob).code(), Code::kInvalidArgument);
        EXPECT_EQ(bytes_of(model.p) == bytes_of(before), true);
        return ok_status();
      });
  EXPECT_TRUE(status.ok()) << status.text();
}

}  // namespace
}  // namespace sotto::test
