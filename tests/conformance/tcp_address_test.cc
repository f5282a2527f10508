// Where ranks listen, and ranks that are not reached there: a fixed port, and something in between
// that forwards another one to it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/iface/unique_id.h"
#include "tests/conformance/tcp_ranks.h"
#include "tests/support/faulty_proxy.h"
#include "tests/support/reserved_port.h"
#include "transports/tcp/net.h"
#include "transports/tcp/tcp_backend.h"

namespace sotto::test {
namespace {

using testing::AllOf;
using testing::HasSubstr;

TransportCase with(const std::function<void(TcpOptions&)>& change) {
  return {"tcp", [change](const Clock& clock) {
            TcpOptions options;
            options.clock = &clock;
            change(options);
            return make_tcp_backend(options);
          }};
}

// Every rank sends `data` to the next one.
void pass_on(RankKit& kit, uint64_t number, std::vector<uint8_t> data) {
  TestOp op(7, number);
  std::vector<uint8_t> got(data.size());
  check(kit.transport->post_op(op.descriptor));
  const int32_t next = (kit.rank + 1) % kit.size;
  const int32_t last = (kit.rank + kit.size - 1) % kit.size;
  kit.start(op.add(true, next, 0, 0, data.data(), data.size()));
  kit.start(op.add(false, last, 0, 0, got.data(), got.size()));
  kit.messages->ready(last, op.descriptor, 0, got.size());
  kit.drive([&] { return kit.sink.done.size() >= 2 * (number + 1); }, 20'000'000);
  kit.transport->complete(op.descriptor);
  require(got == data, "what was sent arrives");
}

// Ranks behind forwarded ports pass data on; `change` is made to the options of every rank.
struct Forwarded {
  static constexpr int kSize = 3;
  std::vector<std::unique_ptr<FaultyProxy>> forwards;  // to each rank
  std::string failure;

  Forwarded(const std::vector<uint8_t>& data, uint64_t times,
            const std::function<void(int rank, TcpOptions& options)>& change) {
    ReservedPort ports[kSize];
    for (const ReservedPort& port : ports)
      forwards.push_back(std::make_unique<FaultyProxy>(ProxyOptions{.target_port = port.number()}));
    UniqueId id{};
    RankBarrier barrier(kSize);
    failure = run_ranks(kSize, [&](int rank) {
      const auto at = static_cast<size_t>(rank);
      const auto which = with([&](TcpOptions& o) {
        o.listen_port = ports[at].number();
        o.advertise = fmt::format("127.0.0.1:{}", forwards[at]->port());
        change(rank, o);
      });
      RankKit kit(which, rank, kSize);
      if (rank == 0) id = check(kit.backend->make_unique_id(Reach::kHost));
      barrier.wait();
      kit.join(id);
      kit.connect();
      for (uint64_t i = 0; i < times; ++i) pass_on(kit, i, data);
      kit.finish();
    });
  }
};

TEST(TcpAddress, DataConnectionsGoThroughAForwardedPort) {
  const std::vector<uint8_t> data(200'000, 7);
  const Forwarded ranks(data, 1, [](int, TcpOptions&) {});
  EXPECT_EQ(ranks.failure, "");
  const auto& forwards = ranks.forwards;
  // The lower rank connects, twice.
  for (size_t r = 0; r < forwards.size(); ++r)
    EXPECT_EQ(forwards[r]->connections(), static_cast<int>(2 * r));
  EXPECT_EQ(forwards[0]->bytes_passed(), 0u);
  EXPECT_GT(forwards[1]->bytes_passed() + forwards[2]->bytes_passed(), 3 * data.size());
}

// Ranks that wish different numbers of connections use the smallest.
TEST(TcpAddress, TheSmallestNumberOfConnectionsCounts) {
  const Forwarded ranks(std::vector<uint8_t>(3'000'000, 9), 5, [](int rank, TcpOptions& o) {
    o.connections = static_cast<uint32_t>(4 - rank);
  });
  EXPECT_EQ(ranks.failure, "");
  for (size_t r = 0; r < ranks.forwards.size(); ++r)
    EXPECT_EQ(ranks.forwards[r]->connections(), static_cast<int>(2 * r));
}

TEST(TcpAddress, APortThatIsTakenIsNamedOnEveryRank) {
  const ReservedPort port;
  UniqueId id{};
  RankBarrier barrier(3);
  EXPECT_EQ(run_ranks(3,
                      [&](int rank) {
                        // Rank 1 and rank 2 want the same one.
                        const auto which =
                            with([&](TcpOptions& o) { o.listen_port = port.number(); });
                        RankKit kit(which, rank, 3);
                        if (rank == 0) id = check(kit.backend->make_unique_id(Reach::kHost));
                        barrier.wait();
                        kit.join(id);
                        const auto connected = kit.connected(10'000'000);
                        require(!connected.ok(), "connecting fails");
                        const std::string& text = connected.status().text();
                        require(connected.status().code() == Code::kTransport, text);
                        for (const std::string& word :
                             {fmt::format("127.0.0.1:{}", port.number()), std::string("in use"),
                              std::string("data connections")}) {
                          require(text.find(word) != std::string::npos, text);
                        }
                      }),
            "");
}

TEST(TcpAddress, AnIdCarriesTheAdvertisedAddress) {
  TcpOptions options;
  options.advertise = "203.0.113.5:4000";
  const auto backend = check(make_tcp_backend(options));
  const UniqueIdFields fields =
      check(decode_unique_id(check(backend->make_unique_id(Reach::kHost))));
  EXPECT_EQ(fields.addresses, "203.0.113.5");
  EXPECT_NE(fields.port, 0);
  EXPECT_NE(fields.port, 4000) << "that port is forwarded to the data connections";
}

TEST(TcpAddress, AnAddressThatIsNone) {
  TcpOptions options;
  options.advertise = "no.such.address:1";
  const auto made = make_tcp_backend(options);
  ASSERT_FALSE(made.ok());
  EXPECT_EQ(made.status().code(), Code::kInvalidArgument);
  EXPECT_THAT(made.status().text(),
              AllOf(HasSubstr("no.such.address:1"), HasSubstr("SOTTO_ADVERTISE")));
}

// A rank that was not told where to listen does so where the rendezvous leads.
TEST(TcpAddress, ListensWhereTheRendezvousLeads) {
  const auto place_of = [](const char* address) {
    return tcp::place_towards({{boost::asio::ip::make_address(address), 4242}});
  };
  EXPECT_EQ(place_of("127.0.0.1").bind.to_string(), "127.0.0.1");
  EXPECT_EQ(place_of("127.0.0.1").published.size(), 1u);
  EXPECT_TRUE(tcp::is_own_address(boost::asio::ip::make_address("127.0.0.1")));
  EXPECT_FALSE(tcp::is_own_address(boost::asio::ip::make_address("192.0.2.1")));
  if (!has_ipv6_loopback()) return;
  EXPECT_EQ(place_of("::1").bind.to_string(), "::1");
  const ReservedPort port;
  const std::string address = fmt::format("tcp://[::1]:{}", port.number());
  EXPECT_EQ(run_ranks(2,
                      [&](int rank) {
                        RankKit kit(with([](TcpOptions&) {}), rank, 2);
                        check(join_at(kit, address));
                        kit.connect();
                        const std::string route = kit.transport->route(1 - rank);
                        require(route.find("[::1]:") != std::string::npos, route);
                        kit.finish();
                      }),
            "");
}

// The address of this machine that others reach, if it has one.
std::string outer_address() {
  const std::string all = check(tcp::listen_place("any")).published.front().to_string();
  return all == "127.0.0.1" ? "" : all;
}

// A name that is loopback here may be another machine's own address there.
TEST(TcpAddress, RanksOfSeveralHostsLeaveLoopback) {
  const ReservedPort port;
  const std::string address = fmt::format("tcp://127.0.0.1:{}", port.number());
  for (const Reach reach : {Reach::kHost, Reach::kNetwork}) {
    EXPECT_EQ(run_ranks(2,
                        [&](int rank) {
                          RankKit kit(with([](TcpOptions&) {}), rank, 2);
                          JoinRequest request;
                          request.address = address;
                          request.reach = reach;
                          check(join(kit, std::move(request), 45'000'000));
                          kit.connect();
                          const std::string route = kit.transport->route(1 - rank);
                          const bool inside = route.find("127.0.0.1:") != std::string::npos;
                          require(inside == (reach == Reach::kHost || outer_address().empty()),
                                  route);
                          kit.finish();
                        }),
              "");
  }
}

TEST(TcpAddress, AnIdForSeveralHostsHasAllAddressesUnlessOneIsNamed) {
  const auto addresses = [](const char* listen, Reach reach) {
    TcpOptions options;
    options.listen = listen;
    const auto backend = check(make_tcp_backend(options));
    return check(decode_unique_id(check(backend->make_unique_id(reach)))).addresses;
  };
  EXPECT_EQ(addresses("", Reach::kNetwork), addresses("any", Reach::kHost));
  EXPECT_EQ(addresses("", Reach::kHost), "127.0.0.1");
  EXPECT_EQ(addresses("127.0.0.1", Reach::kNetwork), "127.0.0.1");
}

TEST(TcpAddress, EveryAddressThatWasTriedIsNamed) {
  const ReservedPort port;
  UniqueIdFields fields;
  fields.kind = IdKind::kTcp;
  fields.port = port.number();
  fields.token = 7;
  fields.addresses = "127.0.0.1,127.0.0.2";
  RankKit kit(with([](TcpOptions&) {}), 1, 2);
  const Status status = join_with(kit, check(encode_unique_id(fields)), 5'000'000);
  EXPECT_THAT(status.text(), AllOf(HasSubstr(fmt::format("127.0.0.1:{}: ", fields.port)),
                                   HasSubstr(fmt::format("127.0.0.2:{}: ", fields.port))));
}

}  // namespace
}  // namespace sotto::test
