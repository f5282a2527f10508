// main() of every test binary: gtest with a watchdog, or, with --rank-main, one rank of a test with
// processes.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>

#include "tests/support/processes.h"

namespace {

using Steady = std::chrono::steady_clock;

// Ends the process if one test takes longer than the limit; `ctest` has limits of its own, this is
// for direct runs.
class Watchdog final : public testing::EmptyTestEventListener {
 public:
  explicit Watchdog(int64_t limit_s) : limit_s_(limit_s) {
    std::thread([this] { watch(); }).detach();
  }
  void OnTestStart(const testing::TestInfo&) override { started_s_ = now_s(); }
  void OnTestEnd(const testing::TestInfo&) override { started_s_ = -1; }

 private:
  static int64_t now_s() {
    return std::chrono::duration_cast<std::chrono::seconds>(Steady::now().time_since_epoch())
        .count();
  }
  void watch() const {
    for (;;) {
      std::this_thread::sleep_for(std::chrono::seconds(1));
      const int64_t started = started_s_;
      if (started < 0 || now_s() - started <= limit_s_) continue;
      std::fprintf(stderr, "watchdog: the test did not end within %lld s\n",
                   static_cast<long long>(limit_s_));
      std::fflush(nullptr);
      std::abort();
    }
  }
  const int64_t limit_s_;
  std::atomic<int64_t> started_s_{-1};
};

}  // namespace

int main(int argc, char** argv) {
  if (sotto::test::is_rank_process(argc, argv)) return sotto::test::run_rank_process(argc, argv);
  testing::InitGoogleTest(&argc, argv);
  int64_t limit_s = 600;
  for (int i = 1; i < argc; ++i) {
    const std::string arg = argv[i];
    if (arg.rfind("--watchdog-s=", 0) != 0) continue;
    limit_s = std::strtoll(arg.c_str() + 13, nullptr, 10);
  }
  // Lives as long as its thread: until the process ends. gtest owns a listener, so it gets one that
  // it may delete.
  class Forward final : public testing::EmptyTestEventListener {
   public:
    explicit Forward(Watchdog& to) : to_(to) {}
    void OnTestStart(const testing::TestInfo& info) override { to_.OnTestStart(info); }
    void OnTestEnd(const testing::TestInfo& info) override { to_.OnTestEnd(info); }

   private:
    Watchdog& to_;
  };
  auto* watchdog = new Watchdog(limit_s);
  testing::UnitTest::GetInstance()->listeners().Append(new Forward(*watchdog));
  return RUN_ALL_TESTS();
}
