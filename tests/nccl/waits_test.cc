// Every wait between streams that collectives over NCCL make is needed: without it, and with what
// is waited for made late, the result is another one. Ranks are processes, so that the streams of
// one have numbers of their own; waits are left out on rank 0.
#include <array>
#include <filesystem>
#include <map>

#include "tests/cuda/device_memory.h"
#include "tests/nccl/process_rank.h"
#include "tests/support/sanitized.h"
#include "tests/support/temp_dir.h"

namespace sotto::test {
namespace {

constexpr int kRounds = 4;
constexpr size_t kN = 9000;

float number(size_t i, int rank, int round) {
  return static_cast<float>((i * 7 + static_cast<size_t>(rank * 5 + round * 3)) % 41) - 20.0f;
}

// In each round, at once: a sum of NCCL's own, a compressed mean, one of the host's tensors in
// between, and the caller's stream in front and behind. What it finds there.
class Session {
 public:
  Session(const ProcessRank& place, int64_t max_delay_us, uint64_t seed) : place_(place) {
    fake_cuda::clear_faults();
    fake_cuda::configure({.max_delay_us = max_delay_us, .seed = seed});
  }

  // `before` and `after` each round. The bits on rank 0, or what has gone wrong.
  std::string run(const std::function<void(int round)>& before,
                  const std::function<void(int round)>& after) {
    Rank r(place_, 2'000'000);
    ok(r.created, "sotto_comm_create");
    std::string result;
    {
      Tensors tensors(Where::kCuda);
      std::vector<float> sum(kN), mean(kN);
      const sotto_buffer s = tensors.add(sum), m = tensors.add(mean);
      for (int round = 0; round < kRounds; ++round) {
        for (auto* all : {&given_, &seen_sum_, &seen_mean_}) {
          (*all)[round].resize(kN);
          for (size_t i = 0; i < kN; ++i) (*all)[round][i] = number(i, place_.rank, round);
          tensors.add((*all)[round]);
        }
      }
      tensors.sync();
      sotto_codec* codec = nullptr;
      OK(sotto_codec_create(r.comm, R"({"type": "onebit"})", &m, 1, &codec));
      try {
        for (int round = 0; round < kRounds; ++round) {
          OK(sotto_barrier(r.comm, nullptr, nullptr));
          before(round);
          result += one(r, tensors, codec, round, s, m, sum, mean);
          after(round);
        }
        tensors.download();
        for (int round = 0; round < kRounds; ++round)
          result += bytes_of(seen_sum_[round]) + bytes_of(seen_mean_[round]);
      } catch (const std::exception& failed) {
        result = failed.what();
        (void)sotto_comm_abort(r.comm, "a round has failed");
      }
      for (sotto_op* op : ops_) {
        (void)sotto_op_wait(op, -1);
        OK(sotto_op_release(op));
      }
      (void)sotto_codec_destroy(codec);
    }
    (void)sotto_comm_destroy(r.comm);
    OK(sotto_context_destroy(r.context));
    require_nothing_left();
    return result;
  }

 private:
  std::string one(const Rank& r, Tensors& tensors, sotto_codec* codec, int round,
                  const sotto_buffer& s, const sotto_buffer& m, std::vector<float>& sum,
                  std::vector<float>& mean) {
    tensors.copy(sum, given_[round]);
    tensors.copy(mean, given_[round]);
    std::vector<int32_t> on_host(3, place_.rank + round);
    const sotto_buffer h = buffer(on_host);
    const sotto_call plain = tensors.call();
    sotto_call compressed = tensors.call();
    compressed.codec = codec;
    OK(sotto_all_reduce(r.comm, &s, &s, 1, &plain, &ops_.emplace_back()));
    OK(sotto_all_reduce(r.comm, &h, &h, 1, nullptr, &ops_.emplace_back()));
    OK(sotto_all_reduce(r.comm, &m, &m, 1, &compressed, &ops_.emplace_back()));
    OK(sotto_op_stream_wait(ops_[0], tensors.stream()));
    tensors.copy(seen_sum_[round], sum);
    OK(sotto_op_stream_wait(ops_[2], tensors.stream()));
    tensors.copy(seen_mean_[round], mean);
    for (sotto_op* op : ops_) OK(sotto_op_wait(op, -1));
    for (sotto_op* op : std::exchange(ops_, {})) OK(sotto_op_release(op));
    tensors.sync();
    return bytes_of(on_host);
  }

  const ProcessRank& place_;
  std::vector<float> given_[kRounds], seen_sum_[kRounds], seen_mean_[kRounds];
  std::vector<sotto_op*> ops_;
};

// A wait as every round has it: connections are made in the first one alone.
struct Site {
  uint32_t stream, awaited;
  uint64_t record;  // of those of the round
  auto operator<=>(const Site&) const = default;
};
using Sites = std::map<Site, std::map<fake_cuda::Wait, int>>;  // in which round

constexpr uint32_t kStreams = 12;

// Which waits are made depends on how far the streams are.
void add_waits(const ProcessRank& place, uint64_t seed, Sites* sites) {
  Session session(place, 500, seed);
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
      (*sites)[{w.stream, w.awaited, w.record - records[round].at(w.awaited)}][w] =
          static_cast<int>(round);
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
std::string left_out(const ProcessRank& place, const fake_cuda::Wait& wait, int round,
                     int64_t late_us) {
  Session session(place, 0, 1);
  fake_cuda::drop_wait(wait);
  return session.run(
      [&](int now) { fake_cuda::make_late(wait.awaited, now == round ? late_us : 0); },
      [&](int) { fake_cuda::make_late(wait.awaited, 0); });
}

SOTTO_RANK_MAIN(nccl_waits) {
  Sessions sessions(self);
  if (self.rank != 0) {
    while (sessions.more(true)) (void)Session(sessions.place(), 0, 1).run(nothing, nothing);
    return 0;
  }
  const std::string want = Session(sessions.next(), 0, 1).run(nothing, nothing);
  require(want.size() == kRounds * (3 * 4 + 2 * kN * 4), want);
  Sites sites;
  for (uint64_t seed = 1; seed <= 3; ++seed) add_waits(sessions.next(), seed, &sites);
  std::string text;
  int needed = 0;
  for (const auto& [site, waits] : sites) {
    bool shows = false;
    uint64_t dropped = 0;
    for (const int64_t late_us : {5'000, 50'000}) {  // the second for a machine with other work
      for (const auto& [wait, round] : waits) {
        if (shows) break;
        shows = left_out(sessions.next(), wait, round, late_us) != want;
        dropped += fake_cuda::waits_dropped();
      }
    }
    if (shows) ++needed;
    // Which record is awaited may depend on time: then it was not left out.
    if (!shows && dropped > 0) {
      text += fmt::format("; stream {} for record {} of stream {} is not needed: left out {} times",
                          site.stream, site.record, site.awaited, dropped);
    }
  }
  sessions.more(false);
  self.say(fmt::format("{} waits are needed{}", needed, text));
  return 0;
}

TEST(NcclWaits, EveryWaitOfACollectiveIsNeeded) {
  if (kThreadSanitizer) GTEST_SKIP() << "what comes too early is a race, which ends the process";
  const TempDir directory;
  Processes ranks(
      "nccl_waits", 2,
      {.argument = directory.path(),
       .environment = {"SOTTO_TRANSPORT=nccl", "SOTTO_NCCL_NATIVE=all", "FAKE_NCCL_MISMATCH=hang"},
       .timeout_ms = 300'000});
  ranks.wait_all();
  ASSERT_EQ(ranks.failure(), "") << ranks.prefixed_output();
  const std::string text = ranks.message(0);
  EXPECT_GE(std::atoi(text.c_str()), 5) << text;
  EXPECT_EQ(text.find("is not needed"), std::string::npos) << text;
}

}  // namespace
}  // namespace sotto::test
