// Streams that come after operations, and contexts, with NCCL under the library. Ranks are threads
// on the fake NCCL, with tensors on fake devices.
#include <atomic>
#include <chrono>
#include <thread>

#include "tests/cuda/device_memory.h"
#include "tests/emulation/cuda/fake_cuda.h"
#include "tests/emulation/nccl/fake_nccl.h"

namespace sotto::test {
namespace {

WorldOptions nccl_world() {
  fake_cuda::configure({.devices = 4});
  WorldOptions options;
  options.transport = "nccl";
  options.on_rank = [](int32_t rank) { CUDA_OK(cudaSetDevice(rank + 1)); };
  return options;
}

void await(const std::function<bool()>& done, const char* what) {
  for (int i = 0; i < 20'000 && !done(); ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  require(done(), what);
}

// NCCL's abort waits for all that NCCL has queued. Here that is an operation behind a stream which
// comes after an operation that fails.
TEST(NcclStreamWaits, DoNotKeepAFailedGroupFromEnding) {
  std::atomic<bool> hangs{false};
  std::atomic<uint64_t> groups{0};
  EXPECT_EQ(
      run_world(2, nccl_world(),
                [&](Member& self) {
                  const auto issued = [&](uint64_t n) {
                    return fake_nccl_calls_of("ncclGroupEnd") - groups >= n;
                  };
                  Tensors tensors(Where::kCuda, self.rank + 1);
                  std::vector<float> in(2000), out(2000), a(100);
                  const sotto_buffer from = tensors.add(in), to = tensors.add(out);
                  const sotto_buffer at = tensors.add(a);
                  tensors.sync();
                  const sotto_call call = tensors.call();
                  const uint64_t counts[] = {1000, 1000};
                  sotto_parts parts = SOTTO_PARTS_INIT;
                  parts.in_counts = parts.out_counts = counts;
                  OK(sotto_barrier(self.comm, nullptr, nullptr));
                  if (self.rank == 0) {
                    groups = fake_nccl_calls_of("ncclGroupEnd");
                    fake_nccl_hang(2);  // one rank's payload, which comes after both ranks' counts
                    hangs = true;
                  }
                  await([&] { return hangs.load(); }, "rank 0 is there");
                  sotto_op *first = nullptr, *second = nullptr;
                  OK(sotto_all_to_all(self.comm, &from, &to, 1, &parts, &call, &first));
                  OK(sotto_op_stream_wait(first, tensors.stream()));
                  await([&] { return issued(4); }, "counts and payload are queued");
                  OK(sotto_all_reduce(self.comm, &at, &at, 1, &call, &second));
                  await([&] { return issued(6); }, "the second operation is queued");
                  if (self.rank == 0) OK(sotto_comm_abort(self.comm, "test"));
                  for (sotto_op* op : {first, second}) {
                    const sotto_status status = sotto_op_wait(op, -1);
                    const std::string says = status == SOTTO_OK ? "OK" : sotto_last_error();
                    require(status == SOTTO_E_ABORTED,
                            (op == first ? "the first: " : "the second: ") + says);
                    OK(sotto_op_release(op));
                  }
                  tensors.sync();
                }),
      "");
}

// Its operations are the device's alone, so events order streams behind them.
TEST(NcclStreamWaits, BlockNoStream) {
  std::atomic<uint64_t> blocks = 0;
  EXPECT_EQ(run_world(2, nccl_world(),
                      [&](Member& self) {
                        Tensors tensors(Where::kCuda, self.rank + 1);
                        std::vector<float> a(5000, 1), sum(5000, 0);
                        const sotto_buffer in = tensors.add(a), out = tensors.add(sum);
                        const sotto_call call = tensors.call();
                        OK(sotto_all_reduce(self.comm, &in, &out, 1, &call, nullptr));
                        OK(sotto_barrier(self.comm, nullptr, nullptr));
                        blocks = fake_cuda::calls("cuStreamWaitValue32");
                        for (int round = 0; round < 50; ++round) {
                          sotto_op* op = nullptr;
                          OK(sotto_all_reduce(self.comm, &in, &out, 1, &call, &op));
                          OK(sotto_op_stream_wait(op, tensors.stream()));
                          OK(sotto_op_release(op));
                        }
                        tensors.download();
                        require(sum[4999] == 2, "the sum");
                      }),
            "");
  EXPECT_EQ(fake_cuda::calls("cuStreamWaitValue32"), blocks);
}

// What the stream does with the operands next does not reach the messages, which are sent from them
// and received into them; whatever device is current, and it stays so.
TEST(NcclStreamWaits, KeepLaterWorkFromTheMessages) {
  WorldOptions options = nccl_world();
  fake_cuda::configure({.devices = 4, .max_delay_us = 300});
  EXPECT_EQ(run_world(2, options,
                      [](Member& self) {
                        constexpr uint64_t kCount = 3000;
                        Tensors tensors(Where::kCuda, self.rank + 1);
                        const auto mine = static_cast<float>(self.rank + 1);
                        std::vector<float> in(kCount), sum(kCount), both(2 * kCount);
                        std::vector<float> fresh(kCount, mine), late(kCount, -1);
                        std::vector<float> seen_sum(kCount), seen_both(2 * kCount);
                        const sotto_buffer from = tensors.add(in);
                        const sotto_buffer to[] = {tensors.add(sum), tensors.add(both)};
                        for (std::vector<float>* v : {&fresh, &late, &seen_sum, &seen_both})
                          (void)tensors.add(*v);
                        const sotto_call call = tensors.call();
                        for (int round = 0; round < 10; ++round) {
                          sotto_op* ops[2] = {};
                          CUDA_OK(cudaSetDevice(self.rank + 1));
                          tensors.copy(in, fresh);
                          CUDA_OK(cudaSetDevice(3));
                          OK(sotto_all_reduce(self.comm, &from, &to[0], 1, &call, &ops[0]));
                          OK(sotto_all_gather(self.comm, &from, &to[1], 1, &call, &ops[1]));
                          for (sotto_op* op : ops) {
                            OK(sotto_op_stream_wait(op, tensors.stream()));
                            OK(sotto_op_release(op));
                          }
                          int current = -1;
                          CUDA_OK(cudaGetDevice(&current));
                          require(current == 3, "the current device is the caller's");
                          CUDA_OK(cudaSetDevice(self.rank + 1));
                          tensors.copy(in, late);
                          tensors.copy(seen_sum, sum);
                          tensors.copy(seen_both, both);
                          tensors.copy(sum, late);
                        }
                        tensors.download();
                        require(seen_sum == std::vector<float>(kCount, 3), "the sum");
                        require(seen_both.front() == 1 && seen_both.back() == 2, "both in turn");
                        OK(sotto_barrier(self.comm, nullptr, nullptr));
                      }),
            "");
}

TEST(NcclContexts, AreMadeOnDevicesInUseAlone) {
  EXPECT_EQ(run_world(2, nccl_world(),
                      [](Member& self) {
                        Tensors tensors(Where::kCuda, self.rank + 1);
                        std::vector<float> a(3000, 1);
                        const sotto_buffer at = tensors.add(a);
                        const sotto_call call = tensors.call();
                        sotto_op* op = nullptr;
                        OK(sotto_all_reduce(self.comm, &at, &at, 1, &call, &op));
                        tensors.sync();
                        OK(sotto_op_wait(op, -1));
                        OK(sotto_op_release(op));
                        OK(sotto_barrier(self.comm, nullptr, nullptr));
                      }),
            "");
  EXPECT_EQ(fake_cuda::contexts(), (std::set<int>{1, 2}));
}

}  // namespace
}  // namespace sotto::test
