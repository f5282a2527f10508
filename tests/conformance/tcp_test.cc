// What only the TCP backend has: addresses, unknown peers, flow control on sockets, the rate
// limiter.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <thread>

#include "core/base/hash.h"
#include "core/iface/unique_id.h"
#include "core/wire/control.h"
#include "core/wire/frame.h"
#include "tests/conformance/tcp_ranks.h"
#include "tests/support/reserved_port.h"
#include "transports/tcp/tcp_backend.h"

namespace sotto::test {
namespace {

using testing::AllOf;
using testing::AnyOf;
using testing::HasSubstr;

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

int connect_to(uint16_t port) {
  const int fd = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in to{};
  to.sin_family = AF_INET;
  to.sin_port = htons(port);
  to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  require(::connect(fd, reinterpret_cast<sockaddr*>(&to), sizeof to) == 0, "connect");
  return fd;
}

// ---- rendezvous

TEST(Tcp, MeetAtAnAddressWhateverComesFirst) {
  for (const bool first_is_early : {true, false}) {
    const ReservedPort port;
    const std::string address = fmt::format("tcp://127.0.0.1:{}", port.number());
    EXPECT_EQ(run_ranks(3,
                        [&](int rank) {
                          RankKit kit(plain(), rank, 3);
                          if ((rank == 0) != first_is_early) {
                            std::this_thread::sleep_for(std::chrono::milliseconds(100));
                          }
                          check(join_at(kit, address));
                          kit.connect();
                          kit.finish();
                        }),
              "");
  }
}

TEST(Tcp, TheSameAddressServesOneGroupAfterTheOther) {
  const ReservedPort port;
  const std::string address = fmt::format("tcp://localhost:{}", port.number());
  EXPECT_EQ(run_ranks(2,
                      [&](int rank) {
                        for (int i = 0; i < 5; ++i) {
                          RankKit kit(plain(), rank, 2);
                          check(join_at(kit, address));
                          kit.connect();
                          if (i % 2 == 0) kit.finish();
                        }
                      }),
            "");
}

TEST(Tcp, AnAddressThatNobodyListensAtIsNamed) {
  RankKit kit(plain(), 1, 2);
  const ReservedPort port;
  const Status status = join_at(kit, fmt::format("tcp://127.0.0.1:{}", port.number()), 5'000'000);
  EXPECT_EQ(status.code(), Code::kTransport);
  EXPECT_THAT(status.text(), AllOf(HasSubstr(fmt::format("127.0.0.1:{}", port.number())),
                                   HasSubstr("Connection refused"), HasSubstr("rank 1")));
}

TEST(Tcp, AnAddressInUseIsNamed) {
  RankKit holder(plain(), 0, 2);
  const UniqueId id = check(holder.backend->make_unique_id(Reach::kHost));
  const uint16_t port = check(decode_unique_id(id)).port;
  RankKit kit(plain(), 0, 2);
  const Status status = join_at(kit, fmt::format("tcp://127.0.0.1:{}", port), 300'000);
  EXPECT_EQ(status.code(), Code::kTransport);
  EXPECT_THAT(status.text(), HasSubstr("in use"));
}

TEST(Tcp, AddressesThatAreNone) {
  for (const char* address : {"127.0.0.1:80", "tcp://127.0.0.1", "tcp://:80", "tcp://h:0",
                              "tcp://h:65536", "tcp://h:1x", "tcp://a:b:1", "udp://h:1"}) {
    RankKit kit(plain(), 1, 2);
    const Status status = join_at(kit, address, 100'000);
    EXPECT_EQ(status.code(), Code::kInvalidArgument) << address;
    EXPECT_THAT(status.text(), AllOf(HasSubstr(address), HasSubstr("tcp://host:port")));
  }
}

TEST(Tcp, RankZeroHasTheRendezvousAddress) {
  RankKit kit(plain(), 0, 2);
  const Status status = join_at(kit, "tcp://192.0.2.1:4242", 100'000);
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT_THAT(status.text(), AllOf(HasSubstr("192.0.2.1:4242"), HasSubstr("lo 127.0.0.1"),
                                   HasSubstr("SOTTO_LISTEN")));
}

TEST(Tcp, ListenNamesWhatThereIs) {
  const auto made = make_tcp_backend({.listen = "no-such-interface"});
  ASSERT_FALSE(made.ok());
  EXPECT_EQ(made.status().code(), Code::kInvalidArgument);
  EXPECT_THAT(made.status().text(), AllOf(HasSubstr("no-such-interface"), HasSubstr("lo")));
}

TEST(Tcp, ListenOnAnInterfaceAnAddressOrAny) {
  for (const char* listen : {"lo", "127.0.0.1", "::1", "any"}) {
    if (listen == std::string("::1") && !has_ipv6_loopback()) continue;
    const auto which = with([&](TcpOptions& o) { o.listen = listen; });
    EXPECT_EQ(run_group(which, 2, [](RankKit& kit) { kit.finish(); }), "") << listen;
  }
}

TEST(Tcp, TheIdMayBeMadeByAnyRank) {
  RankBarrier barrier(4);
  UniqueId id{};
  EXPECT_EQ(run_ranks(4,
                      [&](int rank) {
                        RankKit kit(plain(), rank, 4);
                        if (rank == 2) id = check(kit.backend->make_unique_id(Reach::kHost));
                        barrier.wait();
                        check(join_with(kit, id));
                        kit.connect();
                        kit.finish();
                      }),
            "");
}

TEST(Tcp, AnIdWhoseMakerIsGone) {
  UniqueId id;
  {
    RankKit maker(plain(), 0, 2);
    id = check(maker.backend->make_unique_id(Reach::kHost));
  }
  RankKit kit(plain(), 1, 2);
  const Status status = join_with(kit, id);
  EXPECT_EQ(status.code(), Code::kTransport);
  EXPECT_THAT(status.text(), AllOf(HasSubstr("127.0.0.1"), HasSubstr("Connection refused")));
}

TEST(Tcp, AnotherTokenIsTurnedAwayAndTheGroupForms) {
  RankBarrier barrier(3), turned_away(2);
  UniqueId id{};
  EXPECT_EQ(run_ranks(3,
                      [&](int rank) {
                        RankKit kit(plain(), std::min(rank, 1), 2);
                        if (rank == 0) id = check(kit.backend->make_unique_id(Reach::kHost));
                        barrier.wait();
                        if (rank != 2) {
                          if (rank == 1) turned_away.wait();
                          check(join_with(kit, id));
                          return;
                        }
                        UniqueIdFields fields = check(decode_unique_id(id));
                        fields.token ^= 1;
                        const Status status = join_with(kit, check(encode_unique_id(fields)));
                        EXPECT_EQ(status.code(), Code::kProtocol);
                        EXPECT_THAT(status.text(), HasSubstr("token of another group"));
                        turned_away.wait();
                      }),
            "");
}

TEST(Tcp, WhoComesLateIsToldSo) {
  RankBarrier barrier(3);
  UniqueId id{};
  std::atomic<bool> told{false};
  EXPECT_EQ(run_ranks(3,
                      [&](int rank) {
                        RankKit kit(plain(), std::min(rank, 1), 2);
                        if (rank == 0) id = check(kit.backend->make_unique_id(Reach::kHost));
                        barrier.wait();
                        if (rank < 2) check(join_with(kit, id));
                        barrier.wait();
                        if (rank == 2) {
                          const Status status = join_with(kit, id);
                          EXPECT_EQ(status.code(), Code::kInvalidArgument);
                          EXPECT_THAT(status.text(),
                                      AllOf(HasSubstr("complete"), HasSubstr("rank 1 (pid")));
                          told = true;
                        }
                        if (rank == 0) kit.drive([&] { return told.load(); });
                        barrier.wait();
                      }),
            "");
}

// A coordinator of version 2 answers.
TEST(Tcp, ACoordinatorOfAnotherVersionIsNamed) {
  const int listener = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in at{};
  at.sin_family = AF_INET;
  at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t bytes = sizeof at;
  require(::bind(listener, reinterpret_cast<sockaddr*>(&at), bytes) == 0, "bind");
  require(::listen(listener, 1) == 0, "listen");
  require(::getsockname(listener, reinterpret_cast<sockaddr*>(&at), &bytes) == 0, "getsockname");
  std::thread coordinator([listener] {
    const int fd = ::accept(listener, nullptr, nullptr);
    wire::FrameHeader header;
    header.kind = wire::FrameKind::kBye;
    auto frame = wire::encode_header(header);
    frame[4] = 2;
    EXPECT_EQ(::send(fd, frame.data(), frame.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(frame.size()));
    // It is shown in return what is spoken here: its own join, then a frame of version 1.
    std::string heard(4096, '\0');
    size_t n = 0;
    for (ssize_t got; (got = ::recv(fd, heard.data() + n, heard.size() - n, 0)) > 0;) {
      n += static_cast<size_t>(got);
    }
    EXPECT_GE(n, 2 * wire::kHeaderBytes);
    ::close(fd);
  });
  UniqueIdFields fields;
  fields.kind = IdKind::kTcp;
  fields.port = ntohs(at.sin_port);
  fields.token = 5;
  fields.addresses = "127.0.0.1";
  RankKit kit(plain(), 1, 2);
  const Status status = join_with(kit, check(encode_unique_id(fields)));
  coordinator.join();
  ::close(listener);
  EXPECT_EQ(status.code(), Code::kProtocol);
  EXPECT_THAT(status.text(), AllOf(HasSubstr("version 2"), HasSubstr("version 1")));
}

void join_as_version_2(uint16_t port) {
  const int fd = connect_to(port);
  wire::FrameHeader header;
  header.kind = wire::FrameKind::kJoin;
  auto bytes = wire::encode_header(header);
  bytes[4] = 2;
  EXPECT_EQ(::send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL),
            static_cast<ssize_t>(bytes.size()));
  ::close(fd);
}

TEST(Tcp, ARankOfAnotherVersionIsNamedByThoseWhoWaitForIt) {
  RankBarrier barrier(3);
  UniqueId id{};
  EXPECT_EQ(run_ranks(3,
                      [&](int rank) {
                        RankKit kit(plain(), rank, 3);
                        if (rank == 0) id = check(kit.backend->make_unique_id(Reach::kHost));
                        barrier.wait();
                        if (rank == 2) {
                          join_as_version_2(check(decode_unique_id(id)).port);
                          return;
                        }
                        const Status status = join_with(kit, id, 8'000'000);
                        EXPECT_EQ(status.code(), Code::kTimeout);
                        EXPECT_THAT(status.text(),
                                    AllOf(HasSubstr("rank 2 did not come"), HasSubstr("version 2"),
                                          HasSubstr("version 1")));
                      }),
            "");
}

TEST(Tcp, UnknownPeersDoNoHarm) {
  RankBarrier barrier(2);
  UniqueId id{};
  EXPECT_EQ(run_ranks(2,
                      [&](int rank) {
                        RankKit kit(plain(), rank, 2);
                        std::vector<int> unknown_peers;
                        if (rank == 0) {
                          id = check(kit.backend->make_unique_id(Reach::kHost));
                          const uint16_t port = check(decode_unique_id(id)).port;
                          const std::string text = "GET / HTTP/1.0\r\n\r\n" + std::string(200, 'x');
                          for (int i = 0; i < 20; ++i) {
                            unknown_peers.push_back(connect_to(port));
                            if (i % 2 == 0)
                              ::send(unknown_peers.back(), text.data(), text.size(), 0);
                          }
                        }
                        barrier.wait();
                        check(join_with(kit, id));
                        kit.connect();
                        kit.finish();
                        for (const int fd : unknown_peers) ::close(fd);
                      }),
            "");
}

// ---- flow control

// One rank's side of `count` messages from rank 0 to rank 1 in one operation.
struct Stream {
  TestOp op;
  std::vector<std::vector<uint8_t>> memory;
  std::vector<Transfer*> transfers;

  Stream(RankKit& kit, uint64_t number, int count, uint64_t bytes, int32_t priority = 0)
      : op(7, number) {
    op.descriptor.priority = priority;
    for (int i = 0; i < count; ++i) {
      memory.emplace_back(bytes, static_cast<uint8_t>(kit.rank == 0 ? i + 1 : 0));
      transfers.push_back(&op.add(kit.rank == 0, 1 - kit.rank, 0, static_cast<uint32_t>(i),
                                  memory.back().data(), bytes));
    }
  }
  void start(RankKit& kit) {
    check(kit.transport->post_op(op.descriptor));
    for (Transfer* t : transfers) kit.start(*t);
    if (kit.rank == 1) kit.messages->ready(0, op.descriptor, 0, transfers[0]->bytes);
  }
  void verify() const {
    for (size_t i = 0; i < memory.size(); ++i) {
      for (const uint8_t byte : memory[i]) {
        if (byte != static_cast<uint8_t>(i + 1)) {
          ADD_FAILURE() << "message " << i << " has wrong bytes";
          return;
        }
      }
    }
  }
};

TEST(Tcp, WithoutReceivesNoMoreThanTheCreditIsSent) {
  RankBarrier barrier(2);
  EXPECT_EQ(run_group(plain(), 2,
                      [&](RankKit& kit) {
                        constexpr int kCount = 100;
                        constexpr uint64_t kBytes = 30'000;
                        constexpr uint64_t kAllowed = (1u << 20) / (kBytes + 104);
                        Stream s(kit, 0, kCount, kBytes);
                        if (kit.rank == 0) s.start(kit);
                        const auto moved = [&] {
                          const auto c = kit.transport->counters(7, 1 - kit.rank);
                          return kit.rank == 0 ? c.messages_sent : c.messages_received;
                        };
                        kit.drive([&] { return moved() >= kAllowed; });
                        kit.drive([] { return false; }, 300'000);
                        barrier.wait();
                        if (kit.rank == 0) {
                          EXPECT_EQ(moved(), kAllowed);
                          barrier.wait();
                        } else {
                          barrier.wait();
                          s.start(kit);
                        }
                        kit.await_transfers(kCount);
                        s.verify();
                        kit.transport->complete(s.op.descriptor);
                        kit.finish();
                      }),
            "");
}

TEST(Tcp, LongMessagesWaitForTheirReceiver) {
  RankBarrier barrier(2);
  EXPECT_EQ(run_group(plain(), 2,
                      [&](RankKit& kit) {
                        Stream s(kit, 0, 3, 1'000'003);
                        if (kit.rank == 0) s.start(kit);
                        kit.drive([] { return false; }, 250'000);
                        EXPECT_EQ(kit.transport->counters(7, 1 - kit.rank).messages_sent, 0u);
                        EXPECT_EQ(kit.transport->counters(7, 1 - kit.rank).messages_received, 0u);
                        barrier.wait();
                        if (kit.rank == 1) s.start(kit);
                        kit.await_transfers(3);
                        s.verify();
                        kit.transport->complete(s.op.descriptor);
                        kit.finish();
                      }),
            "");
}

TEST(Tcp, SmallMessagesCostOneFrameEach) {
  EXPECT_EQ(run_group(plain(), 2,
                      [&](RankKit& kit) {
                        const auto before = kit.transport->counters(0, 1 - kit.rank);
                        for (uint64_t i = 0; i < 100; ++i) {
                          Stream s(kit, i, 1, 4);
                          s.start(kit);
                          kit.await_transfers(i + 1);
                          kit.transport->complete(s.op.descriptor);
                        }
                        const auto after = kit.transport->counters(0, 1 - kit.rank);
                        EXPECT_EQ(after.service_bytes_sent, before.service_bytes_sent);
                        EXPECT_EQ(after.service_bytes_received, before.service_bytes_received);
                        kit.finish();
                      }),
            "");
}

TEST(Tcp, ALongMessageForACallThatExpectsAShortOneIsAMismatch) {
  EXPECT_EQ(run_group(plain(), 2,
                      [&](RankKit& kit) {
                        TestOp op(7, 0);
                        op.descriptor.signature.count = kit.rank == 0 ? 250'000 : 1;
                        std::vector<uint8_t> memory(kit.rank == 0 ? 1'000'000 : 4);
                        check(kit.transport->post_op(op.descriptor));
                        kit.start(op.add(kit.rank == 0, 1 - kit.rank, 0, 0, memory.data(),
                                         memory.size()));
                        if (kit.rank == 1) kit.messages->ready(0, op.descriptor, 0, 4);
                        if (kit.rank == 1) {
                          require(kit.drive([&] { return !kit.sink.failures.empty(); }),
                                  "the mismatch was not noticed");
                          EXPECT_THAT(kit.sink.failures[0].status.text(),
                                      AllOf(HasSubstr("250000 elements"), HasSubstr(" 1 element,"),
                                            HasSubstr("rank 0")));
                        }
                        kit.barrier();
                        kit.transport->cancel(op.descriptor);
                      }),
            "");
}

TEST(Tcp, RanksMayDifferInTheirEagerLimits) {
  EXPECT_EQ(run_ranks(2,
                      [board = std::make_shared<IdBoard>(2)](int rank) {
                        const auto which = with([&](TcpOptions& o) {
                          o.eager_bytes = rank == 0 ? 1u << 24 : 32'000;
                          o.credit_bytes = rank == 0 ? 1u << 20 : 1u << 17;
                        });
                        RankKit kit(which, rank, 2);
                        kit.join(board->share(kit));
                        kit.connect();
                        for (uint64_t i = 0; i < 3; ++i) {
                          Stream s(kit, i, 20, 30'000 + 3000 * i);
                          s.start(kit);
                          kit.await_transfers(20 * (i + 1));
                          s.verify();
                          kit.transport->complete(s.op.descriptor);
                        }
                        kit.finish();
                      }),
            "");
}

// ---- rate limit, priorities

TEST(Tcp, TheRateLimitBoundsBothDirections) {
  constexpr double kMbit = 200;
  constexpr int kCount = 16;
  constexpr uint64_t kBytes = 250'000;
  const auto which = with([](TcpOptions& o) { o.rate_limit_mbit = kMbit; });
  EXPECT_EQ(run_group(which, 2,
                      [&](RankKit& kit) {
                        Stream s(kit, 0, kCount, kBytes);
                        kit.barrier();
                        const int64_t begin = Clock::monotonic().now_ns();
                        s.start(kit);
                        kit.await_transfers(kCount);
                        const double seconds =
                            static_cast<double>(Clock::monotonic().now_ns() - begin) * 1e-9;
                        const double bits = 8.0 * (kCount * kBytes - 2 * 131072);
                        EXPECT_GE(seconds, bits / (kMbit * 1e6)) << "faster than the limit";
                        s.verify();
                        kit.transport->complete(s.op.descriptor);
                        kit.finish();
                      }),
            "");
}

// Two senders of 50 Mbit/s each do not make a receiver of 50 Mbit/s faster.
TEST(Tcp, AReceiverIsLimitedOverAllItsPeers) {
  constexpr double kMbit = 100;
  constexpr uint64_t kBytes = 600'000;
  const auto which = with([](TcpOptions& o) { o.rate_limit_mbit = kMbit; });
  EXPECT_EQ(run_group(which, 3,
                      [&](RankKit& kit) {
                        TestOp op(7, 0);
                        std::vector<uint8_t> memory(2 * kBytes);
                        check(kit.transport->post_op(op.descriptor));
                        kit.barrier();
                        const int64_t begin = Clock::monotonic().now_ns();
                        if (kit.rank != 0) {
                          kit.start(op.add(true, 0, 0, 0, memory.data(), kBytes));
                          kit.await_transfers(1);
                        } else {
                          for (int32_t peer : {1, 2}) {
                            kit.start(op.add(
                                false, peer, 0, 0,
                                memory.data() + kBytes * static_cast<uint64_t>(peer - 1), kBytes));
                            kit.messages->ready(peer, op.descriptor, 0, kBytes);
                          }
                          kit.await_transfers(2);
                          const double seconds =
                              static_cast<double>(Clock::monotonic().now_ns() - begin) * 1e-9;
                          EXPECT_GE(seconds, 8.0 * (2 * kBytes - 131072) / (kMbit * 1e6));
                        }
                        kit.transport->complete(op.descriptor);
                        kit.finish();
                      }),
            "");
}

TEST(Tcp, UrgentMessagesOvertakeBulk) {
  const auto which = with([](TcpOptions& o) { o.rate_limit_mbit = 200; });
  RankBarrier barrier(2);
  EXPECT_EQ(run_group(which, 2,
                      [&](RankKit& kit) {
                        Stream bulk(kit, 0, 8, 250'000, 0), urgent(kit, 1, 1, 250'000, 7);
                        Stream scales(kit, 2, 1, 16, -5);
                        scales.transfers[0]->message_class = MessageClass::kMetadata;
                        bulk.start(kit);
                        if (kit.rank == 0) {  // all of them are expected
                          barrier.wait();
                          kit.drive([&] { return !kit.sink.done.empty(); });
                        }
                        urgent.start(kit);
                        scales.start(kit);
                        if (kit.rank == 1) barrier.wait();
                        kit.await_transfers(10);
                        std::vector<size_t> place(3);
                        for (size_t i = 0; i < kit.sink.done.size(); ++i) {
                          place[kit.sink.done[i].transfer->op->key.number] = i;
                        }
                        // One bulk message was on its way, perhaps a second one.
                        EXPECT_LE(place[2], 3u);
                        EXPECT_LE(place[1], 4u);
                        EXPECT_EQ(place[0], 9u);
                        for (Stream* s : {&bulk, &urgent, &scales}) {
                          kit.transport->complete(s->op.descriptor);
                        }
                        kit.finish();
                      }),
            "");
}

// ---- failure

TEST(Tcp, SilenceIsMeasuredBetweenAllRanks) {
  const auto which = with([](TcpOptions& o) { o.heartbeat_ms = 20; });
  std::atomic<int> heard{0};
  EXPECT_EQ(run_group(which, 3,
                      [&](RankKit& kit) {
                        kit.barrier();
                        if (kit.rank == 1) {  // does not drive anything
                          while (heard < 2)
                            std::this_thread::sleep_for(std::chrono::milliseconds(1));
                        } else {
                          const auto silent = [&] {
                            const int64_t ms = kit.control->silent_ms(1);
                            return ms >= 200 && kit.control->silent_ms(kit.rank == 0 ? 2 : 0) < ms;
                          };
                          EXPECT_TRUE(kit.drive(silent));
                          ++heard;
                          kit.drive([&] { return heard == 2; });
                        }
                        kit.barrier();
                        EXPECT_TRUE(kit.drive([&] { return kit.control->silent_ms(1) < 200; }));
                        kit.finish();
                      }),
            "");
}

}  // namespace
}  // namespace sotto::test
