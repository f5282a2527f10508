// Calls of the library that wait for a device come while no stream of it is blocked, and none gets
// blocked meanwhile. No device is needed.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <optional>
#include <thread>

#include "cuda/calls/blocked_streams.h"

namespace sotto {
namespace {

constexpr int32_t kDevice = 1000;
constexpr auto kShort = std::chrono::milliseconds(50);

bool comes(const std::atomic<bool>& what) {
  for (int i = 0; i < 10'000 && !what; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return what;
}

TEST(CallsThatWait, ComeWhenNoStreamIsBlocked) {
  BlockedStreams& streams = BlockedStreams::of(kDevice);
  streams.add();
  streams.add();
  std::atomic<bool> begun{false}, blocked{false}, end{false};
  std::thread waits([&] {
    const NoneBlocked frees(kDevice);
    begun = true;
    EXPECT_TRUE(comes(end));
  });
  std::this_thread::sleep_for(kShort);
  streams.add();  // what waits keeps none from being blocked
  for (int i = 0; i < 2; ++i) streams.remove();
  std::this_thread::sleep_for(kShort);
  EXPECT_FALSE(begun);
  EXPECT_TRUE(streams.any());
  streams.remove();
  EXPECT_TRUE(comes(begun));
  std::thread blocks([&] {
    streams.add();
    blocked = true;
  });
  std::this_thread::sleep_for(kShort);
  EXPECT_FALSE(blocked);
  end = true;
  EXPECT_TRUE(comes(blocked));
  waits.join();
  blocks.join();
  streams.remove();
  EXPECT_FALSE(streams.any());
}

TEST(CallsThatWait, MayComeTogether) {
  const NoneBlocked one(kDevice), another(kDevice);
  EXPECT_TRUE(one.holds() && another.holds());
}

TEST(CallsThatWait, GiveUpWithoutPatience) {
  BlockedStreams& streams = BlockedStreams::of(kDevice);
  streams.add();
  const auto begun = std::chrono::steady_clock::now();
  const NoneBlocked none(kDevice, kShort);
  EXPECT_FALSE(none.holds());
  EXPECT_GE(std::chrono::steady_clock::now() - begun, kShort);
  streams.add();  // at once
  for (int i = 0; i < 2; ++i) streams.remove();
  EXPECT_TRUE(NoneBlocked(kDevice, kShort).holds());
}

TEST(CallsThatWait, HaveToDoWithTheirDeviceAlone) {
  BlockedStreams::of(kDevice).add();
  EXPECT_TRUE(NoneBlocked(kDevice + 1, std::chrono::milliseconds(0)).holds());
  BlockedStreams::of(kDevice).remove();
}

}  // namespace
}  // namespace sotto
