// Groups that are given up while NCCL executes an operation of theirs. Kernels that write are
// queued behind NCCL's by then, and execute when NCCL's abort lets the stream go on, without the
// data. What was to be written then stays as it was, and the operation fails; or else all of it had
// arrived. So it is with operations in graphs.
#include <algorithm>
#include <atomic>
#include <barrier>
#include <cmath>
#include <csignal>
#include <cstdlib>
#include <thread>

#include "tests/cuda/device_memory.h"
#include "tests/cuda/step_graph.h"
#include "tests/nccl/process_rank.h"
#include "tests/support/temp_dir.h"

namespace sotto::test {
namespace {

constexpr int kBefore = 4;  // rounds before the one that is given up: its stage has had one
// Kernels are cut, and messages are several.
constexpr size_t kCounts[] = {150'000, 17};

struct Kind {
  const char* name;
  const char* codec;             // of a compressed mean
  const char* optimizer;         // or of a training
  const char* native = "exact";  // SOTTO_NCCL_NATIVE
};
constexpr size_t kCodecs = 2;  // the first of these
constexpr Kind kKinds[] = {
    {"OneBit", R"({"type": "onebit"})", nullptr},
    {"Int8", R"({"type": "int8"})", nullptr},
    {"Sgd", nullptr, R"({"optimizer": {"type": "SGD", "params": {"lr": 0.01, "momentum": 0.9}}})"},
    {"AdamW", nullptr,
     R"({"optimizer": {"type": "AdamW", "params": {"lr": 0.01}}, "gradient_clipping": 1.0})"},
    {"Lamb", nullptr, R"({"optimizer": {"type": "Lamb", "params": {"lr": 0.01}}})"},
    {"OneBitAdam", nullptr,
     R"({"optimizer": {"type": "OneBitAdam", "params": {"lr": 0.01, "freeze_step": 2}}})"},
    {"OneBitLamb", nullptr,
     R"({"optimizer": {"type": "OneBitLamb", "params": {"lr": 0.01, "freeze_step": 2}}})"},
    {"ZeroOneAdam", nullptr,
     R"({"optimizer": {"type": "ZeroOneAdam", "params": {"lr": 0.01, "var_freeze_step": 2}}})"},
    {"SgdNative", nullptr,
     R"({"optimizer": {"type": "SGD", "params": {"lr": 0.01, "momentum": 0.9}}})", "all"},
    {"AdamWNative", nullptr,
     R"({"optimizer": {"type": "AdamW", "params": {"lr": 0.01}}, "gradient_clipping": 1.0})",
     "all"},
};
void PrintTo(const Kind& kind, std::ostream* out) { *out << kind.name; }

// What operations write, and what they keep.
struct Bytes {
  std::string written, kept;
  bool operator==(const Bytes&) const = default;
};

// A residual that is taken back is what it was but for the rounding of one subtraction. Counters,
// as floats, are subnormal.
bool is_what_it_was(const Bytes& now, const Bytes& was) {
  constexpr float kRounding = 1e-5f;  // of numbers of 40 at most
  if (now.written != was.written || now.kept.size() != was.kept.size()) return false;
  for (size_t at = 0; at + 4 <= was.kept.size(); at += 4) {
    float a = 0, b = 0;
    std::memcpy(&a, &now.kept[at], 4);
    std::memcpy(&b, &was.kept[at], 4);
    if (std::memcmp(&a, &b, 4) == 0) continue;
    const bool counts = std::fpclassify(a) == FP_SUBNORMAL || std::fpclassify(b) == FP_SUBNORMAL;
    if (counts || !(std::abs(a - b) <= kRounding)) return false;
  }
  return true;
}

// A rank's tensors, and what it does with them in each round.
class Work {
 public:
  Work(const Kind& kind, int rank, int device, sotto_comm* comm)
      : rank_(rank), comm_(comm), tensors_(Where::kCuda, device) {
    sotto_param params[2] = {};
    for (size_t t = 0; t < 2; ++t) {
      for (size_t i = 0; i < kCounts[t]; ++i) {
        p_[t].push_back(0.01f * static_cast<float>(i % 97) - 0.3f);
        g_[t].push_back(0);
      }
      params[t].struct_size = sizeof(sotto_param);
      params[t].param = means_[t] = tensors_.add(p_[t]);
      params[t].grad = given_[t] = tensors_.add(g_[t]);
    }
    if (kind.codec != nullptr) {
      OK(sotto_codec_create(comm_, kind.codec, means_, 2, &codec_));
    } else {
      OK(sotto_optim_create(comm_, kind.optimizer, params, 2, &optim_));
    }
  }
  ~Work() {
    tensors_.sync();
    graph_.reset();
    (void)sotto_codec_destroy(codec_);
    (void)sotto_optim_destroy(optim_);
  }
  // A round that is to succeed.
  void run(int round) {
    sotto_op* const op = start(round);
    OK(sotto_op_wait(op, -1));
    release(op);
  }
  // From now on rounds are launches of a graph.
  void record() {
    graph_ = std::make_unique<StepGraph>(tensors_.stream());
    OK(graph_->record(optim_));
  }
  void release(sotto_op* op) {
    if (graph_ == nullptr) OK(sotto_op_release(op));
  }
  sotto_op* start(int round) {
    tensors_.download();
    for (size_t t = 0; t < 2; ++t) {
      for (size_t i = 0; i < kCounts[t]; ++i)
        g_[t][i] =
            static_cast<float>((i * 7 + static_cast<size_t>(rank_ * 5 + round)) % 41) - 20.0f;
    }
    tensors_.upload();
    if (graph_ != nullptr) {
      OK(sotto_optim_replay(optim_, graph_->op()));
      graph_->launch();
      return graph_->op();
    }
    sotto_call call = tensors_.call();
    call.codec = codec_;
    sotto_op* op = nullptr;
    if (codec_ != nullptr) {
      OK(sotto_all_reduce(comm_, given_, means_, 2, &call, &op));
    } else {
      OK(sotto_optim_step(optim_, &call, &op));
    }
    return op;
  }
  Bytes bytes() {
    tensors_.download();
    const auto exported = [&](void* to, uint64_t room, uint64_t* length) {
      OK(codec_ != nullptr ? sotto_codec_state_export(codec_, SOTTO_STATE_EXACT, to, room, length)
                           : sotto_optim_state_export(optim_, SOTTO_STATE_EXACT, to, room, length));
    };
    uint64_t length = 0;
    exported(nullptr, 0, &length);
    std::string blob(length, '\0');
    exported(blob.data(), length, &length);
    blob.resize(length - 8);  // without its checksum
    return {bytes_of(p_[0]) + bytes_of(p_[1]), blob};
  }

 private:
  const int rank_;
  sotto_comm* const comm_;
  Tensors tensors_;
  std::vector<float> p_[2], g_[2];
  sotto_buffer given_[2] = {}, means_[2] = {};
  sotto_codec* codec_ = nullptr;
  sotto_optim* optim_ = nullptr;
  std::unique_ptr<StepGraph> graph_;
};

struct Outcome {
  sotto_status status = SOTTO_OK;
  Bytes before, after;
};
using Outcomes = std::vector<Outcome>;

// Until nothing is queued any more: the engine has done what it can without NCCL.
void await_quiet() {
  const auto queued = [] {
    return fake_cuda::calls("cudaLaunchKernelExC") + fake_cuda::calls("cudaMemcpyAsync");
  };
  uint64_t last = queued();
  for (int same = 0; same < 30; ++same) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    if (queued() != last) same = 0;
    last = queued();
  }
}

// The k-th of NCCL's jobs in the last round, of all ranks, hangs until the group is given up.
// Whether there was one.
bool give_up(const Kind& kind, int size, bool in_graph, uint64_t k, Outcomes* outcomes) {
  outcomes->assign(static_cast<size_t>(size), {});
  fake_cuda::configure({.devices = size + 1});
  WorldOptions options;
  options.transport = "nccl";
  options.on_rank = [](int32_t rank) { CUDA_OK(cudaSetDevice(rank + 1)); };
  bool hung = false;
  std::barrier ranks(size);
  std::atomic<int> started{0};
  setenv("SOTTO_NCCL_NATIVE", kind.native, 1);
  const std::string failure = run_world(size, options, [&](Member& self) {
    Outcome& mine = (*outcomes)[static_cast<size_t>(self.rank)];
    Work work(kind, self.rank, self.rank + 1, self.comm);
    for (int round = 0; round < kBefore; ++round) work.run(round);
    mine.before = work.bytes();
    if (in_graph) work.record();
    ranks.arrive_and_wait();
    if (self.rank == 0) fake_nccl_hang(k);
    ranks.arrive_and_wait();
    sotto_op* const op = work.start(kBefore);
    ++started;
    if (self.rank == 0) {
      const auto runs = [&] {
        return fake_nccl_hanging() == 0 && sotto_op_test(op) == SOTTO_IN_PROGRESS;
      };
      while (started < size || runs()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      await_quiet();
      hung = fake_nccl_hanging() > 0;
      fake_nccl_hang(UINT64_MAX / 2);
      if (hung) OK(sotto_comm_abort(self.comm, "enough"));
    }
    mine.status = sotto_op_wait(op, -1);
    work.release(op);
    mine.after = work.bytes();
  });
  unsetenv("SOTTO_NCCL_NATIVE");
  EXPECT_EQ(failure, "") << "job " << k;
  return hung && failure.empty();
}

class NcclGivenUp : public testing::TestWithParam<Kind> {
 protected:
  // Every job, or every `stride`-th.
  static void in_jobs(int size, bool in_graph, uint64_t stride = 1);
};

void NcclGivenUp::in_jobs(int size, bool in_graph, uint64_t stride) {
  Outcomes whole;
  ASSERT_FALSE(give_up(GetParam(), size, in_graph, UINT64_MAX / 2, &whole));
  std::vector<int> failed(whole.size());
  uint64_t k = 0;
  for (Outcomes given; give_up(GetParam(), size, in_graph, k, &given); k += stride) {
    ASSERT_LT(k, 1000u);
    for (size_t r = 0; r < whole.size(); ++r) {
      SCOPED_TRACE(testing::Message() << "job " << k << ", rank " << r);
      ASSERT_NE(whole[r].before.written, whole[r].after.written);
      ASSERT_TRUE(given[r].before == whole[r].before);
      if (given[r].status == SOTTO_OK) {
        EXPECT_TRUE(given[r].after == whole[r].after);
      } else {
        EXPECT_EQ(given[r].status, SOTTO_E_ABORTED);
        EXPECT_TRUE(is_what_it_was(given[r].after, given[r].before));
        ++failed[r];
      }
    }
  }
  EXPECT_GT(k, 1u);
  for (const int times : failed) EXPECT_GT(times, 0);
}

TEST_P(NcclGivenUp, WhatWasToBeWrittenStaysOrIsWhole) { in_jobs(2, false); }

// All of them with SOTTO_TEST_COMMIT_CASES.
TEST_P(NcclGivenUp, WithMoreRanks) {
  const uint64_t stride = std::getenv("SOTTO_TEST_COMMIT_CASES") != nullptr ? 1 : 5;
  for (const int size : {3, 4}) {
    SCOPED_TRACE(size);
    in_jobs(size, false, stride);
  }
}

class NcclGivenUpGraphs : public NcclGivenUp {};

TEST_P(NcclGivenUpGraphs, WhatWasToBeWrittenStaysOrIsWhole) { in_jobs(2, true); }

const Kind& named(const std::string& name) {
  return *std::find_if(std::begin(kKinds), std::end(kKinds),
                       [&](const Kind& kind) { return kind.name == name; });
}

SOTTO_RANK_MAIN(nccl_killed_in_a_round) {
  Rank r(self);
  ok(r.created, "sotto_comm_create");
  {
    Work work(named(std::getenv("TEST_KIND")), self.rank, 0, r.comm);
    for (int round = 0; round < kBefore; ++round) work.run(round);
    const Bytes before = work.bytes();
    self.at("has run");
    if (self.rank == 1) fake_nccl_hang(std::strtoull(std::getenv("TEST_JOB"), nullptr, 10));
    sotto_op* const op = work.start(kBefore);
    if (self.rank == 1) {
      while (fake_nccl_hanging() == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      self.at("hangs");
      (void)sotto_op_wait(op, -1);
      return 1;
    }
    self.at("has started");
    FAILS(sotto_op_wait(op, -1), SOTTO_E_PEER_LOST, "rank 1");
    OK(sotto_op_release(op));
    require(is_what_it_was(work.bytes(), before), "something has been written");
  }
  (void)sotto_comm_destroy(r.comm);  // says again why it has failed
  OK(sotto_context_destroy(r.context));
  require_nothing_left();
  return 0;
}

TEST_P(NcclGivenUp, ByTheDeathOfARank) {
  for (const auto& [size, job] : {std::pair{2, "0"}, {2, "1"}, {4, "1"}}) {
    SCOPED_TRACE(testing::Message() << "job " << job << ", " << size << " ranks");
    const TempDir directory;
    Processes ranks("nccl_killed_in_a_round", size,
                    {.argument = directory.path(),
                     .environment = {"SOTTO_TRANSPORT=nccl", std::string("TEST_JOB=") + job,
                                     std::string("TEST_KIND=") + GetParam().name,
                                     std::string("SOTTO_NCCL_NATIVE=") + GetParam().native}});
    for (int r = 0; r < size; ++r) {
      if (r == 1) continue;
      ranks.await(r, "has run");  // or else the round before, whose end it may not know yet, fails
      ranks.await(r, "has started");
    }
    ranks.await(1, "hangs");
    ranks.kill(1, SIGKILL);
    ranks.wait_all();
    EXPECT_EQ(ranks.failure(), "") << ranks.prefixed_output();
  }
}

std::string name_of(const testing::TestParamInfo<Kind>& of) { return of.param.name; }

INSTANTIATE_TEST_SUITE_P(Kinds, NcclGivenUp, testing::ValuesIn(kKinds), name_of);
INSTANTIATE_TEST_SUITE_P(Kinds, NcclGivenUpGraphs,
                         testing::ValuesIn(kKinds + kCodecs, std::end(kKinds)), name_of);

}  // namespace
}  // namespace sotto::test
