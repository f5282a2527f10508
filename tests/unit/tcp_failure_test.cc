// Signs of life and the agreement on a cause of failure of TCP's control plane, with ranks that the
// test plays, on a clock that it advances.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "tests/support/fake_clock.h"
#include "tests/unit/played_peers.h"
#include "transports/tcp/failure_agreement.h"
#include "transports/tcp/signs_of_life.h"

namespace sotto::tcp {
namespace {

using test::check;
using test::FakeClock;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using wire::FrameKind;

constexpr const char* kCoordinatorLost = "rank 0 (pid 100 on host) is lost: it does not answer";

// ---- signs of life

constexpr int64_t kHeartbeatMs = 1000;
constexpr int64_t kLimitMs = 2000;

// A rank of four with all that its control plane has of failures.
struct Rank {
  explicit Rank(int32_t rank) : peers(clock, rank, 4) { signs.restart(); }

  // Ticks for so long. heard: the ranks that give signs of life meanwhile.
  void run_ms(int64_t ms, const std::vector<int32_t>& heard = {}) {
    for (int64_t at = 0; at < ms; at += 50) {
      clock.advance_us(50'000);
      for (const int32_t r : heard) peers.heard[static_cast<size_t>(r)] = clock.now_ns();
      signs.tick();
      agreement.tick();
    }
  }
  void hear(int32_t rank) {
    clock.advance_us(1);
    peers.heard[static_cast<size_t>(rank)] = clock.now_ns();
    agreement.on_sign();
  }
  Status receive(int32_t from, Code code, const std::string& text, int32_t accused = -1,
                 const std::string& waits = "") {
    return agreement.on_frame(
        from,
        bytes_of(wire::Failure{static_cast<int32_t>(code), accused, text, from, waits}.encode()));
  }
  // What the last failure frame says.
  wire::Failure said() const {
    const auto& last = peers.sent.back();
    EXPECT_EQ(last.kind, FrameKind::kFailure);
    return check(wire::Failure::decode(bytes_of(last.payload)));
  }
  void expect_failure(Code code, int32_t accused, const testing::Matcher<std::string>& text) {
    ASSERT_TRUE(agreement.failure().has_value());
    EXPECT_EQ(agreement.failure()->code, code);
    EXPECT_EQ(agreement.failure()->rank, accused);
    EXPECT_THAT(agreement.failure()->text, text);
    EXPECT_EQ(failures, 1);
  }

  FakeClock clock;
  PlayedPeers peers;
  AllGather gather{peers};
  SignsOfLife signs{peers, gather, clock, kHeartbeatMs};
  int failures = 0;
  FailureAgreement agreement{peers, signs, clock, [this] { ++failures; }};
};

TEST(SignsOfLife, AreSentWhenDue) {
  Rank r(0);
  EXPECT_FALSE(r.signs.beat());
  r.clock.advance_us(kHeartbeatMs * 1000);
  r.peers.heard[1] = r.clock.now_ns() - 300'000'000;
  r.peers.crowded = {3};
  r.gather.begin("w", "");
  EXPECT_TRUE(r.signs.beat());
  EXPECT_EQ(r.peers.last_heartbeat().waiting, "ranks 1 to 3");
  EXPECT_THAT(r.peers.last_heartbeat().silent_ms, ElementsAre(0, 300, 1000, 1000));
  EXPECT_THAT(r.peers.take(FrameKind::kHeartbeat), ElementsAre(1, 2))
      << "earlier messages to rank 3 wait";
  EXPECT_FALSE(r.signs.beat());
  EXPECT_EQ(r.signs.tick_ms(), 50);
  r.signs.set_limit(kLimitMs);
  r.clock.advance_us(kLimitMs / 4 * 1000);
  EXPECT_TRUE(r.signs.beat()) << "four in the limit";
  r.signs.set_limit(100);
  EXPECT_EQ(r.signs.tick_ms(), 25);
}

TEST(SignsOfLife, OfOtherMembersAreTheCoordinatorsWord) {
  Rank r(2);
  EXPECT_EQ(r.signs.silent_ms(1), 0) << "not known";
  EXPECT_EQ(r.signs.silent_ms(2), 0);
  r.clock.advance_us(kHeartbeatMs * 1000);
  r.signs.on_word({"", {0, 70, 0, 5000}});
  EXPECT_THAT(r.peers.take(FrameKind::kHeartbeat), ElementsAre(0)) << "it may be an inquiry";
  EXPECT_FALSE(r.signs.beat()) << "the answer was one";
  r.clock.advance_us(30'000);
  EXPECT_EQ(r.signs.silent_ms(1), 100);
  EXPECT_EQ(r.signs.silent_ms(2), 0);
  EXPECT_EQ(r.signs.silent_ms(3), 5030);
  EXPECT_EQ(r.signs.silent_ms(0), kHeartbeatMs + 30) << "of its own connection";
  r.signs.on_word({"rank 1", {}});
  EXPECT_EQ(r.signs.silent_ms(1), 100) << "a report of missing ranks says nothing of silence";
  r.peers.crowded = {0};
  r.clock.advance_us(kHeartbeatMs * 1000);
  r.signs.on_word({"", {0, 0, 0, 0}});
  EXPECT_TRUE(r.signs.beat()) << "there was no answer";
}

TEST(SignsOfLife, SilenceBeyondTheLimitFailsTheGroup) {
  Rank r(0);
  r.signs.set_limit(kLimitMs);
  r.peers.opened.erase(3);
  r.run_ms(kLimitMs - 50, {1});
  EXPECT_FALSE(r.agreement.failure().has_value());
  r.run_ms(50, {1});
  r.expect_failure(Code::kPeerLost, 2,
                   "rank 2 (pid 102 on host, 10.0.0.2:1) does not answer rank 0: silent for 2000 "
                   "ms; SOTTO_SILENCE_LIMIT_MS is 2000");
  EXPECT_THAT(r.peers.take(FrameKind::kFailure), ElementsAre(1, 2));
}

TEST(SignsOfLife, ALimitOf0IsNone) {
  Rank r(0);
  r.run_ms(3'600'000);
  EXPECT_THAT(r.signs.overdue(), IsEmpty());
  EXPECT_FALSE(r.agreement.failure().has_value());
}

TEST(SignsOfLife, OnlyRanksOfAGroupThatIsSetUpAndThatHaveNotLeftAreMissed) {
  Rank r(0);
  r.signs.set_limit(kLimitMs);
  r.peers.set_up = false;
  r.run_ms(2 * kLimitMs);
  EXPECT_THAT(r.signs.overdue(), IsEmpty());
  r.peers.set_up = true;
  EXPECT_THAT(r.signs.overdue(), ElementsAre(1, 2, 3));
  r.peers.gone = {2};
  EXPECT_THAT(r.signs.overdue(), ElementsAre(1, 3));
  r.signs.restart();
  EXPECT_THAT(r.signs.overdue(), IsEmpty()) << "silence counts from here on";
}

TEST(SignsOfLife, AStoppedProcessDoesNotCountItsOwnStop) {
  Rank r(0);
  r.signs.set_limit(kLimitMs);
  r.run_ms(500, {1, 2, 3});
  r.clock.advance_us(10 * kLimitMs * 1000);  // stopped
  r.run_ms(kLimitMs);
  EXPECT_EQ(r.signs.silent_ms(1), 11 * kLimitMs);
  EXPECT_FALSE(r.agreement.failure().has_value());
  r.run_ms(50, {1, 3});
  r.expect_failure(Code::kPeerLost, 2, HasSubstr("rank 2 (pid 102"));
}

TEST(SignsOfLife, MembersMissTheCoordinatorHalfAsLongAgain) {
  Rank r(1);
  r.signs.set_limit(kLimitMs);
  r.run_ms(kLimitMs + kLimitMs / 2 - 50);
  EXPECT_FALSE(r.agreement.failure().has_value());
  r.run_ms(50);
  r.expect_failure(Code::kPeerLost, 0, kCoordinatorLost);
  EXPECT_EQ(r.said().text, kCoordinatorLost) << "the coordinator hears of it";
  EXPECT_THAT(r.peers.take(FrameKind::kFailure), ElementsAre(0));
  r.run_ms(kLimitMs);
  EXPECT_THAT(r.peers.sent, IsEmpty()) << "once";
}

// ---- agreement

// The data connections.
class PlayedRoute final : public FailureRoute {
 public:
  void send_failure(int32_t peer, const std::string& /*payload*/) override { told.push_back(peer); }
  bool failure_sent(int32_t peer) const override { return !unsent.contains(peer); }
  bool connected(int32_t peer) const override { return open.contains(peer); }

  std::set<int32_t> open{0, 1, 2, 3}, unsent;
  std::vector<int32_t> told;
};

Status closed() { return error(Code::kPeerLost, "10.0.0.9:1 closed the connection"); }

TEST(Coordinator, ASymptomWaitsForTheInquiry) {
  Rank r(0);
  check(r.receive(2, Code::kTimeout, "no progress", 3, "waits for rank 3"));
  EXPECT_THAT(r.peers.take(FrameKind::kHeartbeat), ElementsAre(1, 2, 3)) << "all are asked";
  r.hear(1);
  r.hear(2);
  EXPECT_FALSE(r.agreement.failure().has_value());
  EXPECT_THAT(r.peers.sent, IsEmpty());
  r.hear(3);
  r.expect_failure(Code::kTimeout, 3, "no progress; waits for rank 3");
  EXPECT_EQ(r.agreement.failure()->reporter, 2);
  EXPECT_EQ(r.said().text, "no progress; waits for rank 3");
  EXPECT_THAT(r.peers.take(FrameKind::kFailure), ElementsAre(1, 2, 3));
}

TEST(Coordinator, RanksWithoutASignOfLifeAreAccused) {
  Rank r(0);
  r.clock.advance_us(1'000'000);
  r.peers.heard[2] -= 4'000'000'000;
  r.peers.heard[1] = r.clock.now_ns();
  r.agreement.fail({Code::kTimeout, 1, "no progress"});
  r.run_ms(kInquiryMs - 50, {1});
  EXPECT_FALSE(r.agreement.failure().has_value());
  r.run_ms(50);
  r.expect_failure(Code::kTimeout, 2,
                   "rank 2 (pid 102 on host, 10.0.0.2:1) does not answer rank 0: silent for 5500 "
                   "ms, rank 3 (pid 103 on host, 10.0.0.3:1) does not answer rank 0: silent for "
                   "1500 ms; no progress");
}

TEST(Coordinator, RanksThatHaveLeftAreNotAsked) {
  Rank r(0);
  r.peers.gone = {2};
  r.peers.opened.erase(3);
  r.agreement.fail({Code::kTimeout, 1, "no progress"});
  r.hear(1);
  r.expect_failure(Code::kTimeout, 1, "no progress");
  EXPECT_THAT(r.peers.take(FrameKind::kFailure), ElementsAre(1));
}

TEST(Coordinator, BeforeTheEndOfTheSetUpTheFirstProposalCounts) {
  Rank r(0);
  r.peers.set_up = false;
  check(r.receive(2, Code::kTimeout, "no progress", 3));
  r.expect_failure(Code::kTimeout, 3, "no progress");
}

TEST(Coordinator, TheFirstCauseWins) {
  Rank r(0);
  check(r.receive(2, Code::kTimeout, "first", 3));
  check(r.receive(1, Code::kTimeout, "second", 2));
  for (const int32_t rank : {1, 2, 3}) r.hear(rank);
  r.expect_failure(Code::kTimeout, 3, "first");
  check(r.receive(1, Code::kAborted, "third", 1));
  r.agreement.decide({Code::kProtocol, 1, "fourth"});
  r.agreement.on_lost(2, {closed()});
  r.expect_failure(Code::kTimeout, 3, "first");
  EXPECT_THAT(r.peers.take(FrameKind::kFailure), ElementsAre(1, 2, 3)) << "one decision";
}

TEST(Coordinator, ACauseThatIsNoSymptomEndsAnInquiry) {
  Rank r(0);
  check(r.receive(2, Code::kTimeout, "no progress", 3));
  check(r.receive(1, Code::kAborted, "aborted by the user", 1));
  r.expect_failure(Code::kAborted, 1, "aborted by the user");
}

TEST(Coordinator, AgreesToItsOwnLossWhenMembersHaveGoneOn) {
  Rank r(0);
  check(r.receive(2, Code::kPeerLost, kCoordinatorLost, 0));
  r.expect_failure(Code::kPeerLost, 0, kCoordinatorLost);
  EXPECT_EQ(r.agreement.failure()->reporter, -1) << "as all others report it";
}

TEST(Coordinator, TheDecisionIsSentBeforeItTakesEffect) {
  Rank r(0);
  PlayedRoute route;
  r.agreement.bridge()->route = &route;
  route.unsent = {1, 2};
  route.open.erase(2);
  r.agreement.fail({Code::kAborted, 0, "aborted"});
  EXPECT_THAT(route.told, ElementsAre(1, 2, 3));
  EXPECT_FALSE(r.agreement.failure().has_value()) << "half of it is sent";
  r.run_ms(50);
  EXPECT_FALSE(r.agreement.failure().has_value());
  route.unsent.erase(1);
  r.run_ms(50);
  r.expect_failure(Code::kAborted, 0, "aborted");  // rank 2 has no data connection
}

TEST(Coordinator, TheDecisionWaitsAShortTimeOnly) {
  Rank r(0);
  PlayedRoute route;
  r.agreement.bridge()->route = &route;
  route.unsent = {1};
  r.agreement.fail({Code::kAborted, 0, "aborted"});
  r.run_ms(kSendMs - 50);
  EXPECT_FALSE(r.agreement.failure().has_value());
  r.run_ms(50);
  r.expect_failure(Code::kAborted, 0, "aborted");
}

TEST(Coordinator, ThatLeavesDoesNotWaitForTheDecisionToBeSent) {
  Rank r(0);
  PlayedRoute route;
  r.agreement.bridge()->route = &route;
  route.unsent = {1};
  r.agreement.fail({Code::kAborted, 0, "aborted"});
  EXPECT_FALSE(r.agreement.failure().has_value());
  r.agreement.conclude_at_once();
  r.expect_failure(Code::kAborted, 0, "aborted");
}

TEST(Coordinator, ARankIsLostWhenAllItsConnectionsHaveEnded) {
  Rank r(0);
  PlayedRoute route;
  r.agreement.bridge()->route = &route;
  r.peers.opened.erase(2);
  r.agreement.on_lost(2, {closed()});
  EXPECT_FALSE(r.agreement.failure().has_value());
  r.agreement.on_disconnected(3);
  EXPECT_FALSE(r.agreement.failure().has_value());
  route.open.erase(2);
  r.agreement.on_disconnected(2);
  r.expect_failure(Code::kPeerLost, 2,
                   "rank 2 (pid 102 on host, 10.0.0.2:1) is lost: 10.0.0.9:1 closed the "
                   "connection");
}

TEST(Coordinator, ABrokenConnectionAloneIsTheFaultOfNeitherEnd) {
  const std::string ends =
      "the control connection between rank 0 (pid 100 on host, 10.0.0.0:1) and rank 2 (pid 102 on "
      "host, 10.0.0.2:1) is ";
  PlayedRoute route;
  {
    Rank r(0);
    r.agreement.bridge()->route = &route;
    r.peers.opened.erase(2);
    r.agreement.on_lost(2, {closed()});
    r.run_ms(kInquiryMs - 50);
    EXPECT_FALSE(r.agreement.failure().has_value()) << "its data connections may end, too";
    r.run_ms(50);  // ranks 1 and 3 were not asked
    r.expect_failure(Code::kPeerLost, 2, ends + "lost: rank 0: 10.0.0.9:1 closed the connection");
  }
  const Status wrong = error(Code::kProtocol, "wrong checksum");
  for (const bool damaged : {true, false}) {
    Rank r(0);
    r.agreement.bridge()->route = &route;
    r.agreement.on_lost(2, {wrong, damaged, false});
    r.expect_failure(Code::kProtocol, 2,
                     damaged ? ends + "damaged: rank 0: wrong checksum"
                             : "rank 2 (pid 102 on host, 10.0.0.2:1) is lost: wrong checksum");
  }
}

TEST(Coordinator, AHostThatAcknowledgesNothingIsLostAtOnce) {
  Rank r(0);
  PlayedRoute route;
  r.agreement.bridge()->route = &route;
  r.agreement.on_lost(2, {error(Code::kPeerLost, "timed out"), false, true});
  r.expect_failure(Code::kPeerLost, 2, "rank 2 (pid 102 on host, 10.0.0.2:1) is lost: timed out");
}

TEST(Coordinator, AnInquiryEndsWhenItLeaves) {
  Rank r(0);
  r.agreement.fail({Code::kTimeout, 1, "no progress"});
  EXPECT_FALSE(r.agreement.failure().has_value());
  r.agreement.conclude_at_once();
  r.expect_failure(Code::kTimeout, 1, "no progress");
}

TEST(Coordinator, ThatHasLeftAsksAndMissesNoRank) {
  Rank r(0);
  r.signs.set_limit(kLimitMs);
  r.peers.gone = {0};
  r.agreement.on_lost(2, {closed()});
  r.run_ms(2 * kLimitMs);
  EXPECT_FALSE(r.agreement.failure().has_value()) << "the end of a connection is in order";
  check(r.receive(2, Code::kTimeout, "no progress", 3));
  r.expect_failure(Code::kTimeout, 3, "no progress");
}

TEST(Member, TheCoordinatorsDecisionCounts) {
  Rank r(2);
  PlayedRoute route;
  r.agreement.bridge()->route = &route;
  r.agreement.fail({Code::kTimeout, 1, "mine", -1, "waits for rank 1"});
  EXPECT_EQ(r.said().text, "mine");
  EXPECT_EQ(r.said().waits, "waits for rank 1");
  EXPECT_EQ(r.said().reporter, 2);
  EXPECT_THAT(r.peers.take(FrameKind::kFailure), ElementsAre(0));
  EXPECT_THAT(route.told, ElementsAre(0)) << "on both ways";
  r.agreement.fail({Code::kTimeout, 3, "another"});
  r.agreement.on_lost(0, {closed()});
  EXPECT_THAT(r.peers.sent, IsEmpty()) << "one proposal";
  check(r.receive(1, Code::kAborted, "of rank 1", 1));
  EXPECT_FALSE(r.agreement.failure().has_value()) << "only the coordinator decides";
  check(r.receive(0, Code::kPeerLost, "rank 3 is lost", 3));
  r.expect_failure(Code::kPeerLost, 3, "rank 3 is lost");
  check(r.receive(0, Code::kAborted, "later", 1));
  r.expect_failure(Code::kPeerLost, 3, "rank 3 is lost");
}

TEST(Member, WithoutADecisionTheCoordinatorIsTheCause) {
  Rank r(2);
  r.agreement.fail({Code::kTimeout, 1, "mine"});
  r.run_ms(kDecisionMs);
  EXPECT_FALSE(r.agreement.failure().has_value())
      << "the decision may have come while this process was away: one more tick";
  r.run_ms(50);
  r.expect_failure(Code::kPeerLost, 0, kCoordinatorLost);
  EXPECT_EQ(r.agreement.failure()->reporter, -1);
  EXPECT_EQ(r.said().text, kCoordinatorLost);
}

TEST(Member, AnAbortIsReportedAsSuchAlsoWithoutADecision) {
  Rank r(2);
  r.agreement.fail({Code::kAborted, 2, "aborted by rank 2"});
  r.run_ms(kDecisionMs + 50);
  r.expect_failure(Code::kAborted, 2, "aborted by rank 2");
}

TEST(Member, WithoutACoordinatorNoDecisionIsAwaited) {
  {
    Rank r(2);
    r.peers.opened.clear();
    r.agreement.fail({Code::kTimeout, 1, "mine"});
    r.expect_failure(Code::kPeerLost, 0, kCoordinatorLost);
  }
  {
    Rank r(2);
    r.peers.gone = {0};
    r.agreement.fail({Code::kTimeout, 1, "mine"});
    r.expect_failure(Code::kTimeout, 1, "mine");
  }
  {
    Rank r(2);
    r.agreement.on_left(0);
    EXPECT_FALSE(r.agreement.failure().has_value()) << "its orderly end is no failure";
    r.agreement.fail({Code::kTimeout, 1, "mine"});
    r.agreement.on_left(0);
    r.expect_failure(Code::kTimeout, 1, "mine");
  }
}

TEST(Member, TheCoordinatorIsLostWhenAllItsConnectionsHaveEnded) {
  Rank r(2);
  PlayedRoute route;
  r.agreement.bridge()->route = &route;
  r.agreement.on_disconnected(0);
  EXPECT_FALSE(r.agreement.failure().has_value()) << "its control connection is there";
  r.peers.opened.clear();
  r.agreement.on_lost(0, {closed()});
  EXPECT_THAT(route.told, ElementsAre(0)) << "it is proposed on the data connection";
  EXPECT_FALSE(r.agreement.failure().has_value());
  route.open.erase(0);
  r.agreement.on_disconnected(0);
  r.expect_failure(Code::kPeerLost, 0, kCoordinatorLost);
}

TEST(Member, AFrameThatCannotBeReadIsRefused) {
  Rank r(2);
  EXPECT_FALSE(r.agreement.on_frame(0, bytes_of("?")).ok());
  EXPECT_FALSE(r.agreement.failure().has_value());
}

TEST(FailureBridge, KnowsWhenTheAgreementIsGone) {
  std::shared_ptr<FailureBridge> bridge;
  {
    const Rank r(1);
    bridge = r.agreement.bridge();
    EXPECT_EQ(bridge->agreement, &r.agreement);
  }
  EXPECT_EQ(bridge->agreement, nullptr);
}

}  // namespace
}  // namespace sotto::tcp
