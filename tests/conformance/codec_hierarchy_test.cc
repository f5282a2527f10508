// Codecs in two levels, on every kind of world: telescoping, equal bits everywhere, bytes as
// planned and as the formula says, values that are not finite wherever they are, state, and what is
// refused. That results are the right ones is the numpy model's to say (tests/model).
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>

#include "core/codec/codec.h"
#include "core/state/optim_state.h"
#include "tests/support/core_ranks.h"
#include "tests/support/random_bits.h"

namespace sotto::test {
namespace {

constexpr uint64_t kElements = 25001;
const std::vector<std::string> kCodecs = {
    R"("type": "onebit", "granularity": "bucket", "bucket_elements": 8192, "chunk_align": 8)",
    R"("type": "onebit", "granularity": "tensor")",
    R"("type": "int8")",
    R"("type": "bf16", "residual": true)",
};

WorldOptions hosts_of(const std::string& kind, const std::vector<int>& hosts) {
  WorldOptions world = world_of(kind, static_cast<int32_t>(hosts.size()));
  world.rank_params = [hosts](int32_t rank, Params* params) {
    params->host_id = "host" + std::to_string(hosts[static_cast<size_t>(rank)]);
  };
  return world;
}

std::string with(const std::string& codec, const std::string& hierarchy) {
  return "{" + codec + R"(, "hierarchy": ")" + hierarchy + "\"}";
}

// A codec of two tensors and what one rank gives and gets.
struct Rank {
  static Result<Rank> make(const std::shared_ptr<Comm>& comm, const std::string& json) {
    Rank r;
    SOTTO_ASSIGN(r.codec,
                 Codec::create(comm, json, {kElements - 7, 7}, {Dtype::kF32, Dtype::kF32}));
    r.random = RandomBits(static_cast<uint32_t>(comm->rank()) + 3);
    return r;
  }
  void fill() {
    std::normal_distribution<float> normal;
    for (float& v : x) v = normal(random);
  }
  Status reduce() {
    SOTTO_ASSIGN(const OpRef op, codec->all_reduce({x.data(), x.data() + kElements - 7},
                                                   {y.data(), y.data() + kElements - 7}, {}));
    return codec->comm()->engine().wait(op, -1);
  }

  std::shared_ptr<Codec> codec;
  std::vector<float> x = std::vector<float>(kElements), y = std::vector<float>(kElements, 42);
  RandomBits random;
};

std::string bytes_of(const std::vector<float>& v) {
  return std::string(reinterpret_cast<const char*>(v.data()), v.size() * 4);
}

// sum y + mean over hosts(ew) + es = sum mean(x), and the same bits everywhere.
Status telescopes(const std::shared_ptr<Comm>& comm, const std::string& json) {
  SOTTO_ASSIGN(Rank r, Rank::make(comm, json));
  std::vector<double> want(kElements), got(kElements);
  for (int call = 0; call < 3; ++call) {
    r.fill();
    SOTTO_TRY(r.reduce());
    SOTTO_ASSIGN(const std::vector<std::string> results, comm->exchange(bytes_of(r.y)));
    SOTTO_ASSIGN(const std::vector<std::string> inputs, comm->exchange(bytes_of(r.x)));
    for (const std::string& other : results) {
      if (other != results[0]) return error(Code::kInternal, "{}: results differ", json);
    }
    for (size_t i = 0; i < kElements; ++i) got[i] += r.y[i];
    for (const std::string& other : inputs) {
      std::vector<float> values(kElements);
      std::memcpy(values.data(), other.data(), other.size());
      for (size_t i = 0; i < kElements; ++i) want[i] += double{values[i]} / comm->size();
    }
  }
  SOTTO_ASSIGN(const MeanErrorFeedback mean, r.codec->mean());
  for (size_t i = 0; i < kElements; ++i) {
    const double sum = got[i] + mean.worker[i] + mean.server[i];
    if (std::abs(sum - want[i]) > 3e-5)
      return error(Code::kInternal, "{}: element {} is {} for {}", json, i, sum, want[i]);
  }
  return ok_status();
}

class CodecHierarchy : public ::testing::TestWithParam<std::string> {};

TEST_P(CodecHierarchy, TelescopesWithTheSameBitsEverywhere) {
  const Status status = run_world(hosts_of(GetParam(), {0, 1, 1, 0}),
                                  [](const std::shared_ptr<Comm>& comm) -> Status {
                                    for (const std::string& codec : kCodecs) {
                                      for (const char* hierarchy : {"sharded", "leader"})
                                        SOTTO_TRY(telescopes(comm, with(codec, hierarchy)));
                                    }
                                    return ok_status();
                                  });
  EXPECT_TRUE(status.ok()) << status.text();
}

// Bytes that this rank sends to another host: (M - 1) chunks twice, and in one level as many to
// each rank there.
TEST_P(CodecHierarchy, BytesAreAsPlannedAndBetweenHostsAsTheFormula) {
  const Status status = run_world(
      hosts_of(GetParam(), {0, 0, 1, 1}), [](const std::shared_ptr<Comm>& comm) -> Status {
        for (const char* hierarchy : {"sharded", "leader"}) {
          const std::string json = with(R"("type": "int8")", hierarchy);
          SOTTO_ASSIGN(Rank r, Rank::make(comm, json));
          r.fill();
          SOTTO_TRY(comm->barrier());
          const CommCounters before = comm->counters();
          SOTTO_TRY(r.reduce());
          const CommCounters after = comm->counters();
          SOTTO_ASSIGN(const std::shared_ptr<PreparedPlan> plan, r.codec->plan({0, 0}));
          const PlanTraffic& traffic = plan->plan().traffic;
          const uint64_t sent = after.moved.payload_bytes_sent - before.moved.payload_bytes_sent;
          if (sent != after.payload_bytes_planned - before.payload_bytes_planned ||
              sent != traffic.total.payload_bytes_sent)
            return error(Code::kInternal, "{}: sent {}, planned {}", json, sent,
                         traffic.total.payload_bytes_sent);
          uint64_t between = 0;
          for (size_t peer = 0; peer < traffic.peers.size(); ++peer) {
            if (static_cast<int32_t>(peer) / 2 != comm->rank() / 2)
              between += traffic.peers[peer].payload_bytes_sent;
          }
          const uint64_t shards = std::string(hierarchy) == "leader" ? 1 : 2;
          const uint64_t servers = 2 * shards;
          const uint64_t chunk = (kElements + 512 * servers - 1) / (512 * servers) * 512;
          const bool serves = static_cast<uint64_t>(comm->rank() % 2) < shards;
          const uint64_t formula = serves ? 2 * chunk / 256 * 260 : 0;
          if (between != formula)
            return error(Code::kInternal, "{}: {} bytes between hosts, formula {}", json, between,
                         formula);
        }
        return ok_status();
      });
  EXPECT_TRUE(status.ok()) << status.text();
}

// Of any rank and in any shard: NONFINITE everywhere with the host in the text, nothing written,
// and error feedback as it was.
TEST_P(CodecHierarchy, NonfiniteInputChangesNothingAnywhere) {
  const Status status = run_world(
      hosts_of(GetParam(), {0, 0, 1, 1}), [](const std::shared_ptr<Comm>& comm) -> Status {
        for (const std::string& codec : kCodecs) {
          for (const char* hierarchy : {"sharded", "leader"}) {
            const std::string json = with(codec, hierarchy);
            SOTTO_ASSIGN(Rank r, Rank::make(comm, json));
            r.fill();
            SOTTO_TRY(r.reduce());
            for (const uint64_t at : {uint64_t{0}, kElements / 2, kElements - 1}) {
              SOTTO_ASSIGN(const Codec::Snapshot before, r.codec->snapshot());
              const std::vector<float> y = r.y;
              r.fill();
              if (comm->rank() == 3) r.x[at] = at == 0 ? std::nanf("") : INFINITY;
              const Status met = r.reduce();
              if (met.code() != Code::kNonfinite ||
                  met.text().find("a rank on the host of rank 2;") == std::string::npos)
                return error(Code::kInternal, "{}: status is {}", json, met.text());
              if (r.y != y) return error(Code::kInternal, "{}: y was written", json);
              SOTTO_ASSIGN(const Codec::Snapshot after, r.codec->snapshot());
              if (after.residual.server != before.residual.server)
                return error(Code::kInternal, "{}: the server residual changed", json);
              for (size_t i = 0; i < before.residual.worker.size(); ++i) {
                const double off = double{after.residual.worker[i]} - before.residual.worker[i];
                if (std::abs(off) > 2e-6)
                  return error(Code::kInternal, "{}: worker residual {} is off by {}", json, i,
                               off);
              }
            }
            r.fill();
            SOTTO_TRY(r.reduce());
          }
        }
        return ok_status();
      });
  EXPECT_TRUE(status.ok()) << status.text();
}

INSTANTIATE_TEST_SUITE_P(Worlds, CodecHierarchy, ::testing::ValuesIn(world_kinds()),
                         [](const auto& p) { return p.param; });

TEST(CodecHierarchyAlone, StateContinuesAndIsOfItsHierarchy) {
  const auto body = [](const std::shared_ptr<Comm>& comm) -> Status {
    for (const char* hierarchy : {"sharded", "leader"}) {
      const std::string json = with(kCodecs[1], hierarchy);
      SOTTO_ASSIGN(Rank one, Rank::make(comm, json));
      SOTTO_ASSIGN(Rank two, Rank::make(comm, json));
      SOTTO_ASSIGN(Rank flat, Rank::make(comm, with(kCodecs[1], "flat")));
      for (int call = 0; call < 2; ++call) {
        one.fill();
        SOTTO_TRY(one.reduce());
      }
      SOTTO_ASSIGN(const std::vector<std::byte> blob, export_state(*one.codec, StateMode::kExact));
      SOTTO_TRY(import_state(*two.codec, StateMode::kExact, blob));
      one.fill();
      two.x = one.x;
      SOTTO_TRY(one.reduce());
      SOTTO_TRY(two.reduce());
      if (one.y != two.y) return error(Code::kInternal, "{}: a restored state differs", json);
      // n / L elements of a worker and n / (L M) of a server.
      SOTTO_ASSIGN(const Codec::Snapshot s, one.codec->snapshot());
      const bool leader = std::string(hierarchy) == "leader";
      const bool serves = !leader || comm->rank() % 2 == 0;
      const size_t most = leader ? kElements : kElements / 2 + 1024;
      if (serves ? s.residual.worker.empty() || s.residual.worker.size() > most
                 : !s.residual.worker.empty() || !s.residual.server.empty())
        return error(Code::kInternal, "{}: {} values of a worker", json, s.residual.worker.size());
      const Status met = import_state(*flat.codec, StateMode::kExact, blob);
      const std::string wanted = fmt::format(
          "the error feedback is of the hierarchy \"{}, hosts 0 0 1 1\", here it is \"flat\"",
          hierarchy);
      if (met.code() != Code::kInvalidArgument || met.text().find(wanted) == std::string::npos)
        return error(Code::kInternal, "{}: status is {}", json, met.text());
      // The mean is of no hierarchy.
      SOTTO_ASSIGN(const std::vector<std::byte> mean, export_state(*one.codec, StateMode::kMean));
      SOTTO_TRY(import_state(*flat.codec, StateMode::kMean, mean));
      SOTTO_ASSIGN(const MeanErrorFeedback a, one.codec->mean());
      SOTTO_ASSIGN(const MeanErrorFeedback b, flat.codec->mean());
      for (size_t i = 0; i < kElements; ++i) {
        if (std::abs(a.worker[i] - b.worker[i]) > 1e-6f || a.server[i] != b.server[i])
          return error(Code::kInternal, "{}: mean error {} differs", json, i);
      }
    }
    return ok_status();
  };
  const Status status = run_world(hosts_of("inproc", {0, 0, 1, 1}), body);
  EXPECT_TRUE(status.ok()) << status.text();
}

TEST(CodecHierarchyAlone, UnevenHostsAreRefusedUnlessItIsAuto) {
  const auto body = [](const std::shared_ptr<Comm>& comm) -> Status {
    const Status met = Rank::make(comm, with(kCodecs[0], "sharded")).status();
    if (met.text().find(
            "hierarchy \"sharded\": the host of rank 0 has 2 ranks of the comm, that of "
            "rank 2 has 1; all hosts need equally many") == std::string::npos)
      return error(Code::kInternal, "status is {}", met.text());
    SOTTO_ASSIGN(Rank automatic, Rank::make(comm, with(kCodecs[0], "auto")));
    SOTTO_ASSIGN(Rank flat, Rank::make(comm, with(kCodecs[0], "flat")));
    automatic.fill();
    flat.x = automatic.x;
    SOTTO_TRY(automatic.reduce());
    SOTTO_TRY(flat.reduce());
    return automatic.y == flat.y ? ok_status() : error(Code::kInternal, "auto is not flat");
  };
  const Status status = run_world(hosts_of("inproc", {0, 0, 1}), body);
  EXPECT_TRUE(status.ok()) << status.text();
}

TEST(CodecHierarchyAlone, BadSettingsAreNamed) {
  const auto body = [](const std::shared_ptr<Comm>& comm) -> Status {
    const std::pair<std::string, std::string> cases[] = {
        {R"({"type": "onebit", "hierarchy": "tree"})",
         "codec.hierarchy: found \"tree\", allowed is one of flat|sharded|leader|auto"},
        {R"({"type": "onebit", "mode": "compat", "hierarchy": "leader"})",
         "codec.hierarchy: in mode compat: found leader, allowed is flat"},
        {R"({"type": "topk", "hierarchy": "sharded"})", "codec.hierarchy"},
    };
    for (const auto& [json, text] : cases) {
      const Status met = Rank::make(comm, json).status();
      if (met.text().find(text) == std::string::npos)
        return error(Code::kInternal, "{}: status is {}", json, met.text());
    }
    return ok_status();
  };
  const Status status = run_world(world_of("inproc", 1), body);
  EXPECT_TRUE(status.ok()) << status.text();
}

}  // namespace
}  // namespace sotto::test
