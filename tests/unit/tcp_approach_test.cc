// Which of several addresses is the peer's: others have listeners that are not the peer.
#include "transports/tcp/approach.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/fake_clock.h"
#include "tests/support/ranks.h"
#include "transports/tcp/listener.h"

namespace sotto::tcp {
namespace {

using test::check;
using test::FakeClock;
using testing::AllOf;
using testing::HasSubstr;

constexpr wire::Hello kOwn{7, 0, 3};
constexpr int32_t kSought = 2;

// What listens at an address.
enum class Who { kPeer, kRefuses, kSilent, kOther, kNobody };

class Site final : public HandshakeOwner {
 public:
  Site(Reactor& reactor, const char* address, Who who) : who_(who) {
    listener_ = check(FrameListener::open(
        reactor, {asio::ip::make_address(address), 0},
        {"site", wire::FrameKind::kHello, kMaxHelloBytes, 4},
        [this](std::unique_ptr<FrameStream>& stream, const wire::FrameHeader& first, wire::Bytes) {
          return admit(stream, first);
        }));
    at = Endpoint(asio::ip::make_address(address), listener_->port());
    if (who == Who::kNobody) listener_.reset();
  }
  void greet() {
    who_ = Who::kPeer;
    for (auto& [stream, header] : silent_) answer(std::move(stream), header);
    silent_.clear();
  }
  std::string text() const { return endpoint_text(at); }

  Endpoint at;
  std::vector<uint32_t> rounds;  // of the hellos that have come

 private:
  std::optional<Refusal> admit(std::unique_ptr<FrameStream>& stream,
                               const wire::FrameHeader& first) {
    rounds.push_back(first.round);
    if (who_ == Who::kRefuses)
      return Refusal{"elsewhere", true, {Code::kProtocol, -1, "this is another"}};
    if (who_ == Who::kSilent) {
      silent_.emplace_back(std::move(stream), first);
    } else {
      answer(std::move(stream), first);
    }
    return {};
  }
  void answer(std::unique_ptr<FrameStream> stream, const wire::FrameHeader& first) {
    wire::Hello own = kOwn;
    own.rank = who_ == Who::kPeer ? kSought : 1;
    greetings_.push_back(std::make_unique<Handshake>(*this, own, 0, first.segment, false));
    greetings_.back()->start(std::move(stream));
  }
  Status on_answer(Handshake& /*handshake*/, const wire::Hello& /*hello*/) override { return {}; }
  void on_greeted(Handshake& /*handshake*/) override {}
  void on_handshake_broken(Handshake& /*handshake*/, const Status& /*why*/) override {}

  Who who_;
  std::unique_ptr<FrameListener> listener_;
  std::vector<std::pair<std::unique_ptr<FrameStream>, wire::FrameHeader>> silent_;
  std::vector<std::unique_ptr<Handshake>> greetings_;
};

class ApproachTest : public testing::Test {
 protected:
  void SetUp() override {
    ReactorOptions options;
    options.clock = &clock_;
    reactor_ = check(Reactor::make(options));
  }
  Site& site(const char* address, Who who) {
    sites_.push_back(std::make_unique<Site>(*reactor_, address, who));
    endpoints_.push_back(sites_.back()->at);
    return *sites_.back();
  }
  void start() {
    approach_ = std::make_unique<Approach>(
        *reactor_, kOwn, kSought, 1, endpoints_,
        Approach::Events{[](const wire::Hello& hello, const std::string& from) {
                           return hello.rank == kSought
                                      ? ok_status()
                                      : error(Code::kProtocol, "{} greets as rank {}", from,
                                              hello.rank);
                         },
                         [this] { ++adopted_; },
                         [this](std::unique_ptr<Handshake> one) { greeted_ = std::move(one); },
                         [this](const Status& why) { failed_.push_back(why); }});
  }
  bool poll_until(const std::function<bool()>& done, int64_t advance_us = 0) {
    const Clock& real = Clock::monotonic();
    const Deadline deadline = Deadline::in_us(real, 30'000'000);
    while (!done() && !deadline.passed(real)) {
      reactor_->poll(1000);
      clock_.advance_us(advance_us);
    }
    return done();
  }
  bool greeted_at(const Site& site, int64_t advance_us = 0) {
    return poll_until([&] { return greeted_ || !failed_.empty(); }, advance_us) && greeted_ &&
           greeted_->over() && greeted_->stream().name() == site.text();
  }
  std::string failure() {
    poll_until([&] { return greeted_ || !failed_.empty(); }, 10'000);
    return failed_.empty() ? "none" : failed_[0].text();
  }

  FakeClock clock_;
  std::unique_ptr<Reactor> reactor_;
  std::vector<std::unique_ptr<Site>> sites_;
  std::vector<Endpoint> endpoints_;
  std::unique_ptr<Handshake> greeted_;
  std::vector<Status> failed_;
  int adopted_ = 0;
  std::unique_ptr<Approach> approach_;
};

TEST_F(ApproachTest, AHelloSaysWhomItGreets) {
  const Site& peer = site("127.0.0.2", Who::kPeer);
  start();
  EXPECT_TRUE(greeted_at(peer));
  EXPECT_EQ(peer.rounds, std::vector<uint32_t>{kSought + 1});
  EXPECT_EQ(adopted_, 1);
  EXPECT_EQ(approach_->progress(), "");
}

TEST_F(ApproachTest, WhatIsNotThePeerIsLeftAtOnce) {
  site("127.0.0.2", Who::kRefuses);
  site("127.0.0.3", Who::kOther);
  site("127.0.0.4", Who::kNobody);
  const Site& peer = site("127.0.0.5", Who::kPeer);
  start();
  EXPECT_TRUE(greeted_at(peer));
  EXPECT_EQ(adopted_, 1);
}

TEST_F(ApproachTest, WhatIsSilentIsLeftAfterAWhile) {
  site("127.0.0.2", Who::kSilent);
  const Site& peer = site("127.0.0.3", Who::kPeer);
  start();
  poll_until([&] { return adopted_ > 0; });
  clock_.advance_us(kAttemptMs * 1000 - 1000);
  for (int i = 0; i < 10; ++i) reactor_->poll(1000);
  EXPECT_TRUE(peer.rounds.empty());
  EXPECT_THAT(approach_->progress(), HasSubstr("127.0.0.2:"));
  EXPECT_THAT(approach_->progress(), HasSubstr("connected, no hello"));
  clock_.advance_us(1000);
  EXPECT_TRUE(greeted_at(peer));
}

// The peer is late, and other addresses are not its own.
TEST_F(ApproachTest, ASilentOneMayGreetLater) {
  Site& peer = site("127.0.0.2", Who::kSilent);
  const Site& other = site("127.0.0.3", Who::kRefuses);
  start();
  EXPECT_TRUE(poll_until([&] { return !other.rounds.empty(); }, 100'000));
  for (int i = 0; i < 20; ++i) reactor_->poll(1000);
  EXPECT_TRUE(failed_.empty());
  EXPECT_THAT(approach_->progress(),
              AllOf(HasSubstr(peer.text() + ": connected, no hello"),
                    HasSubstr(other.text() + ": the peer refuses it: this is another")));
  peer.greet();
  EXPECT_TRUE(greeted_at(peer));
}

TEST_F(ApproachTest, AFailureNamesAllAddresses) {
  const Site& refuses = site("127.0.0.2", Who::kRefuses);
  const Site& other = site("127.0.0.3", Who::kOther);
  const Site& nobody = site("127.0.0.4", Who::kNobody);
  start();
  EXPECT_EQ(failure(), "cannot connect to " + refuses.text() +
                           ": the peer refuses it: this is another, " + other.text() +
                           " greets as rank 1, " + nobody.text() + ": Connection refused");
  EXPECT_EQ(failed_.size(), 1u);
}

TEST_F(ApproachTest, OneAddressFailsWithItsOwnText) {
  site("127.0.0.2", Who::kRefuses);
  start();
  EXPECT_EQ(failure(), "the peer refuses it: this is another");
}

}  // namespace
}  // namespace sotto::tcp
