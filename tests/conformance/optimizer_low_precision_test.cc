// Optimizers with bfloat16 and 8-bit state: what holds for float32 state holds for them.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>

#include "core/config/volume.h"
#include "core/optim/optimizer.h"
#include "core/state/optim_state.h"
#include "tests/support/core_ranks.h"
#include "tests/support/random_bits.h"
#include "tests/support/small_model.h"

namespace sotto::test {
namespace {

constexpr const char* kLowPrecision[] = {
    R"({"type": "SGD", "params": {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.01}})",
    R"({"type": "SGD", "params": {"lr": 0.01, "momentum": 0.9, "nesterov": true}})",
    R"({"type": "Adam", "params": {"lr": 0.01, "weight_decay": 0.01, "adam_w_mode": false}})",
    R"({"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.01}})"};
constexpr StateType kTypes[] = {StateType::kBf16, StateType::kFp8};

struct Model : SmallModel {
  explicit Model(int32_t rank_in) : SmallModel(rank_in) {
    for (size_t i = 0; i < mask.size(); ++i) mask[i] = i % 3 != 1;
  }
  // bfloat16 values. common: the same on all ranks.
  void gradients(uint64_t step, bool common = false, float scale = 1) {
    RandomBits random(static_cast<uint32_t>(step * 16) + (common ? 0 : 1 + rank));
    std::normal_distribution<float> normal;
    for (size_t i = 0; i < g.size(); ++i) {
      const float size = std::exp2(-static_cast<float>(i % 12));
      half[i] =
          f32_to_bf16((0.3f * std::cos(static_cast<float>(i)) + normal(random)) * size * scale);
      g[i] = bf16_to_f32(half[i]);
    }
  }
  std::vector<uint8_t> mask = std::vector<uint8_t>(17);
};

std::string json_of(const char* optimizer, StateType type, const std::string& sotto = "",
                    const std::string& rest = "") {
  return fmt::format(R"({{"optimizer": {}{}, "sotto": {{"state_dtype": "{}"{}}}}})", optimizer,
                     rest, state_type_name(type), sotto);
}

Result<std::shared_ptr<Optimizer>> make(const std::shared_ptr<Comm>& comm, Model& model,
                                        const std::string& json,
                                        const SmallModel::Options& options = {}) {
  return Optimizer::create(comm, json, model.specs(options));
}

Status same(const std::vector<float>& a, const std::vector<float>& b, const std::string& what) {
  for (size_t i = 0; i < a.size(); ++i) {
    if (std::memcmp(&a[i], &b[i], 4) != 0)
      return error(Code::kInternal, "{}: element {} is {} and {}", what, i, a[i], b[i]);
  }
  return ok_status();
}

class OptimizerLowPrecision : public ::testing::TestWithParam<std::string> {};

// Runs body(comm, optimizer, type) for every optimizer, state and number of ranks. Emulated kernels
// take long: they run with the largest number alone.
template <class Body>
void on_all(const std::string& kind, std::vector<int32_t> sizes, const Body& body) {
  if (kind == "cuda") sizes = {sizes.back()};
  for (const char* optimizer : kLowPrecision) {
    for (const StateType type : kTypes) {
      for (const int32_t size : sizes) {
        const Status status =
            run_world(world_of(kind, size), [&](const std::shared_ptr<Comm>& comm) -> Status {
              return body(comm, optimizer, type);
            });
        EXPECT_TRUE(status.ok()) << optimizer << " " << state_type_name(type) << ", " << size
                                 << " ranks: " << status.text();
      }
    }
  }
}

// After every step all ranks have the same state, near the one that float32 state gives.
TEST_P(OptimizerLowPrecision, StateIsEqualOnAllRanksAndNearFloat32) {
  on_all(GetParam(), {1, 2, 3}, [](const auto& comm, const char* optimizer, StateType type) {
    return [&]() -> Status {
      Model model(comm->rank()), wide(comm->rank());
      SOTTO_ASSIGN(const auto o, make(comm, model, json_of(optimizer, type)));
      SOTTO_ASSIGN(const auto reference, make(comm, wide, json_of(optimizer, StateType::kF32)));
      const Model start(0);
      for (uint64_t k = 0; k < 12; ++k) {
        model.gradients(k);
        wide.gradients(k);
        SOTTO_TRY(do_step(*o));
        SOTTO_TRY(do_step(*reference));
        SOTTO_ASSIGN(const OptimSnapshot s, o->snapshot(false));
        const std::vector<std::byte> blob = encode_optim(s);
        SOTTO_ASSIGN(
            const std::vector<std::string> all,
            comm->exchange(std::string(reinterpret_cast<const char*>(blob.data()), blob.size())));
        for (const std::string& other : all) {
          if (other != all[0]) return error(Code::kInternal, "state differs after step {}", k);
        }
      }
      double moved = 0, apart = 0;
      for (size_t i = 0; i < model.p.size(); ++i) {
        moved += std::pow(static_cast<double>(wide.p[i]) - start.p[i], 2);
        apart += std::pow(static_cast<double>(wide.p[i]) - model.p[i], 2);
      }
      const double most = type == StateType::kBf16 ? 0.01 : 0.12;
      if (apart == 0 || std::sqrt(apart) > most * std::sqrt(moved))
        return error(Code::kInternal, "apart by {} of {}", std::sqrt(apart), std::sqrt(moved));
      return ok_status();
    }();
  });
}

// With the same gradients on all ranks, one rank and four give the same bits, and so does another
// layout of the flat space (averages of bfloat16 values in bfloat16 are exact).
TEST_P(OptimizerLowPrecision, RanksAndLayoutChangeNoBit) {
  for (const char* optimizer : kLowPrecision) {
    for (const StateType type : kTypes) {
      std::string alone;
      for (const auto& pair :
           {std::pair(1, ""),
            {2, ""},
            {4, ""},
            {4, R"(, "gradient_codec": {"type": "bf16", "residual": false, "chunk_align": 8})"}}) {
        const int size = pair.first;
        const char* const codec = pair.second;
        std::string found;
        const Status status =
            run_world(world_of(GetParam(), size), [&](const std::shared_ptr<Comm>& comm) -> Status {
              Model model(comm->rank());
              SmallModel::Options options;
              options.mask = model.mask.data();
              SOTTO_ASSIGN(const auto o,
                           make(comm, model, json_of(optimizer, type, codec), options));
              for (uint64_t k = 0; k < 6; ++k) {
                model.gradients(k, true);
                SOTTO_TRY(do_step(*o));
              }
              SOTTO_ASSIGN(const OptimSnapshot s, o->snapshot(false));
              if (comm->rank() == 0)
                found = bytes_of(s.floats("params")) + bytes_of(s.floats("m")) +
                        bytes_of(s.floats("v"));
              return ok_status();
            });
        EXPECT_TRUE(status.ok()) << status.text();
        if (alone.empty()) alone = found;
        EXPECT_TRUE(found == alone)
            << optimizer << " " << state_type_name(type) << ", " << size << " ranks" << codec;
      }
    }
  }
}

// 16-bit gradients, masks, clipping, micro-batches and a loss scale do what they do with float32
// state: the same bits as float32 gradients, or as without the scale.
TEST_P(OptimizerLowPrecision, GradientsOfAllKinds) {
  on_all(GetParam(), {1, 2, 3}, [](const auto& comm, const char* optimizer, StateType type) {
    return [&]() -> Status {
      Model a(comm->rank()), b(comm->rank()), c(comm->rank());
      const std::string clip = R"(, "gradient_clipping": 0.5, "communication_data_type": "fp32")";
      SmallModel::Options options;
      options.mask = a.mask.data();
      SOTTO_ASSIGN(const auto floats, make(comm, a, json_of(optimizer, type, "", clip), options));
      SOTTO_ASSIGN(const auto scaled,
                   make(comm, c,
                        json_of(optimizer, type, "",
                                clip + R"(, "fp16": {"enabled": true, "loss_scale": 1024})"),
                        options));
      options.gradients = Dtype::kBF16;
      options.copies = true;
      SOTTO_ASSIGN(const auto halves, make(comm, b, json_of(optimizer, type, "", clip), options));
      for (uint64_t k = 0; k < 8; ++k) {
        if (k % 3 == 2) {  // of two micro-batches
          for (Model* m : {&a, &b, &c}) m->gradients(100 + k, false, m == &c ? 1024 : 1);
          for (const auto* o : {&floats, &halves, &scaled}) {
            SOTTO_ASSIGN(const OpRef op, (*o)->accumulate({}));
            SOTTO_TRY(comm->engine().wait(op, -1));
          }
        }
        for (Model* m : {&a, &b, &c}) m->gradients(k, false, m == &c ? 1024 : 1);
        for (const auto* o : {&floats, &halves, &scaled}) SOTTO_TRY(do_step(**o));
        SOTTO_TRY(same(a.p, b.p, fmt::format("16-bit gradients, step {}", k)));
        SOTTO_TRY(same(a.p, c.p, fmt::format("loss scale, step {}", k)));
        for (size_t i = 0; i < 17; ++i) {
          const bool decays = std::strstr(optimizer, "weight_decay") != nullptr;
          if (!decays && a.mask[i] == 0 && a.p[1000 + i] != Model(0).p[1000 + i])
            return error(Code::kInternal, "masked element {} moved", i);
        }
      }
      // A step that is left out leaves all as it is, and is counted.
      SOTTO_ASSIGN(OptimSnapshot before, floats->snapshot(false));
      a.g[5] = std::numeric_limits<float>::quiet_NaN();
      const Status met = do_step(*floats);
      if (met.code() != Code::kNonfinite) return error(Code::kInternal, "{}", met.text());
      SOTTO_ASSIGN(const OptimSnapshot after, floats->snapshot(false));
      ++before.skipped_steps;
      if (encode_optim(before) != encode_optim(after))
        return error(Code::kInternal, "a skipped step changed the state");
      return ok_status();
    }();
  });
}

// A state is float32 numbers, and what comes of them is the state that was exported.
TEST_P(OptimizerLowPrecision, ExactRestoreContinuesBitForBit) {
  on_all(GetParam(), {1, 3}, [](const auto& comm, const char* optimizer, StateType type) {
    return [&]() -> Status {
      Model whole(comm->rank());
      SOTTO_ASSIGN(const auto all, make(comm, whole, json_of(optimizer, type)));
      const auto train = [](Optimizer& o, Model& model, uint64_t from, uint64_t to) -> Status {
        for (uint64_t k = from; k < to; ++k) {
          model.gradients(k);
          SOTTO_TRY(do_step(o));
        }
        return ok_status();
      };
      SOTTO_TRY(train(*all, whole, 0, 14));
      SOTTO_ASSIGN(const OptimSnapshot last, all->snapshot(false));
      for (const uint64_t stop : {0, 1, 7, 13}) {
        Model first(comm->rank()), second(comm->rank());
        for (float& p : second.p) p = -7;
        SOTTO_ASSIGN(const auto a, make(comm, first, json_of(optimizer, type)));
        SOTTO_TRY(train(*a, first, 0, stop));
        SOTTO_ASSIGN(const std::vector<std::byte> blob, export_state(*a, StateMode::kExact));
        SOTTO_ASSIGN(const auto b, make(comm, second, json_of(optimizer, type)));
        SOTTO_TRY(import_state(*b, StateMode::kExact, blob));
        SOTTO_ASSIGN(const OptimSnapshot given, a->snapshot(false));
        SOTTO_ASSIGN(const OptimSnapshot taken, b->snapshot(false));
        SOTTO_TRY(same(taken.floats("params"), given.floats("params"),
                       fmt::format("p, restored after {}", stop)));
        SOTTO_TRY(
            same(taken.floats("m"), given.floats("m"), fmt::format("m, restored after {}", stop)));
        SOTTO_TRY(
            same(taken.floats("v"), given.floats("v"), fmt::format("v, restored after {}", stop)));
        SOTTO_TRY(train(*b, second, stop, 14));
        SOTTO_ASSIGN(const OptimSnapshot s, b->snapshot(false));
        SOTTO_TRY(same(s.floats("params"), last.floats("params"),
                       fmt::format("p, stopped after {}", stop)));
        SOTTO_TRY(same(s.floats("m"), last.floats("m"), fmt::format("m, stopped after {}", stop)));
        SOTTO_TRY(same(s.floats("v"), last.floats("v"), fmt::format("v, stopped after {}", stop)));
      }
      return ok_status();
    }();
  });
}

INSTANTIATE_TEST_SUITE_P(Worlds, OptimizerLowPrecision, ::testing::ValuesIn(world_kinds()),
                         [](const auto& p) { return p.param; });

// Float32 state becomes the nearest that the type has, and low-precision state any wider one
// exactly.
TEST(OptimizerLowPrecisionState, ChangesItsType) {
  const Status status =
      run_world(world_of("inproc", 1), [](const std::shared_ptr<Comm>& comm) -> Status {
        const char* adam = kLowPrecision[3];
        Model model(0);
        SOTTO_ASSIGN(const auto wide, make(comm, model, json_of(adam, StateType::kF32)));
        for (uint64_t k = 0; k < 5; ++k) {
          model.gradients(k);
          SOTTO_TRY(do_step(*wide));
        }
        SOTTO_ASSIGN(const OptimSnapshot s, wide->snapshot(false));
        for (const StateType type : kTypes) {
          SOTTO_ASSIGN(const auto narrow, make(comm, model, json_of(adam, type)));
          SOTTO_TRY(narrow->restore(s, false));
          SOTTO_ASSIGN(const OptimSnapshot rounded, narrow->snapshot(false));
          const float part = type == StateType::kBf16 ? 1.0f / 256 : 1.0f / 16;
          for (size_t i = 0; i < s.values<float>("m").size(); ++i) {
            if (std::fabs(rounded.values<float>("m")[i] - s.values<float>("m")[i]) >
                part * std::fabs(s.values<float>("m")[i]) + 2e-6f)
              return error(Code::kInternal, "m {} became {}", s.values<float>("m")[i],
                           rounded.values<float>("m")[i]);
            if (std::fabs(rounded.values<float>("v")[i] - s.values<float>("v")[i]) >
                part * s.values<float>("v")[i] + 1e-9f)
              return error(Code::kInternal, "v {} became {}", s.values<float>("v")[i],
                           rounded.values<float>("v")[i]);
          }
          SOTTO_TRY(wide->restore(rounded, false));
          SOTTO_ASSIGN(const OptimSnapshot back, wide->snapshot(false));
          SOTTO_TRY(same(back.floats("m"), rounded.floats("m"), "m"));
          SOTTO_TRY(same(back.floats("v"), rounded.floats("v"), "v"));
        }
        return ok_status();
      });
  EXPECT_TRUE(status.ok()) << status.text();
}

TEST(OptimizerLowPrecisionState, TakesTheBytesOfTheReport) {
  const Status status =
      run_world(world_of("inproc", 1), [](const std::shared_ptr<Comm>& comm) -> Status {
        constexpr uint64_t kCount = 200 * 512;  // no padding, 12.5 norm blocks
        std::vector<float> p(kCount), g(kCount);
        uint64_t bytes[4] = {};
        for (const StateType type : {StateType::kF32, StateType::kBf16, StateType::kFp8}) {
          const std::string json = json_of(kLowPrecision[3], type);
          SOTTO_ASSIGN(
              const auto o,
              Optimizer::create(comm, json, {{"p", kCount, 0, p.data(), g.data(), nullptr}}));
          SOTTO_ASSIGN(const OptimInfo info, o->info());
          bytes[static_cast<int>(type)] = info.state_bytes;
          SOTTO_ASSIGN(const Config config, parse_config(json));
          const MemoryBytes memory = memory_bytes(config, 1, kCount);
          const uint64_t exponents = type == StateType::kFp8 ? 13 * 32 : 0;
          EXPECT_EQ(memory.m, kCount * state_type_bytes(type) + exponents);
          EXPECT_EQ(memory.v, memory.m);
        }
        EXPECT_EQ(bytes[1] - bytes[2], 2 * 2 * kCount);
        EXPECT_EQ(bytes[1] - bytes[3], 2 * (3 * kCount - 13 * 32));
        return ok_status();
      });
  EXPECT_TRUE(status.ok()) << status.text();
}

TEST(OptimizerLowPrecisionState, RanksMustAgree) {
  const Status status =
      run_world(world_of("inproc", 2), [](const std::shared_ptr<Comm>& comm) -> Status {
        Model model(comm->rank());
        const auto o =
            make(comm, model,
                 json_of(kLowPrecision[3], comm->rank() == 0 ? StateType::kBf16 : StateType::kFp8));
        EXPECT_EQ(o.status().code(), Code::kProtocol) << o.status().text();
        return ok_status();
      });
  EXPECT_TRUE(status.ok()) << status.text();
}

// The report names the type where it is not the usual one.
TEST(OptimizerLowPrecisionState, IsReported) {
  const Status status =
      run_world(world_of("inproc", 1), [](const std::shared_ptr<Comm>& comm) -> Status {
        Model model(0);
        SOTTO_ASSIGN(const auto o, make(comm, model, json_of(kLowPrecision[3], StateType::kFp8)));
        SOTTO_ASSIGN(const std::string report, o->report_json("config"));
        EXPECT_NE(report.find(R"("state_dtype":"fp8")"), std::string::npos) << report;
        return ok_status();
      });
  EXPECT_TRUE(status.ok()) << status.text();
}

}  // namespace
}  // namespace sotto::test
