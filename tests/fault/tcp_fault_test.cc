// Ranks as processes that are killed or stopped while they meet and while they exchange: the others
// learn who it was, soon, and all of them the same.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <thread>

#include "tests/conformance/transport_suite.h"
#include "tests/support/kill_campaign.h"
#include "transports/tcp/tcp_backend.h"

namespace sotto::test {
namespace {

using testing::AllOf;
using testing::AnyOf;
using testing::HasSubstr;
using testing::StartsWith;

constexpr int64_t kJoinUs = 3'000'000;

TransportCase tcp_case() {
  return {"tcp", [](const Clock& clock) {
            TcpOptions options;
            options.clock = &clock;
            options.heartbeat_ms = 50;
            return make_tcp_backend(options);
          }};
}

// Carries rank 0's id to the others.
UniqueId share_id(RankKit& kit, const std::string& path) {
  UniqueId id{};
  if (kit.rank == 0) {
    id = check(kit.backend->make_unique_id());
    publish(path, id.data(), id.size());
  } else {
    require(await_published(path, id.data(), id.size(), 30'000), "rank 0's id");
  }
  return id;
}

std::string one_line(const Status& status) {
  return fmt::format("{}: {}", code_name(status.code()), status.text());
}

// Meets the others and says how that ended.
SOTTO_RANK_MAIN(tcp_meet) {
  RankKit kit(tcp_case(), self.rank, self.size);
  JoinRequest request;
  request.rank = self.rank;
  request.size = self.size;
  request.id = share_id(kit, self.argument);
  request.deadline = kit.in(kJoinUs);
  self.at("before join");
  const auto joined = kit.backend->join(request, kit.driver);
  self.say(joined.ok() ? "joined" : one_line(joined.status()));
  return 0;
}

// All ranks send to all, over and over, until somebody fails; says the cause that the control mesh
// names.
SOTTO_RANK_MAIN(tcp_exchange) {
  RankKit kit(tcp_case(), self.rank, self.size);
  kit.join(share_id(kit, self.argument));
  kit.connect();
  std::deque<TestOp> ops;
  std::vector<uint8_t> out(300'000), in(300'000);
  for (uint64_t number = 0;; ++number) {
    TestOp& op = ops.emplace_back(7, number);
    check(kit.transport->post_op(op.posting));
    for (int32_t peer = 0; peer < self.size; ++peer) {
      if (peer == self.rank) continue;
      kit.start(op.add(true, peer, 0, 0, out.data(), out.size()));
      kit.start(op.add(false, peer, 0, 0, in.data(), in.size()));
      kit.transport->ready(peer, op.posting, 0, in.size());
    }
    const size_t goal = (number + 1) * 2 * static_cast<size_t>(self.size - 1);
    kit.drive([&] { return kit.sink.done.size() >= goal || !kit.listener.causes.empty(); },
              30'000'000);
    if (!kit.listener.causes.empty()) break;
    kit.transport->retire(op.posting);
    if (number == 20) self.at("exchanging");
  }
  const FailureCause& cause = kit.listener.causes[0];
  self.say(fmt::format("{} rank {}: {}", code_name(cause.code), cause.rank, cause.text));
  return 0;
}

// Connected; then an exchange over the control mesh that one rank does not come to.
SOTTO_RANK_MAIN(tcp_gather) {
  RankKit kit(tcp_case(), self.rank, self.size);
  kit.join(share_id(kit, self.argument));
  kit.connect();
  self.at("connected");
  const auto gathered =
      kit.control->all_gather("making a codec", "", kit.driver, kit.in(1'500'000));
  // On a busy machine everybody is silent for a while; the one that was stopped is silent longest.
  std::string silent;
  int32_t longest = 0;
  for (int32_t r = 0; r < self.size; ++r) {
    if (kit.control->silent_ms(r) > 700) silent += fmt::format(" {}", r);
    if (kit.control->silent_ms(r) > kit.control->silent_ms(longest)) longest = r;
  }
  self.say(one_line(gathered.status()) + fmt::format("; silent:{}; longest: {}", silent, longest));
  kit.drive([] { return false; }, 1'000'000);  // the others' time is over a little later
  return 0;
}

class TcpFault : public testing::Test {
 protected:
  TcpFault() {
    std::string name = (std::filesystem::temp_directory_path() / "sotto-tcp-XXXXXX").string();
    directory_ = ::mkdtemp(name.data());
  }
  ~TcpFault() override { std::filesystem::remove_all(directory_); }
  std::string id_file() const { return (directory_ / "id").string(); }

  std::filesystem::path directory_;
};

void pause_ms(int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

TEST_F(TcpFault, AMemberKilledAtTheRendezvous) {
  Processes ranks("tcp_meet", 3,
                  {.argument = id_file(), .stop_at = {"1:before join", "2:before join"}});
  ranks.await(1, "before join");
  ranks.await(2, "before join");
  ranks.go(1);
  pause_ms(300);  // it presents itself
  ranks.kill(1, SIGKILL);
  EXPECT_THAT(ranks.message(0), AllOf(StartsWith("PEER_LOST"), HasSubstr("rank 1 (pid")));
  ranks.go(2);
  ranks.wait_all();
  EXPECT_EQ(ranks.failure(), "") << ranks.prefixed_output();
}

TEST_F(TcpFault, TheCoordinatorKilledAtTheRendezvous) {
  Processes ranks("tcp_meet", 3, {.argument = id_file(), .stop_at = {"2:before join"}});
  ranks.await(2, "before join");
  pause_ms(200);
  ranks.kill(0, SIGKILL);
  EXPECT_THAT(ranks.message(1), AllOf(StartsWith("PEER_LOST"), HasSubstr("rank 1")));
  ranks.go(2);
  // Its port is closed, or closes while this rank connects.
  EXPECT_THAT(ranks.message(2),
              AnyOf(AllOf(StartsWith("TRANSPORT"), HasSubstr("Connection re")),  // refused or reset
                    StartsWith("PEER_LOST: rank 2: rendezvous with 127.0.0.1")));
  ranks.wait_all();
  EXPECT_EQ(ranks.failure(), "") << ranks.prefixed_output();
}

TEST_F(TcpFault, AMemberStoppedBeforeTheRendezvousIsMissing) {
  Processes ranks("tcp_meet", 3, {.argument = id_file(), .stop_at = {"1:before join"}});
  ranks.await(1, "before join");
  ranks.kill(1, SIGSTOP);
  for (const int rank : {0, 2}) {
    EXPECT_THAT(ranks.message(rank),
                AllOf(StartsWith("TIMEOUT"), HasSubstr("rank 1 did not come")));
  }
  ranks.kill(1, SIGKILL);
  ranks.wait_all();
  EXPECT_EQ(ranks.failure(), "") << ranks.prefixed_output();
}

TEST_F(TcpFault, TheCoordinatorStoppedAtTheRendezvous) {
  Processes ranks("tcp_meet", 3, {.argument = id_file(), .stop_at = {"0:before join"}});
  ranks.await(0, "before join");
  ranks.kill(0, SIGSTOP);
  for (const int rank : {1, 2}) {
    EXPECT_THAT(ranks.message(rank),
                AllOf(StartsWith("TIMEOUT"), HasSubstr("coordinator"), HasSubstr("127.0.0.1")));
  }
  ranks.kill(0, SIGKILL);
  ranks.wait_all();
  EXPECT_EQ(ranks.failure(), "") << ranks.prefixed_output();
}

void kill_while_exchanging(const std::string& id_file, int victim) {
  Processes ranks("tcp_exchange", 4, {.argument = id_file, .stop_at = {}});
  for (int r = 0; r < 4; ++r) ranks.await(r, "exchanging");
  const int64_t begin = Clock::monotonic().now_ns();
  ranks.kill(victim, SIGKILL);
  const std::string expected = fmt::format("PEER_LOST rank {}: rank {} (pid", victim, victim);
  for (int r = 0; r < 4; ++r) {
    if (r != victim) {
      EXPECT_THAT(ranks.message(r), StartsWith(expected));
    }
  }
  EXPECT_LT(Clock::monotonic().now_ns() - begin, 5'000'000'000);
  ranks.wait_all();
  EXPECT_EQ(ranks.failure(), "") << ranks.prefixed_output();
}

TEST_F(TcpFault, AMemberKilledWhileExchanging) { kill_while_exchanging(id_file(), 2); }

TEST_F(TcpFault, TheCoordinatorKilledWhileExchanging) { kill_while_exchanging(id_file(), 0); }

TEST_F(TcpFault, AStoppedRankIsMissingAndSilent) {
  Processes ranks("tcp_gather", 3, {.argument = id_file(), .stop_at = {"2:connected"}});
  ranks.await(2, "connected");
  ranks.kill(2, SIGSTOP);
  for (const int rank : {0, 1}) {
    EXPECT_THAT(ranks.message(rank),
                AllOf(StartsWith("TIMEOUT"), HasSubstr("making a codec"),
                      HasSubstr("rank 2 did not come"), HasSubstr("longest: 2")));
  }
  ranks.kill(2, SIGKILL);
  ranks.wait_all();
  EXPECT_EQ(ranks.failure(), "") << ranks.prefixed_output();
}

TEST_F(TcpFault, AStoppedCoordinatorIsNamed) {
  Processes ranks("tcp_gather", 3, {.argument = id_file(), .stop_at = {"0:connected"}});
  ranks.await(0, "connected");
  ranks.kill(0, SIGSTOP);
  for (const int rank : {1, 2}) {
    EXPECT_THAT(ranks.message(rank), AllOf(StartsWith("TIMEOUT"), HasSubstr("making a codec"),
                                           HasSubstr("rank 0"), HasSubstr("silent: 0")));
  }
  ranks.kill(0, SIGKILL);
  ranks.wait_all();
  EXPECT_EQ(ranks.failure(), "") << ranks.prefixed_output();
}

}  // namespace
}  // namespace sotto::test
