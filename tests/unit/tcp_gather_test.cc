// All-gathers of TCP's control plane, with ranks that the test plays.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/fake_clock.h"
#include "tests/unit/played_peers.h"
#include "transports/tcp/all_gather.h"

namespace sotto::tcp {
namespace {

using test::check;
using test::FakeClock;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using wire::FrameKind;

class Gathers : public testing::Test {
 protected:
  static wire::Gather part(uint64_t sequence, std::string what, std::string data) {
    return {sequence, std::move(what), std::move(data)};
  }

  FakeClock clock_;
  PlayedPeers peers_{clock_, 0, 4};
  AllGather gather_{peers_};
};

TEST_F(Gathers, TheLastPartCompletesIt) {
  for (uint64_t sequence : {0u, 1u}) {
    EXPECT_FALSE(gather_.contribute(2, part(sequence, "w", "c")).has_value());
    EXPECT_FALSE(gather_.begin("w", "a").has_value());
    EXPECT_FALSE(gather_.contribute(3, part(sequence, "w", "d")).has_value());
    EXPECT_FALSE(gather_.complete());
    EXPECT_THAT(peers_.sent, IsEmpty());
    EXPECT_FALSE(gather_.contribute(1, part(sequence, "w", "b")).has_value());
    ASSERT_TRUE(gather_.complete());
    EXPECT_THAT(gather_.take(), ElementsAre("a", "b", "c", "d"));
    EXPECT_FALSE(gather_.complete());
    const auto answer = check(wire::Gathered::decode(bytes_of(peers_.sent.back().payload)));
    EXPECT_EQ(answer.sequence, sequence);
    EXPECT_THAT(answer.data, ElementsAre("a", "b", "c", "d"));
    EXPECT_THAT(peers_.take(FrameKind::kGathered), ElementsAre(1, 2, 3));
  }
}

TEST_F(Gathers, TheMissingRanksAreNamed) {
  EXPECT_EQ(gather_.waiting(), "");
  gather_.report_missing();
  EXPECT_THAT(peers_.sent, IsEmpty()) << "none is in progress";
  gather_.begin("w", "");
  EXPECT_EQ(gather_.waiting(), "ranks 1 to 3");
  gather_.contribute(2, part(0, "w", ""));
  EXPECT_EQ(gather_.waiting(), "ranks 1, 3");
  gather_.report_missing();
  EXPECT_EQ(peers_.last_heartbeat().waiting, "ranks 1, 3");
  EXPECT_THAT(peers_.take(FrameKind::kHeartbeat), ElementsAre(2)) << "those that have come";
  gather_.report_missing();
  EXPECT_THAT(peers_.sent, IsEmpty()) << "it is known";
  gather_.contribute(1, part(0, "w", ""));
  gather_.report_missing();
  EXPECT_EQ(peers_.last_heartbeat().waiting, "rank 3");
  EXPECT_THAT(peers_.take(FrameKind::kHeartbeat), ElementsAre(1, 2));
  gather_.contribute(3, part(0, "w", ""));
  EXPECT_EQ(gather_.waiting(), "");
}

TEST_F(Gathers, DifferentNamesAreNamed) {
  gather_.contribute(2, part(0, "columns", ""));
  const auto cause = gather_.begin("rows", "");
  ASSERT_TRUE(cause.has_value());
  EXPECT_EQ(cause->code, Code::kProtocol);
  EXPECT_EQ(cause->rank, 0);
  EXPECT_EQ(cause->text,
            "ranks do not agree on exchange 0: rank 2 came for \"columns\", rank 0 for \"rows\"");
  EXPECT_EQ(gather_.waiting(), "ranks 0, 1, 3") << "its part does not count";
}

TEST_F(Gathers, ARankThatIsAtAnotherOneIsNamed) {
  gather_.begin("w", "");
  for (const uint64_t sequence : {1, 0}) {
    if (sequence == 0) gather_.contribute(3, part(0, "w", ""));
    const auto cause = gather_.contribute(3, part(sequence, "w", ""));
    ASSERT_TRUE(cause.has_value());
    EXPECT_EQ(cause->code, Code::kProtocol);
    EXPECT_EQ(cause->rank, 3);
    EXPECT_EQ(cause->text,
              fmt::format("rank 3 (pid 103 on host, 10.0.0.3:1) is at exchange {} (\"w\"), the "
                          "group is at 0",
                          sequence));
  }
}

TEST_F(Gathers, ARankThatLeavesIsMissed) {
  EXPECT_FALSE(gather_.on_left(3).has_value()) << "none is in progress";
  gather_.begin("w", "");
  gather_.contribute(2, part(0, "w", ""));
  EXPECT_FALSE(gather_.on_left(2).has_value()) << "its part is there";
  const auto cause = gather_.on_left(3);
  ASSERT_TRUE(cause.has_value());
  EXPECT_EQ(cause->code, Code::kPeerLost);
  EXPECT_EQ(cause->rank, 3);
  EXPECT_THAT(cause->text, HasSubstr("has left the group during the exchange \"w\""));
}

TEST(GathersOfAMember, TheAnswerHasToFit) {
  FakeClock clock;
  PlayedPeers peers(clock, 2, 3);
  AllGather gather(peers);
  gather.on_waiting("rank 1");
  EXPECT_FALSE(gather.begin("w", "mine").has_value());
  EXPECT_EQ(gather.waiting(), "") << "of the last one";
  ASSERT_EQ(peers.sent.size(), 1u);
  EXPECT_EQ(peers.sent[0].to, 0);
  const auto sent = check(wire::Gather::decode(bytes_of(peers.sent[0].payload)));
  EXPECT_EQ(sent.sequence, 0u);
  EXPECT_EQ(sent.what, "w");
  EXPECT_EQ(sent.data, "mine");
  gather.on_waiting("rank 1");
  EXPECT_EQ(gather.waiting(), "rank 1");
  for (const wire::Gathered& wrong :
       {wire::Gathered{1, {"a", "b", "c"}}, wire::Gathered{0, {"a", "b"}}}) {
    const Status status = gather.on_answer(bytes_of(wrong.encode()));
    EXPECT_EQ(status.code(), Code::kProtocol);
    EXPECT_THAT(status.text(), HasSubstr("rank 2 is at exchange 0 of 3 ranks"));
    EXPECT_FALSE(gather.complete());
  }
  check(gather.on_answer(bytes_of(wire::Gathered{0, {"a", "b", "c"}}.encode())));
  EXPECT_THAT(gather.take(), ElementsAre("a", "b", "c"));
  EXPECT_EQ(gather.on_answer(bytes_of(wire::Gathered{0, {"a", "b", "c"}}.encode())).code(),
            Code::kProtocol)
      << "the same again";
}

}  // namespace
}  // namespace sotto::tcp
