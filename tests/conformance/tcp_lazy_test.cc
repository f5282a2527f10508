// TCP's data connections that are made when they are first used. Rank 0, the coordinator, is
// connected with all from the start.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <filesystem>
#include <optional>
#include <set>
#include <string>

#include "tests/conformance/lazy_pairs.h"
#include "tests/conformance/tcp_ranks.h"
#include "tests/support/reserved_port.h"
#include "transports/tcp/tcp_backend.h"

namespace sotto::test {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::StartsWith;

constexpr const char* kNotYet = "tcp (connects when it is first used)";

TransportCase tcp_with(const std::function<void(TcpOptions&)>& change) {
  return {"tcp", [change](const Clock& clock) {
            TcpOptions options;
            options.clock = &clock;
            options.heartbeat_ms = 100;
            change(options);
            return make_tcp_backend(options);
          }};
}

std::string run_lazy(int size, const std::function<void(RankKit&)>& body,
                     const TransportCase& which = tcp_with([](TcpOptions&) {})) {
  return run_lazy(which, size, body);
}

bool connected(const RankKit& kit, int32_t peer) { return kit.transport->route(peer) != kNotYet; }

// Messages between two of four ranks, from the lower or the higher one, short and long.
TEST(TcpLazy, APairConnectsAtItsFirstMessage) {
  for (const uint32_t connections : {1u, 2u, 5u}) {
    for (const uint64_t bytes : {4ull, 3'000'000ull}) {
      for (const int32_t from : {1, 3}) {
        SCOPED_TRACE(fmt::format("{} connections, {} bytes from {}", connections, bytes, from));
        EXPECT_EQ(run_lazy(
                      4,
                      [&](RankKit& kit) {
                        for (int32_t peer = 1; peer < 4; ++peer) {
                          if (peer == kit.rank || kit.rank == 0) continue;
                          EXPECT_EQ(kit.transport->route(peer), kNotYet);
                        }
                        if (kit.rank != 0) {
                          EXPECT_THAT(kit.transport->route(0), StartsWith("tcp 127.0.0.1:"));
                        }
                        kit.barrier();
                        const int32_t to = 4 - from;
                        if (kit.rank == from || kit.rank == to) {
                          Message message(kit, 0, from, to, bytes);
                          message.start();
                          kit.await_transfers(1);
                          message.verify(0);
                        }
                        kit.barrier();
                        for (int32_t peer = 1; peer < 4; ++peer) {
                          const bool used =
                              (kit.rank == from && peer == to) || (kit.rank == to && peer == from);
                          if (kit.rank != 0 && peer != kit.rank) {
                            EXPECT_EQ(connected(kit, peer), used);
                          }
                        }
                        kit.finish();
                      },
                      tcp_with([&](TcpOptions& o) { o.connections = connections; })),
                  "");
      }
    }
  }
}

TEST(TcpLazy, AllPairsAtOnceFromBothEnds) {
  const std::vector<TestMessage> messages = messages_of_all_pairs(5);
  for (uint64_t seed = 0; seed < 5; ++seed) {
    EXPECT_EQ(run_lazy(5,
                       [&](RankKit& kit) {
                         run_messages(kit, messages, 1, seed);
                         kit.finish();
                       }),
              "");
  }
}

TEST(TcpLazy, APairThatIsNeverUsedCostsNothing) {
  EXPECT_EQ(run_lazy(3,
                     [&](RankKit& kit) {
                       kit.finish();
                       if (kit.rank != 0) {
                         EXPECT_FALSE(connected(kit, 3 - kit.rank));
                         EXPECT_EQ(kit.transport->counters(0, 3 - kit.rank).service_bytes_sent, 0u);
                       }
                     }),
            "");
}

// Rank 1 would connect, and has no reason to: rank 2 asks it, as soon as the group is set up.
TEST(TcpLazy, ARankThatWaitsAsksForTheConnection) {
  EXPECT_EQ(run_lazy(3,
                     [&](RankKit& kit) {
                       std::optional<Message> message;
                       if (kit.rank == 2) {
                         message.emplace(kit, 0, 2, 1, 1000);
                         message->start();
                       }
                       kit.drive([] { return false; }, 300'000);
                       if (kit.rank == 2) {
                         EXPECT_TRUE(kit.sink.done.empty());
                       }
                       kit.barrier();
                       kit.control->established();
                       if (kit.rank == 2) kit.await_transfers(1);
                       kit.barrier();
                       if (kit.rank != 0) {
                         EXPECT_TRUE(connected(kit, 3 - kit.rank));
                       }
                       if (kit.rank == 1) {
                         message.emplace(kit, 0, 2, 1, 1000);
                         message->start();
                         kit.await_transfers(1);
                         message->verify(0);
                       }
                       if (kit.rank == 2) kit.transport->complete(message->op.descriptor);
                       kit.finish();
                     }),
            "");
}

TEST(TcpLazy, OperationsThatDifferAreSeen) { EXPECT_EQ(run_lazy(3, expect_mismatch_seen), ""); }

TEST(TcpLazy, APeerThatIsGoneIsNamed) {
  RankBarrier barrier(3);
  EXPECT_EQ(run_lazy(3,
                     [&](RankKit& kit) {
                       if (kit.rank == 2) kit.transport.reset();
                       barrier.wait();
                       if (kit.rank == 1) {
                         Message message(kit, 0, 1, 2, 1000);
                         message.start();
                         require(kit.drive([&] { return !kit.sink.failures.empty(); }),
                                 "the connection was not missed");
                         EXPECT_EQ(kit.sink.failures[0].peer, 2);
                         EXPECT_EQ(kit.sink.failures[0].status.code(), Code::kPeerLost);
                         EXPECT_THAT(kit.sink.failures[0].status.text(),
                                     AllOf(StartsWith("the connection between rank 1 (pid "),
                                           HasSubstr(" and rank 2 (pid "),
                                           HasSubstr("cannot connect to 127.0.0.1:"),
                                           HasSubstr("Connection refused")));
                         kit.transport->cancel(message.op.descriptor);
                       }
                       kit.barrier();
                     }),
            "");
}

// What is at the port of rank 2 once its transport has ended.
class Stranger {
 public:
  explicit Stranger(uint16_t port, int backlog) : fd_(::socket(AF_INET, SOCK_STREAM, 0)) {
    const int one = 1;
    ::setsockopt(fd_, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    at_.sin_family = AF_INET;
    at_.sin_port = htons(port);
    at_.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    require(::bind(fd_, reinterpret_cast<sockaddr*>(&at_), sizeof at_) == 0, "bind");
    require(::listen(fd_, backlog) == 0, "listen");
  }
  ~Stranger() {
    for (const int fd : others_) ::close(fd);
    ::close(fd_);
  }
  // Connections that nobody accepts, until the system answers no more.
  void fill() {
    for (int i = 0; i < 8; ++i) {
      others_.push_back(::socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0));
      (void)::connect(others_.back(), reinterpret_cast<sockaddr*>(&at_), sizeof at_);
    }
  }
  void greet(const std::string& bytes) {
    others_.push_back(::accept(fd_, nullptr, nullptr));
    (void)::send(others_.back(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
  }

 private:
  int fd_;
  sockaddr_in at_{};
  std::vector<int> others_;
};

// The next group in the process has the same port.
TEST(TcpLazy, ARankWithAPortOfItsOwnConnectsAtOnce) {
  const ReservedPort port;
  IdBoard board(3);
  EXPECT_EQ(run_ranks(3,
                      [&](int rank) {
                        RankKit kit(tcp_with([&](TcpOptions& o) {
                                      if (rank == 2) o.listen_port = port.number();
                                    }),
                                    rank, 3);
                        for (int group = 0; group < 2; ++group) {
                          kit.join(board.share(kit));
                          kit.connect(all_ranks(*kit.control));
                          if (kit.rank != 0) {
                            EXPECT_TRUE(connected(kit, 3 - kit.rank));
                          }
                          kit.finish();
                          board.wait();
                        }
                      }),
            "");
}

// Ports at which this process listens.
std::set<uint16_t> listening() {
  std::set<uint16_t> ports;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    const int fd = std::stoi(entry.path().filename());
    int listens = 0;
    sockaddr_in at{};
    socklen_t bytes = sizeof listens, size = sizeof at;
    if (::getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &bytes) == 0 && listens != 0 &&
        ::getsockname(fd, reinterpret_cast<sockaddr*>(&at), &size) == 0)
      ports.insert(ntohs(at.sin_port));
  }
  return ports;
}

// Rank 1 sends to rank 2, in whose place there is something else. The failure that it sees.
Status with_stranger(int backlog, const std::function<void(Stranger&)>& act) {
  IdBoard board(3);
  Status seen;
  EXPECT_EQ(run_ranks(3,
                      [&](int rank) {
                        RankKit kit(tcp_with([&](TcpOptions& o) { o.connections = 1; }), rank, 3);
                        kit.join(board.share(kit));
                        const std::set<uint16_t> before = listening();
                        board.wait();
                        kit.connect(all_ranks(*kit.control));
                        kit.barrier();
                        std::optional<Stranger> stranger;
                        if (kit.rank == 2) {
                          std::set<uint16_t> own = listening();
                          for (const uint16_t port : before) own.erase(port);
                          require(own.size() == 1, "not one port");
                          kit.transport.reset();
                          stranger.emplace(*own.begin(), backlog);
                          if (backlog == 0) act(*stranger);
                        }
                        board.wait();
                        if (kit.rank == 2 && backlog != 0) act(*stranger);
                        if (kit.rank == 1) {
                          Message message(kit, 0, 1, 2, 1000);
                          message.start();
                          require(kit.drive([&] { return !kit.sink.failures.empty(); }),
                                  "no failure");
                          EXPECT_EQ(kit.sink.failures[0].peer, 2);
                          seen = kit.sink.failures[0].status;
                          kit.transport->cancel(message.op.descriptor);
                        }
                        kit.barrier();
                      }),
            "");
  return seen;
}

TEST(TcpLazy, AStrangerInItsPlaceIsNoPeer) {
  const Status seen = with_stranger(8, [](Stranger& stranger) {
    stranger.greet("HTTP/1.0 400 Bad Request\r\n\r\n" + std::string(100, ' '));
  });
  EXPECT_EQ(seen.code(), Code::kProtocol) << seen.text();
  EXPECT_THAT(seen.text(), HasSubstr("data connection to rank 2 (pid "));
}

TEST(TcpLazy, APlaceThatDoesNotAnswerIsNamed) {
  const Status seen = with_stranger(0, [](Stranger& stranger) { stranger.fill(); });
  EXPECT_EQ(seen.code(), Code::kPeerLost) << seen.text();
  EXPECT_THAT(seen.text(), AllOf(HasSubstr("no answer from 127.0.0.1:"), HasSubstr("within 10 s"),
                                 HasSubstr("rank 2 (pid ")));
}

}  // namespace
}  // namespace sotto::test
