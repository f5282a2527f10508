// Outer steps whose averages have two levels (sotto.hierarchy), on every kind of world: state that
// continues bit for bit, ranks left out, what one host and hosts of one rank are, and bytes. That
// parameters are the right ones is the numpy model's to say (tests/model).
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "core/outer/outer.h"
#include "core/state/outer_state.h"
#include "tests/support/core_ranks.h"
#include "tests/support/ordered_transport.h"
#include "tests/support/small_model.h"

namespace sotto::test {
namespace {

// Of payloads in full precision, and compressed ones that come a period late or in the middle of
// it.
constexpr const char* kOuter[] = {
    R"("preset": "slowmo", "period": 2)",
    R"("preset": "co2", "period": 3, "codec": {"type": "onebit", "chunk_align": 64})",
    R"("preset": "co2", "period": 3, "delay": 1, "codec": "int8", "dense_rounds": 1)"};

std::string config(const char* outer, const char* hierarchy) {
  return fmt::format(R"({{"sotto": {{"hierarchy": "{}", "outer": {{{}}}}}}})", hierarchy, outer);
}

WorldOptions on_hosts(const std::string& kind, const std::vector<int>& hosts) {
  WorldOptions world = world_of(kind, static_cast<int32_t>(hosts.size()));
  world.rank_params = [hosts](int32_t rank, Params* params) {
    params->host_id = fmt::format("host {}", hosts[static_cast<size_t>(rank)]);
  };
  return world;
}

struct Rank {
  static Result<Rank> make(const std::shared_ptr<Comm>& comm, const std::string& json) {
    Rank r{std::make_unique<SmallModel>(comm->rank()), nullptr};
    SOTTO_ASSIGN(r.outer, Outer::create(comm, json, r.model->specs()));
    return r;
  }
  Status finish(const Result<OpRef>& op) const {
    SOTTO_TRY(op.status());
    return outer->comm()->engine().wait(*op, -1);
  }
  // Inner step k, then what follows on it.
  Status step(uint64_t k) {
    std::mt19937 random(static_cast<uint32_t>(k * 16 + static_cast<uint64_t>(model->rank)));
    std::normal_distribution<float> normal(0, 0.01f);
    for (float& x : model->p) x += normal(random);
    return finish(outer->step({}));
  }
  Status flush() { return finish(outer->flush({})); }
  std::string bytes() const { return bytes_of(model->p); }

  std::unique_ptr<SmallModel> model;
  std::shared_ptr<Outer> outer;
};

Status same_everywhere(Comm& comm, const Rank& rank) {
  SOTTO_ASSIGN(const std::vector<std::string> all, comm.exchange(rank.bytes()));
  for (const std::string& other : all) {
    if (other != all[0]) return error(Code::kInternal, "parameters differ between ranks");
  }
  for (const float x : rank.model->p) {
    if (!std::isfinite(x)) return error(Code::kInternal, "parameters have {}", x);
  }
  return ok_status();
}

// Those of other ranks may have another length.
Result<std::string> of_rank_0(Comm& comm, const std::vector<std::byte>& blob) {
  const auto sized = [](const void* data, uint64_t bytes) {
    return std::string(static_cast<const char*>(data), bytes);
  };
  const uint64_t mine = blob.size();
  SOTTO_ASSIGN(const std::vector<std::string> sizes, comm.exchange(sized(&mine, sizeof mine)));
  uint64_t first = 0, most = 0;
  std::memcpy(&first, sizes[0].data(), sizeof first);
  for (const std::string& size : sizes) {
    uint64_t bytes = 0;
    std::memcpy(&bytes, size.data(), sizeof bytes);
    most = std::max(most, bytes);
  }
  std::string padded = sized(blob.data(), mine);
  padded.resize(most);
  SOTTO_ASSIGN(const std::vector<std::string> all, comm.exchange(padded));
  return all[0].substr(0, first);
}

class OuterHierarchy : public ::testing::TestWithParam<std::string> {
  const CallsOutOfOrder slices_;

 protected:
  void each(const std::vector<int>& hosts,
            const std::function<Status(const std::shared_ptr<Comm>&, const char* outer,
                                       const char* hierarchy)>& body) {
    for (const char* outer : kOuter) {
      for (const char* hierarchy : {"sharded", "leader"}) {
        const Status status = run_world(
            on_hosts(GetParam(), hosts),
            [&](const std::shared_ptr<Comm>& comm) { return body(comm, outer, hierarchy); });
        EXPECT_TRUE(status.ok()) << outer << hierarchy << ": " << status.text();
      }
    }
  }
};

// At every step of two rounds, with averages under way.
TEST_P(OuterHierarchy, ExactRestoreContinuesBitForBit) {
  each({0, 1, 1, 0},
       [](const std::shared_ptr<Comm>& comm, const char* outer, const char* hierarchy) -> Status {
         SOTTO_ASSIGN(Rank whole, Rank::make(comm, config(outer, hierarchy)));
         SOTTO_ASSIGN(Rank second, Rank::make(comm, config(outer, hierarchy)));
         for (uint64_t k = 0; k < 8; ++k) {
           SOTTO_TRY(whole.step(k));
           SOTTO_ASSIGN(const std::vector<std::byte> blob,
                        export_outer(*whole.outer, StateErrors::kOwn));
           SOTTO_ASSIGN(const OuterSnapshot snapshot, decode_outer(blob));
           SOTTO_TRY(second.outer->restore(snapshot, true));
           if (second.bytes() != whole.bytes())
             return error(Code::kInternal, "step {}: restored", k);
           if (k % 2 == 0) continue;
           ++k;
           SOTTO_TRY(whole.step(k));
           SOTTO_TRY(second.step(k));
           if (second.bytes() != whole.bytes()) return error(Code::kInternal, "behind step {}", k);
         }
         SOTTO_ASSIGN(Rank flat, Rank::make(comm, config(outer, "flat")));
         SOTTO_ASSIGN(const std::vector<std::byte> blob,
                      export_outer(*whole.outer, StateErrors::kOwn));
         SOTTO_ASSIGN(const OuterSnapshot snapshot, decode_outer(blob));
         const Status met = flat.outer->restore(snapshot, true);
         const bool codes = std::string_view(outer).find("codec") != std::string_view::npos;
         if (met.ok() == codes ||
             (codes && met.text().find("is of the hierarchy") == std::string::npos))
           return error(Code::kInternal, "in one level: {}", met.text());
         // What ranks have alike goes everywhere, whatever padding is behind it.
         SOTTO_ASSIGN(const std::string common, of_rank_0(*comm, blob));
         SOTTO_ASSIGN(const OuterSnapshot first, decode_outer(std::as_bytes(std::span(common))));
         SOTTO_TRY(flat.outer->restore(first, false).with_prefix("common, in one level"));
         for (uint64_t k = 8; k < 12; ++k) SOTTO_TRY(flat.step(k));
         SOTTO_TRY(flat.flush());
         SOTTO_TRY(same_everywhere(*comm, flat));
         SOTTO_TRY(whole.flush());
         SOTTO_TRY(same_everywhere(*comm, whole));
         for (const Rank* r : {&whole, &second, &flat}) r->outer->close();
         return ok_status();
       });
}

// A rank whose parameters are not finite is left out, and goes on with the others' average.
TEST_P(OuterHierarchy, LeavesOutARankThatIsNotFinite) {
  each({0, 0, 1, 1},
       [](const std::shared_ptr<Comm>& comm, const char* outer, const char* hierarchy) -> Status {
         SOTTO_ASSIGN(Rank r, Rank::make(comm, config(outer, hierarchy)));
         for (uint64_t k = 0; k < 12; ++k) {
           if (k % 3 == 1 && comm->rank() == static_cast<int32_t>(k / 3))
             r.model->p[k] = std::numeric_limits<float>::quiet_NaN();
           SOTTO_TRY(r.step(k));
         }
         SOTTO_TRY(r.flush());
         SOTTO_TRY(same_everywhere(*comm, r));
         r.outer->close();
         return ok_status();
       });
}

// One host averages in full precision, whatever the codec; hosts of one rank are one level.
TEST_P(OuterHierarchy, OneHostAndHostsOfOneRankAreFlat) {
  for (const bool one_host : {true, false}) {
    const std::vector<int> hosts = one_host ? std::vector<int>{0, 0, 0} : std::vector<int>{0, 1, 2};
    each(hosts,
         [one_host](const std::shared_ptr<Comm>& comm, const char* outer,
                    const char* hierarchy) -> Status {
           SOTTO_ASSIGN(Rank levels, Rank::make(comm, config(outer, hierarchy)));
           std::string flat(outer);
           const size_t codec = flat.find(R"(, "codec")");
           if (one_host && codec != std::string::npos) flat.resize(codec);
           SOTTO_ASSIGN(Rank plain, Rank::make(comm, config(flat.c_str(), "flat")));
           for (uint64_t k = 0; k < 7; ++k) {
             SOTTO_TRY(levels.step(k));
             SOTTO_TRY(plain.step(k));
             if (levels.bytes() != plain.bytes())
               return error(Code::kInternal, "behind step {}", k);
           }
           levels.outer->close();
           plain.outer->close();
           return ok_status();
         });
  }
}

INSTANTIATE_TEST_SUITE_P(Worlds, OuterHierarchy, ::testing::ValuesIn(world_kinds()),
                         [](const auto& p) { return p.param; });

TEST(OuterHierarchyErrors, FreshnessWithACodecIsOfOneLevel) {
  const std::string json = config(R"("preset": "eager_diloco", "codec": "int8")", "auto");
  for (const bool two : {false, true}) {
    const WorldOptions world =
        on_hosts("inproc", two ? std::vector{0, 0, 1, 1} : std::vector{0, 0});
    const Status status = run_world(
        world, [&](const std::shared_ptr<Comm>& comm) { return Rank::make(comm, json).status(); });
    EXPECT_EQ(status.ok(), !two);
    EXPECT_EQ(status.text().find("outer.freshness 0.25 (supported") != std::string::npos, two);
  }
}

TEST(OuterHierarchyErrors, UnevenHostsAndRanksThatDisagreeAreNamed) {
  const auto text_of = [](const std::vector<int>& hosts, bool differ) {
    std::string text;
    const Status status =
        run_world(on_hosts("inproc", hosts), [&](const std::shared_ptr<Comm>& comm) -> Status {
          const char* mine = differ && comm->rank() == 1 ? "leader" : "sharded";
          const Status met = Rank::make(comm, config(kOuter[0], mine)).status();
          if (comm->rank() == 0) text = met.text();
          return met.ok() ? error(Code::kInternal, "created") : ok_status();
        });
    EXPECT_TRUE(status.ok()) << status.text();
    return text;
  };
  EXPECT_NE(text_of({0, 0, 1}, false).find("hierarchy \"sharded\": the host of rank 0 has 2 ranks"),
            std::string::npos);
  const std::string differs = text_of({0, 0, 1, 1}, true);
  EXPECT_NE(differs.find("sotto.hierarchy"), std::string::npos) << differs;
}

}  // namespace
}  // namespace sotto::test
