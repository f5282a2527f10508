// A rank that has forked children, as trainers have data loaders: when it is killed the others
// learn so at once, although the children live on.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>

#include "tests/conformance/transport_suite.h"
#include "tests/support/kill_campaign.h"
#include "tests/support/tcp_case.h"
#include "tests/support/temp_dir.h"

namespace sotto::test {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::StartsWith;

constexpr int kChildSeconds = kSanitized ? 60 : 20;

// A child that does nothing, until the file is there.
void fork_child(const std::string& until) {
  if (::fork() != 0) return;
  for (int i = 0; i < kChildSeconds * 20 && !std::filesystem::exists(until); ++i) ::usleep(50'000);
  ::_exit(0);
}

SOTTO_RANK_MAIN(fork_then_die) {
  const std::string id_file = self.argument + "/id", end_file = self.argument + "/end";
  RankKit kit(tcp_case(), self.rank, self.size);
  UniqueId id{};
  if (self.rank == 0) {
    id = check(kit.backend->make_unique_id(Reach::kHost));
    publish(id_file, id.data(), id.size());
  } else {
    require(await_published(id_file, id.data(), id.size(), 30'000), "rank 0's id");
  }
  kit.join(id);
  kit.connect();
  if (self.rank == 1) fork_child(end_file);
  kit.control->established();
  kit.barrier();
  self.at("working");
  kit.drive([&] { return !kit.listener.causes.empty(); }, (kChildSeconds + 10) * 1'000'000LL);
  require(!kit.listener.causes.empty(), "no failure was heard");
  self.say(fmt::format("{} rank {}: {}", code_name(kit.listener.causes[0].code),
                       kit.listener.causes[0].rank, kit.listener.causes[0].text));
  return 0;
}

TEST(ForkFault, ARankWhoseChildrenLiveOnIsLostAtOnce) {
  const TempDir folder;
  Processes ranks("fork_then_die", 2,
                  {.argument = folder.path(), .stop_at = {"0:working", "1:working"}});
  ranks.await(0, "working");
  ranks.await(1, "working");
  const auto killed = std::chrono::steady_clock::now();
  ranks.kill(1, SIGKILL);
  ranks.go(0);
  EXPECT_THAT(ranks.message(0), AllOf(StartsWith("PEER_LOST rank 1"), HasSubstr("rank 1 (pid")));
  EXPECT_LT(std::chrono::steady_clock::now() - killed, std::chrono::seconds(kChildSeconds / 2));
  publish(folder.path() + "/end", "x", 1);
  ranks.wait_all();
  EXPECT_EQ(ranks.failure(), "") << ranks.prefixed_output();
}

}  // namespace
}  // namespace sotto::test
