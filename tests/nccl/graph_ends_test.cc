// Ends of comms and of operations while there are CUDA graphs with operations of NCCL, which ends a
// communicator when those graphs have been destroyed, and not before. Nobody waits for that.
#include <atomic>
#include <barrier>
#include <chrono>
#include <thread>

#include "tests/cuda/graph_training.h"
#include "tests/emulation/cuda/fake_cuda.h"
#include "tests/emulation/nccl/fake_nccl.h"
#include "tests/nccl/process_rank.h"
#include "tests/nccl/second_comm.h"

namespace sotto::test {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr auto kSoon = std::chrono::seconds(5);  // less than what gives up on NCCL
constexpr uint64_t kNever = UINT64_MAX / 2;      // of jobs that hang
constexpr uint32_t kHoursUs = 4'000'000'000;

WorldOptions world(const char* transport) {
  fake_cuda::configure({.devices = 4});
  WorldOptions options;
  options.transport = transport;
  options.on_rank = [](int32_t rank) { CUDA_OK(cudaSetDevice(rank)); };
  return options;
}

// A training that has a graph.
struct Recorded : Training {
  explicit Recorded(const Member& on, int device) : Training(kGraphKinds[0], on, device) {
    call();
    require(record(), "nothing was recorded");
  }
};

void await(const std::function<bool()>& done, const char* what) {
  for (int i = 0; i < 5'000 && !done(); ++i) std::this_thread::sleep_for(milliseconds(1));
  require(done(), what);
}

void await_live_comms(uint64_t live) {
  await([&] { return fake_nccl_live_comms() == live; }, "communicators have not ended");
}

bool keeps_on(sotto_op* op, int ms) {
  for (int i = 0; i < ms; ++i) {
    if (sotto_op_test(op) != SOTTO_IN_PROGRESS) return false;
    std::this_thread::sleep_for(milliseconds(1));
  }
  return true;
}

// `aborted`: an operation fails first.
void outlive(bool aborted) {
  const uint64_t live = fake_nccl_live_comms();
  std::barrier ranks(2);
  EXPECT_EQ(run_world(2, world("tcp"),
                      [&](Member& self) {
                        Member member = self;
                        member.comm = nccl_comm(self, 60'000'000);
                        cudaGraphExec_t graph = nullptr;
                        steady_clock::time_point begun;
                        {
                          Recorded training(member, self.rank);
                          ranks.arrive_and_wait();
                          begun = steady_clock::now();
                          if (aborted) {
                            if (self.rank == 0) OK(sotto_comm_abort(member.comm, "enough"));
                            const sotto_call call = training.tensors().call();
                            FAILS(sotto_optim_step(training.optim(), &call, nullptr),
                                  SOTTO_E_ABORTED, "enough");
                            ranks.arrive_and_wait();
                          }
                          graph = training.graph().take();
                        }
                        const sotto_status ended = sotto_comm_destroy(member.comm);
                        require((ended == SOTTO_OK) != aborted, "sotto_comm_destroy");
                        require(steady_clock::now() - begun < kSoon, "it has waited for the graph");
                        require(fake_nccl_live_comms() == live + 2, "NCCL has not waited for it");
                        ranks.arrive_and_wait();
                        CUDA_OK(cudaGraphExecDestroy(graph));
                        ranks.arrive_and_wait();
                        await_live_comms(live);
                      }),
            "");
}

TEST(NcclGraphEnds, AGraphMayOutliveItsComm) { outlive(false); }

TEST(NcclGraphEnds, OperationsFailWithoutWaitingForGraphs) { outlive(true); }

// It ends with its launch, which the device may go on with behind the abort.
TEST(NcclGraphEnds, AReplayDoesNotEndBeforeItsLaunch) {
  std::barrier ranks(2);
  EXPECT_EQ(run_world(2, world("nccl"),
                      [&](Member& self) {
                        Recorded training(self, self.rank);
                        sotto_op* const op = training.graph().op();
                        ranks.arrive_and_wait();
                        if (self.rank == 0) fake_nccl_hang(0);
                        ranks.arrive_and_wait();
                        OK(sotto_optim_replay(training.optim(), op));
                        training.graph().launch();
                        ranks.arrive_and_wait();
                        if (self.rank == 0) {
                          // Both launches have begun.
                          await([] { return fake_nccl_hanging() > 0; }, "nothing hangs");
                          for (uint64_t last = 0, same = 0; same < 50; ++same) {
                            std::this_thread::sleep_for(milliseconds(1));
                            if (const uint64_t now = fake_cuda::executions(); now != last) {
                              same = 0;
                              last = now;
                            }
                          }
                          fake_nccl_hang(kNever);
                          fake_cuda::hold();
                          OK(sotto_comm_abort(self.comm, "enough"));
                        }
                        ranks.arrive_and_wait();
                        const bool kept = keeps_on(op, 500);
                        ranks.arrive_and_wait();
                        if (self.rank == 0) fake_cuda::resume();
                        const sotto_status status = sotto_op_wait(op, -1);
                        require(kept, "it has ended before its launch");
                        fails(status, SOTTO_E_ABORTED, {"enough"}, "the replay");
                      }),
            "");
}

// NCCL's thread, which is not seen to end but by the end of the communicator, may put what it has
// in progress on the stream behind the abort.
TEST(NcclGraphEnds, AnOperationThatNcclHasInProgressDoesNotEndBeforeTheGraph) {
  std::barrier ranks(2);
  EXPECT_EQ(run_world(2, world("nccl"),
                      [&](Member& self) {
                        Recorded training(self, self.rank);
                        std::vector<float> x(500, 1.0f);
                        Tensors tensors(Where::kCuda, self.rank);
                        const sotto_buffer at = tensors.add(x);
                        const sotto_call call = tensors.call();
                        ranks.arrive_and_wait();
                        if (self.rank == 0) fake_nccl_delay_launches(kHoursUs);
                        ranks.arrive_and_wait();
                        sotto_op* op = nullptr;
                        OK(sotto_all_reduce(self.comm, &at, &at, 1, &call, &op));
                        bool kept = keeps_on(op, 50);
                        ranks.arrive_and_wait();
                        if (self.rank == 0) {
                          fake_nccl_delay_launches(0);
                          OK(sotto_comm_abort(self.comm, "enough"));
                        }
                        ranks.arrive_and_wait();
                        kept = keeps_on(op, 500) && kept;
                        ranks.arrive_and_wait();
                        CUDA_OK(cudaGraphExecDestroy(training.graph().take()));
                        const auto begun = steady_clock::now();
                        FAILS(sotto_op_wait(op, -1), SOTTO_E_ABORTED, "enough");
                        require(kept, "it has ended before the graph");
                        require(steady_clock::now() - begun < kSoon, "it has not ended with it");
                        OK(sotto_op_release(op));
                      }),
            "");
}

// Those of splits end after graphs with their own operations, not after those of others.
TEST(NcclGraphEnds, OfASplitAreKeptByItsGraphsAlone) {
  setenv("SOTTO_NCCL_NATIVE", "all", 1);
  for (const bool of_split : {false, true}) {
    SCOPED_TRACE(of_split);
    std::barrier ranks(2);
    EXPECT_EQ(run_world(2, world("nccl"),
                        [&](Member& self) {
                          ranks.arrive_and_wait();
                          const uint64_t live = fake_nccl_live_comms();
                          ranks.arrive_and_wait();
                          Member child{1 - self.rank, 2, self.context, nullptr};
                          OK(sotto_comm_split(self.comm, 0, child.rank, &child.comm));
                          cudaGraphExec_t graph = nullptr;
                          {
                            Recorded training(of_split ? child : self, self.rank);
                            graph = training.graph().take();
                          }
                          require(fake_nccl_live_comms() == live + 2, "the split has none");
                          ranks.arrive_and_wait();
                          OK(sotto_comm_destroy(child.comm));
                          if (of_split) {
                            std::this_thread::sleep_for(milliseconds(50));
                            require(fake_nccl_live_comms() == live + 2, "it was not kept");
                            OK(sotto_barrier(self.comm, nullptr, nullptr));
                            CUDA_OK(cudaGraphExecDestroy(graph));
                          }
                          await_live_comms(live);
                          OK(sotto_barrier(self.comm, nullptr, nullptr));
                          if (!of_split) CUDA_OK(cudaGraphExecDestroy(graph));
                        }),
              "");
  }
  unsetenv("SOTTO_NCCL_NATIVE");
}

}  // namespace
}  // namespace sotto::test
