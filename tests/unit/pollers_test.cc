// One wait for all pollers: by wakes that are forwarded, descriptors that are watched, or short
// waits.
#include "core/engine/pollers.h"

#include <gtest/gtest.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <set>
#include <thread>

#include "transports/tcp/reactor.h"

namespace sotto::test {
namespace {

// Notes what it is asked.
class NotingPoller : public Poller {
 public:
  bool poll(int64_t wait_us) override {
    waits.push_back(wait_us);
    return false;
  }
  void wake() override { ++wakes; }
  void forward_wakes(Poller* other) override { forwards_to = other; }
  int64_t poll_interval_us() const override { return interval_us; }
  bool watch(int descriptor, bool on) override {
    if (!can_watch) return false;
    on ? watched.insert(descriptor) : watched.erase(watched.find(descriptor));
    return true;
  }

  std::vector<int64_t> waits;
  int wakes = 0;
  int64_t interval_us = INT64_MAX;
  Poller* forwards_to = nullptr;
  bool can_watch = true;
  std::multiset<int> watched;
};

// Its work is what is written to an eventfd.
class DescriptorPoller final : public NotingPoller {
 public:
  DescriptorPoller() : fd_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {}
  ~DescriptorPoller() override { ::close(fd_); }
  bool poll(int64_t) override {
    uint64_t count = 0;
    const bool any = ::read(fd_, &count, sizeof count) == sizeof count;
    served += count;
    return any;
  }
  int descriptor() const override { return fd_; }
  bool arm() override {
    ++armed;
    return !has_work;
  }
  void give_work() const {
    const uint64_t one = 1;
    ASSERT_EQ(::write(fd_, &one, sizeof one), static_cast<ssize_t>(sizeof one));
  }

  uint64_t served = 0;
  int armed = 0;
  bool has_work = false;

 private:
  int fd_;
};

class PollerBackend final : public Backend {
 public:
  explicit PollerBackend(Poller& poller) : poller_(poller) {}
  const char* name() const override { return "poller"; }
  Poller& poller() override { return poller_; }
  Result<UniqueId> make_unique_id(Reach) override { return invalid_state("no ids"); }
  bool knows(const UniqueId&) const override { return false; }
  Result<std::unique_ptr<ControlPlane>> join(const JoinRequest&, Driver&) override {
    return invalid_state("no ranks");
  }
  Result<std::unique_ptr<Transport>> connect(ControlPlane&, const LinkPeers&, TransferSink&,
                                             Driver&, Deadline) override {
    return invalid_state("no ranks");
  }

 private:
  Poller& poller_;
};

std::unique_ptr<Backend> backend_of(Poller& poller) {
  return std::make_unique<PollerBackend>(poller);
}

TEST(Pollers, ADescriptorEndsTheWaitOfTheBlockingPoller) {
  auto reactor = tcp::Reactor::make({});
  ASSERT_TRUE(reactor.ok()) << reactor.status().text();
  DescriptorPoller other;
  Pollers pollers;
  pollers.add(backend_of(**reactor), true);
  pollers.add(backend_of(other), false);
  for (uint64_t round = 1; round <= 3; ++round) {
    std::thread writer([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      other.give_work();
    });
    const auto begin = std::chrono::steady_clock::now();
    while (other.served < round) {
      ASSERT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(30));
      pollers.wait(60'000'000);
      pollers.serve();
    }
    writer.join();
  }
  EXPECT_GE(other.armed, 3);
}

TEST(Pollers, WorkThatCameBeforeTheWaitIsNotSleptOver) {
  NotingPoller blocking;
  DescriptorPoller other;
  Pollers pollers;
  pollers.add(backend_of(blocking), true);
  pollers.add(backend_of(other), false);
  pollers.wait(5000);
  other.has_work = true;
  pollers.wait(5000);
  EXPECT_EQ(blocking.waits, (std::vector<int64_t>{5000, 0}));
}

// Its work comes right behind its turn, and wakes the one that it forwards to.
class LatePoller final : public NotingPoller {
 public:
  bool poll(int64_t) override {
    forwards_to->wake();
    return false;
  }
};

// Takes a wake in each turn; a wait that a wake has come for ends at once.
class WokenPoller final : public NotingPoller {
 public:
  bool poll(int64_t wait_us) override {
    const bool woken = std::exchange(wakes, 0) != 0;
    if (!woken && wait_us != 0) ++slept;
    return woken;
  }
  int slept = 0;
};

TEST(Pollers, WorkThatComesBehindItsTurnIsNotSleptOver) {
  LatePoller late;
  WokenPoller blocking;
  Pollers pollers;
  pollers.add(backend_of(late), false);
  pollers.add(backend_of(blocking), true);
  EXPECT_FALSE(pollers.serve());
  pollers.wait(20'000);
  EXPECT_EQ(blocking.slept, 0);
}

// Its work is seen in memory at the look with this number.
class MemoryPoller final : public NotingPoller {
 public:
  explicit MemoryPoller(int at) : at_(at) {}
  std::optional<bool> peek() const override { return ++looks == at_; }
  bool poll(int64_t wait_us) override {
    NotingPoller::poll(wait_us);
    return looks == at_;
  }
  mutable int looks = 0;

 private:
  const int at_;
};

TEST(Pollers, AWaitLooksIntoMemoryBeforeItSleeps) {
  NotingPoller blocking;
  MemoryPoller memory(3);
  Pollers pollers(60'000'000);
  pollers.add(backend_of(blocking), true);
  pollers.add(backend_of(memory), false);
  pollers.wait(60'000'000);
  EXPECT_EQ(memory.looks, 3);
  EXPECT_EQ(memory.waits, (std::vector<int64_t>{0}));  // by the look that has found it
  EXPECT_TRUE(blocking.waits.empty());                 // no system call before that
}

TEST(Pollers, AWaitThatLooksIntoMemoryServesTheOthersToo) {
  WokenPoller blocking;
  MemoryPoller memory(0);
  Pollers pollers(60'000'000);
  pollers.add(backend_of(blocking), true);
  pollers.add(backend_of(memory), false);
  blocking.wakes = 1;
  pollers.wait(60'000'000);
  EXPECT_EQ(blocking.wakes, 0);
  EXPECT_EQ(blocking.slept, 0);
  EXPECT_GT(memory.looks, 1);
}

TEST(Pollers, AWakeBehindItsTurnEndsAWaitThatPolls) {
  LatePoller late;
  WokenPoller blocking;
  Pollers pollers(60'000'000);
  pollers.add(backend_of(late), false);
  pollers.add(backend_of(blocking), true);
  pollers.wait(60'000'000);
  EXPECT_EQ(blocking.slept, 0);
}

TEST(Pollers, AWaitSleepsForWhatIsLeftOfItsTime) {
  NotingPoller blocking;
  Pollers pollers(100);
  pollers.add(backend_of(blocking), true);
  pollers.wait(5000);
  EXPECT_EQ(blocking.waits.back(), 4900);
  EXPECT_EQ(std::ranges::count(blocking.waits, 0),
            static_cast<ptrdiff_t>(blocking.waits.size()) - 1);
  blocking.waits.clear();
  pollers.wait(50);  // polled for all of it
  EXPECT_EQ(std::ranges::count(blocking.waits, 0), static_cast<ptrdiff_t>(blocking.waits.size()));
}

TEST(Pollers, WhatCannotEndTheWaitShortensIt) {
  NotingPoller blocking, slow;
  DescriptorPoller unwatched;
  blocking.can_watch = false;
  slow.interval_us = 700;
  Pollers pollers;
  pollers.add(backend_of(blocking), true);
  pollers.add(backend_of(slow), false);
  pollers.wait(5000);
  pollers.add(backend_of(unwatched), false);
  pollers.wait(5000);
  EXPECT_EQ(blocking.waits, (std::vector<int64_t>{700, 20}));
}

TEST(Pollers, ANewBlockingPollerTakesOverWhatEndsTheWait) {
  NotingPoller first, second, forwarding;
  DescriptorPoller described;
  {
    Pollers pollers;
    EXPECT_TRUE(pollers.add(backend_of(first), false));  // there is no other
    EXPECT_FALSE(pollers.add(backend_of(forwarding), false));
    EXPECT_FALSE(pollers.add(backend_of(described), false));
    EXPECT_EQ(forwarding.forwards_to, &first);
    EXPECT_EQ(first.watched, std::multiset<int>{described.descriptor()});
    EXPECT_TRUE(pollers.add(backend_of(second), true));
    EXPECT_EQ(forwarding.forwards_to, &second);
    EXPECT_EQ(first.forwards_to, &second);
    EXPECT_TRUE(first.watched.empty());
    EXPECT_EQ(second.watched, std::multiset<int>{described.descriptor()});
    pollers.wake();
    EXPECT_EQ(first.wakes, 0);
    EXPECT_EQ(second.wakes, 1);
  }
  EXPECT_EQ(forwarding.forwards_to, nullptr);
  EXPECT_EQ(first.forwards_to, nullptr);
  EXPECT_TRUE(second.watched.empty());
}

}  // namespace
}  // namespace sotto::test
