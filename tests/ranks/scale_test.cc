// What does not depend on the machine or its load: threads and descriptors of ranks, and that
// operations which are repeated keep no memory.
#include <dirent.h>
#include <gtest/gtest.h>
#include <malloc.h>

#include <chrono>
#include <fstream>
#include <thread>

#include "tests/ranks/capi_support.h"

namespace sotto::test {
namespace {

int64_t descriptors() {
  DIR* const directory = ::opendir("/proc/self/fd");
  require(directory != nullptr, "cannot read /proc/self/fd");
  int64_t count = 0;
  while (const dirent* entry = ::readdir(directory)) count += entry->d_name[0] != '.';
  ::closedir(directory);
  return count - 1;  // of the directory itself
}

int64_t threads() {
  std::ifstream file("/proc/self/status");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("Threads:")) return std::stoll(line.substr(8));
  }
  throw RankError("/proc/self/status has no Threads");
}

struct Figures {
  int64_t descriptors = 0, threads = 0;
};

// A thread that has been joined is counted until the system has let go of it.
void await_threads(int64_t count) {
  for (int i = 0; i < 20'000 && threads() > count; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  EXPECT_EQ(threads(), count);
}

// Of a group of `size` ranks in this process, their own threads not counted.
Figures figures_of(int32_t size) {
  const Figures before{descriptors(), threads()};
  Figures with;
  RankBarrier barrier(size);
  EXPECT_EQ(run_world(size, {.transport = "tcp"},
                      [&](Member& self) {
                        OK(sotto_barrier(self.comm, nullptr, nullptr));
                        barrier.wait();
                        if (self.rank == 0) with = {descriptors(), threads()};
                        barrier.wait();
                      }),
            "");
  EXPECT_EQ(descriptors(), before.descriptors) << "after the end";
  await_threads(before.threads);
  return {with.descriptors - before.descriptors, with.threads - before.threads - size};
}

// A pair of ranks has two data connections, a rank a control connection to the coordinator; each
// has two ends. All the rest is a number per rank, and one per group: where the coordinator
// listens.
TEST(Scale, DescriptorsAndThreadsGrowAsTheConnectionsDo) {
  const auto connections = [](int64_t w) { return 2 * w * (w - 1) + 2 * (w - 1); };
  const Figures two = figures_of(2);
  for (const int32_t size : {4, 8}) {
    const Figures f = figures_of(size);
    const int64_t per_rank = (two.descriptors - connections(2) - 1) / 2;
    EXPECT_EQ(f.descriptors, connections(size) + size * per_rank + 1) << size << " ranks";
    EXPECT_EQ(f.threads, two.threads / 2 * size) << size << " ranks";
    EXPECT_LE(per_rank, 8);
  }
  EXPECT_LE(two.threads, 2 * 2) << "a thread per rank that makes progress, and one for kernels";
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
// Bytes that the process has asked for and not given back.
TEST(Scale, RepeatedOperationsKeepNoMemory) {
  constexpr int32_t kSize = 4;
  constexpr int kWarmUp = 100, kRepeated = 1000;
  constexpr uint64_t kElements = 5000;
  RankBarrier barrier(kSize);
  size_t before = 0, after = 0;
  EXPECT_EQ(run_world(kSize, {.transport = "tcp"},
                      [&](Member& self) {
                        std::vector<float> in(kElements, 1.0f), out(kElements), w(kElements);
                        const sotto_buffer from = buffer(in), to = buffer(out);
                        sotto_codec* codec = nullptr;
                        OK(sotto_codec_create(self.comm, R"({"type": "1bit"})", &from, 1, &codec));
                        sotto_param param = {};
                        param.struct_size = sizeof param;
                        param.param = buffer(w);
                        param.grad = buffer(in);
                        sotto_optim* optim = nullptr;
                        OK(sotto_optim_create(self.comm,
                                              R"({"optimizer": {"type": "Adam", "params": {}}})",
                                              &param, 1, &optim));
                        const sotto_call call = call_with([&](sotto_call& c) { c.codec = codec; });
                        const auto repeat = [&](int times) {
                          for (int i = 0; i < times; ++i) {
                            OK(sotto_all_reduce(self.comm, &from, &to, 1, nullptr, nullptr));
                            OK(sotto_all_reduce(self.comm, &from, &to, 1, &call, nullptr));
                            OK(sotto_optim_step(optim, nullptr, nullptr));
                          }
                        };
                        const auto look = [&](size_t* bytes) {
                          OK(sotto_barrier(self.comm, nullptr, nullptr));
                          barrier.wait();
                          const struct mallinfo2 info = ::mallinfo2();
                          if (self.rank == 0) *bytes = info.uordblks + info.hblkhd;
                          barrier.wait();
                        };
                        repeat(kWarmUp);
                        look(&before);
                        repeat(kRepeated);
                        look(&after);
                        OK(sotto_optim_destroy(optim));
                        OK(sotto_codec_destroy(codec));
                      }),
            "");
  // Lists that double their length once, on four ranks; 12000 operations that kept 16 bytes each
  // would be more.
  EXPECT_LE(static_cast<int64_t>(after) - static_cast<int64_t>(before), 128 << 10);
}
#endif

}  // namespace
}  // namespace sotto::test
