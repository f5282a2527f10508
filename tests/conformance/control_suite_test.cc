// Rendezvous, set-up exchange and failure: the part of the transport suite that is about the
// control plane.
#include <algorithm>
#include <atomic>
#include <cstring>

#include "tests/conformance/transport_suite.h"

namespace sotto::test {
namespace {

// Of what a time-out is to end.
constexpr int64_t kShortUs = 8'000'000;

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

// A rank that has left in order decides nothing any more, whatever connections to it are still
// open, and is no reason for what another rank meets.
TEST_P(TransportSuite, WithoutACoordinatorTheCauseIsARanksOwn) {
  // At once, but for a busy machine now and then: asking takes three times as long.
  bool at_once = false;
  for (int attempt = 0; attempt < 20 && !at_once; ++attempt) {
    std::atomic<bool> left = false, ended = false;
    EXPECT_EQ(run_group(GetParam(), 2,
                        [&](RankKit& kit) {
                          kit.barrier();
                          if (kit.rank == 0) {
                            kit.control->leave(kit.in(1'000'000));
                            left = true;
                            require(kit.drive([&] { return ended.load(); }), "rank 1 did not end");
                            return;
                          }
                          require(kit.drive([&] { return left.load(); }), "rank 0 did not leave");
                          kit.drive([] { return false; }, 50'000);
                          kit.control->fail({Code::kTimeout, 0, "rank 1 waits in vain"});
                          at_once =
                              kit.drive([&] { return !kit.listener.causes.empty(); }, 500'000);
                          kit.drive([&] { return !kit.listener.causes.empty(); });
                          EXPECT_EQ(kit.control->failure()->code, Code::kTimeout);
                          EXPECT_EQ(kit.control->failure()->text, "rank 1 waits in vain");
                          ended = true;
                        }),
              "");
  }
  EXPECT_TRUE(at_once);
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
  RankBarrier barrier(2);
  EXPECT_EQ(run_group(GetParam(), 4,
                      [&](RankKit& kit) {
                        kit.barrier();
                        if (kit.rank == 1 || kit.rank == 2) return;
                        barrier.wait();
                        const auto got =
                            kit.control->all_gather("splitting", "x", kit.driver, kit.in(kShortUs));
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
  for (const Status& status : join_all(GetParam(), {{0, 5}, {1, 5}, {3, 5}}, kShortUs)) {
    EXPECT_EQ(status.code(), Code::kTimeout) << status.text();
    EXPECT_NE(status.text().find("2, 4"), std::string::npos) << status.text();
  }
}

// Everybody is told what is wrong: as INVALID_ARGUMENT, or, where only `wrong` ranks are refused,
// as the time-out of those who waited for the right ones.
void expect_told(const TransportCase& which, const std::vector<Status>& results, int wrong,
                 const std::vector<std::string>& words) {
  int refused = 0;
  for (const Status& status : results) {
    refused += status.code() == Code::kInvalidArgument;
    if (which.refuses_alone && status.code() == Code::kTimeout) {
      EXPECT_NE(status.text().find("did not come ("), std::string::npos) << status.text();
      EXPECT_NE(status.text().find("turned away: "), std::string::npos) << status.text();
    } else {
      EXPECT_EQ(status.code(), Code::kInvalidArgument) << status.text();
    }
    for (const std::string& word : words)
      EXPECT_NE(status.text().find(word), std::string::npos) << status.text();
  }
  EXPECT_EQ(refused, which.refuses_alone ? wrong : static_cast<int>(results.size()));
}

TEST_P(TransportSuite, JoinNamesARankThatCameTwice) {
  const int64_t limit_us = GetParam().refuses_alone ? kShortUs : 60'000'000;
  const auto results = join_all(GetParam(), {{0, 3}, {1, 3}, {1, 3}}, limit_us);
  expect_told(GetParam(), results, 1, {"rank 1"});
}

TEST_P(TransportSuite, JoinNamesSizesThatDiffer) {
  const int64_t limit_us = GetParam().refuses_alone ? kShortUs : 60'000'000;
  const auto results = join_all(GetParam(), {{0, 3}, {1, 4}, {2, 3}}, limit_us);
  expect_told(GetParam(), results, 1, {"3", "4"});
}

TEST_P(TransportSuite, JoinRefusesARankOutsideItsGroup) {
  const auto results = join_all(GetParam(), {{0, 2}, {2, 2}}, kShortUs);
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
  RankBarrier barrier(kRanks);
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
                    barrier.wait();
                    for (size_t i = 0; i < kRanks; ++i) {
                      require(board[i].size() == bytes,
                              "all ranks exchange the same number of bytes");
                      std::memcpy(static_cast<char*>(out) + i * bytes, board[i].data(), bytes);
                    }
                    barrier.wait();
                    return ok_status();
                  };
                  kit.control = check(kit.backend->join(request, kit.driver), "join by exchange");
                  kit.connect();
                  run_messages(kit, {{0, 0, 3, 0, 0, 1000}, {0, 2, 1, 0, 0, 100'000}}, 1, 1);
                  tokens[static_cast<size_t>(rank)] = kit.control->token();
                  kit.finish();
                  barrier.wait();
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
  if (!GetParam().joins_by_exchange)
    GTEST_SKIP() << GetParam().name << " does not join by exchange";
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
                        auto transport = check(a.backend->connect(*control, {all_ranks(*control)},
                                                                  sink, a.driver, a.in(10'000'000)),
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

}  // namespace
}  // namespace sotto::test
