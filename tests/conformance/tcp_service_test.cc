// Service frames of a rank that is played by the test, byte for byte: what no rank sends fails the
// group as PROTOCOL, with the right culprit, and what is for others is passed on.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/conformance/tcp_ranks.h"
#include "tests/support/reserved_port.h"
#include "tests/support/unknown_peer.h"
#include "transports/tcp/tcp_backend.h"

namespace sotto::test {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using wire::FrameKind;

TransportCase quiet() {
  return {"tcp", [](const Clock& clock) {
            TcpOptions options;
            options.clock = &clock;
            options.heartbeat_ms = 3'600'000;
            return make_tcp_backend(options);
          }};
}

std::string service(int32_t source, int32_t destination, uint32_t channel,
                    const std::string& bytes) {
  return frame_of(FrameKind::kService,
                  wire::Service{{source, destination, channel, bytes}}.encode());
}

std::string one_line(const Status& status) {
  return fmt::format("{}: {}", code_name(status.code()), status.text());
}

// How rank 0 of three ends, the coordinator, to which rank 1 says this after the rendezvous, and
// what rank 2 is sent.
struct End {
  std::string text;
  std::vector<ReceivedFrame> passed_on;
};
End coordinator_hears(const std::string& said) {
  const ReservedPort port;
  End end;
  EXPECT_EQ(run_ranks(2,
                      [&](int rank) {
                        if (rank == 0) {
                          RankKit kit(quiet(), 0, 3);
                          check(join_at(kit, fmt::format("tcp://127.0.0.1:{}", port.number())));
                          kit.control->set_listener(&kit.listener);
                          kit.control->established();
                          kit.drive([&] { return !kit.listener.causes.empty(); }, 5'000'000);
                          end.text = kit.control->failure()
                                         ? one_line(kit.control->failure()->status())
                                         : "no failure";
                          kit.control->set_listener(nullptr);
                          return;
                        }
                        std::vector<UnknownPeer> peers;
                        for (const int32_t r : {1, 2}) {
                          peers.emplace_back(port.number());
                          peers.back().send(frame_of(
                              FrameKind::kJoin, wire::Join{0, r, 3, 4711, "nowhere"}.encode()));
                        }
                        for (UnknownPeer& peer : peers) {
                          ReceivedFrame frame = peer.next();
                          while (frame.header.kind == FrameKind::kHeartbeat) frame = peer.next();
                          EXPECT_EQ(frame.header.kind, FrameKind::kMembers);
                        }
                        peers[0].send(said);
                        peers[0].send(frame_of(FrameKind::kFailure,
                                               wire::Failure{-8, 1, "rank 1 aborts"}.encode()));
                        for (ReceivedFrame& frame : peers[1].receive_all()) {
                          if (frame.header.kind == FrameKind::kService)
                            end.passed_on.push_back(std::move(frame));
                        }
                      }),
            "");
  return end;
}

TEST(TcpService, TheCoordinatorRefusesWhatNoRankSends) {
  const std::pair<std::string, const char*> wrong[] = {
      {service(2, 0, 0, "x"), "rank 1 sends a service message of rank 2"},
      {service(1, 3, 0, "x"), "rank 1 sends a service message to rank 3 of 3 on channel 0"},
      {service(1, -1, 0, "x"), "to rank -1 of 3"},
      {service(1, 2, 17, "x"), "to rank 2 of 3 on channel 17"},
      {service(1, 0, 17, "x"), "of rank 1 on channel 17 with 1 byte"},
      {service(1, 0, 16, ""), "rank 1 has taken more service messages than it may"},
      {frame_of(FrameKind::kService, ""), "malformed service frame of 0 bytes"},
      {frame_of(FrameKind::kService, "abc"), "malformed service frame of 3 bytes"},
      {frame_of(FrameKind::kService, wire::Service{{1, 0, 0, std::string(4097, 'x')}}.encode()),
       "malformed service frame of 4113 bytes"}};
  for (const auto& [bytes, words] : wrong) {
    const End end = coordinator_hears(bytes);
    EXPECT_THAT(end.text, AllOf(HasSubstr("PROTOCOL: rank 1 (pid 4711"), HasSubstr(words)));
    EXPECT_TRUE(end.passed_on.empty());
  }
  std::string flood;
  for (uint32_t i = 0; i <= kServiceWindow; ++i) flood += service(1, 0, 5, "x");
  EXPECT_THAT(coordinator_hears(flood).text,
              AllOf(HasSubstr("PROTOCOL"), HasSubstr("sends more service messages than it may")));
}

TEST(TcpService, TheCoordinatorPassesMessagesOnAsTheyCame) {
  const std::string payload = wire::Service{{1, 2, 9, "to the other one"}}.encode();
  const End end = coordinator_hears(frame_of(FrameKind::kService, payload));
  EXPECT_EQ(end.text, "ABORTED: rank 1 aborts");
  ASSERT_EQ(end.passed_on.size(), 1u);
  EXPECT_EQ(end.passed_on[0].payload, payload);
}

// How rank 1 of two ends whose coordinator says this.
std::string member_hears(const std::string& said) {
  const RogueListener coordinator;
  std::string text;
  EXPECT_EQ(
      run_ranks(2,
                [&](int rank) {
                  if (rank == 1) {
                    RankKit kit(quiet(), 1, 2);
                    check(join_at(kit, fmt::format("tcp://127.0.0.1:{}", coordinator.port())));
                    kit.control->set_listener(&kit.listener);
                    kit.barrier();
                    kit.control->established();
                    kit.drive([&] { return !kit.listener.causes.empty(); }, 5'000'000);
                    text = kit.control->failure() ? one_line(kit.control->failure()->status())
                                                  : "no failure";
                    kit.control->set_listener(nullptr);
                    return;
                  }
                  UnknownPeer link = coordinator.accept();
                  EXPECT_EQ(link.next().header.kind, FrameKind::kJoin);
                  wire::Members members;
                  members.token = 7;
                  members.members.resize(2);
                  link.send(frame_of(FrameKind::kMembers, members.encode()));
                  EXPECT_EQ(link.next().header.kind, FrameKind::kGather);
                  const std::string gathered = wire::Gathered{0, {"", ""}}.encode();
                  link.send(frame_of(FrameKind::kGathered, gathered) + said);
                  link.receive_all();
                }),
      "");
  return text;
}

TEST(TcpService, AMemberRefusesWhatNoCoordinatorSends) {
  EXPECT_THAT(member_hears(service(0, 0, 0, "x")),
              AllOf(HasSubstr("PROTOCOL"), HasSubstr("from rank 0 to rank 0 came to rank 1 of 2")));
  EXPECT_THAT(member_hears(service(2, 1, 0, "x")),
              AllOf(HasSubstr("PROTOCOL"), HasSubstr("from rank 2 to rank 1")));
  EXPECT_THAT(member_hears(frame_of(FrameKind::kService, "abcdef")),
              AllOf(HasSubstr("PROTOCOL"), HasSubstr("malformed service frame of 6 bytes")));
}

}  // namespace
}  // namespace sotto::test
