// A name or an id has several addresses, and something else listens at the first: ranks meet at the
// other one.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <thread>

#include "tests/support/poll_driver.h"
#include "tests/support/ranks.h"
#include "tests/support/unknown_peer.h"
#include "transports/tcp/rendezvous_server.h"

namespace sotto::test {
namespace {

using testing::AllOf;
using testing::HasSubstr;

constexpr int64_t kTimeoutUs = 45'000'000;
const char kGreeting[] = "SSH-2.0-OpenSSH_9.2\r\n";

// Takes connections at 127.0.0.1, and does the same with each.
class Stranger {
 public:
  using Manners = std::function<void(UnknownPeer&)>;
  explicit Stranger(Manners manners)
      : thread_([this, manners = std::move(manners)] {
          std::vector<UnknownPeer> taken;
          while (!over_) {
            try {
              taken.push_back(listener_.accept(50));
              manners(taken.back());
            } catch (const RankError&) {  // nobody has come
            }
          }
        }) {}
  ~Stranger() {
    over_ = true;
    thread_.join();
  }
  uint16_t port() const { return listener_.port(); }

 private:
  RogueListener listener_;
  std::atomic<bool> over_{false};
  std::thread thread_;
};

struct Rank {
  Rank() : reactor(check(tcp::Reactor::make({}), "reactor")), driver(*reactor) {}
  wire::Join join(int32_t rank, uint64_t token) const {
    return {token, rank, 2, static_cast<uint32_t>(::getpid()), "here"};
  }
  Deadline deadline() const { return Deadline::in_us(Clock::monotonic(), kTimeoutUs); }

  std::unique_ptr<tcp::Reactor> reactor;
  PollDriver driver;
};

tcp::Endpoint at(const char* address, uint16_t port) {
  return {tcp::asio::ip::make_address(address), port};
}

// token 0: at an address.
std::string meet(uint64_t token, const Stranger::Manners& manners) {
  const Stranger stranger(manners);
  RankBarrier barrier(2);
  const std::vector<tcp::Endpoint> endpoints{at("127.0.0.1", stranger.port()),
                                             at("127.0.0.2", stranger.port())};
  return run_ranks(2, [&](int rank) {
    Rank self;
    const wire::Join own = self.join(rank, token);
    std::unique_ptr<tcp::RendezvousServer> server;
    if (rank == 0)
      server = check(tcp::RendezvousServer::open(*self.reactor, token, endpoints[1]), "open");
    barrier.wait();
    const tcp::Membership met =
        rank == 0 ? check(tcp::RendezvousServer::run(std::move(server), own, self.driver,
                                                     self.deadline()),
                          "run")
                  : check(tcp::join_rendezvous(*self.reactor, endpoints, token == 0, own,
                                               self.driver, self.deadline()),
                          "join");
    EXPECT_EQ(met.size(), 2);
    barrier.wait();
  });
}

TEST(TcpRendezvous, AStrangerAtTheFirstAddressThatCloses) {
  for (const uint64_t token : {0, 5})
    EXPECT_EQ(meet(token, [](UnknownPeer& one) { one.hang_up(); }), "") << token;
}

TEST(TcpRendezvous, AStrangerAtTheFirstAddressThatSpeaks) {
  for (const uint64_t token : {0, 5})
    EXPECT_EQ(meet(token, [](UnknownPeer& one) { one.send(kGreeting); }), "") << token;
}

TEST(TcpRendezvous, AStrangerAtTheFirstAddressThatIsSilent) {
  EXPECT_EQ(meet(0, [](UnknownPeer&) {}), "");
}

// It is named where there is nothing else.
TEST(TcpRendezvous, AStrangerAtTheOnlyAddress) {
  const Stranger stranger([](UnknownPeer& one) { one.send(kGreeting); });
  for (const std::vector<const char*>& addresses :
       {std::vector{"127.0.0.1"}, std::vector{"127.0.0.2", "127.0.0.1"}}) {
    Rank self;
    const wire::Join own = self.join(1, 5);
    std::vector<tcp::Endpoint> endpoints;
    for (const char* one : addresses) endpoints.push_back(at(one, stranger.port()));
    const Status status =
        tcp::join_rendezvous(*self.reactor, endpoints, false, own, self.driver, self.deadline())
            .status();
    EXPECT_THAT(status.text(),
                AllOf(HasSubstr(fmt::format("rank 1: rendezvous with 127.0.0.1:{}: from 127.0.0.1",
                                            stranger.port()))));
    if (addresses.size() > 1) {
      EXPECT_THAT(status.text(), HasSubstr("Connection refused"));
    }
  }
}

}  // namespace
}  // namespace sotto::test
