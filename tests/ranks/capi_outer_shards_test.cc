// Outer optimizers on shards: norms are of the whole parameters, all ranks create them or none, and
// what fails on one shard fails on all.
#include <chrono>
#include <cmath>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "tests/ranks/capi_outer_model.h"
#include "tests/support/sanitized.h"

namespace sotto::test {
namespace {

constexpr int kReplicas = 2;
constexpr uint64_t kSteps = 14;
// More than a norm block on every shard, and one tensor of which the last shard has nothing.
const std::vector<size_t> kWhole = {11'003, 37};

using Trace = std::vector<std::vector<float>>;  // live parameters behind every step, and a flush

// What a rank holds of every tensor, [begin, end).
struct Part {
  size_t begin, end;
};
std::vector<Part> parts_of(int shard, int shards) {
  if (shards == 1) return {{0, kWhole[0]}, {0, kWhole[1]}};
  const size_t cuts[] = {0, 4'100, 9'000, kWhole[0]};
  const auto s = static_cast<size_t>(shard);
  const size_t end = shard + 1 == shards ? kWhole[0] : cuts[s + 1];
  const size_t of_b[] = {0, 20, kWhole[1], kWhole[1]};
  return {{cuts[s], end}, {of_b[s], shards == 2 ? (shard == 0 ? 20 : kWhole[1]) : of_b[s + 1]}};
}

struct ShardedModel {
  OuterModel model;
  std::vector<Part> parts;
  int replica;

  ShardedModel(int of_replica, int shard, int shards)
      : model(1, 0, sizes(parts_of(shard, shards))),
        parts(parts_of(shard, shards)),
        replica(of_replica) {}
  static std::vector<size_t> sizes(const std::vector<Part>& parts) {
    return {parts[0].end - parts[0].begin, parts[1].end - parts[1].begin};
  }
  void train(uint64_t done) {
    for (size_t t = 0; t < 2; ++t) {
      for (size_t i = parts[t].begin; i < parts[t].end; ++i) {
        const uint64_t x = (i * 31 + done * 17 + static_cast<uint64_t>(replica) * 7 + t) % 23;
        // Shards differ by so much that none is like the whole.
        const float scale = i < 4'000 ? 0.04f : 0.002f;
        model.weights[t][i - parts[t].begin] += scale * (static_cast<float>(x) - 10);
      }
    }
  }
  // Into the place that it has in the whole.
  void put(std::vector<float>* whole) const {
    for (size_t t = 0; t < 2; ++t) {
      const size_t at = (t == 0 ? 0 : kWhole[0]) + parts[t].begin;
      std::copy(model.weights[t].begin(), model.weights[t].end(),
                whole->begin() + static_cast<ptrdiff_t>(at));
    }
  }
};

struct Split {
  sotto_comm* comm = nullptr;    // of the same shard
  sotto_comm* shards = nullptr;  // of this replica
  int replica, shard;

  Split(const Member& self, int n) : replica(self.rank / n), shard(self.rank % n) {
    OK(sotto_comm_split(self.comm, shard, 0, &comm));
    OK(sotto_comm_split(self.comm, replica, 0, &shards));
  }
  ~Split() {
    sotto_comm_destroy(comm);
    sotto_comm_destroy(shards);
  }
  Split(const Split&) = delete;
  Split& operator=(const Split&) = delete;
};

// tells: whether shards tell each other their norms.
Trace train(const std::string& json, int n, bool tells, const char* transport = "inproc") {
  Trace trace(kSteps + 1, std::vector<float>(kWhole[0] + kWhole[1]));
  std::mutex mutex;
  WorldOptions options;
  options.transport = transport;
  const std::string failure = run_world(kReplicas * n, options, [&](Member& self) {
    const Split split(self, n);
    ShardedModel m(split.replica, split.shard, n);
    sotto_outer* outer = nullptr;
    const auto& params = m.model.params;
    OK(tells ? sotto_outer_create_sharded(split.comm, split.shards, json.c_str(), params.data(),
                                          params.size(), &outer)
             : sotto_outer_create(split.comm, json.c_str(), params.data(), params.size(), &outer));
    const auto keep = [&](uint64_t k) {
      const std::lock_guard lock(mutex);
      if (split.replica == 1) m.put(&trace[k]);
    };
    for (uint64_t k = 0; k < kSteps; ++k) {
      m.train(k);
      OK(sotto_outer_set(outer, "lr", 0.1));
      OK(sotto_outer_step(outer, nullptr, nullptr));
      keep(k);
    }
    OK(sotto_outer_flush(outer, nullptr, nullptr));
    keep(kSteps);
    OK(sotto_outer_destroy(outer));
  });
  EXPECT_EQ(failure, "");
  return trace;
}

double distance(const Trace& a, const Trace& b) {
  double most = 0;
  for (size_t k = 0; k < a.size(); ++k) {
    for (size_t i = 0; i < a[k].size(); ++i)
      most = std::max(most, std::abs(static_cast<double>(a[k][i]) - b[k][i]));
  }
  return most;
}

struct Settings {
  const char* name;
  const char* json;
};
constexpr Settings kSettings[] = {
    {"co2", R"({"preset": "co2", "period": 3})"},
    {"gap_rel_norm",
     R"({"preset": "co2", "period": 2, "penalty": "gap_rel", "clip": "norm", "phi": 0.2})"},
    {"gap_inner",
     R"({"preset": "co2", "period": 3, "penalty": "gap_inner", "clip": "none", "auto_floor": false, "alpha": 0.5})"},
    {"nesterov_between",
     R"({"preset": "diloco", "period": 4, "delay": 1, "clip": "rms", "phi": 1.2})"},
    {"params_now", R"({"preset": "slowmo", "period": 2, "clip": "norm", "phi": 0.3})"},
    {"anchor_diff", R"({"preset": "co2_paper", "period": 2, "clip": "rms", "phi": 1.1})"},
    {"fragments",
     R"({"preset": "co2", "period": 4, "fragments": [[0], [1]], "clip": "rms", "phi": 1.1})"},
    {"merge_lerp",
     R"({"preset": "co2", "period": 2, "merge": "lerp", "merge_a": 0.5, "clip": "rms"})"},
    {"progress",
     R"({"preset": "co2", "period": 2, "merge": "add_progress", "delay": 1, "clip": "rms"})"},
};

class CapiOuterShards : public testing::TestWithParam<Settings> {};

TEST_P(CapiOuterShards, NormsAreOfTheWhole) {
  const std::string json = GetParam().json;
  const Trace whole = train(json, 1, false);
  for (const int shards : {2, 3}) {
    SCOPED_TRACE(shards);
    EXPECT_LT(distance(train(json, shards, true), whole), 4e-6);
  }
  EXPECT_LT(distance(train(json, 2, true, "tcp"), whole), 4e-6);
  // What the same is where every shard takes its own norms.
  EXPECT_GT(distance(train(json, 2, false), whole), 1e-4);
}

INSTANTIATE_TEST_SUITE_P(Settings, CapiOuterShards, testing::ValuesIn(kSettings),
                         [](const auto& of) { return std::string(of.param.name); });

// Bits where nothing takes a norm, and the updates have no messages then.
TEST(CapiOuterShardsToo, WithoutNormsTheyHaveTheBitsOfTheWhole) {
  const std::string json = R"({"preset": "diloco", "period": 3})";
  EXPECT_EQ(train(json, 2, true), train(json, 1, false));
}

// Creates it on `self`; returns what that says.
std::string refusal(const Member& self, const std::string& json, bool bad_rank_1 = false) {
  const Split split(self, 2);
  ShardedModel m(split.replica, split.shard, 2);
  sotto_outer* outer = nullptr;
  const std::string mine = bad_rank_1 && self.rank == 1 ? R"({"preset": "nothing"})" : json;
  const sotto_status status = sotto_outer_create_sharded(
      split.comm, split.shards, mine.c_str(), m.model.params.data(), m.model.params.size(), &outer);
  require(status != SOTTO_OK && outer == nullptr, "it was created");
  return sotto_last_error();
}

TEST(CapiOuterShardsToo, WhatEveryShardWouldDecideForItselfIsRefused) {
  const std::pair<const char*, const char*> kCases[] = {
      {R"({"preset": "co2", "period": 2, "granularity": "tensor"})", "sotto.outer.granularity"},
      {R"({"preset": "delta_corrected", "period": 2, "clip": "norm", "phi": 1})",
       "sotto.outer.freshness"},
      {R"({"preset": "co2", "period": "auto"})", "sotto.outer.period"},
      {R"({"preset": "co2", "period": 2, "fragments": 2})", "sotto.outer.fragments"},
      {R"({"preset": "co2", "period": 2, "nonfinite": "error"})", "sotto.outer.nonfinite"}};
  for (const auto& [json, key] : kCases) {
    SCOPED_TRACE(json);
    EXPECT_EQ(run_world(4, {},
                        [&, json = json, key = key](Member& self) {
                          const std::string text = refusal(self, json);
                          require(text.find(key) != std::string::npos, text);
                          require(
                              text.find("allowed where parameters are shards") != std::string::npos,
                              text);
                        }),
              "");
  }
}

// Of one rank all others hear, those that have another shard in another replica too.
TEST(CapiOuterShardsToo, OneThatRefusesIsHeardByAll) {
  EXPECT_EQ(run_world(4, {},
                      [&](Member& self) {
                        const std::string text =
                            refusal(self, R"({"preset": "co2", "period": 2})", true);
                        require(text.find("preset") != std::string::npos, text);
                        OK(sotto_barrier(self.comm, nullptr, nullptr));  // the comms are healthy
                      }),
            "");
}

TEST(CapiOuterShardsToo, SettingsOfShardsAreCompared) {
  EXPECT_EQ(run_world(4, {},
                      [&](Member& self) {
                        const bool odd = self.rank % 2 == 1;
                        const std::string text =
                            refusal(self, odd ? R"({"preset": "co2", "period": 2})"
                                              : R"({"preset": "co2", "period": 3})");
                        require(text.find("sotto.outer.period") != std::string::npos, text);
                      }),
            "");
}

TEST(CapiOuterShardsToo, ShardsAreOfTheSameContext) {
  EXPECT_EQ(
      run_world(
          2, {},
          [&](Member& self) {
            ShardedModel m(self.rank, 0, 1);
            sotto_outer* outer = nullptr;
            sotto_context* const other = new_context(true);
            sotto_comm* alone = nullptr;
            sotto_comm_config config = SOTTO_COMM_CONFIG_INIT;
            config.rank = 0;
            config.size = 1;
            OK(sotto_comm_create(other, &config, &alone));
            same(sotto_outer_create_sharded(self.comm, alone, R"({"preset": "co2", "period": 2})",
                                            m.model.params.data(), m.model.params.size(), &outer),
                 SOTTO_E_INVALID_ARGUMENT, "status");
            const std::string text = sotto_last_error();
            require(text.find("shards: found a comm of another context") != std::string::npos,
                    text);
            same(sotto_outer_create_sharded(self.comm, nullptr, R"({"preset": "co2", "period": 2})",
                                            m.model.params.data(), m.model.params.size(), &outer),
                 SOTTO_E_INVALID_ARGUMENT, "status");
            OK(sotto_comm_destroy(alone));
            OK(sotto_context_destroy(other));
          }),
      "");
}

// ---- failures ----

// Comms of the two shards and the two replicas, each a group of its own.
struct Groups {
  sotto_unique_id ids[4];
  explicit Groups(sotto_context* context) {
    for (sotto_unique_id& id : ids) OK(sotto_unique_id_create(context, &id));
  }
  sotto_comm* join(const Member& self, size_t number, int rank) const {
    sotto_comm_config config = SOTTO_COMM_CONFIG_INIT;
    config.rank = rank;
    config.size = 2;
    config.id = &ids[number];
    sotto_comm* comm = nullptr;
    OK(sotto_comm_create(self.context, &config, &comm));
    return comm;
  }
};

// fails: what the rank of replica 1 and shard 0 does in place of the step that consumes an average.
void expect_one_failure(const std::function<void(sotto_comm* comm, sotto_comm* shards)>& fails) {
  setenv("SOTTO_TRANSPORT", "inproc", 1);
  sotto_context* const first = new_context();
  const Groups groups(first);
  unsetenv("SOTTO_TRANSPORT");
  EXPECT_EQ(
      run_world(4, {},
                [&](Member& self) {
                  const int replica = self.rank / 2, shard = self.rank % 2;
                  sotto_comm* const comm = groups.join(self, static_cast<size_t>(shard), replica);
                  sotto_comm* const shards =
                      groups.join(self, 2 + static_cast<size_t>(replica), shard);
                  ShardedModel m(replica, shard, 2);
                  sotto_outer* outer = nullptr;
                  OK(sotto_outer_create_sharded(
                      comm, shards, R"({"preset": "diloco", "period": 2, "clip": "rms"})",
                      m.model.params.data(), m.model.params.size(), &outer));
                  for (uint64_t k = 0; k < 3; ++k) {
                    m.train(k);
                    OK(sotto_outer_step(outer, nullptr, nullptr));
                  }
                  m.train(3);
                  const std::vector<float> before = m.model.weights[0];
                  OK(sotto_barrier(self.comm, nullptr, nullptr));
                  if (self.rank == 2) fails(comm, shards);
                  const auto start = std::chrono::steady_clock::now();
                  require(sotto_outer_step(outer, nullptr, nullptr) == SOTTO_E_ABORTED,
                          std::string("a step of 2 averages says ") + sotto_last_error());
                  const std::string text = sotto_last_error();
                  require(text.find("a test") != std::string::npos, text);
                  require(m.model.weights[0] == before, "live parameters have changed");
                  same(info_of(outer).round, 1, "round");
                  const std::string state = read_all([&](char* b, uint64_t size, uint64_t* n) {
                    return sotto_outer_state_export(outer, SOTTO_STATE_EXACT, b, size, n);
                  });
                  require(!state.empty(), "no state");
                  OK(sotto_outer_destroy(outer));
                  const auto passed = std::chrono::steady_clock::now() - start;
                  require(passed < std::chrono::seconds(kSanitized ? 20 : 8), "it has waited");
                  (void)sotto_comm_destroy(comm);
                  (void)sotto_comm_destroy(shards);
                }),
      "");
  OK(sotto_context_destroy(first));
}

TEST(CapiOuterShardsToo, AFailureOfOneShardIsOneOfAll) {
  expect_one_failure([](sotto_comm* comm, sotto_comm*) { OK(sotto_comm_abort(comm, "a test")); });
}

TEST(CapiOuterShardsToo, AFailureOfOneReplicaIsOneOfAll) {
  expect_one_failure(
      [](sotto_comm*, sotto_comm* shards) { OK(sotto_comm_abort(shards, "a test")); });
}

}  // namespace
}  // namespace sotto::test
