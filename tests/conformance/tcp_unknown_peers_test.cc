// Anybody may connect to the ports of a group. Whatever comes there, to the rendezvous or to the
// data connections: only its own connection ends, it is told why where that can be told, the log
// has one line per cause, and the ranks meet and exchange messages.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <thread>

#include "core/base/log.h"
#include "core/iface/unique_id.h"
#include "tests/conformance/tcp_ranks.h"
#include "tests/support/faulty_proxy.h"
#include "tests/support/reserved_port.h"
#include "tests/support/unknown_peer.h"
#include "transports/tcp/tcp_backend.h"

namespace sotto::test {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using wire::FrameKind;

TransportCase with(const std::function<void(TcpOptions&)>& change) {
  return {"tcp", [change](const Clock& clock) {
            TcpOptions options;
            options.clock = &clock;
            options.heartbeat_ms = 3'600'000;
            change(options);
            return make_tcp_backend(options);
          }};
}
TransportCase plain() {
  return with([](TcpOptions&) {});
}

// Counts the lines of the log.
class LogLines {
 public:
  LogLines() { set_log(&LogLines::take, this); }
  ~LogLines() { set_log(nullptr, nullptr); }
  size_t with(const std::string& word) const {
    const std::lock_guard lock(mutex_);
    return static_cast<size_t>(std::count_if(
        lines_.begin(), lines_.end(),
        [&](const std::string& line) { return line.find(word) != std::string::npos; }));
  }

 private:
  static void take(void* user, int32_t /*level*/, const char* message) {
    auto* self = static_cast<LogLines*>(user);
    const std::lock_guard lock(self->mutex_);
    self->lines_.emplace_back(message);
  }
  mutable std::mutex mutex_;
  std::vector<std::string> lines_;
};

std::string join_of(int32_t rank, int32_t size, uint64_t token = 0) {
  return frame_of(FrameKind::kJoin, wire::Join{token, rank, size, 4711, "nowhere"}.encode());
}
// to: the rank that is greeted; -1: whoever it is.
std::string hello_of(int32_t rank, int32_t size, uint64_t token, uint32_t number, int32_t to = -1) {
  wire::FrameHeader header;
  header.kind = FrameKind::kHello;
  header.round = static_cast<uint32_t>(to + 1);
  header.segment = number;
  return frame_of(header, wire::Hello{token, rank, size}.encode());
}

// Bytes that are no frames, or broken ones.
std::vector<std::string> noise() {
  std::string random(4096, '\0');
  for (size_t i = 0; i < random.size(); ++i) random[i] = static_cast<char>((i * i + 7 * i) >> 3);
  std::string flipped = join_of(1, 2);
  flipped[50] ^= 1;
  std::string damaged = join_of(1, 2);
  damaged.back() ^= 1;
  return {"GET / HTTP/1.1\r\nHost: here\r\n\r\n",
          std::string("\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 11) + std::string(300, 'x'),
          "SSH-2.0-OpenSSH_9.2\r\n",
          std::string(1000, '\0'),
          random,
          flipped,
          damaged};
}

// What an unknown peer says, and words of what it is told.
struct Saying {
  std::string bytes;
  std::string told;
};

void knock(uint16_t port, const Saying& saying) {
  UnknownPeer one(port);
  one.send(saying.bytes);
  EXPECT_THAT(one.refusal(), HasSubstr(saying.told)) << saying.told;
  EXPECT_TRUE(one.closed()) << saying.told;
}

// Noise, and connections that end in all ways; those that say nothing stay open.
std::vector<UnknownPeer> make_noise(uint16_t port) {
  std::vector<UnknownPeer> silent;
  for (const std::string& bytes : noise()) {
    UnknownPeer one(port);
    one.send(bytes);
    for (const ReceivedFrame& answer : one.receive_all())
      EXPECT_EQ(answer.header.kind, FrameKind::kFailure);
    EXPECT_TRUE(one.closed());
  }
  UnknownPeer(port).hang_up();  // closes at once
  for (const size_t begun : {0, 3, 50, 100}) {
    silent.emplace_back(port);
    silent.back().send(join_of(1, 2).substr(0, begun));
  }
  UnknownPeer other_version(port);
  other_version.send(in_version(2, join_of(1, 2)));
  // The version of this side.
  const std::vector<ReceivedFrame> shown = other_version.receive_all();
  EXPECT_TRUE(other_version.closed());
  EXPECT_EQ(shown.size(), 1u);
  return silent;
}

// A message each way.
void exchange(RankKit& kit) {
  run_messages(kit, {{0, 0, 1, 0, 0, 100'000}, {0, 1, 0, 0, 0, 3000}}, 1, 1);
  kit.finish();
}

// ---- the rendezvous

std::vector<Saying> wrong_joins() {
  return {{join_of(1, 3), "sizes differ: rank 0 (pid"},
          {join_of(1, 3), "says 2 ranks, rank 1 (pid 4711 on nowhere"},
          {join_of(2, 2), "out of range: the group has 2 ranks"},
          {join_of(-1, 2), "out of range"},
          {join_of(0, 2), "rank 0 is already taken by pid"},
          {join_of(1, 2, 99), "token of another group"},
          {frame_of(FrameKind::kJoin, "x"), "malformed join frame of 1 byte"},
          {header_of(FrameKind::kJoin, uint64_t{1} << 40), "instead of a join"},
          {frame_of(FrameKind::kFailure, wire::Failure{-8, 0, "all is lost"}.encode()),
           "failure frame of 23 bytes"},
          {frame_of(FrameKind::kMembers, wire::Members{}.encode()), "members frame"},
          {frame_of(FrameKind::kHello, wire::Hello{1, 1, 2}.encode()), "hello frame"},
          {frame_of(FrameKind::kBye, ""), "bye frame"}};
}

TEST(TcpUnknownPeers, AtTheRendezvousOnlyTheyAreRefused) {
  const LogLines log;
  const ReservedPort port;
  const std::string address = fmt::format("tcp://127.0.0.1:{}", port.number());
  EXPECT_EQ(run_ranks(2,
                      [&](int rank) {
                        RankKit kit(plain(), rank, 2);
                        std::vector<UnknownPeer> silent;
                        if (rank == 1) {
                          silent = make_noise(port.number());
                          for (const Saying& saying : wrong_joins()) knock(port.number(), saying);
                        }
                        check(join_at(kit, address));
                        kit.connect();
                        exchange(kit);
                      }),
            "");
  for (const char* cause : {"sizes differ", "out of range", "already taken", "another group",
                            "instead of a join", "version 2", "starts with", "checksum"})
    EXPECT_LE(log.with(cause), 1u) << cause;
}

// A rank that came and then says that all is lost has left. Its place is free.
TEST(TcpUnknownPeers, AForgedFailureLeavesThePlaceToTheRank) {
  const ReservedPort port;
  const std::string address = fmt::format("tcp://127.0.0.1:{}", port.number());
  EXPECT_EQ(run_ranks(2,
                      [&](int rank) {
                        RankKit kit(plain(), rank, 2);
                        if (rank == 1) {
                          // Of a group of two the join alone would complete it: the failure comes
                          // with it.
                          UnknownPeer forged(port.number());
                          forged.send(join_of(1, 2) +
                                      frame_of(FrameKind::kFailure,
                                               wire::Failure{-8, 0, "all is lost"}.encode()));
                          forged.receive_all(300);
                        }
                        check(join_at(kit, address));
                        kit.connect();
                        exchange(kit);
                      }),
            "");
}

// Three ranks: what is said for rank 1 while rank 2 has not come.
TEST(TcpUnknownPeers, WhoLeavesBeforeAllAreThereCanBeReplaced) {
  const ReservedPort port;
  const std::string address = fmt::format("tcp://127.0.0.1:{}", port.number());
  std::atomic<bool> left{false};
  EXPECT_EQ(run_ranks(3,
                      [&](int rank) {
                        RankKit kit(plain(), rank, 3);
                        if (rank == 2) {
                          for (int i = 0; i < 3; ++i) {
                            UnknownPeer forged(port.number());
                            forged.send(join_of(1, 3));
                            forged.next();  // whom the coordinator waits for
                            knock(port.number(), {join_of(1, 3),
                                                  "rank 1 is already taken by pid "
                                                  "4711 on nowhere"});
                            if (i == 0)
                              forged.send(frame_of(FrameKind::kFailure,
                                                   wire::Failure{-8, 0, "all is lost"}.encode()));
                            if (i == 1) forged.send("nonsense that is no frame");
                            forged.hang_up();
                          }
                          left = true;
                        }
                        while (rank == 1 && !left)
                          std::this_thread::sleep_for(std::chrono::milliseconds(1));
                        check(join_at(kit, address));
                        kit.connect();
                        exchange(kit);
                      }),
            "");
}

// A rank whose join an unknown peer repeats keeps its place.
TEST(TcpUnknownPeers, ARepeatedJoinIsRefused) {
  const ReservedPort port;
  FaultyProxy to_coordinator({.target_port = port.number()});
  const std::string address = fmt::format("tcp://127.0.0.1:{}", port.number());
  const std::string through_proxy = fmt::format("tcp://127.0.0.1:{}", to_coordinator.port());
  std::atomic<bool> repeated{false};
  EXPECT_EQ(run_ranks(3,
                      [&](int rank) {
                        RankKit kit(plain(), rank, 3);
                        if (rank == 2) {
                          // Rank 1 has come before.
                          while (to_coordinator.bytes_passed() < join_of(1, 3).size())
                            std::this_thread::sleep_for(std::chrono::milliseconds(1));
                          for (int i = 0; i < 5; ++i)
                            knock(port.number(), {join_of(1, 3), "rank 1 is already taken by pid"});
                          repeated = true;
                        }
                        if (rank == 1) UnknownPeer(port.number()).hang_up();  // it listens
                        check(join_at(kit, rank == 1 ? through_proxy : address));
                        EXPECT_TRUE(repeated);
                        kit.connect();
                        exchange(kit);
                      }),
            "");
}

TEST(TcpUnknownPeers, ATimeOutSaysWhoWasTurnedAway) {
  const ReservedPort port;
  const std::string address = fmt::format("tcp://127.0.0.1:{}", port.number());
  EXPECT_EQ(run_ranks(2,
                      [&](int rank) {
                        if (rank == 1) {
                          knock(port.number(), {join_of(1, 4), "says 3 ranks, rank 1"});
                          knock(port.number(), {"GET / HTTP/1.0\r\n\r\n", ""});
                        }
                        RankKit kit(plain(), 2 * rank, 3);
                        const Status status = join_at(kit, address, 8'000'000);
                        EXPECT_EQ(status.code(), Code::kTimeout);
                        EXPECT_THAT(status.text(),
                                    AllOf(HasSubstr("rank 1 did not come"),
                                          HasSubstr("says 3 ranks, rank 1 (pid 4711 on nowhere"),
                                          HasSubstr("it starts like HTTP")));
                      }),
            "");
}

// A rank that is lost and does not come again ends the set-up long before the time is over.
TEST(TcpUnknownPeers, ARankThatIsLostAndDoesNotComeAgainIsNamedSoon) {
  const ReservedPort port;
  const std::string address = fmt::format("tcp://127.0.0.1:{}", port.number());
  const int64_t begin = Clock::monotonic().now_ns();
  EXPECT_EQ(run_ranks(2,
                      [&](int rank) {
                        if (rank == 1) {
                          UnknownPeer lost(port.number());
                          lost.send(join_of(1, 3));
                          lost.next();
                          return;
                        }
                        RankKit kit(plain(), 0, 3);
                        const Status status = join_at(kit, address);
                        EXPECT_EQ(status.code(), Code::kPeerLost);
                        EXPECT_THAT(status.text(), HasSubstr("rank 1 (pid 4711 on nowhere"));
                      }),
            "");
  EXPECT_LT(Clock::monotonic().now_ns() - begin, 10'000'000'000);
}

// The port of a unique id stays open for those who come late: what else comes there does no harm.
TEST(TcpUnknownPeers, AfterTheSetUpTheGroupGoesOn) {
  RankBarrier barrier(3);
  UniqueId id{};
  EXPECT_EQ(run_ranks(3,
                      [&](int rank) {
                        if (rank == 2) {
                          barrier.wait();
                          barrier.wait();
                          const UniqueIdFields fields = check(decode_unique_id(id));
                          make_noise(fields.port);
                          knock(fields.port, {join_of(1, 2, fields.token), "was complete"});
                          knock(fields.port, {join_of(7, 9, fields.token), "was complete"});
                          const IdleCrowd crowd(fields.port, 100);
                          for (int i = 0; i < 30'000 && crowd.open() == 100; ++i)
                            std::this_thread::sleep_for(std::chrono::milliseconds(1));
                          EXPECT_LT(crowd.open(), 100);
                          barrier.wait();
                          return;
                        }
                        RankKit kit(plain(), rank, 2);
                        if (rank == 0) id = check(kit.backend->make_unique_id(Reach::kHost));
                        barrier.wait();
                        check(join_with(kit, id));
                        kit.connect();
                        std::atomic<bool> over{false};
                        barrier.wait();
                        std::thread other([&] {
                          barrier.wait();
                          over = true;
                        });
                        kit.drive([&] { return over.load(); }, 60'000'000);
                        other.join();
                        exchange(kit);
                      }),
            "");
}

// ---- data connections

TEST(TcpUnknownPeers, AtDataConnectionsOnlyTheyAreRefused) {
  const ReservedPort rendezvous, data;
  const std::string address = fmt::format("tcp://127.0.0.1:{}", rendezvous.number());
  const LogLines log;
  EXPECT_EQ(
      run_ranks(
          2,
          [&](int rank) {
            RankKit kit(with([&](TcpOptions& o) {
                          if (rank == 1) o.listen_port = data.number();
                        }),
                        rank, 2);
            check(join_at(kit, address));
            std::vector<UnknownPeer> silent;
            if (rank == 0) {
              const uint64_t token = kit.control->token();
              silent = make_noise(data.number());
              for (const Saying& saying : std::vector<Saying>{
                       {hello_of(0, 2, token ^ 1, 0), "with another token"},
                       {hello_of(1, 2, token, 0), "greets as rank 1 of 2"},
                       {hello_of(-5, 2, token, 0), "greets as rank -5"},
                       {hello_of(0, 3, token, 0), "greets as rank 0 of 3"},
                       {hello_of(0, 2, token, 64), "no such connection"},
                       {hello_of(0, 2, token, 0, 2), "rank 0, greets rank 2, and this is rank 1"},
                       {header_of(FrameKind::kHello, 1u << 30), "instead of a hello"},
                       {frame_of(FrameKind::kHello, "short"), "malformed hello"},
                       {join_of(1, 2), "instead of a hello"},
                       {frame_of(FrameKind::kFailure, wire::Failure{-8, 0, "all is lost"}.encode()),
                        "instead of a hello"},
                       {header_of(FrameKind::kData, 1u << 30), "instead of a hello"}})
                knock(data.number(), saying);
            }
            kit.connect();
            exchange(kit);
          }),
      "");
  EXPECT_LE(log.with("greets as"), 3u);
  EXPECT_LE(log.with("instead of a hello"), 1u);
}

// Rank 2 is reached slowly, so that rank 1 still listens when rank 0 has connected to it.
TEST(TcpUnknownPeers, ARepeatedHelloIsRefused) {
  const ReservedPort ports[3];
  FaultyProxy to_1({.target_port = ports[1].number()});
  FaultyProxy to_2({.target_port = ports[2].number(), .max_delay_us = 1'000'000, .max_chunk = 64});
  std::atomic<uint64_t> token{0};
  std::string told;
  const std::string address = fmt::format("tcp://127.0.0.1:{}", ports[0].number());
  EXPECT_EQ(run_ranks(4,
                      [&](int rank) {
                        if (rank == 3) {
                          const auto both = 2 * 2 * hello_of(0, 3, 1, 0).size();
                          while (to_1.bytes_passed() < both || token == 0)
                            std::this_thread::sleep_for(std::chrono::milliseconds(1));
                          UnknownPeer replay(ports[1].number());
                          replay.send(hello_of(0, 3, token, 0));
                          told = replay.refusal();
                          return;
                        }
                        const auto which = with([&](TcpOptions& o) {
                          if (rank == 0) return;
                          o.listen_port = ports[rank].number();
                          o.advertise = fmt::format(":{}", (rank == 1 ? to_1 : to_2).port());
                        });
                        RankKit kit(which, rank, 3);
                        check(join_at(kit, address));
                        token = kit.control->token();
                        kit.connect();
                        exchange(kit);
                      }),
            "");
  EXPECT_THAT(told, HasSubstr("connected already"));
}

// ---- the log

TEST(TcpUnknownPeers, APortScannerFillsNoLog) {
  const LogLines log;
  const ReservedPort port;
  const std::string address = fmt::format("tcp://127.0.0.1:{}", port.number());
  EXPECT_EQ(run_ranks(2,
                      [&](int rank) {
                        RankKit kit(plain(), rank, 2);
                        for (int i = 0; rank == 1 && i < 200; ++i) {
                          UnknownPeer one(port.number());
                          one.send(i % 2 == 0 ? "GET / HTTP/1.0\r\n\r\n" : join_of(5, 2));
                          one.receive_all();
                        }
                        check(join_at(kit, address));
                      }),
            "");
  EXPECT_EQ(log.with("rendezvous at"), 2u);
}

}  // namespace
}  // namespace sotto::test
