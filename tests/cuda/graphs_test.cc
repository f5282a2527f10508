// Optimizer steps in CUDA graphs: trainings that replay recorded steps have the bits of those that
// call every step, and a launch that is not awaited writes nothing.
#include "tests/cuda/graph_training.h"

namespace sotto::test {
namespace {

const WorldOptions kAlone;

class Graphs : public testing::TestWithParam<GraphKind> {};

TEST_P(Graphs, HaveTheBitsOfCalls) {
  EXPECT_EQ(run_world(1, kAlone,
                      [&](Member& self) {
                        Training called(GetParam(), self, 0), replayed(GetParam(), self, 0);
                        called.run(Steps::kCalled);
                        replayed.run(Steps::kReplayed);
                        require(called.result() == replayed.result(), "the bits differ");
                        require(replayed.replayed() >= kGraphSteps / 2,
                                std::to_string(replayed.replayed()) + " were replayed");
                      }),
            "");
}

INSTANTIATE_TEST_SUITE_P(Kinds, Graphs, testing::ValuesIn(kGraphKinds),
                         [](const auto& of) { return std::string(of.param.name); });

TEST(GraphSteps, WriteNothingIfNobodyAwaitsThem) {
  for (const bool twice : {false, true}) {
    EXPECT_EQ(run_world(1, kAlone,
                        [&](Member& self) {
                          Training training(kGraphKinds[1], self, 0);
                          training.new_gradients(0);
                          require(training.record(), "nothing was recorded");
                          if (twice) {
                            OK(sotto_optim_replay(training.optim(), training.graph().op()));
                            training.graph().run();
                          }
                          const std::string before = training.parameters();
                          training.graph().launch();
                          require(training.parameters() == before, "parameters were written");
                          FAILS(sotto_optim_replay(training.optim(), training.graph().op()),
                                SOTTO_E_INVALID_STATE,
                                twice ? "launched 2 times, but replayed 1 times"
                                      : "launched 1 times, but replayed 0 times");
                          const sotto_call call = training.tensors().call();
                          FAILS(sotto_optim_step(training.optim(), &call, nullptr),
                                SOTTO_E_INVALID_STATE, "launched");
                        }),
              "");
  }
}

// Whether the time is over or the comm is aborted.
TEST(GraphSteps, EndWithoutTheirLaunch) {
  for (const bool abort : {false, true}) {
    WorldOptions options = kAlone;
    if (!abort) options.timeout_us = 8'000'000;
    EXPECT_EQ(run_world(1, options,
                        [&](Member& self) {
                          Training training(kGraphKinds[1], self, 0);
                          training.new_gradients(0);
                          require(training.record(), "nothing was recorded");
                          sotto_op* const op = training.graph().op();
                          const std::string before = training.parameters();
                          OK(sotto_optim_replay(training.optim(), op));
                          FAILS(sotto_optim_replay(training.optim(), op), SOTTO_E_BUSY);
                          require(sotto_op_test(op) == SOTTO_IN_PROGRESS, "it has ended");
                          if (abort) OK(sotto_comm_abort(self.comm, "enough"));
                          FAILS(sotto_op_wait(op, -1), abort ? SOTTO_E_ABORTED : SOTTO_E_TIMEOUT);
                          training.graph().launch();
                          require(training.parameters() == before, "parameters were written");
                          FAILS(sotto_optim_replay(training.optim(), op),
                                abort ? SOTTO_E_ABORTED : SOTTO_E_TIMEOUT);
                        }),
              "");
  }
}

// One that is made when another has gone may be at its place in memory.
TEST(GraphSteps, AreNotThoseOfALaterOptimizer) {
  EXPECT_EQ(
      run_world(1, kAlone,
                [](Member& self) {
                  Tensors tensors(Where::kCuda, 0);
                  std::vector<float> p(100, 1.0f), g(100, 0.5f);
                  std::vector<sotto_param> params(2);
                  for (sotto_param& param : params) {
                    param.struct_size = sizeof(sotto_param);
                    param.param = tensors.add(p);
                    param.grad = tensors.add(g);
                  }
                  tensors.sync();
                  const auto make = [&](uint64_t n) {
                    sotto_optim* made = nullptr;
                    OK(sotto_optim_create(self.comm, kGraphKinds[0].json, params.data(), n, &made));
                    return made;
                  };
                  StepGraph graph(tensors.stream());
                  sotto_optim* const first = make(1);
                  require(graph.record(first) == SOTTO_OK, "nothing was recorded");
                  OK(sotto_optim_destroy(first));
                  for (int i = 0; i < 8; ++i) {
                    sotto_optim* const later = make(2);
                    FAILS(sotto_optim_replay(later, graph.op()), SOTTO_E_INVALID_ARGUMENT,
                          "no step of this optimizer");
                    OK(sotto_optim_destroy(later));
                  }
                }),
      "");
}

TEST(GraphSteps, RefuseWhatCannotBeRecorded) {
  EXPECT_EQ(run_world(1, kAlone,
                      [](Member& self) {
                        Training one(kGraphKinds[7], self, 0), other(kGraphKinds[0], self, 0);
                        const sotto_call call = one.tensors().call();
                        sotto_call tells = call;
                        tells.on_done = [](void*, sotto_status) {};
                        sotto_op *op = nullptr, *called = nullptr;
                        OK(sotto_optim_step(other.optim(), &call, &called));
                        OK(sotto_op_wait(called, -1));
                        FAILS(sotto_optim_replay(other.optim(), called), SOTTO_E_INVALID_STATE,
                              "no recorded one");
                        require(other.record(), "nothing was recorded");
                        FAILS(sotto_optim_replay(one.optim(), other.graph().op()),
                              SOTTO_E_INVALID_ARGUMENT, "no step of this optimizer");
                        FAILS(sotto_op_stream_wait(other.graph().op(), call.stream),
                              SOTTO_E_INVALID_STATE, "part of a CUDA graph");
                        // Gradients that have moved.
                        other.move_gradients();
                        FAILS(sotto_optim_replay(other.optim(), other.graph().op()),
                              SOTTO_E_INVALID_STATE, "other memory");
                        other.call();
                        const auto stream = static_cast<cudaStream_t>(call.stream);
                        CUDA_OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
                        FAILS(sotto_optim_step(one.optim(), &call, nullptr),
                              SOTTO_E_INVALID_ARGUMENT, "out_op");
                        FAILS(sotto_optim_step(one.optim(), &tells, &op), SOTTO_E_INVALID_ARGUMENT,
                              "callback");
                        FAILS(sotto_optim_accumulate(one.optim(), &call, &op),
                              SOTTO_E_INVALID_STATE, "optimizer steps alone");
                        cudaGraph_t graph = nullptr;
                        CUDA_OK(cudaStreamEndCapture(stream, &graph));
                        CUDA_OK(cudaGraphDestroy(graph));
                        // The switch comes once; a recording of the stage before does not fit any
                        // more.
                        require(one.record(), "nothing was recorded");
                        for (int step = 0; step < 2; ++step) one.call();
                        FAILS(sotto_optim_replay(one.optim(), one.graph().op()),
                              SOTTO_E_INVALID_STATE, "another kind");
                        require(!one.record(), "the first compressed step was recorded");
                        one.call();
                        OK(sotto_op_release(called));
                      }),
            "");
}

}  // namespace
}  // namespace sotto::test
