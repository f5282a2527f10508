// The CPU device apart from its kernels: memory, thread pool, SIMD levels.
#include "core/cpu/cpu_device.h"

#include <gtest/gtest.h>

#include <atomic>

namespace sotto {
namespace {

TEST(CpuDevice, MemoryIsZeroedAndAligned) {
  const std::unique_ptr<Device> device = make_cpu_device(1, SimdLevel::kAuto).take();
  for (const uint64_t bytes : {uint64_t{0}, uint64_t{1}, uint64_t{4097}, (uint64_t{2} << 20) - 1,
                               uint64_t{2} << 20, uint64_t{5000001}}) {
    const Result<void*> memory = device->alloc(bytes);
    ASSERT_TRUE(memory.ok());
    EXPECT_EQ(reinterpret_cast<uintptr_t>(*memory) % 128, 0u);
    auto* data = static_cast<uint8_t*>(*memory);
    for (uint64_t i = 0; i < bytes; i += 977) ASSERT_EQ(data[i], 0);
    if (bytes != 0) data[bytes - 1] = 1;
    device->free(*memory, bytes);
  }
  device->free(nullptr, 8);
  const Result<void*> huge = device->alloc(UINT64_MAX);
  ASSERT_FALSE(huge.ok());
  EXPECT_EQ(huge.status().code(), Code::kOutOfMemory);
  EXPECT_NE(huge.status().text().find("18446744073709551615"), std::string::npos);
}

TEST(CpuDevice, RefusesWhatItHasNot) {
  EXPECT_EQ(make_cpu_device(0, SimdLevel::kAuto).status().code(), Code::kInvalidArgument);
  EXPECT_EQ(make_cpu_device(4097, SimdLevel::kAuto).status().code(), Code::kInvalidArgument);
  const std::unique_ptr<Device> device = make_cpu_device(2, SimdLevel::kAuto).take();
  EXPECT_TRUE(device->caps().synchronous);
  EXPECT_EQ(device->caps().split_elements, 2u * 65536);
  EXPECT_EQ(device->record_stream(nullptr).status().code(), Code::kUnsupported);
  EXPECT_EQ(device->record(0).status().code(), Code::kUnsupported);
  uint8_t byte = 0;
  EXPECT_FALSE(device->copy(1, &byte, &byte, 1, nullptr, 0).ok());
  KernelCall unknown;
  unknown.id = KernelId::kCount;
  EXPECT_FALSE(device->launch(0, unknown, {}).ok());
}

TEST(CpuDevice, BusyTimeGrows) {
  const std::unique_ptr<Device> device = make_cpu_device(1, SimdLevel::kAuto).take();
  EXPECT_EQ(device->busy_ns(), 0u);
  std::vector<uint8_t> a(1 << 20), b(1 << 20);
  ASSERT_TRUE(device->copy(0, a.data(), b.data(), a.size(), nullptr, 0).ok());
  const uint64_t first = device->busy_ns();
  EXPECT_GT(first, 0u);
  ASSERT_TRUE(device->copy(0, a.data(), b.data(), a.size(), nullptr, 0).ok());
  EXPECT_GT(device->busy_ns(), first);
}

TEST(SimdLevels, NamesAndLimits) {
  EXPECT_EQ(*simd_level_from_name("avx2"), SimdLevel::kAvx2);
  const Result<SimdLevel> unknown = simd_level_from_name("avx");
  ASSERT_FALSE(unknown.ok());
  EXPECT_NE(unknown.status().text().find("'avx'"), std::string::npos);
  EXPECT_EQ(simd_in_use(SimdLevel::kScalar), "scalar");
  const std::vector<std::string> available = simd_levels_available();
  ASSERT_FALSE(available.empty());
  EXPECT_EQ(available.front(), "scalar");
  EXPECT_EQ(available.back(), simd_in_use(SimdLevel::kAuto));
  for (const std::string& name : available)
    EXPECT_EQ(simd_in_use(*simd_level_from_name(name)), name);
  EXPECT_LE(simd_level_in_use(SimdLevel::kSse4), SimdLevel::kSse4);
}

TEST(ThreadPool, EveryShareRunsOnceInEveryRun) {
  for (const uint32_t threads : {1u, 2u, 5u}) {
    ThreadPool pool(threads);
    std::vector<std::atomic<int>> counts(threads);
    for (int run = 0; run < 40; ++run) {
      pool.run([](void* c, uint32_t i) { (*static_cast<std::vector<std::atomic<int>>*>(c))[i]++; },
               &counts);
      for (const auto& count : counts) ASSERT_EQ(count.load(), run + 1);
    }
  }
}

}  // namespace
}  // namespace sotto
