// NCCL makes a connection when it is first used. Those of messages are made with the comm; those of
// its own collectives take until the peer comes, and meanwhile a rank goes on with everything else:
// other comms, deadlines, aborts. Ranks are threads.
#include <atomic>
#include <barrier>
#include <chrono>
#include <cstdlib>
#include <numeric>
#include <thread>

#include "tests/cuda/device_memory.h"
#include "tests/emulation/cuda/fake_cuda.h"
#include "tests/emulation/nccl/fake_nccl.h"
#include "tests/nccl/second_comm.h"

namespace sotto::test {
namespace {

using namespace std::chrono_literals;

int64_t ms_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now() -
                                                               start)
      .count();
}

class NcclConnecting : public testing::TestWithParam<Where> {
 protected:
  void SetUp() override {
    fake_cuda::clear_faults();
    fake_cuda::configure({.devices = 4, .max_delay_us = 100, .seed = 3});
  }
  void TearDown() override {
    fake_cuda::drain();
    EXPECT_EQ(fake_nccl_live_comms(), 0u);
    EXPECT_EQ(fake_cuda::live(), fake_cuda::Live{}) << fake_cuda::live().text();
  }
  static std::string run(int32_t size, const std::function<void(Member&)>& body) {
    WorldOptions options;
    options.transport = "tcp";
    options.on_rank = [](int32_t rank) { CUDA_OK(cudaSetDevice(rank)); };
    return run_world(size, options, body);
  }
};

// Rank 0 has operations over NCCL under way when it comes to the other comm's barrier, rank 1 calls
// them behind it.
TEST_P(NcclConnecting, OtherCommsGoOn) {
  EXPECT_EQ(run(2,
                [](Member& self) {
                  sotto_comm* const nccl = nccl_comm(self, 60'000'000);
                  constexpr size_t kOps = 5, kN = 3000;
                  Tensors tensors(GetParam(), self.rank);
                  std::vector<std::vector<float>> x(kOps, std::vector<float>(kN));
                  std::vector<std::vector<int32_t>> y(kOps, std::vector<int32_t>(kN));
                  std::vector<sotto_op*> ops;
                  if (self.rank == 1) OK(sotto_barrier(self.comm, nullptr, nullptr));
                  for (size_t k = 0; k < kOps; ++k) {
                    std::iota(x[k].begin(), x[k].end(), static_cast<float>(self.rank));
                    std::iota(y[k].begin(), y[k].end(), static_cast<int32_t>(k));
                    const sotto_buffer a = tensors.add(x[k]), b = tensors.add(y[k]);
                    const sotto_call call = tensors.call();
                    OK(sotto_all_reduce(nccl, &a, &a, 1, &call, &ops.emplace_back()));
                    OK(sotto_all_reduce(nccl, &b, &b, 1, &call, &ops.emplace_back()));
                  }
                  if (self.rank == 0) {
                    std::this_thread::sleep_for(20ms);  // NCCL has begun
                    OK(sotto_barrier(self.comm, nullptr, nullptr));
                  }
                  for (sotto_op* op : ops) {
                    OK(sotto_op_wait(op, -1));
                    OK(sotto_op_release(op));
                  }
                  tensors.download();
                  for (size_t k = 0; k < kOps; ++k) {
                    for (size_t i = 0; i < kN; ++i) {
                      require(x[k][i] == static_cast<float>(2 * i + 1), "a sum of floats");
                      require(y[k][i] == static_cast<int32_t>(2 * (i + k)), "a sum of integers");
                    }
                  }
                  OK(sotto_barrier(nccl, nullptr, nullptr));
                  OK(sotto_comm_destroy(nccl));
                }),
            "");
}

TEST_P(NcclConnecting, AnAbortTakesNoTime) {
  EXPECT_EQ(run(2,
                [](Member& self) {
                  sotto_comm* const nccl = nccl_comm(self, 300'000'000);
                  {
                    Tensors tensors(GetParam(), self.rank);
                    std::vector<float> x(1000, 1.0f);
                    const sotto_buffer a = tensors.add(x);
                    const sotto_call call = tensors.call();
                    sotto_op* op = nullptr;
                    if (self.rank == 0) {
                      OK(sotto_all_reduce(nccl, &a, &a, 1, &call, &op));
                      std::this_thread::sleep_for(20ms);
                      const auto start = std::chrono::steady_clock::now();
                      OK(sotto_comm_abort(nccl, "enough"));
                      FAILS(sotto_op_wait(op, -1), SOTTO_E_ABORTED, "enough");
                      EXPECT_LT(ms_since(start), 60'000);
                      OK(sotto_op_release(op));
                    }
                    OK(sotto_barrier(self.comm, nullptr, nullptr));
                    FAILS(sotto_all_reduce(nccl, &a, &a, 1, &call, nullptr), SOTTO_E_ABORTED,
                          "enough");
                  }
                  (void)sotto_comm_destroy(nccl);
                }),
            "");
}

TEST_P(NcclConnecting, TheTimeOfAnOperationHolds) {
  EXPECT_EQ(run(2,
                [](Member& self) {
                  sotto_comm* const nccl = nccl_comm(self, 300'000'000);
                  {
                    Tensors tensors(GetParam(), self.rank);
                    std::vector<float> x(1000, 1.0f);
                    const sotto_buffer a = tensors.add(x);
                    sotto_call call = tensors.call();
                    call.timeout_us = 500'000;
                    const auto start = std::chrono::steady_clock::now();
                    if (self.rank == 0)
                      FAILS(sotto_all_reduce(nccl, &a, &a, 1, &call, nullptr), SOTTO_E_TIMEOUT,
                            "made no progress for 0.5 s", "waiting for rank 1");
                    EXPECT_LT(ms_since(start), 60'000);
                    OK(sotto_barrier(self.comm, nullptr, nullptr));
                  }
                  (void)sotto_comm_destroy(nccl);
                }),
            "");
}

class NcclConnections : public testing::Test {
 protected:
  void SetUp() override {
    fake_cuda::clear_faults();
    fake_cuda::configure({.devices = 4});
    setenv("SOTTO_NCCL_NATIVE", "off", 1);
  }
  void TearDown() override { unsetenv("SOTTO_NCCL_NATIVE"); }
  static WorldOptions world() {
    WorldOptions options;
    options.transport = "nccl";
    options.on_rank = [](int32_t rank) { CUDA_OK(cudaSetDevice(rank)); };
    return options;
  }
  // Of a comm or a split, on the device and on the host.
  static void sum(sotto_comm* comm, Where where, int device) {
    Tensors tensors(where, device);
    std::vector<float> x(70'000, 1.0f);
    const sotto_buffer a = tensors.add(x);
    const sotto_call call = tensors.call();
    OK(sotto_all_reduce(comm, &a, &a, 1, &call, nullptr));
  }
};

TEST_F(NcclConnections, AreMadeWithTheComm) {
  for (const int32_t size : {1, 2, 4}) {
    std::barrier ranks(size);
    const uint64_t before = fake_nccl_connections();
    EXPECT_EQ(run_world(size, world(),
                        [&](Member& self) {
                          // Each rank with each other one, both ways.
                          const uint64_t all = 2 * static_cast<uint64_t>(size) * (size - 1);
                          ranks.arrive_and_wait();
                          require(fake_nccl_connections() - before == all, "connections");
                          for (const Where where : {Where::kCuda, Where::kHost})
                            sum(self.comm, where, self.rank);
                          sotto_comm* turned = nullptr;
                          OK(sotto_comm_split(self.comm, 0, -self.rank, &turned));
                          sum(turned, Where::kCuda, self.rank);
                          OK(sotto_comm_destroy(turned));
                          ranks.arrive_and_wait();
                          require(fake_nccl_connections() - before == all, "no more of them");
                        }),
              "")
        << size << " ranks";
  }
}

void wait_for(void* go) {
  while (!static_cast<std::atomic<bool>*>(go)->load())
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

// A stream of the caller may wait for what the caller does behind the operation.
TEST_F(NcclConnections, KeepNoOperationWaitingForTheDevice) {
  std::barrier ranks(2);
  EXPECT_EQ(run_world(2, world(),
                      [&](Member& self) {
                        std::atomic<bool> go{false};
                        cudaStream_t stream = nullptr;
                        CUDA_OK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
                        Tensors tensors(Where::kCuda, self.rank);
                        std::vector<float> x(1000, 1.0f);
                        const sotto_buffer a = tensors.add(x);
                        const sotto_call call = tensors.call();
                        ranks.arrive_and_wait();
                        CUDA_OK(cudaLaunchHostFunc(stream, wait_for, &go));
                        fake_nccl_wait_for_device(true);
                        const sotto_status status =
                            sotto_all_reduce(self.comm, &a, &a, 1, &call, nullptr);
                        ranks.arrive_and_wait();
                        fake_nccl_wait_for_device(false);
                        go = true;
                        CUDA_OK(cudaStreamSynchronize(stream));
                        CUDA_OK(cudaStreamDestroy(stream));
                        ok(status, "the sum");
                      }),
            "");
}

INSTANTIATE_TEST_SUITE_P(Memory, NcclConnecting, ::testing::Values(Where::kHost, Where::kCuda));

}  // namespace
}  // namespace sotto::test
