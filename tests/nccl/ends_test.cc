// NCCL's aborts and destroys wait for the device, as drivers do with the context's lock. That does
// not stand still while an operation of another comm has its stream blocked, which the thread that
// drives is to carry on. Ranks are threads.
#include <atomic>
#include <barrier>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <thread>
#include <utility>

#include "tests/cuda/device_memory.h"
#include "tests/emulation/cuda/fake_cuda.h"
#include "tests/emulation/nccl/fake_nccl.h"
#include "tests/nccl/second_comm.h"

namespace sotto::test {
namespace {

void await(const std::function<bool()>& done) {
  for (int i = 0; i < 20'000 && !done(); ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  require(done(), "rank 0 has begun to end");
}

// What a rank has over NCCL, and how rank 0 ends it. `watched`: the device need not be kept busy
// any more.
struct Abort {
  Abort(const Member& self, sotto_comm* of) : comm(of), tensors(Where::kCuda, self.rank) {
    const sotto_buffer b = tensors.add(x);
    const sotto_call call = tensors.call();
    if (self.rank == 0) OK(sotto_all_reduce(comm, &b, &b, 1, &call, &op));
  }
  void end(std::atomic<bool>& watched) {
    OK(sotto_comm_abort(comm, "enough"));
    // NCCL may touch its memory until the abort is over.
    for (int i = 0; i < 100; ++i) {
      require(sotto_op_test(op) == SOTTO_IN_PROGRESS, "it has ended");
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    watched = true;
  }
  void finish() {
    if (op != nullptr) {
      FAILS(sotto_op_wait(op, -1), SOTTO_E_ABORTED, "enough");
      OK(sotto_op_release(op));
    }
    (void)sotto_comm_destroy(comm);  // says again why it has failed
  }
  static constexpr const char* kCall = "ncclCommAbort";

  sotto_comm* comm;
  Tensors tensors;
  std::vector<float> x = std::vector<float>(1000, 1.0f);
  sotto_op* op = nullptr;
};

struct DestroyComm {
  DestroyComm(const Member&, sotto_comm* of) : comm(of) {}
  void end(std::atomic<bool>& watched) {
    watched = true;
    OK(sotto_comm_destroy(std::exchange(comm, nullptr)));
  }
  void finish() { OK(sotto_comm_destroy(comm)); }
  static constexpr const char* kCall = "ncclCommDestroy";

  sotto_comm* comm;
};

struct DestroySplit {
  DestroySplit(const Member& self, sotto_comm* of) : comm(of) {
    OK(sotto_comm_split(comm, 0, -self.rank, &split));  // with a communicator of its own
  }
  void end(std::atomic<bool>& watched) {
    watched = true;
    OK(sotto_comm_destroy(std::exchange(split, nullptr)));
  }
  void finish() {
    OK(sotto_comm_destroy(split));
    OK(sotto_comm_destroy(comm));
  }
  static constexpr const char* kCall = "ncclCommDestroy";

  sotto_comm *comm, *split = nullptr;
};

template <class Ending>
class NcclEnds : public testing::Test {
 protected:
  void SetUp() override {
    setenv("SOTTO_STREAM_BLOCK", "1", 1);
    setenv("CUDA_MODULE_LOADING", "EAGER", 1);
    fake_cuda::clear_faults();
    fake_cuda::configure({.devices = 4});
  }
  void TearDown() override {
    fake_nccl_wait_for_device(false);
    for (const char* name : {"SOTTO_STREAM_BLOCK", "CUDA_MODULE_LOADING"}) unsetenv(name);
    fake_cuda::drain();
    EXPECT_EQ(fake_nccl_live_comms(), 0u);
    EXPECT_EQ(fake_cuda::live(), fake_cuda::Live{}) << fake_cuda::live().text();
  }
};
using Endings = testing::Types<Abort, DestroyComm, DestroySplit>;
TYPED_TEST_SUITE(NcclEnds, Endings);

// Rank 0 has a stream blocked for an operation over TCP, in which rank 1 takes part when NCCL has
// begun to end.
template <class Ending>
void keep_no_other_comm_waiting() {
  std::atomic<bool> blocked{false}, watched{false};
  std::atomic<uint64_t> before{0};
  std::barrier ranks(2);
  WorldOptions options;
  options.transport = "tcp";
  options.on_rank = [](int32_t rank) { CUDA_OK(cudaSetDevice(rank)); };
  EXPECT_EQ(run_world(2, options,
                      [&](Member& self) {
                        sotto_comm* const nccl = nccl_comm(self, 60'000'000);
                        Tensors tensors(Where::kCuda, self.rank);
                        std::vector<float> x(1000, 1.0f);
                        const sotto_buffer a = tensors.add(x);
                        const sotto_call call = tensors.call();
                        // Allocates what the next one needs.
                        OK(sotto_all_reduce(self.comm, &a, &a, 1, &call, nullptr));
                        Ending ending(self, nccl);
                        ranks.arrive_and_wait();  // a comm that is being made would fail
                        if (self.rank == 1) {
                          await([&] {
                            return blocked && watched && fake_nccl_calls_of(Ending::kCall) > before;
                          });
                        }
                        sotto_op* op = nullptr;
                        OK(sotto_all_reduce(self.comm, &a, &a, 1, &call, &op));
                        if (self.rank == 0) {
                          OK(sotto_op_stream_wait(op, tensors.stream()));
                          before = fake_nccl_calls_of(Ending::kCall);
                          fake_nccl_wait_for_device(true);
                          blocked = true;
                          ending.end(watched);
                        }
                        OK(sotto_op_wait(op, -1));
                        OK(sotto_op_release(op));
                        ending.finish();
                        tensors.download();
                        require(x[999] == 4.0f, "the sum");
                      }),
            "");
}

TYPED_TEST(NcclEnds, KeepNoOtherCommWaiting) { keep_no_other_comm_waiting<TypeParam>(); }

// Nor with the lock of the context, which every call of CUDA takes, and with which NCCL's calls
// that free may wait.
TYPED_TEST(NcclEnds, WaitForNoBlockedStreamWithALock) {
  fake_cuda::configure({.devices = 4, .context_lock = true, .deadlock_ms = 10'000});
  keep_no_other_comm_waiting<TypeParam>();
}

}  // namespace
}  // namespace sotto::test
