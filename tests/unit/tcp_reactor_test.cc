// What a reactor serves and when: turns, timers and waits, on a clock that the test advances.
#include "transports/tcp/reactor.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <functional>
#include <utility>
#include <vector>

#include "tests/support/fake_clock.h"
#include "tests/support/ranks.h"
#include "transports/tcp/listener.h"
#include "transports/tcp/net.h"

namespace sotto::tcp {
namespace {

using test::check;
using test::FakeClock;
using testing::ElementsAre;
using testing::IsEmpty;

const Address kHere = asio::ip::address_v4::loopback();

// Notes its turns.
class Noted final : public Pollable {
 public:
  Noted(std::string name, std::vector<std::string>& turns)
      : name_(std::move(name)), turns_(turns) {}
  bool serve(uint32_t events) override {
    turns_.push_back(events == 0 ? name_ : name_ + std::to_string(events));
    if (during) during();
    return wants_more;
  }

  bool wants_more = false;
  std::function<void()> during;

 private:
  const std::string name_;
  std::vector<std::string>& turns_;
};

class Turns : public testing::Test {
 protected:
  void SetUp() override {
    for (Noted* one : {&a_, &b_, &c_}) queue_.add(*one);
  }
  std::vector<std::string> serve() {
    queue_.serve();
    return std::exchange(served_, {});
  }

  FakeClock clock_;
  std::vector<std::string> served_;
  TurnQueue queue_{clock_};
  Noted a_{"a", served_}, b_{"b", served_}, c_{"c", served_};
};

TEST_F(Turns, AreInTheOrderInWhichTheyWereWanted) {
  queue_.want(b_);
  queue_.want(a_, EPOLLIN);
  queue_.want(b_, EPOLLOUT);
  queue_.want(a_, EPOLLOUT);
  EXPECT_THAT(serve(), ElementsAre("b4", "a5")) << "one turn each, with all events";
  EXPECT_THAT(serve(), IsEmpty());
  EXPECT_FALSE(queue_.serve());
  queue_.want(a_);
  EXPECT_THAT(serve(), ElementsAre("a")) << "events come once";
}

TEST_F(Turns, WhatIsWantedInsideATurnIsForTheNextPass) {
  a_.wants_more = true;
  a_.during = [&] { queue_.want(c_); };
  queue_.want(a_);
  queue_.want(b_);
  EXPECT_THAT(serve(), ElementsAre("a", "b"));
  a_.wants_more = false;
  EXPECT_THAT(serve(), ElementsAre("c", "a"));
}

TEST_F(Turns, ThatWaitForATimeComeWhenTheClockIsThere) {
  const int64_t now = clock_.now_ns();
  EXPECT_EQ(queue_.next_ns(), INT64_MAX);
  queue_.want_at(a_, now + 3000);
  queue_.want_at(b_, now + 1000);
  queue_.want_at(a_, now + 2000);
  queue_.want_at(a_, now + 9000);
  EXPECT_EQ(queue_.next_ns(), now + 1000);
  queue_.release();
  EXPECT_THAT(serve(), IsEmpty());
  clock_.advance_us(1);
  queue_.release();
  queue_.want(c_, EPOLLIN);
  EXPECT_THAT(serve(), ElementsAre("b", "c1"));
  EXPECT_EQ(queue_.next_ns(), now + 2000) << "the earliest time of each counts";
  clock_.advance_us(1);
  queue_.release();
  EXPECT_THAT(serve(), ElementsAre("a"));
  EXPECT_EQ(queue_.next_ns(), INT64_MAX);
}

TEST_F(Turns, EndWithARemovalInsideATurn) {
  a_.wants_more = true;
  a_.during = [&] {
    queue_.want_at(c_, 0);
    EXPECT_TRUE(queue_.remove(c_)) << "it waits in this pass and for a time";
    EXPECT_TRUE(queue_.remove(a_)) << "its turn is this one";
  };
  queue_.want(a_);
  queue_.want(b_);
  queue_.want(c_);
  EXPECT_THAT(serve(), ElementsAre("a", "b"));
  EXPECT_EQ(queue_.next_ns(), INT64_MAX);
  EXPECT_FALSE(queue_.remove(a_));
  queue_.want(a_);
  queue_.want_at(a_, 0);
  queue_.release();
  EXPECT_THAT(serve(), IsEmpty());
  queue_.add(c_);
  queue_.want(c_);
  EXPECT_THAT(serve(), ElementsAre("c")) << "turns again";
}

TEST_F(Turns, AreGoneWhenTheirOwnerIsRemoved) {
  queue_.want(a_);
  queue_.want_at(b_, 0);
  EXPECT_TRUE(queue_.remove(a_));
  EXPECT_TRUE(queue_.remove(b_));
  queue_.want(a_);
  queue_.want_at(b_, 0);
  EXPECT_EQ(queue_.next_ns(), INT64_MAX);
  queue_.release();
  EXPECT_THAT(serve(), IsEmpty());
  // Also when it comes back at once: what it answers belongs to the time before.
  c_.wants_more = true;
  c_.during = [&] {
    queue_.remove(c_);
    queue_.add(c_);
  };
  queue_.want(c_);
  EXPECT_THAT(serve(), ElementsAre("c"));
  EXPECT_THAT(serve(), IsEmpty());
}

TEST(Timers, CallAtTheTimesOfTheClock) {
  FakeClock clock;
  Timers timers(clock);
  std::vector<std::string> calls;
  const int64_t begin = clock.now_ns();
  const Timers::Timer late = timers.after(20, [&] { calls.emplace_back("late"); });
  const Timers::Timer often = timers.every(5, [&] { calls.emplace_back("often"); });
  const Timers::Timer early = timers.after(2, [&] { calls.emplace_back("early"); });
  EXPECT_EQ(timers.next_ns(), begin + 2'000'000);
  EXPECT_FALSE(timers.run(clock.now_ns()));
  clock.advance_us(6000);
  EXPECT_TRUE(timers.run(clock.now_ns()));
  EXPECT_THAT(calls, ElementsAre("early", "often"));
  EXPECT_EQ(timers.next_ns(), begin + 11'000'000);
  clock.advance_us(30'000);
  timers.run(clock.now_ns());
  EXPECT_THAT(calls, ElementsAre("early", "often", "often", "late")) << "late ones are not made up";
  EXPECT_FALSE(timers.run(clock.now_ns()));
}

TEST(Timers, EndWithTheirOwnerAlsoInsideACall) {
  FakeClock clock;
  Timers timers(clock);
  int calls = 0;
  Timers::Timer itself, other, next;
  itself = timers.every(1, [&] {
    ++calls;
    other.reset();
    next = timers.after(1, [&] { calls += 100; });
    itself.reset();
    ++calls;
  });
  other = timers.every(2, [&] { calls += 1000; });
  clock.advance_us(2000);
  EXPECT_TRUE(timers.run(clock.now_ns()));
  EXPECT_EQ(calls, 2);
  clock.advance_us(1000);
  timers.run(clock.now_ns());
  EXPECT_EQ(calls, 102);
  EXPECT_EQ(timers.next_ns(), INT64_MAX);
}

class ReactorOnAClock : public testing::Test {
 protected:
  void SetUp() override {
    ReactorOptions options;
    options.clock = &clock_;
    reactor_ = check(Reactor::make(options));
  }
  // Polls until `done`, for a generous real time.
  bool poll_until(const std::function<bool()>& done, int64_t advance_us = 200) {
    const Clock& real = Clock::monotonic();
    const Deadline deadline = Deadline::in_us(real, 30'000'000);
    while (!done() && !deadline.passed(real)) {
      reactor_->poll(1000);
      clock_.advance_us(advance_us);
    }
    return done();
  }
  // Of joins.
  std::unique_ptr<FrameListener> listen() {
    return check(
        FrameListener::open(*reactor_, {kHere, 0}, {"here", wire::FrameKind::kJoin, 64, 0},
                            [](std::unique_ptr<FrameStream>&, const wire::FrameHeader&,
                               wire::Bytes) { return std::optional<Refusal>(Refusal{}); }));
  }

  FakeClock clock_;
  std::unique_ptr<Reactor> reactor_;
};

TEST_F(ReactorOnAClock, APollEndsAlthoughTheClockStandsStill) {
  reactor_->poll(0);
  EXPECT_FALSE(reactor_->poll(2000));
}

TEST_F(ReactorOnAClock, TimersAndDelayedTurnsFollowTheClock) {
  int ticks = 0;
  const Timers::Timer timer = reactor_->every(50, [&] { ++ticks; });
  std::vector<std::string> turns;
  Noted pollable("turn", turns);
  int ends[2];
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
  ASSERT_TRUE(reactor_->add(ends[0], pollable).ok());
  reactor_->poll(0);
  turns.clear();
  reactor_->want_turn_at(pollable, clock_.now_ns() + 60'000'000);
  reactor_->poll(60'000);
  EXPECT_EQ(ticks, 0) << "real time does not count";
  EXPECT_THAT(turns, IsEmpty());
  clock_.advance_us(50'000);
  EXPECT_TRUE(reactor_->poll(0));
  EXPECT_EQ(ticks, 1);
  EXPECT_THAT(turns, IsEmpty());
  clock_.advance_us(10'000);
  EXPECT_TRUE(reactor_->poll(0));
  EXPECT_EQ(ticks, 1);
  EXPECT_THAT(turns, ElementsAre("turn"));
  reactor_->remove(ends[0], pollable);
  ::close(ends[0]);
  ::close(ends[1]);
}

TEST(Reactor, AWaitEndsForATimerAndForADelayedTurn) {
  const std::unique_ptr<Reactor> reactor = check(Reactor::make({}));
  std::vector<std::string> turns;
  Noted pollable("turn", turns);
  int ends[2];
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
  ASSERT_TRUE(reactor->add(ends[0], pollable).ok());
  reactor->poll(0);
  // Several polls: Asio ends a wait for its own handlers, too.
  const auto poll_for = [&](const auto& done) {
    for (int i = 0; i < 10 && !done(); ++i) reactor->poll(600'000'000);
    return done();
  };
  for (int round = 0; round < 3; ++round) {
    turns.clear();
    reactor->want_turn_at(pollable, reactor->now_ns() + 5'000'000);
    EXPECT_TRUE(poll_for([&] { return !turns.empty(); }));
    int calls = 0;
    const Timers::Timer timer = reactor->after(5, [&] { ++calls; });
    EXPECT_TRUE(poll_for([&] { return calls > 0; }));
  }
  reactor->remove(ends[0], pollable);
  ::close(ends[0]);
  ::close(ends[1]);
}

// Every look at it takes 50 us.
class TickingClock final : public Clock {
 public:
  int64_t now_ns() const override { return now_ns_ += 50'000; }

 private:
  mutable int64_t now_ns_ = 1'000'000'000;
};

// Has one frame to send.
class OneFrame final : public StreamOwner {
 public:
  explicit OneFrame(const std::vector<uint8_t>& payload) : payload_(payload) {}
  Result<PayloadPlace> on_header(FrameStream&, const wire::FrameHeader&) override {
    return PayloadPlace{};
  }
  Status on_frame(FrameStream&, const wire::FrameHeader&) override { return ok_status(); }
  bool next_frame(FrameStream&, OutFrame& out) override {
    if (std::exchange(begun_, true)) return false;
    out.header.kind = wire::FrameKind::kData;
    out.header.payload_bytes = payload_.size();
    out.payload = payload_.data();
    return true;
  }
  void on_sent(FrameStream&, const OutFrame&) override { sent = true; }
  void on_broken(FrameStream&, Status why) override { ADD_FAILURE() << why.text(); }

  bool sent = false;

 private:
  const std::vector<uint8_t>& payload_;
  bool begun_ = false;
};

// Not a crumb for every look at the clock: the driver sleeps until some kilobytes may pass.
TEST(Reactor, AStreamOnASlowLinkSendsALotAtATime) {
  constexpr uint64_t kBytes = 512 * 1024;
  TickingClock clock;
  ReactorOptions options;
  options.clock = &clock;
  options.rate_limit_mbit = 20;
  const std::unique_ptr<Reactor> reactor = check(Reactor::make(options));
  int ends[2];  // every send is a record
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends), 0);
  const std::vector<uint8_t> payload(kBytes, 7);
  OneFrame owner(payload);
  const std::unique_ptr<FrameStream> stream =
      check(FrameStream::make(*reactor, ends[0], "there", owner));
  stream->flush();
  uint64_t sends = 0, bytes = 0;
  std::vector<uint8_t> record(1 << 17);
  const Deadline deadline = Deadline::in_us(Clock::monotonic(), 30'000'000);
  while (bytes < kBytes && !deadline.passed(Clock::monotonic())) {
    reactor->poll(0);
    for (ssize_t n; (n = ::recv(ends[1], record.data(), record.size(), MSG_DONTWAIT)) > 0; ++sends)
      bytes += static_cast<uint64_t>(n);
  }
  EXPECT_TRUE(owner.sent);
  EXPECT_GE(bytes, kBytes);
  EXPECT_LE(sends, kBytes / 8192 + 8);
  ::close(ends[1]);
}

TEST_F(ReactorOnAClock, ASilentConnectionHasItsTimeOfTheClock) {
  const auto listener = listen();
  int fd = -1;
  const Connector connector(
      *reactor_, {{kHere, listener->port()}}, false,
      [&](int connected, const std::string&) { fd = connected; }, [](const Status&) {});
  ASSERT_TRUE(poll_until([&] { return fd >= 0 && listener->pending() == 1; }));
  const int64_t begin = clock_.now_ns();
  ASSERT_TRUE(poll_until([&] { return listener->pending() == 0; }, 20'000));
  const int64_t ms = (clock_.now_ns() - begin) / 1'000'000;
  EXPECT_GE(ms, kFirstFrameMs - 100);
  EXPECT_LE(ms, kFirstFrameMs + 200);
  EXPECT_THAT(listener->refusals().summary(), testing::HasSubstr("no join within 5 s"));
  ::close(fd);
}

// A listening socket whose queue is full: who connects gets no answer.
class Unanswering {
 public:
  Unanswering() : fd_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in at{};
    at.sin_family = AF_INET;
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof at;
    ok = ::bind(fd_, reinterpret_cast<sockaddr*>(&at), length) == 0 && ::listen(fd_, 0) == 0 &&
         ::getsockname(fd_, reinterpret_cast<sockaddr*>(&at), &length) == 0;
    for (int& fd : fill_) {
      fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
      ::connect(fd, reinterpret_cast<sockaddr*>(&at), length);
    }
    port = ntohs(at.sin_port);
  }
  ~Unanswering() {
    for (const int fd : fill_) ::close(fd);
    ::close(fd_);
  }
  bool ok = false;
  uint16_t port = 0;

 private:
  int fd_;
  std::array<int, 4> fill_{};
};

TEST_F(ReactorOnAClock, AnAddressWithoutAnAnswerIsLeftForTheNext) {
  const Unanswering unanswering;
  ASSERT_TRUE(unanswering.ok);
  const auto listener = listen();
  int fd = -1;
  const Connector connector(
      *reactor_, {{kHere, unanswering.port}, {kHere, listener->port()}}, false,
      [&](int connected, const std::string&) { fd = connected; }, [](const Status&) {});
  clock_.advance_us(1'900'000);
  for (int i = 0; i < 10; ++i) reactor_->poll(1000);
  EXPECT_LT(fd, 0);
  EXPECT_EQ(connector.tried(), "");
  clock_.advance_us(100'000);
  ASSERT_TRUE(poll_until([&] { return fd >= 0; }));
  EXPECT_THAT(connector.tried(), testing::EndsWith("no answer"));
  ::close(fd);
}

}  // namespace
}  // namespace sotto::tcp
