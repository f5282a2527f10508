// Every wait between streams that collectives, training steps and boundaries of outer steps over
// NCCL make is needed: without it, and with what is waited for made late, the result is another
// one. Ranks are processes, so that the streams of one have numbers of their own; waits are left
// out on rank 0, and show on either.
#include <array>
#include <cmath>
#include <filesystem>
#include <map>
#include <memory>

#include "tests/cuda/device_memory.h"
#include "tests/nccl/process_rank.h"
#include "tests/support/sanitized.h"
#include "tests/support/temp_dir.h"

namespace sotto::test {
namespace {

constexpr size_t kN = 9000;
constexpr int kMaxRounds = 11;

// What the ranks do in a session, round by round.
struct Kind {
  const char* name;
  const char* codec;      // of a compressed mean beside other collectives
  const char* optimizer;  // or of a training
  int rounds;
  // Rounds of one stage have the same plans, and so the same waits.
  int stage[kMaxRounds];
  // Which rank's gradients have a NaN, in what the other rank adds up.
  int nan_of_rank[kMaxRounds];
  const char* native = "exact";  // SOTTO_NCCL_NATIVE
  int least = 5;                 // waits that there are
  const char* outer = nullptr;   // or of outer steps
  // Needed, but not to be seen: lane 1 waits for messages of rank 1 that say something only of
  // values that are not finite, from this record of that stream on. Before it may be records for
  // the caller's stream.
  struct {
    uint32_t stream = 0, awaited = 0;
    uint64_t record = 0;
  } unseen = {};
};
constexpr Kind kKinds[] = {
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
};

float number(size_t i, int rank, int round) {
  return static_cast<float>((i * 7 + static_cast<size_t>(rank * 5 + round * 3)) % 41) - 20.0f;
}

// One rank's part of a session. What it brings on rank 0 is compared.
class Work {
 public:
  virtual ~Work() = default;
  // What it says at once.
  virtual std::string round(int round) = 0;
  // What the caller's stream has found behind each operation, all rounds together.
  virtual std::string seen() = 0;
  // Ends what has been started.
  virtual void end() = 0;
};

// In each round, at once: a sum of NCCL's own, a compressed mean, one of the host's tensors in
// between, and the caller's stream in front and behind.
class Collectives final : public Work {
 public:
  Collectives(const Kind& kind, const ProcessRank& place, sotto_comm* comm, int64_t timeout_us)
      : kind_(kind), place_(place), comm_(comm), timeout_us_(timeout_us) {
    s_ = tensors_.add(sum_);
    m_ = tensors_.add(mean_);
    for (int round = 0; round < kind_.rounds; ++round) {
      for (auto* all : {&given_, &seen_sum_, &seen_mean_}) {
        (*all)[round].resize(kN);
        for (size_t i = 0; i < kN; ++i) (*all)[round][i] = number(i, place_.rank, round);
        tensors_.add((*all)[round]);
      }
    }
    tensors_.sync();
    OK(sotto_codec_create(comm_, kind.codec, &m_, 1, &codec_));
  }
  ~Collectives() override { (void)sotto_codec_destroy(codec_); }

  std::string round(int round) override {
    tensors_.copy(sum_, given_[round]);
    tensors_.copy(mean_, given_[round]);
    std::vector<int32_t> on_host(3, place_.rank + round);
    const sotto_buffer h = buffer(on_host);
    sotto_call plain = tensors_.call();
    plain.timeout_us = timeout_us_;
    sotto_call compressed = plain;
    compressed.codec = codec_;
    OK(sotto_all_reduce(comm_, &s_, &s_, 1, &plain, &ops_.emplace_back()));
    OK(sotto_all_reduce(comm_, &h, &h, 1, nullptr, &ops_.emplace_back()));
    OK(sotto_all_reduce(comm_, &m_, &m_, 1, &compressed, &ops_.emplace_back()));
    OK(sotto_op_stream_wait(ops_[0], tensors_.stream()));
    tensors_.copy(seen_sum_[round], sum_);
    OK(sotto_op_stream_wait(ops_[2], tensors_.stream()));
    tensors_.copy(seen_mean_[round], mean_);
    for (sotto_op* op : ops_) OK(sotto_op_wait(op, -1));
    for (sotto_op* op : std::exchange(ops_, {})) OK(sotto_op_release(op));
    tensors_.sync();
    return bytes_of(on_host);
  }
  std::string seen() override {
    tensors_.download();
    std::string all;
    for (int round = 0; round < kind_.rounds; ++round)
      all += bytes_of(seen_sum_[round]) + bytes_of(seen_mean_[round]);
    return all;
  }
  void end() override {
    for (sotto_op* op : ops_) {
      (void)sotto_op_wait(op, -1);
      OK(sotto_op_release(op));
    }
  }

 private:
  const Kind& kind_;
  const ProcessRank& place_;
  sotto_comm* comm_;
  const int64_t timeout_us_;
  Tensors tensors_{Where::kCuda};
  std::vector<float> sum_ = std::vector<float>(kN), mean_ = std::vector<float>(kN);
  sotto_buffer s_ = {}, m_ = {};
  std::vector<float> given_[kMaxRounds], seen_sum_[kMaxRounds], seen_mean_[kMaxRounds];
  sotto_codec* codec_ = nullptr;
  std::vector<sotto_op*> ops_;
};

// A step per round, the caller's stream in front and behind.
class Training final : public Work {
 public:
  Training(const Kind& kind, const ProcessRank& place, sotto_comm* comm, int64_t timeout_us)
      : kind_(kind), timeout_us_(timeout_us) {
    sotto_param params[2] = {};
    for (size_t t = 0; t < 2; ++t) {
      p_[t].resize(kCounts[t]);
      g_[t].resize(kCounts[t]);
      for (size_t i = 0; i < kCounts[t]; ++i) p_[t][i] = 0.01f * static_cast<float>(i % 97) - 0.3f;
      params[t].struct_size = sizeof(sotto_param);
      params[t].param = tensors_.add(p_[t]);
      params[t].grad = tensors_.add(g_[t]);
      for (int round = 0; round < kind_.rounds; ++round) {
        given_[round][t].resize(kCounts[t]);
        for (size_t i = 0; i < kCounts[t]; ++i) given_[round][t][i] = number(i, place.rank, round);
        if (t == 0 && kind_.nan_of_rank[round] == place.rank)
          given_[round][t][place.rank == 0 ? kCounts[t] - 5 : 5] = NAN;
        seen_[round][t].resize(kCounts[t]);
        tensors_.add(given_[round][t]);
        tensors_.add(seen_[round][t]);
      }
    }
    tensors_.sync();
    OK(sotto_optim_create(comm, kind.optimizer, params, 2, &optim_));
  }
  ~Training() override { (void)sotto_optim_destroy(optim_); }

  std::string round(int round) override {
    for (size_t t = 0; t < 2; ++t) tensors_.copy(g_[t], given_[round][t]);
    sotto_call call = tensors_.call();
    call.timeout_us = timeout_us_;
    OK(sotto_optim_step(optim_, &call, &op_));
    OK(sotto_op_stream_wait(op_, tensors_.stream()));
    for (size_t t = 0; t < 2; ++t) tensors_.copy(seen_[round][t], p_[t]);
    const sotto_status status = sotto_op_wait(op_, -1);
    const std::string says = status == SOTTO_OK ? "" : sotto_last_error();
    OK(sotto_op_release(std::exchange(op_, nullptr)));
    require(status == (kind_.nan_of_rank[round] < 0 ? SOTTO_OK : SOTTO_E_NONFINITE),
            fmt::format("step {}: {} {}", round, sotto_status_name(status), says));
    tensors_.sync();
    return says;
  }
  std::string seen() override {
    tensors_.download();
    std::string all;
    for (int round = 0; round < kind_.rounds; ++round)
      all += bytes_of(seen_[round][0]) + bytes_of(seen_[round][1]);
    return all + bytes_of(p_[0]) + bytes_of(p_[1]);
  }
  void end() override {
    if (op_ == nullptr) return;
    (void)sotto_op_wait(op_, -1);
    OK(sotto_op_release(op_));
  }

 private:
  static constexpr size_t kCounts[2] = {kN, 17};

  const Kind& kind_;
  const int64_t timeout_us_;
  Tensors tensors_{Where::kCuda};
  std::vector<float> p_[2], g_[2], given_[kMaxRounds][2], seen_[kMaxRounds][2];
  sotto_optim* optim_ = nullptr;
  sotto_op* op_ = nullptr;
};

// An inner step and what follows on it per round, the caller's stream in front and behind. A round
// sees the end of the average that it has launched.
class OuterSteps final : public Work {
 public:
  OuterSteps(const Kind& kind, const ProcessRank& place, sotto_comm* comm, int64_t timeout_us)
      : kind_(kind), place_(place), timeout_us_(timeout_us) {
    for (size_t i = 0; i < kN; ++i) p_[i] = 0.01f * static_cast<float>(i % 97) - 0.3f;
    sotto_param param = {};
    param.struct_size = sizeof(sotto_param);
    param.param = tensors_.add(p_);
    for (int round = 0; round < kind_.rounds; ++round) {
      given_[round].resize(kN);
      seen_[round].resize(kN);
      for (size_t i = 0; i < kN; ++i) given_[round][i] = number(i, place.rank, round);
      tensors_.add(given_[round]);
      tensors_.add(seen_[round]);
    }
    tensors_.sync();
    OK(sotto_outer_create(comm, kind.outer, &param, 1, &outer_));
  }
  ~OuterSteps() override { (void)sotto_outer_destroy(outer_); }

  std::string round(int round) override {
    tensors_.copy(p_, given_[round]);
    sotto_call call = tensors_.call();
    call.timeout_us = timeout_us_;
    OK(sotto_outer_vote(outer_, 1u << (2 * round + place_.rank)));  // goes with the average
    OK(sotto_outer_step(outer_, &call, &op_));
    OK(sotto_op_stream_wait(op_, tensors_.stream()));
    tensors_.copy(seen_[round], p_);
    OK(sotto_op_wait(op_, -1));
    OK(sotto_op_release(std::exchange(op_, nullptr)));
    uint64_t length = 0;
    OK(sotto_outer_state_export(outer_, SOTTO_STATE_EXACT, nullptr, 0, &length));
    tensors_.sync();
    sotto_outer_info info = SOTTO_OUTER_INFO_INIT;
    OK(sotto_outer_get_info(outer_, &info));
    return fmt::format("{} {} {};", info.votes, info.delta_norm, info.step_norm);
  }
  std::string seen() override {
    tensors_.download();
    std::string all;
    for (int round = 0; round < kind_.rounds; ++round) all += bytes_of(seen_[round]);
    return all;
  }
  void end() override {
    if (op_ == nullptr) return;
    (void)sotto_op_wait(op_, -1);
    OK(sotto_op_release(op_));
  }

 private:
  const Kind& kind_;
  const ProcessRank& place_;
  const int64_t timeout_us_;
  Tensors tensors_{Where::kCuda};
  std::vector<float> p_ = std::vector<float>(kN), given_[kMaxRounds], seen_[kMaxRounds];
  sotto_outer* outer_ = nullptr;
  sotto_op* op_ = nullptr;
};

class Session {
 public:
  // timeout_us: of operations; 0 is the comm's.
  Session(const Kind& kind, const ProcessRank& place, int64_t max_delay_us, uint64_t seed,
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
      std::unique_ptr<Work> work;
      if (kind_.codec != nullptr) {
        work = std::make_unique<Collectives>(kind_, place_, r.comm, timeout_us_);
      } else if (kind_.outer != nullptr) {
        work = std::make_unique<OuterSteps>(kind_, place_, r.comm, timeout_us_);
      } else {
        work = std::make_unique<Training>(kind_, place_, r.comm, timeout_us_);
      }
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
  const Kind& kind_;
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
using Sites = std::map<Site, std::map<fake_cuda::Wait, int>>;  // in which round

constexpr uint32_t kStreams = 12;

// Which waits are made depends on how far the streams are.
void add_waits(const Kind& kind, const ProcessRank& place, uint64_t seed, Sites* sites) {
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
              [w] = static_cast<int>(round);
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

// The result without the wait and with the awaited stream late in its round.
std::string left_out(const Kind& kind, const ProcessRank& place, const fake_cuda::Wait& wait,
                     int round, int64_t late_us) {
  Session session(kind, place, 0, 1, 2'000'000);  // without it an operation may hang
  fake_cuda::drop_wait(wait);
  return session.run(
      [&](int now) { fake_cuda::make_late(wait.awaited, now == round ? late_us : 0); },
      [&](int) { fake_cuda::make_late(wait.awaited, 0); });
}

const Kind& kind_named(const char* name) {
  for (const Kind& kind : kKinds) {
    if (name != nullptr && std::string(kind.name) == name) return kind;
  }
  throw RankError("TEST_KIND names nothing");
}

SOTTO_RANK_MAIN(nccl_waits) {
  const Kind& kind = kind_named(std::getenv("TEST_KIND"));
  Sessions sessions(self);
  if (self.rank != 0) {
    while (sessions.more(true)) (void)Session(kind, sessions.place(), 0, 1).run(nothing, nothing);
    return 0;
  }
  const std::string want = Session(kind, sessions.next(), 0, 1).run(nothing, nothing);
  require(want.rfind("failed", 0) != 0, want);
  require(want.size() >= static_cast<size_t>(kind.rounds) * kN * 4, "a result is missing");
  Sites sites;
  for (uint64_t seed = 1; seed <= 3; ++seed) add_waits(kind, sessions.next(), seed, &sites);
  std::string text;
  int needed = 0;
  for (const auto& [site, waits] : sites) {
    bool shows = false;
    uint64_t dropped = 0;
    for (const int64_t late_us : {5'000, 50'000}) {  // the second for a machine with other work
      for (const auto& [wait, round] : waits) {
        if (shows) break;
        shows = left_out(kind, sessions.next(), wait, round, late_us) != want;
        dropped += fake_cuda::waits_dropped();
      }
    }
    if (shows) ++needed;
    const bool unseen = site.stream == kind.unseen.stream && site.awaited == kind.unseen.awaited &&
                        site.record >= kind.unseen.record;
    // Which record is awaited may depend on time: then it was not left out.
    if (!shows && dropped > 0 && !unseen) {
      text += fmt::format(
          "; stage {}, stream {} for record {} of stream {} is not needed: left out {} times",
          site.stage, site.stream, site.record, site.awaited, dropped);
    }
  }
  sessions.more(false);
  self.say(fmt::format("{} waits are needed{}", needed, text));
  return 0;
}

class NcclWaits : public testing::TestWithParam<Kind> {};

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
