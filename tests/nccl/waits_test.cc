// Every wait between streams that collectives, training steps, rounds of overlaps and boundaries of
// outer steps over NCCL make is needed: without it, and with what is waited for made late, the
// result is another one. Ranks are processes, so that the streams of one have numbers of their own;
// waits are left out on rank 0, and show on either.
#include <array>
#include <filesystem>
#include <map>
#include <memory>
#include <set>

#include "tests/nccl/waits_work.h"
#include "tests/support/sanitized.h"
#include "tests/support/temp_dir.h"

namespace sotto::test {
namespace {

constexpr WorkKind kKinds[] = {
    {"OneBit", R"({"type": "onebit"})", nullptr, 4, {}, {}, "all"},
    {"Int8", R"({"type": "int8"})", nullptr, 4, {}, {}, "all", 5, nullptr, {3, 7, 9}},
    {"AdamW",
     nullptr,
     R"({"optimizer": {"type": "AdamW", "params": {"lr": 0.01}}, "gradient_clipping": 1.0})",
     4,
     {},
     {-1, 0, 1, -1}},
    {"AdamWNative",
     nullptr,
     R"({"optimizer": {"type": "AdamW", "params": {"lr": 0.01}}, "gradient_clipping": 1.0})",
     4,
     {},
     {-1, 0, 1, -1},
     "all",
     4},
    {"SgdNative",  // with flags
     nullptr,
     R"({"optimizer": {"type": "SGD", "params": {"lr": 0.01, "momentum": 0.9}}})",
     4,
     {},
     {-1, 0, 1, -1},
     "all"},
    {"OneBitAdam",
     nullptr,
     R"({"optimizer": {"type": "OneBitAdam", "params": {"lr": 0.01, "freeze_step": 3}}})",
     kMaxRounds,
     {0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 2},
     {-1, 0, 1, -1, 0, 1, -1, -1, 0, 1, -1}},
    {"OneBitLamb",
     nullptr,
     R"({"optimizer": {"type": "OneBitLamb", "params": {"lr": 0.01, "freeze_step": 3}}})",
     kMaxRounds,
     {0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 2},
     {-1, 0, 1, -1, 0, 1, -1, -1, 0, 1, -1}},
    // A hold, updates with averages in full precision, those with a codec's.
    {"OuterLate",
     nullptr,
     nullptr,
     8,
     {0, 1, 1, 2, 3, 3, 3, 3},
     {},
     "exact",
     5,
     R"({"preset": "co2", "period": 1, "delay": 1, "codec": "onebit", "dense_rounds": 4})",
     {9, 8, 12}},
    {"OuterNow",
     nullptr,
     nullptr,
     4,
     {},
     {},
     "exact",
     5,
     R"({"preset": "diloco", "period": 1, "delay": 0, "codec": "int8", "dense_rounds": 0})",
     {9, 8, 7}},
    // A bucket for each gradient.
    {"Overlap",
     nullptr,
     nullptr,
     4,
     {},
     {-1, -1, -1, -1},
     "exact",
     5,
     nullptr,
     {},
     R"({"first_bucket_bytes": 4, "bucket_bytes": 4})",
     {0, 1, 2, 0}},
    {"OverlapNative",
     nullptr,
     nullptr,
     4,
     {},
     {-1, -1, -1, -1},
     "all",
     5,
     nullptr,
     {},
     R"({"first_bucket_bytes": 4, "bucket_bytes": 4})",
     {0, 1, 2, 0}},
    {"OverlapInt8",
     nullptr,
     nullptr,
     6,
     {},
     {-1, 0, 1, -1, -1, -1},
     "exact",
     5,
     nullptr,
     {4, 8, 4},
     R"({"first_bucket_bytes": 4, "bucket_bytes": 4, "codec": "int8"})",
     {0, 0, 0, 1, 2, 0}},
    {"OverlapAdamW",
     nullptr,
     R"({"optimizer": {"type": "AdamW", "params": {"lr": 0.01}}})",
     6,
     {},
     {-1, 0, 1, -1, -1, -1},
     "exact",
     5,
     nullptr,
     {},
     R"({"first_bucket_bytes": 4, "bucket_bytes": 4})",
     {0, 0, 0, 1, 2, 0}},
};

class Session {
 public:
  // timeout_us: of operations; 0 is the comm's.
  Session(const WorkKind& kind, const ProcessRank& place, int64_t max_delay_us, uint64_t seed,
          int64_t timeout_us = 0)
      : kind_(kind), place_(place), timeout_us_(timeout_us) {
    fake_cuda::clear_faults();
    fake_cuda::configure({.max_delay_us = max_delay_us, .seed = seed});
  }

  // `before` and `after` each round. The bits, or what has gone wrong; on rank 0 with a hash of
  // rank 1's behind them, since what is sent too early shows there alone.
  std::string run(const std::function<void(int round)>& before,
                  const std::function<void(int round)>& after) {
    Rank r(place_, 60'000'000);
    ok(r.created, "sotto_comm_create");
    std::string result;
    {
      const std::unique_ptr<Work> work = make_work(kind_, place_, r.comm, timeout_us_);
      try {
        for (int round = 0; round < kind_.rounds; ++round) {
          OK(sotto_barrier(r.comm, nullptr, nullptr));
          before(round);
          result += work->round(round);
          after(round);
        }
        result += work->seen();
      } catch (const std::exception& failed) {
        result = std::string("failed: ") + failed.what();
        (void)sotto_comm_abort(r.comm, "a round has failed");
      }
      work->end();
    }
    (void)sotto_comm_destroy(r.comm);
    OK(sotto_context_destroy(r.context));
    require_nothing_left();
    uint64_t of_rank_1 = std::hash<std::string>()(result);
    const std::string at = place_.argument + "/result";
    if (place_.rank == 1) {
      publish(at, &of_rank_1, sizeof of_rank_1);
    } else {
      require(await_published(at, &of_rank_1, sizeof of_rank_1, 60'000), "rank 1 has no result");
      result += std::to_string(of_rank_1);
    }
    return result;
  }

 private:
  const WorkKind& kind_;
  const ProcessRank& place_;
  const int64_t timeout_us_;
};

// A wait as every round of a stage has it: connections are made in the first one alone.
struct Site {
  int stage;
  uint32_t stream, awaited;
  uint64_t record;  // of those of the round
  auto operator<=>(const Site&) const = default;
};
using Sites = std::map<Site, std::set<int>>;  // in which rounds it was seen

constexpr uint32_t kStreams = 12;

// Which waits are made depends on how far the streams are.
void add_waits(const WorkKind& kind, const ProcessRank& place, uint64_t seed, Sites* sites) {
  Session session(kind, place, 500, seed);
  std::vector<size_t> first;
  std::vector<std::array<uint64_t, kStreams>> records;
  (void)session.run(
      [&](int) {
        first.push_back(fake_cuda::waits());
        records.emplace_back();
        for (uint32_t s = 0; s < kStreams; ++s) records.back()[s] = fake_cuda::records(s);
      },
      [](int) {});
  const std::vector<fake_cuda::Wait> made = fake_cuda::waits_made();
  first.push_back(made.size());
  for (size_t round = 0; round + 1 < first.size(); ++round) {
    for (size_t k = first[round]; k < first[round + 1]; ++k) {
      const fake_cuda::Wait& w = made[k];
      (*sites)[{kind.stage[round], w.stream, w.awaited, w.record - records[round].at(w.awaited)}]
          .insert(static_cast<int>(round));
    }
  }
}

// The sessions of the two ranks, each in a folder of its own.
class Sessions {
 public:
  explicit Sessions(const ProcessRank& self) : self_(self) {}
  // Rank 0 says whether there is one more.
  bool more(bool is) {
    place_ = {self_.rank, self_.size, self_.argument + "/" + std::to_string(count_++), {}};
    std::filesystem::create_directories(place_.argument);
    char word = is ? 1 : 0;
    if (self_.rank == 0) {
      publish(place_.argument + "/more", &word, 1);
    } else {
      require(await_published(place_.argument + "/more", &word, 1, 60'000), "word of rank 0");
    }
    return word == 1;
  }
  const ProcessRank& next() {
    more(true);
    return place_;
  }
  const ProcessRank& place() const { return place_; }

 private:
  const ProcessRank& self_;
  ProcessRank place_;
  int count_ = 0;
};

void nothing(int) {}

// The result without the wait and with the awaited stream late in one round.
std::string left_out(const WorkKind& kind, const ProcessRank& place, const Site& site, int round,
                     int64_t late_us) {
  Session session(kind, place, 0, 1, 2'000'000);  // without it an operation may hang
  return session.run(
      [&](int now) {
        const uint64_t first = fake_cuda::records(site.awaited);
        if (now == round) fake_cuda::drop_wait({site.stream, site.awaited, first + site.record});
        fake_cuda::make_late(site.awaited, now == round ? late_us : 0);
      },
      [&](int) { fake_cuda::make_late(site.awaited, 0); });
}

// All rounds of the stage, those first in which it was seen. It may have been seen only in some
// that change nothing; one that says of withdrawals shows only where a rank withdraws.
std::vector<int> rounds_to_try(const WorkKind& kind, const Site& site, const std::set<int>& seen) {
  std::vector<int> rounds(seen.begin(), seen.end());
  for (int round = 0; round < kind.rounds; ++round) {
    if (kind.stage[round] == site.stage && !seen.contains(round)) rounds.push_back(round);
  }
  return rounds;
}

const WorkKind& kind_named(const char* name) {
  for (const WorkKind& kind : kKinds) {
    if (name != nullptr && std::string(kind.name) == name) return kind;
  }
  throw RankError("TEST_KIND names nothing");
}

SOTTO_RANK_MAIN(nccl_waits) {
  const WorkKind& kind = kind_named(std::getenv("TEST_KIND"));
  Sessions sessions(self);
  if (self.rank != 0) {
    while (sessions.more(true)) (void)Session(kind, sessions.place(), 0, 1).run(nothing, nothing);
    return 0;
  }
  const std::string want = Session(kind, sessions.next(), 0, 1).run(nothing, nothing);
  require(want.rfind("failed", 0) != 0, want);
  require(want.size() >= static_cast<size_t>(kind.rounds) * kWorkElements * 4,
          "a result is missing");
  Sites sites;
  for (uint64_t seed = 1; seed <= 3; ++seed) add_waits(kind, sessions.next(), seed, &sites);
  std::string text;
  int needed = 0;
  for (const auto& [site, seen] : sites) {
    if (site.stream == kind.unseen.stream && site.awaited == kind.unseen.awaited &&
        site.record >= kind.unseen.record)
      continue;
    bool shows = false;
    const std::vector<int> rounds = rounds_to_try(kind, site, seen);
    std::set<int> without;  // rounds in which it was left out
    // The later ones are for a machine with other work.
    for (const int64_t late_us : {5'000, 50'000, 300'000}) {
      for (const int round : rounds) {
        if (shows) break;
        shows = left_out(kind, sessions.next(), site, round, late_us) != want;
        if (fake_cuda::waits_dropped() > 0) without.insert(round);
      }
    }
    if (shows) ++needed;
    // Which record is awaited may depend on time: then it was not left out.
    if (!shows && without.size() == rounds.size()) {
      text += fmt::format("; stage {}, stream {} for record {} of stream {} is not needed",
                          site.stage, site.stream, site.record, site.awaited);
    }
  }
  sessions.more(false);
  self.say(fmt::format("{} waits are needed{}", needed, text));
  return 0;
}

class NcclWaits : public testing::TestWithParam<WorkKind> {};

TEST_P(NcclWaits, EveryWaitOfAStreamIsNeeded) {
  if (kThreadSanitizer) GTEST_SKIP() << "what comes too early is a race, which ends the process";
  const TempDir directory;
  Processes ranks("nccl_waits", 2,
                  {.argument = directory.path(),
                   .environment = {"SOTTO_TRANSPORT=nccl", "FAKE_NCCL_MISMATCH=hang",
                                   std::string("SOTTO_NCCL_NATIVE=") + GetParam().native,
                                   std::string("TEST_KIND=") + GetParam().name},
                   .timeout_ms = 600'000});
  ranks.wait_all();
  ASSERT_EQ(ranks.failure(), "") << ranks.prefixed_output();
  const std::string text = ranks.message(0);
  EXPECT_GE(std::atoi(text.c_str()), GetParam().least) << text;
  EXPECT_EQ(text.find("is not needed"), std::string::npos) << text;
}

INSTANTIATE_TEST_SUITE_P(Kinds, NcclWaits, testing::ValuesIn(kKinds),
                         [](const auto& of) { return std::string(of.param.name); });

}  // namespace
}  // namespace sotto::test
