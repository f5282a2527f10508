// One thread at a time drives, a waiting thread drives itself, and waiting looks at the clock that
// it was given.
#include "core/engine/driver_role.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include "tests/support/fake_clock.h"

namespace sotto::test {
namespace {

// Notes who works. A block takes the time that it may take.
class NotedWork final : public DriverWork {
 public:
  explicit NotedWork(FakeClock& clock) : clock_(clock) {}
  bool progress() override {
    EXPECT_FALSE(busy.exchange(true)) << "two threads drive";
    niceness = getpriority(PRIO_PROCESS, 0);
    passes.fetch_add(1);
    busy.store(false);
    return false;
  }
  void block(int64_t wait_us) override {
    EXPECT_FALSE(busy.exchange(true)) << "two threads drive";
    clock_.advance_us(wait_us);
    busy.store(false);
    std::this_thread::yield();
  }
  void wake() override { wakes.fetch_add(1); }

  std::atomic<bool> busy{false};
  std::atomic<int> passes{0}, wakes{0};
  std::atomic<int> niceness{0};  // of the thread of the last pass

 private:
  FakeClock& clock_;
};

class DriverRoleTest : public testing::Test {
 protected:
  FakeClock clock_;
  NotedWork work_{clock_};
  DriverRole role_{work_, clock_};
};

TEST_F(DriverRoleTest, WhoWaitsDrives) {
  int asked = 0;
  EXPECT_TRUE(role_.wait_until([&] { return ++asked > 3; }, -1));
  EXPECT_GT(work_.passes.load(), 0);
}

TEST_F(DriverRoleTest, WaitsEndByTheGivenClock) {
  const int64_t before = clock_.now_ns();
  EXPECT_FALSE(role_.wait_until([] { return false; }, 3'600'000'000));
  EXPECT_GE(clock_.now_ns() - before, 3'600'000'000'000);
  const DriverRole::Lock lock(role_);
  EXPECT_FALSE(
      role_.run_until([] { return false; }, Deadline::in_us(clock_, int64_t{3'600'000'000})));
  EXPECT_GE(clock_.now_ns() - before, 7'200'000'000'000);
}

TEST_F(DriverRoleTest, TheHolderMayAskAgain) {
  const DriverRole::Lock outer(role_);
  EXPECT_FALSE(outer.nested());
  {
    const DriverRole::Lock inner(role_);
    EXPECT_TRUE(inner.nested());
  }
  bool ran = false;
  role_.try_drive([&] { ran = true; });
  EXPECT_FALSE(ran);  // the role is not free
}

// As a thread that polls in a loop does.
TEST_F(DriverRoleTest, AThreadThatTakesTheRoleAgainAndAgainLetsOthersIn) {
  for (int i = 0; i < 100; ++i) {
    std::atomic<bool> had_it{false};
    auto held = std::make_unique<DriverRole::Lock>(role_);
    std::thread other([&] {
      const DriverRole::Lock lock(role_);
      had_it = true;
    });
    while (!role_.claimed()) std::this_thread::yield();
    held.reset();
    held = std::make_unique<DriverRole::Lock>(role_);
    EXPECT_TRUE(had_it);
    held.reset();
    other.join();
  }
}

TEST_F(DriverRoleTest, AThreadThatAsksGetsTheRoleFromOneThatWaits) {
  std::atomic<bool> done{false};
  std::thread waiter([&] { EXPECT_TRUE(role_.wait_until([&] { return done.load(); }, -1)); });
  while (work_.passes.load() == 0) std::this_thread::yield();
  for (int i = 0; i < 100; ++i) {
    const DriverRole::Lock lock(role_);
    EXPECT_FALSE(lock.nested());
    EXPECT_FALSE(work_.busy.exchange(true));
    work_.busy.store(false);
  }
  EXPECT_GT(work_.wakes.load(), 0);
  done = true;
  waiter.join();
}

TEST_F(DriverRoleTest, TasksWakeAndAreTakenOnce) {
  std::atomic<int> ran{0};
  std::thread other([&] { role_.run_on_driver([&] { ++ran; }); });
  std::vector<Handover> ops;
  const auto take = [&] {
    std::vector<DriverRole::Task> tasks;
    if (!role_.take_inbox(&ops, &tasks)) return;
    for (const auto& task : tasks) task();
    role_.notify();
  };
  while (ran == 0) {
    const DriverRole::Lock lock(role_);
    take();
  }
  other.join();
  EXPECT_EQ(ran, 1);
  std::vector<DriverRole::Task> none;
  EXPECT_FALSE(role_.take_inbox(&ops, &none));
}

TEST_F(DriverRoleTest, TheProgressThreadIsAsNiceAsItIsTold) {
  const int own = getpriority(PRIO_PROCESS, 0);
  role_.start_progress_thread(own + 3);
  role_.set_serving();
  role_.add_op();
  while (work_.passes.load() == 0) std::this_thread::yield();
  role_.end_op(nullptr, [] {});
  role_.stop();
  EXPECT_EQ(work_.niceness.load(), own + 3);
  EXPECT_EQ(getpriority(PRIO_PROCESS, 0), own);
}

TEST_F(DriverRoleTest, TheProgressThreadWorksForOperationsAlone) {
  role_.start_progress_thread(0);
  role_.add_op();
  std::this_thread::yield();
  EXPECT_EQ(work_.passes.load(), 0);  // it has nothing to wait on
  role_.set_serving();
  while (work_.passes.load() == 0) std::this_thread::yield();
  bool published = false;
  role_.end_op(nullptr, [&] { published = true; });
  EXPECT_TRUE(published);
  EXPECT_EQ(role_.ops_in_flight(), 0u);
  role_.stop();
  const int passes = work_.passes.load();
  EXPECT_TRUE(role_.take_callback() == nullptr);
  EXPECT_EQ(work_.passes.load(), passes);
}

}  // namespace
}  // namespace sotto::test
