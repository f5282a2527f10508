#include "tests/support/kill_campaign.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <random>
#include <thread>

namespace sotto::test {
namespace {

using testing::AnyOf;
using testing::ContainsRegex;
using testing::StartsWith;

// Rank 0 is where the others meet: without it they know its address, or not even that, or who it
// had not seen.
bool could_not_find_rank_0(const std::string& text) {
  if (text == "TIMEOUT no id") return true;
  for (const char* words :
       {"not reachable", "the coordinator at", "rendezvous with", "did not come"}) {
    if (text.find(words) != std::string::npos) return true;
  }
  return false;
}

// None is there before, or after.
struct IdFiles {
  explicit IdFiles(std::string name) : first(std::move(name)) { remove(); }
  ~IdFiles() { remove(); }
  void remove() const {
    for (const char* more : {"", ".new", ".next", ".next.new"}) std::remove((first + more).c_str());
  }
  IdFiles(const IdFiles&) = delete;
  IdFiles& operator=(const IdFiles&) = delete;
  const std::string first;
};

bool ends_by_time(const KillCase& c) { return c.signal == SIGSTOP || c.while_they_meet; }

void run_kill_case(const KillCase& c) {
  SCOPED_TRACE(fmt::format("{} signal {} seed {}", c.what, c.signal, c.seed));
  std::mt19937 random(c.seed);
  const int drawn = 2 + static_cast<int>(random() % 3);
  const int size = c.size != 0 ? c.size : drawn;
  const int victim = static_cast<int>(random() % static_cast<uint32_t>(size));
  const auto delay = std::chrono::microseconds(random() % 8000);
  const IdFiles files(fmt::format("{}sotto-kill-{}-{}-{}-{}-{}-{}", testing::TempDir(), getpid(),
                                  c.rank_main, c.what, c.while_they_meet, c.signal, c.seed));
  ProcessOptions options;
  options.argument =
      KillTask{files.first, c.what, victim, ends_by_time(c) ? kStopTimeoutUs : kKillTimeoutUs}
          .argument();
  options.environment = c.environment;
  options.timeout_ms = 200'000;
  for (int r = 0; c.while_they_meet && r < size; ++r)
    options.stop_at.push_back(fmt::format("{}:started", r));
  Processes ranks(c.rank_main, size, options);
  if (!c.while_they_meet) ranks.await(victim, "working");
  for (int r = 0; c.while_they_meet && r < size; ++r) ranks.await(r, "started");
  for (int r = 0; c.while_they_meet && r < size; ++r) ranks.go(r);
  std::this_thread::sleep_for(delay);
  ranks.kill(victim, c.signal);
  for (int r = 0; r < size; ++r) {
    if (r == victim) continue;
    const std::string text = ranks.message(r);
    if (c.while_they_meet && victim == 0 && could_not_find_rank_0(text)) continue;
    EXPECT_THAT(text, AnyOf(StartsWith("PEER_LOST"), StartsWith("TIMEOUT")));
    EXPECT_THAT(text, ContainsRegex(fmt::format("rank(s|[(]s[)])? [0-9, ]*{}", victim)));
  }
  if (c.signal == SIGSTOP) ranks.kill(victim, SIGKILL);
  ranks.wait_all();
  EXPECT_EQ(ranks.failure(), "") << ranks.prefixed_output();
}

}  // namespace

std::string KillTask::argument() const {
  return fmt::format("{}|{}|{}|{}", id_file, what, victim, timeout_us);
}

KillTask KillTask::parse(const ProcessRank& self) {
  const std::string& text = self.argument;
  const size_t third = text.rfind('|');
  const size_t second = text.rfind('|', third - 1);
  const size_t first = text.rfind('|', second - 1);
  return {text.substr(0, first), text.substr(first + 1, second - first - 1),
          std::stoi(text.substr(second + 1)), std::stoll(text.substr(third + 1))};
}

void run_kill_cases(const std::vector<KillCase>& cases) {
  std::atomic<size_t> next{0};
  const auto run = [&] {
    for (size_t i; (i = next++) < cases.size();) {
      try {
        run_kill_case(cases[i]);
      } catch (const std::exception& e) {
        ADD_FAILURE() << e.what();
      }
    }
  };
  std::vector<std::jthread> lanes;
  for (int more = 1; more < (ends_by_time(cases.front()) ? 4 : 1); ++more) lanes.emplace_back(run);
  run();
}

void publish(const std::string& file, const void* bytes, size_t count) {
  const std::string temporary = file + ".new";
  std::ofstream out(temporary, std::ios::binary);
  out.write(static_cast<const char*>(bytes), static_cast<std::streamsize>(count));
  out.close();
  require(out.good(), "writing " + temporary);
  std::filesystem::rename(temporary, file);
}

bool await_published(const std::string& file, void* bytes, size_t count, int64_t timeout_ms) {
  using Clock = std::chrono::steady_clock;
  const auto end = Clock::now() + std::chrono::milliseconds(timeout_ms);
  while (!std::filesystem::exists(file)) {
    if (Clock::now() > end) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  std::ifstream in(file, std::ios::binary);
  in.read(static_cast<char*>(bytes), static_cast<std::streamsize>(count));
  return in.gcount() == static_cast<std::streamsize>(count);
}

}  // namespace sotto::test
