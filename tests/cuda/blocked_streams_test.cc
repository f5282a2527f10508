// On the fake CUDA runtime, which shows what a GPU would hide: the default stream that runs late,
// contexts on unused devices, streams that are blocked although they need not be, and calls that
// could wait for a blocked stream.
#include <gmock/gmock.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "tests/cuda/device_memory.h"
#include "tests/cuda/on_fake_cuda.h"
#include "tests/emulation/cuda/fake_cuda.h"

namespace sotto::test {
namespace {

using CudaStreamOrder = OnFakeCuda<testing::Test>;

// With what SOTTO_STREAM_BLOCK asks for.
class CudaBlockedStreams : public CudaStreamOrder {
 protected:
  void SetUp() override {
    setenv("SOTTO_STREAM_BLOCK", "1", 1);
    setenv("CUDA_MODULE_LOADING", "EAGER", 1);
    CudaStreamOrder::SetUp();
  }
  void TearDown() override {
    for (const char* name : {"SOTTO_STREAM_BLOCK", "CUDA_MODULE_LOADING"}) unsetenv(name);
    EXPECT_THAT(fake_cuda::waits_behind_blocks(), testing::IsEmpty());
    CudaStreamOrder::TearDown();
  }
};

// An all-reduce of two ranks, of which the first has its tensor on a device.
struct DeviceAndHost {
  explicit DeviceAndHost(const Member& self)
      : comm(self.comm), tensors(self.rank == 0 ? Where::kCuda : Where::kHost) {
    at = tensors.add(values);
    call = tensors.call();
  }
  // In place.
  sotto_op* all_reduce() {
    sotto_op* op = nullptr;
    OK(sotto_all_reduce(comm, &at, &at, 1, &call, &op));
    return op;
  }

  sotto_comm* comm;
  Tensors tensors;
  std::vector<float> values = std::vector<float>(1000, 1);
  sotto_buffer at{};
  sotto_call call{};
};

// NULL is all defaults, so the default stream too.
TEST_F(CudaStreamOrder, ACallWithoutOptionsComesAfterTheDefaultStream) {
  EXPECT_EQ(run_world(1, {},
                      [](Member& self) {
                        // The first stream that is made: number 0.
                        CUDA_OK(cudaStreamSynchronize(nullptr));
                        Tensors tensors(Where::kCuda);
                        std::vector<float> a(1000, 1), fresh(1000, 2), sum(1000, 0);
                        const sotto_buffer in = tensors.add(a), out = tensors.add(sum);
                        const sotto_buffer from = tensors.add(fresh);
                        tensors.sync();
                        fake_cuda::make_late(0, 100'000);
                        CUDA_OK(cudaMemcpyAsync(in.data, from.data, 4000, cudaMemcpyDeviceToDevice,
                                                nullptr));
                        OK(sotto_all_reduce(self.comm, &in, &out, 1, nullptr, nullptr));
                        tensors.download();
                        require(sum[0] == 2 && sum[999] == 2, "what the default stream has copied");
                      }),
            "");
}

// A rank whose tensors are on one device makes no context on another, whatever thread works for it.
TEST_F(CudaStreamOrder, ContextsAreMadeOnDevicesInUseAlone) {
  WorldOptions options;
  options.on_rank = [](int32_t) { CUDA_OK(cudaSetDevice(1)); };
  EXPECT_EQ(run_world(2, options,
                      [](Member& self) {
                        Tensors tensors(Where::kCuda, 1);
                        std::vector<float> a(3000, 1);
                        const sotto_buffer at = tensors.add(a);
                        const sotto_call call = tensors.call();
                        for (int round = 0; round < 3; ++round) {
                          sotto_op* op = nullptr;
                          OK(sotto_all_reduce(self.comm, &at, &at, 1, &call, &op));
                          OK(sotto_op_stream_wait(op, tensors.stream()));
                          tensors.sync();  // the progress thread drives
                          OK(sotto_op_wait(op, -1));
                          OK(sotto_op_release(op));
                        }
                        tensors.download();
                        require(a[2999] == 8, "the sum");
                      }),
            "");
  EXPECT_EQ(fake_cuda::contexts(), std::set<int>{1});
}

// Events order a stream behind an operation that only its device has to do with.
TEST_F(CudaBlockedStreams, AreNotThoseOfOperationsThatTheHostHasNoPartIn) {
  const uint64_t blocks = fake_cuda::calls("cuStreamWaitValue32");
  EXPECT_EQ(run_world(1, {},
                      [](Member& self) {
                        Tensors tensors(Where::kCuda);
                        std::vector<float> a(5000, 3), sum(5000, 0);
                        const sotto_buffer in = tensors.add(a), out = tensors.add(sum);
                        const sotto_call call = tensors.call();
                        for (int round = 0; round < 50; ++round) {
                          sotto_op* op = nullptr;
                          OK(sotto_all_reduce(self.comm, &in, &out, 1, &call, &op));
                          OK(sotto_op_stream_wait(op, tensors.stream()));
                          OK(sotto_op_release(op));
                        }
                        tensors.download();
                        require(sum[4999] == 3, "the sum");
                      }),
            "");
  EXPECT_EQ(fake_cuda::calls("cuStreamWaitValue32"), blocks);
}

// Their words were made when the device was opened, so there are only so many.
TEST_F(CudaBlockedStreams, HaveALimit) {
  std::atomic<bool> enough{false};
  EXPECT_EQ(run_world(2, {},
                      [&](Member& self) {
                        DeviceAndHost x(self);
                        while (self.rank == 1 && !enough) std::this_thread::yield();
                        sotto_op* const op = x.all_reduce();
                        if (self.rank == 0) {
                          for (int i = 0; i < 16384; ++i)
                            OK(sotto_op_stream_wait(op, x.tensors.stream()));
                          FAILS(sotto_op_stream_wait(op, x.tensors.stream()), SOTTO_E_DEVICE,
                                "16384 streams of cuda:0 wait");
                          enough = true;
                        }
                        OK(sotto_op_wait(op, -1));
                        x.tensors.sync();
                        if (self.rank == 0) OK(sotto_op_stream_wait(op, x.tensors.stream()));
                        OK(sotto_op_release(op));
                      }),
            "");
}

// What waits until the device stands still would wait for a stream that is blocked.
TEST_F(CudaBlockedStreams, DoNotHoldUpWhatIsGivenBack) {
  constexpr const char* kConfig = R"({"optimizer": {"type": "AdamW", "params": {"lr": 0.01}}})";
  EXPECT_EQ(
      run_world(2, {},
                [&](Member& self) {
                  Tensors tensors(self.rank == 0 ? Where::kCuda : Where::kHost);
                  std::vector<float> p(3000, 1), g(3000, 1);
                  sotto_param param = {};
                  param.struct_size = sizeof param;
                  param.param = tensors.add(p);
                  param.grad = tensors.add(g);
                  tensors.sync();
                  const sotto_call call = tensors.call();
                  sotto_optim* optim = nullptr;
                  OK(sotto_optim_create(self.comm, kConfig, &param, 1, &optim));
                  OK(sotto_optim_step(optim, &call, nullptr));
                  OK(sotto_all_reduce(self.comm, &param.grad, &param.grad, 1, &call, nullptr));
                  OK(sotto_barrier(self.comm, nullptr, nullptr));
                  // The stream of rank 0 is blocked until rank 1 comes.
                  if (self.rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(300));
                  sotto_op* op = nullptr;
                  OK(sotto_all_reduce(self.comm, &param.grad, &param.grad, 1, &call, &op));
                  if (self.rank == 0) OK(sotto_op_stream_wait(op, tensors.stream()));
                  OK(sotto_optim_destroy(optim));
                  OK(sotto_op_wait(op, -1));
                  OK(sotto_op_release(op));
                  tensors.download();
                }),
      "");
  EXPECT_THAT(fake_cuda::waits_behind_blocks(), testing::IsEmpty());
}

// One all-reduce of two ranks, rank 0 on a device; rank 1 comes when `let_rank_1` allows it.
std::string reduce_behind(const std::function<void(Member&, sotto_op*, cudaStream_t)>& order,
                          const std::atomic<bool>& let_rank_1) {
  return run_world(2, {}, [&](Member& self) {
    DeviceAndHost x(self);
    while (self.rank == 1 && !let_rank_1) std::this_thread::yield();
    sotto_op* const op = x.all_reduce();
    if (self.rank == 0) {
      order(self, op, x.tensors.stream());
      x.tensors.download();
      require(x.values[0] == 2 && x.values[999] == 2, "the stream comes after the operation");
    }
    OK(sotto_op_wait(op, -1));
    OK(sotto_op_release(op));
  });
}

// Without being asked to, no stream is blocked: the thread waits for the other rank's message.
TEST_F(CudaStreamOrder, IsAwaitedOnTheHost) {
  const uint64_t blocks = fake_cuda::calls("cuStreamWaitValue32");
  std::atomic<bool> comes{false};
  EXPECT_EQ(reduce_behind(
                [&](Member&, sotto_op* op, cudaStream_t stream) {
                  std::thread other([&] {
                    std::this_thread::sleep_for(std::chrono::milliseconds(50));
                    comes = true;
                  });
                  OK(sotto_op_stream_wait(op, stream));
                  require(comes, "the other rank has come");
                  other.join();
                },
                comes),
            "");
  EXPECT_EQ(fake_cuda::calls("cuStreamWaitValue32"), blocks);
}

// A rank that waits for a stream does not wait for longer than the operation lasts.
TEST_F(CudaStreamOrder, AnOperationThatFailsEndsTheWait) {
  std::atomic<bool> comes{false};
  EXPECT_EQ(run_world(2, {},
                      [&](Member& self) {
                        DeviceAndHost x(self);
                        x.call.timeout_us = 200'000;
                        if (self.rank == 1) {
                          while (!comes) std::this_thread::yield();
                          return;
                        }
                        sotto_op* const op = x.all_reduce();
                        OK(sotto_op_stream_wait(op, x.tensors.stream()));
                        FAILS(sotto_op_error(op, nullptr), SOTTO_E_TIMEOUT, "");
                        OK(sotto_op_release(op));
                        x.tensors.sync();
                        comes = true;
                      }),
            "");
}

// What has been queued for a failed operation still uses its memory, so it ends with its stream.
TEST_F(CudaStreamOrder, AFailedOperationEndsWhenItsStreamGoesOn) {
  std::atomic<bool> goes_on{false};
  EXPECT_EQ(run_world(2, {},
                      [&](Member& self) {
                        DeviceAndHost x(self);
                        x.call.timeout_us = 200'000;
                        const auto stand_still = [](void* until) {
                          while (!*static_cast<std::atomic<bool>*>(until))
                            std::this_thread::sleep_for(std::chrono::milliseconds(1));
                        };
                        if (self.rank == 0)
                          CUDA_OK(cudaLaunchHostFunc(x.tensors.stream(), stand_still, &goes_on));
                        sotto_op* const op = x.all_reduce();
                        if (self.rank == 1) {  // which has no stream
                          FAILS(sotto_op_wait(op, -1), SOTTO_E_TIMEOUT, "");
                          OK(sotto_op_release(op));
                          return;
                        }
                        while (sotto_comm_error(self.comm, nullptr) == SOTTO_OK)
                          OK(sotto_context_poll(self.context, 1000));
                        require(sotto_op_wait(op, 20'000) == SOTTO_IN_PROGRESS, "under way");
                        goes_on = true;
                        FAILS(sotto_op_wait(op, -1), SOTTO_E_TIMEOUT, "");
                        OK(sotto_op_release(op));
                        x.tensors.sync();
                      }),
            "");
}

// The thread goes on, the stream waits, and the device ends that.
TEST_F(CudaBlockedStreams, GoOnWithoutTheHost) {
  const uint64_t writes = fake_cuda::calls("cuStreamWriteValue32");
  std::atomic<bool> comes{false};
  EXPECT_EQ(reduce_behind(
                [&](Member&, sotto_op* op, cudaStream_t stream) {
                  OK(sotto_op_stream_wait(op, stream));
                  require(cudaStreamQuery(stream) == cudaErrorNotReady, "the stream is blocked");
                  // A device that is done before the host looks leaves the end to the host.
                  fake_cuda::make_late(fake_cuda::kAllStreams, 300'000);
                  comes = true;
                },
                comes),
            "");
  EXPECT_EQ(fake_cuda::calls("cuStreamWriteValue32"), writes + 1);
}

// An operation of a new size needs pinned memory, which CUDA may only give when the device stands
// still: not while the stream waits for another rank.
TEST_F(CudaBlockedStreams, AreNotWaitedForByThoseWhoEndThem) {
  std::atomic<bool> comes{false};
  EXPECT_EQ(run_world(2, {},
                      [&](Member& self) {
                        DeviceAndHost x(self);
                        std::vector<float> more(300'000, 1);
                        const sotto_buffer at = x.tensors.add(more);
                        x.tensors.sync();
                        while (self.rank == 1 && !comes) std::this_thread::yield();
                        sotto_op* ops[2] = {x.all_reduce(), nullptr};
                        std::thread other;
                        if (self.rank == 0) {
                          OK(sotto_op_stream_wait(ops[0], x.tensors.stream()));
                          other = std::thread([&] {
                            std::this_thread::sleep_for(std::chrono::milliseconds(50));
                            comes = true;
                          });
                        }
                        OK(sotto_all_reduce(self.comm, &at, &at, 1, &x.call, &ops[1]));
                        OK(sotto_op_wait_all(ops, 2, -1));
                        for (sotto_op* op : ops) OK(sotto_op_release(op));
                        if (other.joinable()) other.join();
                        x.tensors.download();
                        require(x.values[999] == 2 && more[299'999] == 2, "the sums");
                      }),
            "");
}

// A block takes the place of an earlier one only when the stream of that has gone on.
TEST_F(CudaBlockedStreams, CanBeMadeAgainAndAgain) {
  EXPECT_EQ(run_world(2, {},
                      [](Member& self) {
                        DeviceAndHost x(self);
                        for (int round = 0; round < 20; ++round) {
                          sotto_op* const op = x.all_reduce();
                          if (self.rank == 0) OK(sotto_op_stream_wait(op, x.tensors.stream()));
                          OK(sotto_op_wait(op, -1));
                          OK(sotto_op_release(op));
                        }
                        x.tensors.download();
                        require(x.values[999] == 1 << 20, "twenty sums");
                      }),
            "");
}

// In a process where they could block themselves there are none.
TEST_F(CudaBlockedStreams, NeedTheirConditions) {
  const auto refused = [](const char* why) {
    std::atomic<bool> comes{false};
    return run_world(2, {}, [&](Member& self) {
      DeviceAndHost x(self);
      while (self.rank == 1 && !comes) std::this_thread::yield();
      sotto_op* const op = x.all_reduce();
      if (self.rank == 0)
        FAILS(sotto_op_stream_wait(op, x.tensors.stream()), SOTTO_E_UNSUPPORTED,
              "SOTTO_STREAM_BLOCK", why);
      comes = true;
      OK(sotto_op_wait(op, -1));
      OK(sotto_op_release(op));
    });
  };
  unsetenv("CUDA_MODULE_LOADING");
  EXPECT_EQ(refused("CUDA_MODULE_LOADING=EAGER, which is \"\""), "");
  setenv("CUDA_MODULE_LOADING", "EAGER", 1);
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1", 1);
  EXPECT_EQ(refused("CUDA_DEVICE_MAX_CONNECTIONS of 8 or more, which is 1"), "");
  unsetenv("CUDA_DEVICE_MAX_CONNECTIONS");
}

}  // namespace
}  // namespace sotto::test
