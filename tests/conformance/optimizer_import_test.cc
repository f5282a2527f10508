// A state as arrays of a DeepSpeed checkpoint goes on with the same bits as the state itself
// without error feedback, on every kind of device and transport.
#include <gtest/gtest.h>

#include <cmath>
#include <deque>

#include "core/optim/optimizer.h"
#include "core/state/optim_state.h"
#include "tests/support/core_ranks.h"

namespace sotto::test {
namespace {

constexpr uint64_t kCounts[] = {700, 0, 8200, 9};
constexpr uint64_t kElements = 8909;

struct Model {
  explicit Model(int32_t rank_in) : rank(rank_in) {
    for (uint64_t i = 0; i < kElements; ++i) p[i] = std::sin(static_cast<float>(i) * 0.37f);
  }
  std::vector<ParamSpec> specs() {
    std::vector<ParamSpec> out;
    uint64_t at = 0;
    for (size_t t = 0; t < std::size(kCounts); ++t) {
      out.push_back({fmt::format("t{}", t), kCounts[t], static_cast<uint32_t>(t % 2), p.data() + at,
                     g.data() + at});
      out.back().copy = copy.data() + at;
      at += kCounts[t];
    }
    return out;
  }
  Status step(Optimizer& optimizer, uint64_t k) {
    for (uint64_t i = 0; i < kElements; ++i) {
      g[i] = 0.1f * p[i] +
             0.05f * std::sin(static_cast<float>(i * 7 + k * 13) + static_cast<float>(rank));
    }
    SOTTO_ASSIGN(const OpRef op, optimizer.step({}));
    return optimizer.comm()->engine().wait(op, -1);
  }
  int32_t rank;
  std::vector<float> p = std::vector<float>(kElements), g = std::vector<float>(kElements);
  std::vector<uint16_t> copy = std::vector<uint16_t>(kElements);
};

// The snapshot as a checkpoint has it. `numbers` keeps what single numbers lie in.
std::vector<NamedArray> arrays_of(const OptimSnapshot& s, std::deque<double>* numbers) {
  std::vector<NamedArray> out;
  uint64_t at = 0;
  for (size_t t = 0; t < s.names.size(); ++t) {
    const uint64_t count = s.counts[t];
    const auto elements = [&](const char* key, std::span<const float> values) {
      if (!values.empty()) out.push_back({s.names[t] + "/" + key, values.data() + at, count});
    };
    const auto number = [&](const char* key, auto value) {
      numbers->push_back(static_cast<double>(value));
      out.push_back({s.names[t] + "/" + key, &numbers->back(), 1, Dtype::kF64});
    };
    elements("fp32", s.values<float>("params"));
    elements("exp_avg", s.values<float>("m"));
    elements("exp_avg_sq", s.values<float>("v"));
    elements("exp_avg_sq_fresh", s.values<float>("vf"));
    number("step", s.step + s.step_offset);
    if (s.algorithm == "OneBitLamb") {
      number("lamb_coeff_freeze", s.values<TensorState>("tensor_states")[t].c_avg);
      number("last_factor", s.values<TensorState>("tensor_states")[t].last_factor);
      number("scaling_coeff", s.values<TensorState>("tensor_states")[t].scaling_coeff);
    }
    if (s.algorithm == "ZeroOneAdam") {
      number("var_interval", s.number("zeroone.var_interval"));
      number("var_counter", s.number("zeroone.var_counter"));
      number("local_step_interval", s.number("zeroone.local_interval"));
      number("local_step_counter", s.number("zeroone.local_counter"));
    }
    at += count;
  }
  return out;
}

class OptimizerImport : public ::testing::TestWithParam<std::string> {};

TEST_P(OptimizerImport, GoesOnLikeTheState) {
  for (
      const char* type :
      {R"({"type": "OneBitAdam", "params": {"lr": 0.01, "freeze_step": 4}})",
       R"({"type": "OneBitLamb", "params": {"lr": 0.01, "freeze_step": 4, "weight_decay": 0.01}})",
       R"({"type": "ZeroOneAdam", "params": {"lr": 0.01, "var_freeze_step": 5, "var_update_scaler": 2,
            "local_step_scaler": 3, "local_step_clipper": 4}})"}) {
    const std::string json = fmt::format(R"({{"optimizer": {}}})", type);
    const Status status =
        run_world(world_of(GetParam(), 2), [&](const std::shared_ptr<Comm>& comm) -> Status {
          Model first(comm->rank()), a(comm->rank()), b(comm->rank());
          SOTTO_ASSIGN(const auto source, Optimizer::create(comm, json, first.specs()));
          for (uint64_t k = 0; k < 9; ++k) SOTTO_TRY(first.step(*source, k));
          SOTTO_TRY(source->synchronise());
          SOTTO_ASSIGN(const OptimSnapshot s, source->snapshot(false));
          SOTTO_ASSIGN(const auto restored, Optimizer::create(comm, json, a.specs()));
          SOTTO_ASSIGN(const auto imported, Optimizer::create(comm, json, b.specs()));
          SOTTO_TRY(restored->restore(s, false));
          std::deque<double> numbers;
          SOTTO_TRY(imported->import_arrays(arrays_of(s, &numbers)));
          for (uint64_t k = 9; k < 18; ++k) {
            if (a.p != b.p || a.copy != b.copy)
              return error(Code::kInternal, "before step {}: parameters differ", k);
            SOTTO_TRY(a.step(*restored, k));
            SOTTO_TRY(b.step(*imported, k));
          }
          SOTTO_TRY(restored->synchronise());
          SOTTO_TRY(imported->synchronise());
          SOTTO_ASSIGN(const auto one, export_state(*restored, StateMode::kExact));
          SOTTO_ASSIGN(const auto two, export_state(*imported, StateMode::kExact));
          if (one != two) return error(Code::kInternal, "states differ at the end");
          return ok_status();
        });
    EXPECT_TRUE(status.ok()) << type << ": " << status.text();
  }
}

// All ranks hear of the first array and tensor that differ, and of all ranks that have others.
TEST_P(OptimizerImport, DifferencesAreNamed) {
  struct Difference {
    const char* array;
    uint64_t first, second;  // elements, on ranks 1 and 3
    std::string_view told;
  };
  const Difference differences[] = {
      {"m", 700, 8899, "ranks 0 and 1, 3 import different values (exp_avg) of parameter \"t2\";"},
      {"v", 8900, 699,
       "ranks 0 and 1, 3 import different values (exp_avg_sq) of parameter \"t0\";"},
      {"params", 699, 699,
       "ranks 0 and 1, 3 import different values (parameters) of parameter "
       "\"t0\";"},
      {"vf", 8908, 8908, "(exp_avg_sq_fresh) of parameter \"t3\";"},
      {"tensor_states", 2, 3, "(tensor_states) of parameter \"t2\";"},
  };
  const std::string json =
      R"({"optimizer": {"type": "OneBitLamb", "params": {"lr": 0.01, "freeze_step": 2}}})";
  const Status status =
      run_world(world_of(GetParam(), 4), [&](const std::shared_ptr<Comm>& comm) -> Status {
        Model model(comm->rank());
        SOTTO_ASSIGN(const auto optimizer, Optimizer::create(comm, json, model.specs()));
        for (uint64_t k = 0; k < 4; ++k) SOTTO_TRY(model.step(*optimizer, k));
        SOTTO_ASSIGN(const OptimSnapshot s, optimizer->snapshot(false));
        for (const Difference& d : differences) {
          OptimSnapshot mine = s;
          if (comm->rank() % 2 == 1) {
            const uint64_t at = comm->rank() == 1 ? d.first : d.second;
            if (std::string_view(d.array) == "tensor_states") {
              mine.values<TensorState>(d.array)[at].c_avg += 1;
            } else {
              mine.values<float>(d.array)[at] += 1;
            }
          }
          std::deque<double> numbers;
          const Status refused = optimizer->import_arrays(arrays_of(mine, &numbers));
          EXPECT_EQ(refused.code(), Code::kProtocol);
          EXPECT_NE(refused.text().find(d.told), std::string::npos) << refused.text();
        }
        std::deque<double> numbers;
        SOTTO_TRY(optimizer->import_arrays(arrays_of(s, &numbers)));
        return model.step(*optimizer, 4);
      });
  EXPECT_TRUE(status.ok()) << status.text();
}

INSTANTIATE_TEST_SUITE_P(Worlds, OptimizerImport, ::testing::ValuesIn(world_kinds()),
                         [](const auto& kind) { return kind.param; });

}  // namespace
}  // namespace sotto::test
