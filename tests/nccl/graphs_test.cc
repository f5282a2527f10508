// Optimizer steps in CUDA graphs, between ranks, and when calls fail.
#include <barrier>
#include <functional>
#include <thread>

#include "tests/cuda/graph_training.h"
#include "tests/emulation/cuda/fake_cuda.h"
#include "tests/nccl/process_rank.h"
#include "tests/support/temp_dir.h"

namespace sotto::test {
namespace {

WorldOptions world(int32_t size) {
  WorldOptions options;
  options.transport = size == 1 ? "inproc" : "nccl";
  options.on_rank = [](int32_t rank) { CUDA_OK(cudaSetDevice(rank)); };
  return options;
}

class Graphs : public testing::TestWithParam<GraphKind> {};

TEST_P(Graphs, HaveTheBitsOfCallsBetweenRanks) {
  fake_cuda::configure({.devices = 4, .max_delay_us = 30});
  EXPECT_EQ(run_world(2, world(2),
                      [&](Member& self) {
                        // One after the other: each has a stream, and ThreadSanitizer threads for
                        // each.
                        const auto result = [&](const std::function<void(Training&)>& run) {
                          Training training(GetParam(), self, self.rank);
                          run(training);
                          return training.result();
                        };
                        const std::string called =
                            result([](Training& t) { t.run(Steps::kCalled); });
                        const std::string replayed = result([](Training& t) {
                          t.run(Steps::kReplayed);
                          require(t.replayed() >= kGraphSteps / 2,
                                  std::to_string(t.replayed()) + " were replayed");
                          require(t.graphs() == GetParam().graphs,
                                  std::to_string(t.graphs()) + " graphs");
                        });
                        require(called == replayed, "the bits differ");
                        // To the other rank a replay is the call that it stands for.
                        const std::string mixed = result([&](Training& t) {
                          for (int step = 0; step < kGraphSteps; ++step) {
                            t.new_gradients(step);
                            step % 2 == self.rank ? t.next() : t.call();
                          }
                        });
                        require(called == mixed, "the bits of both differ");
                      }),
            "");
}

// Bytes that were moved are those that were planned, also of launches.
TEST(GraphSteps, AreCounted) {
  EXPECT_EQ(run_world(2, world(2),
                      [](Member& self) {
                        Training training(kGraphKinds[0], self, self.rank);
                        training.call();
                        require(training.record(), "nothing was recorded");
                        const auto counters = [&] {
                          OK(sotto_barrier(self.comm, nullptr, nullptr));
                          sotto_comm_counters c = {};
                          c.struct_size = sizeof c;
                          OK(sotto_comm_get_counters(self.comm, &c));
                          return c;
                        };
                        const sotto_comm_counters before = counters();
                        training.run(Steps::kReplayed);
                        const sotto_comm_counters after = counters();
                        sotto_optim_info info = {};
                        info.struct_size = sizeof info;
                        OK(sotto_optim_get_info(training.optim(), &info));
                        const uint64_t moved = after.payload_bytes_sent - before.payload_bytes_sent;
                        require(moved == kGraphSteps * info.payload_bytes_next_step,
                                "payload bytes");
                        require(after.payload_bytes_planned - before.payload_bytes_planned == moved,
                                "planned bytes");
                      }),
            "");
}

// Ranks launch steps of different optimizers, with messages of the same sizes.
TEST(GraphSteps, AreFoundToDiffer) {
  EXPECT_EQ(run_world(2, world(2),
                      [](Member& self) {
                        Training sgd(kGraphKinds[0], self, self.rank),
                            adam(kGraphKinds[2], self, self.rank);
                        for (Training* training : {&sgd, &adam}) {
                          training->call();
                          require(training->record(), "nothing was recorded");
                        }
                        Training& mine = self.rank == 0 ? sgd : adam;
                        OK(sotto_optim_replay(mine.optim(), mine.graph().op()));
                        mine.graph().launch();
                        FAILS(sotto_op_wait(mine.graph().op(), -1), SOTTO_E_PROTOCOL,
                              "rank 0 called optimizer step", "rank 1 called optimizer step");
                      }),
            "");
}

// NCCL registers memory of captured operations, which both sides have to do or none.
TEST(GraphSteps, BesideCallsNeedMemoryThatIsNotRegistered) {
  for (const bool both : {true, false}) {
    unsetenv("NCCL_GRAPH_REGISTER");
    EXPECT_EQ(
        run_world(2, world(2),
                  [&](Member& self) {
                    Training training(kGraphKinds[0], self, self.rank);
                    training.call();
                    require(training.record(), "nothing was recorded");
                    if (both || self.rank == 0) {
                      OK(sotto_optim_replay(training.optim(), training.graph().op()));
                      training.graph().launch();
                      const sotto_status status = sotto_op_wait(training.graph().op(), -1);
                      if (both) return ok(status, "replays");
                      fails(status, SOTTO_E_PROTOCOL,
                            {"rank 0 replays a graph", "rank 1 does not", "NCCL_GRAPH_REGISTER=0"},
                            "the replay");
                    } else {
                      const sotto_call call = training.tensors().call();
                      FAILS(sotto_optim_step(training.optim(), &call, nullptr), SOTTO_E_PROTOCOL,
                            "rank 0 replays a graph");
                    }
                  }),
        "");
    setenv("NCCL_GRAPH_REGISTER", "0", 1);
  }
}

TEST(GraphSteps, AnyExecutionMayFail) {
  uint64_t k = 0;
  for (bool failed = true; failed; ++k) {
    ASSERT_LT(k, 1000u);
    fake_cuda::configure({.devices = 4});
    EXPECT_EQ(run_world(1, world(1),
                        [&](Member& self) {
                          Training training(kGraphKinds[1], self, 0);
                          training.new_gradients(0);
                          require(training.record(), "nothing was recorded");
                          OK(sotto_optim_replay(training.optim(), training.graph().op()));
                          fake_cuda::fail_execution(k);
                          training.graph().launch();
                          const sotto_status status = sotto_op_wait(training.graph().op(), -1);
                          failed = status != SOTTO_OK;
                          if (failed) require(status == SOTTO_E_DEVICE, "another error");
                          fake_cuda::drain();  // nothing that was queued executes later
                          fake_cuda::clear_faults();
                        }),
              "")
        << k;
  }
  EXPECT_GT(k, 5u);
}

// While a step is recorded: it is refused with an error that names the call, or NCCL's that made
// it.
TEST(GraphSteps, AnyCallMayFailWhileRecording) {
  for (const int32_t size : {1, 2}) {
    uint64_t k = 0;
    for (bool failed = true; failed; ++k) {
      ASSERT_LT(k, 1000u);
      fake_cuda::configure({.devices = 4});
      std::barrier ranks(size);
      EXPECT_EQ(run_world(size, world(size),
                          [&](Member& self) {
                            Training training(kGraphKinds[1], self, self.rank);
                            training.call();
                            ranks.arrive_and_wait();
                            StepGraph graph(training.tensors().stream());
                            sotto_status status = SOTTO_OK;
                            std::string text, failed_call;
                            if (self.rank == 0) {
                              status = graph.record([&](const auto* call, auto* op) {
                                fake_cuda::fail_call(k);
                                const sotto_status of_step =
                                    sotto_optim_step(training.optim(), call, op);
                                failed_call = fake_cuda::failed_call();
                                fake_cuda::clear_faults();
                                return of_step;
                              });
                              text = sotto_last_error();
                            }
                            ranks.arrive_and_wait();
                            if (self.rank > 0) return;
                            failed = !failed_call.empty();
                            if (status == SOTTO_OK) return;
                            require(failed, "an error without a cause: " + text);
                            require(status == SOTTO_E_DEVICE || status == SOTTO_E_TRANSPORT,
                                    "another error: " + text);
                            require(text.find(failed_call) != std::string::npos ||
                                        text.find("nccl") != std::string::npos,
                                    "which call? " + failed_call + ": " + text);
                          }),
                "")
          << "call " << k << ", ranks " << size;
    }
    EXPECT_GT(k, 20u);
  }
}

SOTTO_RANK_MAIN(nccl_replays_between_calls) {
  Rank r(self);
  ok(r.created, "sotto_comm_create");
  {
    const Member member{self.rank, self.size, r.context, r.comm};
    Training training(kGraphKinds[0], member, 0);
    training.call();
    require(training.record(), "nothing was recorded");
    std::vector<float> x(500, 1.0f);
    Tensors tensors(Where::kCuda, 0);
    const sotto_buffer at = tensors.add(x);
    const sotto_call call = tensors.call();
    sotto_op* op = nullptr;
    OK(sotto_all_reduce(r.comm, &at, &at, 1, &call, &op));
    if (self.rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(300));
    OK(sotto_optim_replay(training.optim(), training.graph().op()));
    sotto_op* later = nullptr;
    OK(sotto_all_reduce(r.comm, &at, &at, 1, &call, &later));
    if (self.rank == 0) std::this_thread::sleep_for(std::chrono::milliseconds(300));
    training.graph().run();
    for (sotto_op* each : {op, later}) {
      OK(sotto_op_wait(each, -1));
      OK(sotto_op_release(each));
    }
    tensors.download();
    require(x.back() == 4.0f, "the sum of sums");
  }
  OK(sotto_comm_destroy(r.comm));
  OK(sotto_context_destroy(r.context));
  return 0;
}

// However long NCCL takes to queue what was called before, and whenever the graph is launched.
TEST(GraphSteps, KeepTheOrderOfCalls) {
  const TempDir directory;
  Processes ranks("nccl_replays_between_calls", 2,
                  {.argument = directory.path(),
                   .environment = {"SOTTO_TRANSPORT=nccl", "FAKE_NCCL_LAUNCH_DELAY_US=100000"}});
  ranks.wait_all();
  EXPECT_EQ(ranks.failure(), "") << ranks.prefixed_output();
}

INSTANTIATE_TEST_SUITE_P(Kinds, Graphs, testing::ValuesIn(kGraphKinds),
                         [](const auto& of) { return std::string(of.param.name); });

}  // namespace
}  // namespace sotto::test
