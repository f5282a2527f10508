#include "tests/conformance/transport_suite.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>
#include <thread>

namespace sotto::test {
namespace {

// Bytes that name their message.
void fill(std::vector<uint8_t>& data, uint32_t source, uint32_t destination, uint32_t round,
          uint32_t segment) {
  uint32_t state = source * 0x9e3779b9u ^ destination * 0x85ebca6bu ^ round * 0xc2b2ae35u ^
                   segment * 0x27d4eb2fu;
  for (uint8_t& byte : data) {
    state = state * 1664525u + 1013904223u;
    byte = static_cast<uint8_t>(state >> 24);
  }
}

struct Message {
  uint64_t op;
  uint32_t source, destination, round, segment;
  uint64_t bytes;
};

// Runs the messages on all ranks: each rank posts its operations and starts its transfers in an
// order drawn from the seed, then checks what came.
void run_messages(RankKit& kit, const std::vector<Message>& messages, uint64_t ops, uint64_t seed,
                  uint64_t comm = 7) {
  std::mt19937_64 random(seed * 1000 + static_cast<uint64_t>(kit.rank));
  std::deque<TestOp> my_ops;
  for (uint64_t i = 0; i < ops; ++i) my_ops.emplace_back(comm, i);
  std::deque<std::vector<uint8_t>> memory;
  std::vector<std::pair<const Message*, Transfer*>> mine;
  for (const Message& m : messages) {
    for (const bool is_send : {true, false}) {
      if (static_cast<uint32_t>(kit.rank) != (is_send ? m.source : m.destination)) continue;
      auto& data = memory.emplace_back(m.bytes);
      if (is_send) fill(data, m.source, m.destination, m.round, m.segment);
      const auto peer = static_cast<int32_t>(is_send ? m.destination : m.source);
      mine.emplace_back(&m,
                        &my_ops[m.op].add(is_send, peer, m.round, m.segment, data.data(), m.bytes));
    }
  }
  const size_t before = kit.sink.done.size();
  for (TestOp& op : my_ops) check(kit.transport->post_op(op.posting), "post_op");
  std::vector<Transfer*> order;
  for (auto& [m, t] : mine) order.push_back(t);
  std::shuffle(order.begin(), order.end(), random);
  for (Transfer* t : order) {
    kit.start(*t);
    if (random() % 8 == 0) kit.backend->poller().poll(0);
  }
  for (TestOp& op : my_ops) {
    for (int32_t peer = 0; peer < kit.size; ++peer) {
      uint32_t last = 0;
      uint64_t largest = 0;
      bool any = false;
      for (const Transfer& t : op.transfers) {
        if (t.is_send || t.peer != peer) continue;
        any = true;
        last = std::max(last, t.round);
        largest = std::max(largest, t.bytes);
      }
      if (any) kit.transport->ready(peer, op.posting, last, largest);
    }
  }
  kit.await_transfers(before + mine.size());
  for (TestOp& op : my_ops) kit.transport->retire(op.posting);
  for (const auto& [m, t] : mine) {
    if (t->is_send) continue;
    std::vector<uint8_t> expected(m->bytes);
    fill(expected, m->source, m->destination, m->round, m->segment);
    require(m->bytes == 0 || std::memcmp(expected.data(), t->data, m->bytes) == 0,
            fmt::format("message {} -> {}, round {}, segment {}: wrong bytes", m->source,
                        m->destination, m->round, m->segment));
  }
}

TEST_P(TransportSuite, MessagesOfEverySizeBetweenAllPairs) {
  for (const int size : {1, 2, 3, 4, 7}) {
    std::vector<Message> messages;
    for (uint32_t s = 0; s < static_cast<uint32_t>(size); ++s) {
      for (uint32_t d = 0; d < static_cast<uint32_t>(size); ++d) {
        uint32_t segment = 0;
        if (s == d) continue;
        for (const uint64_t bytes : {0, 1, 7, 4096, 65535, 65536, 65537, 300001}) {
          messages.push_back({0, s, d, 0, segment++, bytes});
        }
      }
    }
    EXPECT_EQ(run_group(GetParam(), size,
                        [&](RankKit& kit) {
                          for (const uint64_t seed : {1, 2})
                            run_messages(kit, messages, 1, seed, seed);
                          kit.finish();
                        }),
              "")
        << size << " ranks";
  }
}

TEST_P(TransportSuite, ManyOperationsInFlightInAnyOrder) {
  constexpr uint32_t kRanks = 3;
  std::mt19937_64 random(5);
  std::vector<Message> messages;
  for (uint64_t op = 0; op < 20; ++op) {
    for (uint32_t segment = 0; segment < 12; ++segment) {
      const auto source = static_cast<uint32_t>(random() % kRanks);
      const auto destination =
          static_cast<uint32_t>((source + 1 + random() % (kRanks - 1)) % kRanks);
      const uint64_t bytes = random() % 4 == 0 ? random() % 200'000 : random() % 2'000;
      messages.push_back({op, source, destination, segment / 4, segment, bytes});
    }
  }
  EXPECT_EQ(run_group(GetParam(), kRanks,
                      [&](RankKit& kit) {
                        for (uint64_t seed = 0; seed < 5; ++seed)
                          run_messages(kit, messages, 20, seed, 100 + seed);
                        kit.finish();
                      }),
            "");
}

TEST_P(TransportSuite, ALargeMessage) {
  EXPECT_EQ(
      run_group(
          GetParam(), 2,
          [&](RankKit& kit) {
            run_messages(kit, {{0, 0, 1, 0, 0, 20'000'003}, {0, 1, 0, 0, 0, 20'000'003}}, 1, 3);
            kit.finish();
          }),
      "");
}

TEST_P(TransportSuite, CountersCountWhatCrossed) {
  EXPECT_EQ(
      run_group(GetParam(), 2,
                [&](RankKit& kit) {
                  const uint64_t comm = 42;
                  TestOp op(comm, 0);
                  std::vector<uint8_t> data(70'000), scales(12), in(70'000), scales_in(12);
                  const int32_t peer = 1 - kit.rank;
                  check(kit.transport->post_op(op.posting));
                  op.add(true, peer, 0, 0, data.data(), data.size());
                  op.add(true, peer, 0, 1, scales.data(), scales.size()).message_class =
                      MessageClass::kMetadata;
                  op.add(false, peer, 0, 0, in.data(), in.size());
                  op.add(false, peer, 0, 1, scales_in.data(), scales_in.size()).message_class =
                      MessageClass::kMetadata;
                  for (Transfer& t : op.transfers) kit.start(t);
                  kit.transport->ready(peer, op.posting, 0, in.size());
                  kit.await_transfers(4);
                  const TransferCounters c = kit.transport->counters(comm, peer);
                  const uint64_t headers = 12 + kit.transport->header_bytes(data.size()) +
                                           kit.transport->header_bytes(scales.size());
                  EXPECT_EQ(c.payload_bytes_sent, data.size());
                  EXPECT_EQ(c.payload_bytes_received, data.size());
                  EXPECT_EQ(c.header_bytes_sent, headers);
                  EXPECT_EQ(c.header_bytes_received, headers);
                  EXPECT_EQ(c.messages_sent, 2u);
                  EXPECT_EQ(c.messages_received, 2u);
                  EXPECT_EQ(kit.transport->counters(comm + 1, peer).messages_sent, 0u);
                  EXPECT_FALSE(kit.transport->route(peer).empty());
                  kit.transport->retire(op.posting);
                  kit.finish();
                }),
      "");
}

void expect_mismatch(const RankKit& kit, const std::vector<std::string>& words) {
  require(!kit.sink.failures.empty(), fmt::format("rank {} heard of no failure", kit.rank));
  const Status& status = kit.sink.failures[0].status;
  EXPECT_EQ(status.code(), Code::kProtocol);
  for (const std::string& word : words)
    EXPECT_NE(status.text().find(word), std::string::npos) << status.text();
}

TEST_P(TransportSuite, AMessageOfAnotherOperationIsAProtocolErrorWithoutAnyReceive) {
  for (const bool sender_first : {true, false}) {
    Meeting meeting(2);
    EXPECT_EQ(
        run_group(GetParam(), 2,
                  [&](RankKit& kit) {
                    TestOp op(7, 0, kit.rank == 0 ? 11 : 22);
                    if (kit.rank == (sender_first ? 1 : 0)) meeting.wait();
                    check(kit.transport->post_op(op.posting));
                    std::vector<uint8_t> data(100);
                    if (kit.rank == 0)
                      kit.transport->send(op.add(true, 1, 0, 0, data.data(), data.size()));
                    if (kit.rank == (sender_first ? 0 : 1)) {
                      kit.backend->poller().poll(0);
                      meeting.wait();
                    }
                    kit.drive([&] { return !kit.sink.failures.empty(); },
                              kit.rank == 1 ? 20'000'000 : 200'000);
                    if (kit.rank == 1)
                      expect_mismatch(kit, {"rank 0", "rank 1", "tag 11", "tag 22", "all_reduce"});
                    kit.barrier();
                    kit.transport->cancel(op.posting);
                  }),
        "");
  }
}

TEST_P(TransportSuite, AReceiveThatThePeerDoesNotKnowIsAProtocolError) {
  EXPECT_EQ(run_group(GetParam(), 2,
                      [&](RankKit& kit) {
                        TestOp op(7, 3, kit.rank == 0 ? 11 : 22);
                        check(kit.transport->post_op(op.posting));
                        std::vector<uint8_t> data(1 << 20);
                        if (kit.rank == 1) {
                          kit.transport->recv(op.add(false, 0, 0, 0, data.data(), data.size()));
                          kit.transport->ready(0, op.posting, 0, data.size());
                        }
                        kit.drive([&] { return !kit.sink.failures.empty(); },
                                  kit.rank == 0 ? 20'000'000 : 200'000);
                        if (kit.rank == 0)
                          expect_mismatch(kit, {"operation 3", "tag 11", "tag 22"});
                        kit.barrier();
                        kit.transport->cancel(op.posting);
                      }),
            "");
}

TEST_P(TransportSuite, ASizeThatDoesNotFitIsAProtocolError) {
  EXPECT_EQ(
      run_group(GetParam(), 2,
                [&](RankKit& kit) {
                  TestOp op(7, 0);
                  check(kit.transport->post_op(op.posting));
                  std::vector<uint8_t> data(2000, 5);
                  if (kit.rank == 0) {
                    kit.transport->send(op.add(true, 1, 0, 0, data.data(), 1000));
                    kit.drive([&] { return !kit.sink.done.empty() || !kit.sink.failures.empty(); },
                              200'000);
                  } else {
                    kit.transport->recv(op.add(false, 0, 0, 0, data.data(), 1004));
                    kit.transport->ready(0, op.posting, 0, 1004);
                    kit.drive([&] { return !kit.sink.done.empty() || !kit.sink.failures.empty(); });
                    const Status status = !kit.sink.done.empty()      ? kit.sink.done[0].status
                                          : kit.sink.failures.empty() ? ok_status()
                                                                      : kit.sink.failures[0].status;
                    EXPECT_EQ(status.code(), Code::kProtocol);
                    EXPECT_NE(status.text().find("1000"), std::string::npos) << status.text();
                    EXPECT_NE(status.text().find("1004"), std::string::npos) << status.text();
                  }
                  kit.barrier();
                  kit.transport->cancel(op.posting);
                }),
      "");
}

// After cancel the memory is given back at once: a sanitizer, or the wrong bytes, show who still
// touches it.
TEST_P(TransportSuite, CancelledTransfersAreNotTouched) {
  constexpr int kRanks = 3;
  EXPECT_EQ(run_group(GetParam(), kRanks,
                      [&](RankKit& kit) {
                        std::mt19937_64 random(static_cast<uint64_t>(kit.rank));
                        for (uint64_t round = 0; round < 30; ++round) {
                          auto op = std::make_unique<TestOp>(9, round);
                          check(kit.transport->post_op(op->posting));
                          std::vector<std::unique_ptr<std::vector<uint8_t>>> memory;
                          for (uint32_t segment = 0; segment < 4; ++segment) {
                            for (int32_t peer = 0; peer < kRanks; ++peer) {
                              if (peer == kit.rank) continue;
                              for (const bool is_send : {true, false}) {
                                memory.push_back(std::make_unique<std::vector<uint8_t>>(20'000));
                                kit.start(op->add(is_send, peer, 0, segment, memory.back()->data(),
                                                  20'000));
                              }
                            }
                          }
                          const uint64_t polls = random() % 4;
                          for (uint64_t i = 0; i < polls; ++i) kit.backend->poller().poll(50);
                          kit.transport->cancel(op->posting);
                          const size_t heard = kit.sink.done.size();
                          const Transfer* const first = &op->transfers.front();
                          memory.clear();
                          op.reset();
                          for (int i = 0; i < 3; ++i) kit.backend->poller().poll(20);
                          for (size_t i = heard; i < kit.sink.done.size(); ++i) {
                            EXPECT_NE(kit.sink.done[i].transfer, first)
                                << "on_transfer after cancel";
                          }
                          EXPECT_EQ(kit.sink.done.size(), heard);
                        }
                      }),
            "");
}

TEST_P(TransportSuite, AnOrderlyEndIsNoFailure) {
  EXPECT_EQ(
      run_group(GetParam(), 3,
                [&](RankKit& kit) {
                  kit.barrier();
                  if (kit.rank != 0) {
                    kit.transport->close(kit.in(1'000'000));
                    kit.control->leave(kit.in(1'000'000));
                    return;
                  }
                  kit.drive(
                      [&] { return !kit.listener.causes.empty() || !kit.sink.failures.empty(); },
                      100'000);
                  EXPECT_TRUE(kit.listener.causes.empty());
                  EXPECT_TRUE(kit.sink.failures.empty());
                }),
      "");
}

TEST_P(TransportSuite, ARankThatGoesAwayIsNamed) {
  EXPECT_EQ(run_group(GetParam(), 3,
                      [&](RankKit& kit) {
                        kit.barrier();
                        if (kit.rank == 1) {
                          kit.transport.reset();
                          kit.control.reset();
                          kit.backend.reset();
                          return;
                        }
                        require(kit.drive([&] { return !kit.listener.causes.empty(); }),
                                "nothing was heard of the lost rank");
                        EXPECT_EQ(kit.listener.causes.size(), 1u);
                        EXPECT_EQ(kit.listener.causes[0].code, Code::kPeerLost);
                        EXPECT_EQ(kit.listener.causes[0].rank, 1);
                        EXPECT_NE(kit.listener.causes[0].text.find("rank 1"), std::string::npos)
                            << kit.listener.causes[0].text;
                        EXPECT_TRUE(kit.control->failure().has_value());
                        const auto gathered =
                            kit.control->all_gather("after", "", kit.driver, kit.in(5'000'000));
                        EXPECT_EQ(gathered.status().code(), Code::kPeerLost);
                      }),
            "");
}

TEST_P(TransportSuite, TheFirstCauseIsEverybodysCause) {
  std::vector<std::string> texts(4);
  EXPECT_EQ(run_group(GetParam(), 4,
                      [&](RankKit& kit) {
                        kit.barrier();
                        if (kit.rank >= 2) {
                          kit.control->fail({Code::kAborted, kit.rank,
                                             fmt::format("rank {} gives up", kit.rank)});
                          kit.control->fail({Code::kInternal, kit.rank, "a later cause"});
                        }
                        require(kit.drive([&] { return !kit.listener.causes.empty(); }),
                                "no failure was heard");
                        kit.drive([&] { return kit.listener.causes.size() > 1; }, 50'000);
                        EXPECT_EQ(kit.listener.causes.size(), 1u);
                        EXPECT_EQ(kit.control->failure()->text, kit.listener.causes[0].text);
                        EXPECT_EQ(kit.listener.causes[0].code, Code::kAborted);
                        texts[static_cast<size_t>(kit.rank)] = kit.listener.causes[0].text;
                      }),
            "");
  EXPECT_EQ(std::count(texts.begin(), texts.end(), texts[0]), 4)
      << texts[0] << " | " << texts[1] << " | " << texts[3];
}

TEST_P(TransportSuite, SetUpExchange) {
  EXPECT_EQ(
      run_group(GetParam(), 4,
                [&](RankKit& kit) {
                  for (int round = 0; round < 50; ++round) {
                    const std::string mine(static_cast<size_t>((kit.rank * 37 + round * 11) % 200),
                                           static_cast<char>('a' + kit.rank));
                    const auto all = check(
                        kit.control->all_gather("round", mine, kit.driver, kit.in(10'000'000)));
                    require(all.size() == 4, "four blobs");
                    for (int r = 0; r < 4; ++r) {
                      const std::string expected(static_cast<size_t>((r * 37 + round * 11) % 200),
                                                 static_cast<char>('a' + r));
                      require(all[static_cast<size_t>(r)] == expected,
                              fmt::format("round {}: blob of rank {}", round, r));
                    }
                  }
                  const std::string large(1 << 20, static_cast<char>(kit.rank));
                  const auto all = check(
                      kit.control->all_gather("large", large, kit.driver, kit.in(10'000'000)));
                  require(all[3] == std::string(1 << 20, 3), "a blob of one MiB");
                  kit.finish();
                }),
      "");
}

TEST_P(TransportSuite, SetUpExchangeNamesWhoIsMissing) {
  EXPECT_EQ(run_group(GetParam(), 4,
                      [&](RankKit& kit) {
                        kit.barrier();
                        if (kit.rank == 1 || kit.rank == 2) {
                          kit.drive([] { return false; }, 300'000);
                          return;
                        }
                        const auto got =
                            kit.control->all_gather("splitting", "x", kit.driver, kit.in(150'000));
                        require(!got.ok(), "the exchange cannot be complete");
                        EXPECT_EQ(got.status().code(), Code::kTimeout);
                        EXPECT_NE(got.status().text().find("splitting"), std::string::npos)
                            << got.status().text();
                        EXPECT_NE(got.status().text().find("1, 2"), std::string::npos)
                            << got.status().text();
                      }),
            "");
}

TEST_P(TransportSuite, SetUpExchangesThatDifferAreAnErrorEverywhere) {
  EXPECT_EQ(run_group(GetParam(), 3,
                      [&](RankKit& kit) {
                        const auto got =
                            kit.control->all_gather(kit.rank == 2 ? "making a codec" : "splitting",
                                                    "x", kit.driver, kit.in(10'000'000));
                        require(!got.ok(),
                                fmt::format("rank {} took part in another exchange", kit.rank));
                        EXPECT_EQ(got.status().code(), Code::kProtocol) << got.status().text();
                      }),
            "");
}

TEST_P(TransportSuite, ABlobThatIsTooLargeIsAnErrorEverywhere) {
  EXPECT_EQ(run_group(GetParam(), 2,
                      [&](RankKit& kit) {
                        const std::string mine(kit.rank == 0 ? (1 << 20) + 1 : 1, 'x');
                        const auto got = kit.control->all_gather("too much", mine, kit.driver,
                                                                 kit.in(10'000'000));
                        require(!got.ok(), "more than one MiB was accepted");
                        EXPECT_EQ(got.status().code(), Code::kInvalidArgument)
                            << got.status().text();
                      }),
            "");
}

// ---- Rendezvous
// -----------------------------------------------------------------------------------------------------

struct Claim {
  int32_t rank;
  int32_t size;
};

// Every thread joins with what it claims. The texts of all results.
std::vector<Status> join_all(const TransportCase& which, const std::vector<Claim>& claims,
                             int64_t timeout_us) {
  std::vector<Status> results(claims.size());
  IdBoard board(static_cast<int>(claims.size()));
  const std::string failure = run_ranks(static_cast<int>(claims.size()), [&](int i) {
    RankKit kit(which, i, static_cast<int32_t>(claims.size()));
    JoinRequest request;
    request.id = board.share(kit);
    request.rank = claims[static_cast<size_t>(i)].rank;
    request.size = claims[static_cast<size_t>(i)].size;
    request.deadline = kit.in(timeout_us);
    auto control = kit.backend->join(request, kit.driver);
    results[static_cast<size_t>(i)] = control.status();
    board.wait();
    if (control.ok()) (*control)->leave(kit.in(1'000'000));
  });
  EXPECT_EQ(failure, "");
  return results;
}

TEST_P(TransportSuite, JoinNamesMissingRanks) {
  for (const Status& status : join_all(GetParam(), {{0, 5}, {1, 5}, {3, 5}}, 300'000)) {
    EXPECT_EQ(status.code(), Code::kTimeout) << status.text();
    EXPECT_NE(status.text().find("2, 4"), std::string::npos) << status.text();
  }
}

TEST_P(TransportSuite, JoinNamesARankThatCameTwice) {
  for (const Status& status : join_all(GetParam(), {{0, 3}, {1, 3}, {1, 3}}, 10'000'000)) {
    EXPECT_EQ(status.code(), Code::kInvalidArgument) << status.text();
    EXPECT_NE(status.text().find("rank 1"), std::string::npos) << status.text();
  }
}

TEST_P(TransportSuite, JoinNamesSizesThatDiffer) {
  for (const Status& status : join_all(GetParam(), {{0, 3}, {1, 4}, {2, 3}}, 10'000'000)) {
    EXPECT_EQ(status.code(), Code::kInvalidArgument) << status.text();
    EXPECT_NE(status.text().find('3'), std::string::npos) << status.text();
    EXPECT_NE(status.text().find('4'), std::string::npos) << status.text();
  }
}

TEST_P(TransportSuite, JoinRefusesARankOutsideItsGroup) {
  const auto results = join_all(GetParam(), {{0, 2}, {2, 2}}, 2'000'000);
  EXPECT_EQ(results[1].code(), Code::kInvalidArgument) << results[1].text();
  EXPECT_NE(results[1].text().find("rank 2"), std::string::npos) << results[1].text();
  EXPECT_FALSE(results[0].ok());
}

TEST_P(TransportSuite, JoinRefusesForeignIds) {
  RankKit kit(GetParam(), 0, 1);
  JoinRequest request;
  request.id = UniqueId{};
  request.deadline = kit.in(1'000'000);
  EXPECT_FALSE(kit.backend->knows(UniqueId{}));
  EXPECT_EQ(kit.backend->join(request, kit.driver).status().code(), Code::kInvalidArgument);
}

TEST_P(TransportSuite, JoinByExchange) {
  if (!GetParam().joins_by_exchange)
    GTEST_SKIP() << GetParam().name << " does not join by exchange";
  constexpr int kRanks = 4;
  Meeting meeting(kRanks);
  std::vector<std::string> board(kRanks);
  std::vector<uint64_t> tokens(kRanks);
  EXPECT_EQ(
      run_ranks(kRanks,
                [&](int rank) {
                  RankKit kit(GetParam(), rank, kRanks);
                  JoinRequest request;
                  request.rank = rank;
                  request.size = kRanks;
                  request.deadline = kit.in(10'000'000);
                  request.exchange = [&](const void* in, uint64_t bytes, void* out) {
                    board[static_cast<size_t>(rank)].assign(static_cast<const char*>(in), bytes);
                    meeting.wait();
                    for (size_t i = 0; i < kRanks; ++i) {
                      require(board[i].size() == bytes,
                              "all ranks exchange the same number of bytes");
                      std::memcpy(static_cast<char*>(out) + i * bytes, board[i].data(), bytes);
                    }
                    meeting.wait();
                    return ok_status();
                  };
                  kit.control = check(kit.backend->join(request, kit.driver), "join by exchange");
                  kit.connect();
                  run_messages(kit, {{0, 0, 3, 0, 0, 1000}, {0, 2, 1, 0, 0, 100'000}}, 1, 1);
                  tokens[static_cast<size_t>(rank)] = kit.control->token();
                  kit.finish();
                  meeting.wait();
                }),
      "");
  EXPECT_EQ(std::count(tokens.begin(), tokens.end(), tokens[0]), kRanks);
}

TEST_P(TransportSuite, AnExchangeThatFailsIsNamed) {
  RankKit kit(GetParam(), 0, 2);
  JoinRequest request;
  request.size = 2;
  request.deadline = kit.in(1'000'000);
  request.exchange = [](const void*, uint64_t, void*) {
    return error(Code::kTransport, "the store is gone");
  };
  if (!GetParam().joins_by_exchange) GTEST_SKIP();
  const Status status = kit.backend->join(request, kit.driver).status();
  EXPECT_NE(status.text().find("the store is gone"), std::string::npos) << status.text();
}

TEST_P(TransportSuite, SeveralGroupsOfTheSameContexts) {
  constexpr int kRanks = 3;
  IdBoard first(kRanks), second(kRanks);
  EXPECT_EQ(run_ranks(kRanks,
                      [&](int rank) {
                        RankKit a(GetParam(), rank, kRanks);
                        a.join(first.share(a));
                        a.connect();
                        // Another group in the same context: the same backend and poller.
                        UniqueId id = second.share(a);
                        JoinRequest request;
                        request.rank = kRanks - 1 - rank;
                        request.size = kRanks;
                        request.id = id;
                        request.deadline = a.in(10'000'000);
                        auto control = check(a.backend->join(request, a.driver), "second join");
                        RecordingSink sink;
                        auto transport =
                            check(a.backend->connect(*control, sink, a.driver, a.in(10'000'000)),
                                  "second connect");
                        require(control->token() != a.control->token(),
                                "tokens differ between groups");
                        run_messages(a, {{0, 0, 1, 0, 0, 70'000}, {0, 1, 2, 0, 0, 10}}, 1, 1);
                        control->fail({Code::kAborted, control->rank(), "only the second group"});
                        run_messages(a, {{0, 2, 1, 0, 0, 70'000}, {0, 1, 0, 0, 0, 10}}, 1, 2, 8);
                        require(a.listener.causes.empty(), "the first group has not failed");
                        transport.reset();
                        control.reset();
                        a.finish();
                        first.wait();
                      }),
            "");
}

TEST_P(TransportSuite, WakeEndsAPoll) {
  RankKit kit(GetParam(), 0, 1);
  Poller& poller = kit.backend->poller();
  const int64_t begin = Clock::monotonic().now_ns();
  std::thread other([&] { poller.wake(); });
  poller.poll(30'000'000);
  other.join();
  poller.wake();
  poller.poll(
      30'000'000);  // a wake before the poll counts, too (at most one of these two waits a little)
  EXPECT_LT(Clock::monotonic().now_ns() - begin, 20'000'000'000);
  const int64_t before = Clock::monotonic().now_ns();
  poller.poll(0);
  EXPECT_FALSE(poller.poll(2'000));
  EXPECT_LT(Clock::monotonic().now_ns() - before, 10'000'000'000);
}

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(TransportSuite);

}  // namespace
}  // namespace sotto::test
