// Ranks as processes that are killed or stopped while they meet and while they exchange: the others
// learn who it was, soon, and all of them the same.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <filesystem>

#include "tests/conformance/transport_suite.h"
#include "tests/support/kill_campaign.h"
#include "tests/support/tcp_case.h"

namespace sotto::test {
namespace {

using testing::AllOf;
using testing::AnyOf;
using testing::HasSubstr;
using testing::StartsWith;

// Of what a time-out is to end.
constexpr int64_t kShortUs = 10'000'000;

// Carries rank 0's id to the others.
UniqueId share_id(RankKit& kit, const std::string& path) {
  UniqueId id{};
  if (kit.rank == 0) {
    id = check(kit.backend->make_unique_id(Reach::kHost));
    publish(path, id.data(), id.size());
  } else {
    require(await_published(path, id.data(), id.size(), 30'000), "rank 0's id");
  }
  return id;
}

std::string one_line(const Status& status) {
  return fmt::format("{}: {}", code_name(status.code()), status.text());
}

// Whether anything has come through a connection of this process.
bool has_received() {
  for (int fd = 3; fd < 64; ++fd) {
    tcp_info info{};
    socklen_t bytes = sizeof info;
    if (::getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &bytes) == 0 && info.tcpi_bytes_received > 0)
      return true;
  }
  return false;
}

// Says when the rank has been answered at the rendezvous.
class AnsweredDriver final : public Driver {
 public:
  AnsweredDriver(Driver& driver, const ProcessRank& self) : driver_(driver), self_(self) {}
  bool run_until(const std::function<bool()>& done, Deadline deadline) override {
    const auto look = [&] {
      if (!said_ && has_received()) {
        self_.at("answered");
        said_ = true;
      }
      return done();
    };
    return driver_.run_until(look, deadline);
  }
  const Clock& clock() const override { return driver_.clock(); }

 private:
  Driver& driver_;
  const ProcessRank& self_;
  bool said_ = false;
};

// Meets the others and says how that ended.
SOTTO_RANK_MAIN(tcp_meet) {
  RankKit kit(tcp_case(), self.rank, self.size);
  JoinRequest request;
  request.rank = self.rank;
  request.size = self.size;
  request.id = share_id(kit, self.argument);
  self.at("before join");
  request.deadline = kit.in(kShortUs);
  AnsweredDriver driver(kit.driver, self);
  const auto joined = kit.backend->join(request, driver);
  self.say(joined.ok() ? "joined" : one_line(joined.status()));
  return 0;
}

void say_cause(const RankKit& kit, const ProcessRank& self) {
  const FailureCause& cause = kit.listener.causes[0];
  self.say(fmt::format("{} rank {}: {}", code_name(cause.code), cause.rank, cause.text));
  self.at("told");  // nobody goes away before all have found the first failure
}

// All ranks send to all, over and over, until somebody fails; says the cause that the control plane
// names.
SOTTO_RANK_MAIN(tcp_exchange) {
  RankKit kit(tcp_case(), self.rank, self.size);
  kit.join(share_id(kit, self.argument));
  kit.connect();
  std::deque<TestOp> ops;
  std::vector<uint8_t> out(300'000), in(300'000);
  for (uint64_t number = 0;; ++number) {
    TestOp& op = ops.emplace_back(7, number);
    check(kit.transport->post_op(op.descriptor));
    for (int32_t peer = 0; peer < self.size; ++peer) {
      if (peer == self.rank) continue;
      kit.start(op.add(true, peer, 0, 0, out.data(), out.size()));
      kit.start(op.add(false, peer, 0, 0, in.data(), in.size()));
      kit.messages->ready(peer, op.descriptor, 0, in.size());
    }
    const size_t goal = (number + 1) * 2 * static_cast<size_t>(self.size - 1);
    kit.drive([&] { return kit.sink.done.size() >= goal || !kit.listener.causes.empty(); },
              30'000'000);
    if (!kit.listener.causes.empty()) break;
    kit.transport->complete(op.descriptor);
    if (number == 20) self.at("exchanging");
  }
  say_cause(kit, self);
  return 0;
}

// The same with service messages, each of which is answered by the next one.
class Answerer final : public ServiceListener {
 public:
  explicit Answerer(ControlPlane& control) : control_(control) {}
  void on_service(int32_t from, std::string_view bytes) noexcept override {
    ++heard;
    (void)control_.send_service(from, kTestChannel, bytes);
  }
  int heard = 0;

 private:
  ControlPlane& control_;
};

SOTTO_RANK_MAIN(tcp_service) {
  RankKit kit(tcp_case(), self.rank, self.size);
  kit.join(share_id(kit, self.argument));
  kit.connect();
  kit.control->established();
  Answerer answerer(*kit.control);
  kit.control->set_service_listener(kTestChannel, &answerer);
  for (int32_t peer = 0; peer < self.size; ++peer) {
    for (int i = 0; i < 8 && peer != self.rank; ++i)
      check(kit.control->send_service(peer, kTestChannel, std::string(500, 'x')));
  }
  bool exchanging = false;
  kit.drive(
      [&] {
        if (!std::exchange(exchanging, exchanging || answerer.heard > 2000) && exchanging)
          self.at("exchanging");
        return !kit.listener.causes.empty();
      },
      60'000'000);
  require(!kit.listener.causes.empty(), "no failure was heard");
  const Status status = kit.control->send_service(self.rank, kTestChannel, "late");
  require(one_line(status) == one_line(kit.listener.causes[0].status()), "another status");
  kit.control->set_service_listener(kTestChannel, nullptr);
  say_cause(kit, self);
  return 0;
}

// Connected; then an exchange over the control plane that one rank does not come to.
SOTTO_RANK_MAIN(tcp_gather) {
  RankKit kit(tcp_case(), self.rank, self.size);
  kit.join(share_id(kit, self.argument));
  kit.connect();
  self.at("connected");
  const auto gathered = kit.control->all_gather("making a codec", "", kit.driver, kit.in(kShortUs));
  // On a busy machine everybody is silent for a while; the one that was stopped is silent longest.
  std::string silent;
  int32_t longest = 0;
  for (int32_t r = 0; r < self.size; ++r) {
    if (kit.control->silent_ms(r) > 700) silent += fmt::format(" {}", r);
    if (kit.control->silent_ms(r) > kit.control->silent_ms(longest)) longest = r;
  }
  self.say(one_line(gathered.status()) + fmt::format("; silent:{}; longest: {}", silent, longest));
  self.at("told");  // the others' time is over a little later
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

// The ranks come to the point, and go on together.
void pass(Processes& ranks, const std::vector<int>& which, const std::string& point) {
  for (const int rank : which) ranks.await(rank, point);
  for (const int rank : which) ranks.go(rank);
}

TEST_F(TcpFault, AMemberKilledAtTheRendezvous) {
  Processes ranks(
      "tcp_meet", 3,
      {.argument = id_file(), .stop_at = {"0:before join", "1:before join", "2:before join"}});
  ranks.await(2, "before join");
  pass(ranks, {0, 1}, "before join");
  ranks.await(1, "answered");
  ranks.kill(1, SIGKILL);
  EXPECT_THAT(ranks.message(0), AllOf(StartsWith("PEER_LOST"), HasSubstr("rank 1 (pid")));
  ranks.go(2);
  ranks.wait_all();
  EXPECT_EQ(ranks.failure(), "") << ranks.prefixed_output();
}

TEST_F(TcpFault, TheCoordinatorKilledAtTheRendezvous) {
  Processes ranks(
      "tcp_meet", 3,
      {.argument = id_file(), .stop_at = {"0:before join", "1:before join", "2:before join"}});
  ranks.await(2, "before join");
  pass(ranks, {0, 1}, "before join");
  ranks.await(1, "answered");
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
  Processes ranks(
      "tcp_meet", 3,
      {.argument = id_file(), .stop_at = {"0:before join", "1:before join", "2:before join"}});
  ranks.await(1, "before join");
  ranks.kill(1, SIGSTOP);
  pass(ranks, {0, 2}, "before join");
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

void kill_while_exchanging(const char* main_name, const std::string& id_file, int victim) {
  Processes ranks(main_name, 4,
                  {.argument = id_file, .stop_at = {"0:told", "1:told", "2:told", "3:told"}});
  for (int r = 0; r < 4; ++r) ranks.await(r, "exchanging");
  const int64_t begin = Clock::monotonic().now_ns();
  std::vector<int> others;
  ranks.kill(victim, SIGKILL);
  const std::string expected = fmt::format("PEER_LOST rank {}: rank {} (pid", victim, victim);
  for (int r = 0; r < 4; ++r) {
    if (r == victim) continue;
    EXPECT_THAT(ranks.message(r), StartsWith(expected));
    others.push_back(r);
  }
  EXPECT_LT(Clock::monotonic().now_ns() - begin, 25'000'000'000) << "a time-out was waited for";
  pass(ranks, others, "told");
  ranks.wait_all();
  EXPECT_EQ(ranks.failure(), "") << ranks.prefixed_output();
}

TEST_F(TcpFault, AMemberKilledWhileExchanging) {
  kill_while_exchanging("tcp_exchange", id_file(), 2);
}

TEST_F(TcpFault, TheCoordinatorKilledWhileExchanging) {
  kill_while_exchanging("tcp_exchange", id_file(), 0);
}

TEST_F(TcpFault, AMemberKilledBetweenServiceMessages) {
  kill_while_exchanging("tcp_service", id_file(), 2);
}

TEST_F(TcpFault, TheCoordinatorKilledBetweenServiceMessages) {
  kill_while_exchanging("tcp_service", id_file(), 0);
}

const std::vector<std::string> kGatherStops = {"0:connected", "1:connected", "2:connected",
                                               "0:told",      "1:told",      "2:told"};

TEST_F(TcpFault, AStoppedRankIsMissingAndSilent) {
  Processes ranks("tcp_gather", 3, {.argument = id_file(), .stop_at = kGatherStops});
  ranks.await(2, "connected");
  ranks.kill(2, SIGSTOP);
  pass(ranks, {0, 1}, "connected");
  for (const int rank : {0, 1}) {
    EXPECT_THAT(ranks.message(rank),
                AllOf(StartsWith("TIMEOUT"), HasSubstr("making a codec"),
                      HasSubstr("rank 2 did not come"), HasSubstr("longest: 2")));
  }
  pass(ranks, {0, 1}, "told");
  ranks.kill(2, SIGKILL);
  ranks.wait_all();
  EXPECT_EQ(ranks.failure(), "") << ranks.prefixed_output();
}

TEST_F(TcpFault, AStoppedCoordinatorIsNamed) {
  Processes ranks("tcp_gather", 3, {.argument = id_file(), .stop_at = kGatherStops});
  ranks.await(0, "connected");
  ranks.kill(0, SIGSTOP);
  pass(ranks, {1, 2}, "connected");
  for (const int rank : {1, 2}) {
    EXPECT_THAT(ranks.message(rank), AllOf(StartsWith("TIMEOUT"), HasSubstr("making a codec"),
                                           HasSubstr("rank 0"), HasSubstr("silent: 0")));
  }
  pass(ranks, {1, 2}, "told");
  ranks.kill(0, SIGKILL);
  ranks.wait_all();
  EXPECT_EQ(ranks.failure(), "") << ranks.prefixed_output();
}

}  // namespace
}  // namespace sotto::test
