// What ranks of an optimizer must have alike: at creation, in imported state, in every step.
#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <mutex>

#include "core/engine/device_array.h"
#include "core/state/optim_state.h"
#include "tests/support/core_ranks.h"
#include "tests/support/sanitized.h"
#include "tests/support/small_model.h"

namespace sotto::test {
namespace {

constexpr const char* kAdam = R"({"optimizer": {"type": "AdamW", "params": {"lr": 0.01}}})";

std::string with_policy(const char* policy) {
  return fmt::format(R"({{"optimizer": {{"type": "AdamW", "params": {{"lr": 0.01}}}},
                          "sotto": {{"initial_parameters": "{}"}}}})",
                     policy);
}

// What every rank ended with.
struct Ends {
  std::mutex mutex;
  std::vector<Status> statuses;
  explicit Ends(int32_t size) : statuses(static_cast<size_t>(size)) {}
  void put(int32_t rank, const Status& status) {
    const std::lock_guard lock(mutex);
    statuses[static_cast<size_t>(rank)] = status;
  }
  void expect_alike(Code code, std::string_view words) const {
    for (const Status& s : statuses) {
      EXPECT_EQ(s.code(), code) << s.text();
      EXPECT_EQ(s.text(), statuses[0].text());
      EXPECT_NE(s.text().find(words), std::string::npos) << s.text();
    }
  }
};

// Parameters where the device of the world wants them.
class PlacedModel {
 public:
  static Result<PlacedModel> make(const std::shared_ptr<Comm>& comm, SmallModel& model,
                                  const SmallModel::Options& options = {}) {
    PlacedModel out;
    out.access_ = DeviceAccess(comm->context()->engine(), comm->context()->device());
    for (ParamSpec spec : model.specs(options)) {
      SOTTO_ASSIGN(spec.param, out.place(spec.param, spec.count));
      SOTTO_ASSIGN(spec.grad, out.place(static_cast<const float*>(spec.grad), spec.count));
      if (spec.copy != nullptr) {
        SOTTO_ASSIGN(spec.copy, out.place(static_cast<const uint16_t*>(spec.copy), spec.count));
      }
      out.specs.push_back(std::move(spec));
    }
    return out;
  }
  Result<std::vector<float>> params() const {
    std::vector<float> all;
    for (const ParamSpec& spec : specs) {
      SOTTO_ASSIGN(const std::vector<float> part, access_.download<float>(spec.param, spec.count));
      all.insert(all.end(), part.begin(), part.end());
    }
    return all;
  }
  Result<std::vector<uint16_t>> copy_of(size_t t) const {
    return access_.download<uint16_t>(specs[t].copy, specs[t].count);
  }

  std::vector<ParamSpec> specs;

 private:
  template <class T>
  Result<T*> place(const T* values, uint64_t count) {
    SOTTO_ASSIGN(DeviceArray array, DeviceArray::make(access_.device(), count * sizeof(T)));
    SOTTO_TRY(access_.upload(array.data(), std::span<const T>(values, count)));
    auto* data = static_cast<T*>(array.data());
    arrays_.push_back(std::move(array));
    return data;
  }

  DeviceAccess access_;
  std::vector<DeviceArray> arrays_;
};

Status barrier(const std::shared_ptr<Comm>& comm) { return comm->barrier(); }

TEST(OptimizerAgreement, OtherValuesAreRefusedOnAllRanksAlike) {
  for (const std::string& kind : world_kinds()) {
    Ends ends(3);
    const Status status = run_world(world_of(kind, 3), [&](const std::shared_ptr<Comm>& comm) {
      SmallModel model(comm->rank());
      if (comm->rank() == 2) model.p[1010] += 1;  // of t1
      if (comm->rank() != 0) model.p[9000] += 1;  // of t3
      SOTTO_ASSIGN(const PlacedModel placed, PlacedModel::make(comm, model));
      ends.put(comm->rank(), Optimizer::create(comm, kAdam, placed.specs).status());
      return barrier(comm);
    });
    EXPECT_TRUE(status.ok()) << kind << ": " << status.text();
    ends.expect_alike(Code::kProtocol,
                      "parameter \"t1\" has other values on rank 2 than on rank 0");
  }
}

TEST(OptimizerAgreement, BroadcastGivesAllRanksThoseOfRank0) {
  for (const std::string& kind : world_kinds()) {
    const Status status =
        run_world(world_of(kind, 3), [&](const std::shared_ptr<Comm>& comm) -> Status {
          SmallModel model(comm->rank());
          const std::vector<float> wanted = model.p;
          for (float& x : model.p) x += static_cast<float>(comm->rank());
          SmallModel::Options options;
          options.copies = true;
          SOTTO_ASSIGN(const PlacedModel placed, PlacedModel::make(comm, model, options));
          SOTTO_ASSIGN(const std::shared_ptr<Optimizer> optimizer,
                       Optimizer::create(comm, with_policy("broadcast"), placed.specs));
          SOTTO_ASSIGN(const std::vector<float> got, placed.params());
          EXPECT_EQ(bytes_of(got), bytes_of(wanted)) << kind;
          SOTTO_ASSIGN(const std::vector<uint16_t> copy, placed.copy_of(3));
          for (size_t i = 0; i < copy.size(); ++i) {
            if (copy[i] != f32_to_bf16(wanted[1017 + i]))
              return error(Code::kInternal, "{}: model copy, element {}", kind, i);
          }
          return do_step(*optimizer);
        });
    EXPECT_TRUE(status.ok()) << kind << ": " << status.text();
  }
}

TEST(OptimizerAgreement, TrustDoesNotLook) {
  const Status status = run_world(world_of("inproc", 2), [](const std::shared_ptr<Comm>& comm) {
    SmallModel model(comm->rank());
    model.p[3] = static_cast<float>(comm->rank());
    return Optimizer::create(comm, with_policy("trust"), model.specs()).status();
  });
  EXPECT_TRUE(status.ok()) << status.text();
}

// Whatever makes one rank refuse, all of them hear of it, and the comm goes on.
TEST(OptimizerAgreement, OneRankRefuses) {
  struct Case {
    std::function<void(std::vector<ParamSpec>*, std::string*)> change;
    Code code;
    const char* words;
  };
  const Case cases[] = {
      {[](auto*, std::string* json) { *json = R"({"optimizer": {"type": "Adamm"}})"; },
       Code::kInvalidArgument, "rank 1 refuses: configuration: line 1, column 24: optimizer.type"},
      {[](auto*, std::string* json) { *json += "]"; }, Code::kInvalidArgument, "rank 1 refuses: "},
      {[](auto* specs, std::string*) { specs->clear(); }, Code::kInvalidArgument,
       "rank 1 refuses: no parameters were given"},
      {[](auto* specs, std::string*) { (*specs)[1].name = (*specs)[0].name; },
       Code::kInvalidArgument, "rank 1 refuses: parameter 1: the name \"t0\" is used twice"},
      {[](auto* specs, std::string*) { (*specs)[3].group = 7; }, Code::kInvalidArgument,
       "rank 1 refuses: parameter 3 (\"t3\"): group is 7; allowed: 0 to 4"},
      {[](auto* specs, std::string*) { (*specs)[0].count = uint64_t{1} << 45; }, Code::kOutOfMemory,
       "rank 1 refuses: "},
      {[](auto* specs, std::string*) { specs->pop_back(); }, Code::kProtocol,
       "rank 0 registers 5 parameters with 9211 elements, rank 1 4 with 9210"},
  };
  for (const char* kind : {"inproc", "tcp", "async"}) {
    for (const Case& c : cases) {
      // A sanitizer ends a process that asks for so much memory.
      if (kSanitized && c.code == Code::kOutOfMemory) continue;
      Ends ends(3);
      const Status status =
          run_world(world_of(kind, 3), [&](const std::shared_ptr<Comm>& comm) -> Status {
            SmallModel model(comm->rank());
            std::vector<ParamSpec> specs = model.specs();
            std::string json = kAdam;
            if (comm->rank() == 1) c.change(&specs, &json);
            ends.put(comm->rank(), Optimizer::create(comm, json, specs).status());
            SOTTO_TRY(barrier(comm));
            return Optimizer::create(comm, kAdam, model.specs()).status();
          });
      EXPECT_TRUE(status.ok()) << c.words << ": " << status.text();
      ends.expect_alike(c.code, c.words);
    }
  }
}

TEST(OptimizerAgreement, NamesOfParameters) {
  const Status status =
      run_world(world_of("inproc", 1), [](const std::shared_ptr<Comm>& comm) -> Status {
        const auto named = [&](const char* name) {
          SmallModel model(0);
          std::vector<ParamSpec> specs = model.specs();
          specs[1].name = name;
          return Optimizer::create(comm, kAdam, specs).status().text();
        };
        EXPECT_NE(named("w\xff").find("parameter 1: the name \"w\\xff\" is not UTF-8"),
                  std::string::npos)
            << named("w\xff");
        EXPECT_NE(named("group:0").find("begins like that of a parameter group"),
                  std::string::npos);
        EXPECT_NE(named("group:12/w").find("begins like that"), std::string::npos);
        for (const char* good :
             {"encoder/layer/0", "group:", "group:x", "gewicht\xc3\xa4", "group"})
          EXPECT_EQ(named(good), "") << good;
        return ok_status();
      });
  EXPECT_TRUE(status.ok()) << status.text();
}

// Steps of two ranks after `change` has set something on rank 1. The first rank's error.
std::string step_after(const char* kind, const std::string& json,
                       const std::function<Status(Optimizer&, SmallModel&)>& change) {
  std::string text;
  std::mutex mutex;
  WorldOptions world = world_of(kind, 2);
  const Status status = run_world(world, [&](const std::shared_ptr<Comm>& comm) -> Status {
    SmallModel model(comm->rank());
    SOTTO_ASSIGN(const std::shared_ptr<Optimizer> optimizer,
                 Optimizer::create(comm, json, model.specs()));
    SOTTO_TRY(do_step(*optimizer));
    SOTTO_TRY(change(*optimizer, model));
    const Status end = do_step(*optimizer);
    const std::lock_guard lock(mutex);
    EXPECT_TRUE(end.ok() || end.code() == Code::kProtocol) << end.text();
    if (comm->rank() == 0) text = end.text();
    return ok_status();
  });
  EXPECT_TRUE(status.ok()) << status.text();
  return text;
}

TEST(OptimizerAgreement, SettingsOfAStepAreCompared) {
  const auto set_on_1 = [](std::string name, int32_t group) {
    return [=](Optimizer& optimizer, SmallModel& model) {
      return optimizer.set(name, group, model.rank == 1 ? 0.25 : 0.5);
    };
  };
  for (const char* kind : {"inproc", "tcp", "async"}) {
    EXPECT_NE(step_after(kind, kAdam, set_on_1("lr", 1)).find("betas of group 1 differ"),
              std::string::npos);
    EXPECT_NE(step_after(kind, kAdam, set_on_1("weight_decay", 0)).find("of group 0 differ"),
              std::string::npos);
    EXPECT_EQ(
        step_after(kind, kAdam, [](Optimizer& o, SmallModel&) { return o.set("lr", -1, 0.25); }),
        "");
    EXPECT_EQ(step_after(kind, kAdam,
                         [](Optimizer& o, SmallModel& m) {
                           return o.set("weight_decay", 0, m.rank == 1 ? -0.0 : 0.0);
                         }),
              "");
  }
}

TEST(OptimizerAgreement, ImportedStateIsCompared) {
  for (const char* optimizer : kOptimizers) {
    for (const char* sotto : {"{}", R"({"mode": "compat"})"}) {
      const std::string json = fmt::format(R"({{"optimizer": {}, "sotto": {}}})", optimizer, sotto);
      std::string text;
      std::mutex mutex;
      const Status status =
          run_world(world_of("inproc", 2), [&](const std::shared_ptr<Comm>& comm) -> Status {
            SmallModel model(comm->rank());
            SOTTO_ASSIGN(const std::shared_ptr<Optimizer> o,
                         Optimizer::create(comm, json, model.specs()));
            // Through both stages, of 0/1 Adam also between synchronisations.
            for (int k = 0; k < 12; ++k) {
              for (size_t i = 0; i < model.g.size(); ++i)
                model.g[i] = 0.1f * model.p[i] + 0.01f * static_cast<float>(comm->rank() + k);
              SOTTO_TRY(do_step(*o));
              SOTTO_ASSIGN(const std::vector<std::byte> blob, export_state(*o, StateMode::kExact));
              SOTTO_TRY(import_state(*o, StateMode::kExact, blob));
            }
            SOTTO_ASSIGN(OptimSnapshot s, o->snapshot(true));
            if (comm->rank() == 1 && s.bytes("v") != 0) s.values<float>("v")[0] *= 2;
            if (comm->rank() == 1 && s.bytes("v") == 0) s.values<float>("params")[0] += 1;
            SOTTO_TRY(o->restore(s, true));
            // Local steps of 0/1 Adam send nothing: the next one with messages tells.
            Status next;
            for (int k = 0; k < 6 && next.ok(); ++k) next = do_step(*o);
            const std::lock_guard lock(mutex);
            if (comm->rank() == 0) text = next.text();
            return ok_status();
          });
      EXPECT_TRUE(status.ok()) << json << ": " << status.text();
      const bool local = std::string_view(optimizer).find("ZeroOne") != std::string_view::npos;
      EXPECT_NE(text.find(local ? "an operation before it differs"
                                : "imported since the last step differs"),
                std::string::npos)
          << json << ": " << text;
    }
  }
}

TEST(OptimizerAgreement, OneRankImportsAlone) {
  const auto import_on_1 = [](Optimizer& o, SmallModel& model) -> Status {
    SOTTO_ASSIGN(const std::vector<std::byte> blob, export_state(o, StateMode::kExact));
    return model.rank == 1 ? import_state(o, StateMode::kExact, blob) : ok_status();
  };
  EXPECT_NE(step_after("tcp", kAdam, import_on_1).find("only one of them has imported any"),
            std::string::npos);
  EXPECT_EQ(step_after("tcp", with_policy("trust"), import_on_1), "");
}

}  // namespace
}  // namespace sotto::test
