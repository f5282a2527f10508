// Optimizer steps in CUDA graphs: trainings that replay recorded steps have the bits of those that
// call every step, and a launch that nobody awaits, or that is given up, writes nothing.
#include <atomic>
#include <barrier>
#include <cstdlib>
#include <memory>

#include "tests/cuda/device_memory.h"
#include "tests/nccl/graph.h"
#include "tests/support/fake_cuda/fake_cuda.h"

namespace sotto::test {
namespace {

constexpr int kSteps = 14;
const std::vector<size_t> kCounts = {3000, 17, 700};

struct Kind {
  const char* name;
  const char* json;
  int graphs;         // recordings that a training of one rank, and of two, makes
  bool half = false;  // fp16 gradients, one of which overflows now and then
};
constexpr char kFp16[] =
    R"({"optimizer": {"type": "AdamW", "params": {"lr": 0.01}}, "fp16": {"enabled": true,
        "initial_scale_power": 4, "loss_scale_window": 3}, "gradient_clipping": 0.5,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 9}}})";
constexpr Kind kKinds[] = {
    {"Sgd", R"({"optimizer": {"type": "SGD", "params": {"lr": 0.01, "momentum": 0.9,
                "dampening": 0.1}}})", 1},
    {"AdamW", R"({"optimizer": {"type": "AdamW", "params": {"lr": 0.01}}, "gradient_clipping": 1.0,
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_max_lr": 0.01,
        "warmup_num_steps": 3, "total_num_steps": 20}}})", 1},
    {"NarrowState", R"({"optimizer": {"type": "Adam", "params": {"lr": 0.01}},
                        "sotto": {"state_dtype": "fp8"}})", 1},
    {"LossScale", kFp16, 1, true},
    {"Lamb", R"({"optimizer": {"type": "Lamb", "params": {"lr": 0.01, "weight_decay": 0.01}}})", 1},
    {"Int8Gradients", R"({"optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
                          "sotto": {"gradient_codec": {"type": "int8"}}})", 2},
    {"OneBitGradients", R"({"optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
                            "sotto": {"gradient_codec": {"type": "onebit"}}})", 2},
    {"OneBitAdam", R"({"optimizer": {"type": "OneBitAdam", "params": {"lr": 0.01,
                       "freeze_step": 3}}})", 3},
    {"OneBitLamb", R"({"optimizer": {"type": "OneBitLamb", "params": {"lr": 0.01, "freeze_step": 3,
                       "weight_decay": 0.01}}})", 3},
    {"ZeroOneAdam", R"({"optimizer": {"type": "ZeroOneAdam", "params": {"lr": 0.01,
        "var_freeze_step": 3, "var_update_scaler": 2, "local_step_scaler": 3,
        "local_step_clipper": 4}}})", 0},
};
void PrintTo(const Kind& kind, std::ostream* out) { *out << kind.name; }

enum class Steps { kCalled, kReplayed };

// A training on one rank; its result, parameters and state.
class Training {
 public:
  Training(const Kind& kind, const Member& self, int device)
      : half_(kind.half), rank_(self.rank), tensors_(Where::kCuda, device), params_(kCounts.size()) {
    p_.resize(kCounts.size());
    g_.resize(kCounts.size());
    h_.resize(kCounts.size());
    for (size_t t = 0; t < kCounts.size(); ++t) {
      for (size_t i = 0; i < kCounts[t]; ++i)
        p_[t].push_back(0.01f * static_cast<float>(i % 97) - 0.3f);
      g_[t].resize(kCounts[t]);
      h_[t].resize(kCounts[t]);
      elsewhere_.emplace_back(kCounts[t]);
      params_[t].struct_size = sizeof(sotto_param);
      params_[t].param = tensors_.add(p_[t]);
      params_[t].grad = half_ ? half_buffer(t) : tensors_.add(g_[t]);
    }
    tensors_.sync();
    OK(sotto_optim_create(self.comm, kind.json, params_.data(), params_.size(), &optim_));
  }
  ~Training() {
    graphs_.clear();
    (void)sotto_optim_destroy(optim_);
  }

  sotto_optim* optim() const { return optim_; }
  Tensors& tensors() { return tensors_; }
  size_t graphs() const { return graphs_.size(); }
  StepGraph& graph() { return *graphs_.front(); }
  int replayed() const { return replayed_; }

  void run(Steps steps) {
    for (int step = 0; step < kSteps; ++step) {
      new_gradients(step);
      if (steps == Steps::kReplayed) {
        next();
      } else {
        call();
      }
    }
  }
  void call() {
    const sotto_call call = tensors_.call();
    OK(sotto_optim_step(optim_, &call, nullptr));
  }
  // The next step with a graph that fits, or one that is recorded for it; or else by a call.
  void next() {
    for (const auto& graph : graphs_) {
      if (!ready(*graph)) continue;
      graph->run();
      ++replayed_;
      return;
    }
    if (!record()) {
      call();
      return;
    }
    require(ready(*graphs_.back()), "a step that was just recorded cannot be replayed");
    graphs_.back()->run();
    ++replayed_;
  }
  // To memory of parameters' size that is nobody's.
  void move_gradients() {
    std::vector<sotto_buffer> moved;
    for (std::vector<float>& p : elsewhere_) moved.push_back(tensors_.add(p));
    tensors_.sync();
    OK(sotto_optim_set_grads(optim_, moved.data(), moved.size()));
  }
  bool record() {
    auto graph = std::make_unique<StepGraph>(tensors_.stream());
    const sotto_status status = graph->record(optim_);
    if (status == SOTTO_E_INVALID_STATE) return false;
    require(status == SOTTO_OK, "sotto_optim_step while capturing");
    graphs_.push_back(std::move(graph));
    return true;
  }
  // All of it, also what only rank 0 writes for the gradients of step `step`.
  void new_gradients(int step) {
    tensors_.download();
    for (size_t t = 0; t < kCounts.size(); ++t) {
      for (size_t i = 0; i < kCounts[t]; ++i) {
        const auto place = i * 7 + t * 13 + static_cast<size_t>(rank_ * 5 + step * 3);
        g_[t][i] = static_cast<float>(place % 41) - 20.0f;
        h_[t][i] = static_cast<uint16_t>(0x2c00 + place % 1021);
      }
    }
    if (step % 5 == 3) h_[1][3] = 0x7c00;  // infinite
    tensors_.upload();
  }
  std::string result() {
    tensors_.download();
    std::string all;
    for (const std::vector<float>& p : p_) all += bytes_of(p);
    uint64_t length = 0;
    OK(sotto_optim_state_export(optim_, SOTTO_STATE_EXACT, nullptr, 0, &length));
    std::string blob(length, '\0');
    OK(sotto_optim_state_export(optim_, SOTTO_STATE_EXACT, blob.data(), length, &length));
    return all + blob;
  }
  std::string parameters() {
    tensors_.download();
    std::string all;
    for (const std::vector<float>& p : p_) all += bytes_of(p);
    return all;
  }

 private:
  sotto_buffer half_buffer(size_t t) {
    sotto_buffer b = tensors_.add(h_[t]);
    b.dtype = SOTTO_FLOAT16;
    return b;
  }
  bool ready(StepGraph& graph) {
    const sotto_status status = sotto_optim_replay(optim_, graph.op());
    if (status == SOTTO_E_INVALID_STATE) return false;
    require(status == SOTTO_OK, "sotto_optim_replay: " + std::string(sotto_last_error()));
    return true;
  }

  const bool half_;
  const int rank_;
  Tensors tensors_;
  std::vector<sotto_param> params_;
  std::vector<std::vector<float>> p_, g_, elsewhere_;
  std::vector<std::vector<uint16_t>> h_;
  sotto_optim* optim_ = nullptr;
  std::vector<std::unique_ptr<StepGraph>> graphs_;
  int replayed_ = 0;
};

WorldOptions world(int32_t size) {
  WorldOptions options;
  options.transport = size == 1 ? "inproc" : "nccl";
  options.on_rank = [](int32_t rank) { CUDA_OK(cudaSetDevice(rank)); };
  return options;
}

class Graphs : public testing::TestWithParam<Kind> {};

TEST_P(Graphs, HaveTheBitsOfCalls) {
  for (const int32_t size : {1, 2}) {
    SCOPED_TRACE(size);
    fake_cuda::configure({.devices = 4, .max_delay_us = 30});
    EXPECT_EQ(run_world(size, world(size),
                        [&](Member& self) {
                          std::string results[2];
                          for (const Steps steps : {Steps::kCalled, Steps::kReplayed}) {
                            Training training(GetParam(), self, self.rank);
                            training.run(steps);
                            results[static_cast<size_t>(steps)] = training.result();
                            if (steps == Steps::kCalled) continue;
                            if (GetParam().graphs > 0 && size > 1)
                              require(training.graphs() == static_cast<size_t>(GetParam().graphs),
                                      std::to_string(training.graphs()) + " graphs");
                            require(training.replayed() >= kSteps / 2, std::to_string(training.replayed()) + " were replayed");
                          }
                          require(results[0] == results[1], "the bits differ");
                        }),
              "");
  }
}

// To the others a replay is the call that it stands for.
TEST_P(Graphs, GoTogetherWithCallsOfOtherRanks) {
  fake_cuda::configure({.devices = 4});
  std::string results[2];
  EXPECT_EQ(run_world(2, world(2),
                      [&](Member& self) {
                        Training called(GetParam(), self, self.rank);
                        called.run(Steps::kCalled);
                        Training mixed(GetParam(), self, self.rank);
                        for (int step = 0; step < kSteps; ++step) {
                          mixed.new_gradients(step);
                          step % 2 == self.rank ? mixed.next() : mixed.call();
                        }
                        require(called.result() == mixed.result(), "the bits differ");
                      }),
            "");
}

// Bytes that were moved are those that were planned, also of launches.
TEST(GraphSteps, AreCounted) {
  EXPECT_EQ(run_world(2, world(2),
                      [](Member& self) {
                        Training training(kKinds[0], self, self.rank);
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
                        const uint64_t moved =
                            after.payload_bytes_sent - before.payload_bytes_sent;
                        require(moved == kSteps * info.payload_bytes_next_step, "payload bytes");
                        require(after.payload_bytes_planned - before.payload_bytes_planned == moved,
                                "planned bytes");
                      }),
            "");
}

// Ranks launch steps of different optimizers, with messages of the same sizes.
TEST(GraphSteps, AreFoundToDiffer) {
  EXPECT_EQ(run_world(2, world(2),
                      [](Member& self) {
                        Training sgd(kKinds[0], self, self.rank), adam(kKinds[2], self, self.rank);
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

TEST(GraphSteps, WriteNothingIfNobodyAwaitsThem) {
  for (const bool twice : {false, true}) {
    EXPECT_EQ(run_world(1, world(1),
                        [&](Member& self) {
                          Training training(kKinds[1], self, 0);
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
    WorldOptions options = world(1);
    if (!abort) options.timeout_us = 200'000;
    EXPECT_EQ(run_world(1, options,
                        [&](Member& self) {
                          Training training(kKinds[1], self, 0);
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

TEST(GraphSteps, AnyExecutionMayFail) {
  uint64_t k = 0;
  for (bool failed = true; failed; ++k) {
    ASSERT_LT(k, 1000u);
    fake_cuda::configure({.devices = 4});
    EXPECT_EQ(run_world(1, world(1),
                        [&](Member& self) {
                          Training training(kKinds[1], self, 0);
                          training.new_gradients(0);
                          require(training.record(), "nothing was recorded");
                          OK(sotto_optim_replay(training.optim(), training.graph().op()));
                          fake_cuda::fail_execution(k);
                          training.graph().launch();
                          const sotto_status status = sotto_op_wait(training.graph().op(), -1);
                          failed = status != SOTTO_OK;
                          if (failed) require(status == SOTTO_E_DEVICE, "another error");
                          fake_cuda::clear_faults();
                        }),
              "")
        << k;
  }
  EXPECT_GT(k, 5u);
}

// While a step is recorded: it is refused with an error that names the call, or NCCL's that made it.
TEST(GraphSteps, AnyCallMayFailWhileRecording) {
  for (const int32_t size : {1, 2}) {
    uint64_t k = 0;
    for (bool failed = true; failed; ++k) {
      ASSERT_LT(k, 1000u);
      fake_cuda::configure({.devices = 4});
      std::barrier ranks(size);
      EXPECT_EQ(run_world(size, world(size),
                          [&](Member& self) {
                            Training training(kKinds[1], self, self.rank);
                            training.call();
                            ranks.arrive_and_wait();
                            StepGraph graph(training.tensors().stream());
                            sotto_status status = SOTTO_OK;
                            std::string text;
                            if (self.rank == 0) {
                              status = graph.record(training.optim(), k);
                              text = sotto_last_error();
                            }
                            ranks.arrive_and_wait();
                            if (self.rank > 0) return;
                            failed = !graph.failed_call().empty();
                            if (status == SOTTO_OK) return;
                            require(failed, "an error without a cause: " + text);
                            require(status == SOTTO_E_DEVICE || status == SOTTO_E_TRANSPORT,
                                    "another error: " + text);
                            require(text.find(graph.failed_call()) != std::string::npos ||
                                        text.find("nccl") != std::string::npos,
                                    "which call? " + graph.failed_call() + ": " + text);
                          }),
                "")
          << "call " << k << ", ranks " << size;
    }
    EXPECT_GT(k, 20u);
  }
}

TEST(GraphSteps, RefuseWhatCannotBeRecorded) {
  EXPECT_EQ(
      run_world(
          1, world(1),
          [](Member& self) {
            Training one(kKinds[7], self, 0), other(kKinds[0], self, 0);
            const sotto_call call = one.tensors().call();
            sotto_call tells = call;
            tells.on_done = [](void*, sotto_status) {};
            sotto_op *op = nullptr, *called = nullptr;
            OK(sotto_optim_step(other.optim(), &call, &called));
            OK(sotto_op_wait(called, -1));
            FAILS(sotto_optim_replay(other.optim(), called), SOTTO_E_INVALID_STATE,
                  "no recorded one");
            require(other.record(), "nothing was recorded");
            FAILS(sotto_optim_replay(one.optim(), other.graph().op()), SOTTO_E_INVALID_ARGUMENT,
                  "no step of this optimizer");
            FAILS(sotto_op_stream_wait(other.graph().op(), call.stream), SOTTO_E_INVALID_STATE,
                  "part of a CUDA graph");
            // Gradients that have moved.
            other.move_gradients();
            FAILS(sotto_optim_replay(other.optim(), other.graph().op()), SOTTO_E_INVALID_STATE,
                  "other memory");
            other.call();
            const auto stream = static_cast<cudaStream_t>(call.stream);
            CUDA_OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
            FAILS(sotto_optim_step(one.optim(), &call, nullptr), SOTTO_E_INVALID_ARGUMENT,
                  "out_op");
            FAILS(sotto_optim_step(one.optim(), &tells, &op), SOTTO_E_INVALID_ARGUMENT, "callback");
            FAILS(sotto_optim_accumulate(one.optim(), &call, &op), SOTTO_E_INVALID_STATE,
                  "optimizer steps alone");
            cudaGraph_t graph = nullptr;
            CUDA_OK(cudaStreamEndCapture(stream, &graph));
            CUDA_OK(cudaGraphDestroy(graph));
            // The switch comes once; a recording of the stage before does not fit any more.
            require(one.record(), "nothing was recorded");
            for (int step = 0; step < 2; ++step) one.call();
            FAILS(sotto_optim_replay(one.optim(), one.graph().op()), SOTTO_E_INVALID_STATE,
                  "another kind");
            require(!one.record(), "the first compressed step was recorded");
            one.call();
            OK(sotto_op_release(called));
          }),
      "");
}

INSTANTIATE_TEST_SUITE_P(Kinds, Graphs, testing::ValuesIn(kKinds),
                         [](const auto& of) { return std::string(of.param.name); });

}  // namespace
}  // namespace sotto::test
