// The pieces of the C ABI's border that can be tested without a context: growing structs, checked
// handles, guard.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "capi/src/handle_pool.h"
#include "capi/src/struct_in.h"

namespace sotto::capi {
namespace {

// Two versions of one struct, and a version that the library does not know yet.
struct V1 {
  uint32_t struct_size;
  uint32_t a;
};
struct V2 {
  uint32_t struct_size;
  uint32_t a;
  uint64_t b;
};
struct V3 {
  uint32_t struct_size;
  uint32_t a;
  uint64_t b;
  uint64_t c;
};

template <class T, class Client>
Status take_from(const Client* client, T& out) {
  return take(reinterpret_cast<const T*>(client), out, sizeof(V1), "config");
}

TEST(StructIn, OlderClientReadsAsZeroTail) {
  const V1 client{sizeof(V1), 7};
  V2 got{1, 2, 3};
  ASSERT_TRUE(take_from(&client, got).ok());
  EXPECT_EQ(got.a, 7u);
  EXPECT_EQ(got.b, 0u);
}

TEST(StructIn, NewerClientIsAcceptedWhileItsTailIsZero) {
  V3 client{sizeof(V3), 7, 8, 0};
  V2 got{};
  ASSERT_TRUE(take_from(&client, got).ok());
  EXPECT_EQ(got.b, 8u);
  client.c = uint64_t{1} << 63;  // the last byte
  const Status status = take_from(&client, got);
  EXPECT_EQ(status.code(), Code::kUnsupported);
  EXPECT_NE(status.text().find("config has a field behind byte 16"), std::string::npos)
      << status.text();
}

TEST(StructIn, SizesOutOfRangeAreRefused) {
  V2 got{};
  EXPECT_EQ(take<V2>(nullptr, got, sizeof(V1), "config").code(), Code::kInvalidArgument);
  for (const uint32_t size : {0u, 4u, 7u, 4097u, 0xffffffffu}) {
    const V1 client{size, 7};
    const Status status = take_from(&client, got);
    EXPECT_EQ(status.code(), Code::kInvalidArgument) << size;
    EXPECT_EQ(status.text(), "config.struct_size is " + std::to_string(size) +
                                 ", allowed 8 to 4096: set it to sizeof of the struct");
  }
}

TEST(StructOut, WritesWhatTheCallerHasRoomFor) {
  const V2 value{0, 7, 8};
  struct {
    V1 out;
    uint32_t guard;
  } older{{sizeof(V1), 0}, 0xabcdu};
  ASSERT_TRUE(put(value, reinterpret_cast<V2*>(&older.out), sizeof(V1), "out").ok());
  EXPECT_EQ(older.out.struct_size, sizeof(V1));
  EXPECT_EQ(older.out.a, 7u);
  EXPECT_EQ(older.guard, 0xabcdu);

  V3 newer{sizeof(V3), 1, 1, 1};
  ASSERT_TRUE(put(value, reinterpret_cast<V2*>(&newer), sizeof(V1), "out").ok());
  EXPECT_EQ(newer.struct_size, sizeof(V3));
  EXPECT_EQ(newer.b, 8u);
  EXPECT_EQ(newer.c, 0u);  // unknown to the library: zero

  V2 bad{4, 1, 1};
  EXPECT_EQ(put(value, &bad, sizeof(V1), "out").code(), Code::kInvalidArgument);
  EXPECT_EQ(bad.a, 1u);
}

using Pool = HandlePool<std::shared_ptr<int>>;

TEST(HandlePool, StaleAndForeignHandlesAreRecognised) {
  static Pool& pool = *new Pool("operation", "released");  // pools live as long as the process
  void* const handle = pool.insert(std::make_shared<int>(5)).take();
  EXPECT_EQ(***pool.get(handle), 5);
  EXPECT_EQ(***pool.remove(handle), 5);

  for (const Status& status : {pool.get(handle).status(), pool.remove(handle).status()}) {
    EXPECT_EQ(status.code(), Code::kInvalidArgument);
    EXPECT_NE(status.text().find("has been released before"), std::string::npos) << status.text();
  }
  int local = 0;
  EXPECT_EQ(pool.get(&local).status().code(), Code::kInvalidArgument);
  EXPECT_EQ(pool.get(nullptr).status().text(), "operation is NULL");
  EXPECT_EQ(pool.get(reinterpret_cast<void*>(~uintptr_t{0})).status().code(),
            Code::kInvalidArgument);
  // An address inside a slot that no handle has.
  EXPECT_EQ(pool.get(static_cast<char*>(handle) + 64).status().code(), Code::kInvalidArgument);
}

TEST(HandlePool, ReleasedHandleStaysInvalidWhileOthersComeAndGo) {
  static Pool& pool = *new Pool("operation", "released");  // pools live as long as the process
  void* const stale = pool.insert(std::make_shared<int>(1)).take();
  ASSERT_TRUE(pool.remove(stale).ok());
  for (size_t i = 0; i < 63 * Pool::kLeastSlots; ++i) {
    void* const handle = pool.insert(std::make_shared<int>(2)).take();
    ASSERT_NE(handle, stale);
    ASSERT_FALSE(pool.get(stale).ok());
    ASSERT_TRUE(pool.remove(handle).ok());
  }
}

TEST(HandlePool, ManyLiveHandlesAreDistinctAndValuesDieWithRemoval) {
  static Pool& pool = *new Pool("operation", "released");  // pools live as long as the process
  const auto value = std::make_shared<int>(3);
  std::set<void*> handles;
  for (size_t i = 0; i < 3 * Pool::kLeastSlots + 1; ++i) handles.insert(pool.insert(value).take());
  EXPECT_EQ(handles.size(), 3 * Pool::kLeastSlots + 1);
  for (void* handle : handles) ASSERT_TRUE(pool.remove(handle).ok());
  EXPECT_EQ(value.use_count(), 1);
}

TEST(HandlePool, AValueLivesAsLongAsItIsUsed) {
  static Pool& pool = *new Pool("operation", "released");  // pools live as long as the process
  const auto value = std::make_shared<int>(3);
  void* const handle = pool.insert(value).take();
  {
    const auto use = pool.get(handle);
    {
      const auto last = pool.remove(handle);
      EXPECT_FALSE(pool.get(handle).ok());
      EXPECT_FALSE(pool.remove(handle).ok());
      EXPECT_EQ(***last, 3);
    }
    EXPECT_EQ(***use, 3);
    EXPECT_EQ(value.use_count(), 2);
  }
  EXPECT_EQ(value.use_count(), 1);
  // A place that nothing was put into is free again: there are as many as before.
  for (size_t i = 0; i <= Pool::kMaxSlots; ++i) ASSERT_TRUE(pool.reserve().ok());
}

// Handles are given out, used and removed by all threads at once, so that a look-up meets every
// moment of a removal. A value is right or refused, it is removed by one, and goes once.
TEST(HandlePool, ThreadsUseAndRemoveTheSameHandles) {
  static Pool& pool = *new Pool("operation", "released");  // pools live as long as the process
  constexpr int kThreads = 4, kHandles = 8, kRounds = 10'000;
  const auto value = std::make_shared<int>(3);
  std::array<std::atomic<void*>, kHandles> handles{};
  for (auto& handle : handles) handle = pool.insert(value).take();
  std::atomic<int> wrong{0}, removed{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < kRounds; ++i) {
        std::atomic<void*>& place = handles[static_cast<size_t>((i * 7 + t) % kHandles)];
        void* const handle = place;
        if (const auto use = pool.get(handle); use.ok() && ***use != 3) ++wrong;
        if (i % 5 != t || !pool.remove(handle).ok()) continue;
        ++removed;
        place = pool.insert(value).take();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_GT(removed, 0);
  EXPECT_EQ(value.use_count(), 1 + kHandles);
  for (const auto& handle : handles) EXPECT_TRUE(pool.remove(handle).ok());
  EXPECT_EQ(value.use_count(), 1);
}

}  // namespace
}  // namespace sotto::capi
