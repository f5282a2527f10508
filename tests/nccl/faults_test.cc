// Faults in training steps over NCCL, between processes: each call of NCCL and each call of CUDA
// fails once on rank 0. The step ends with an error that names the call, nothing is left, and the
// next training has the bits that it has without faults.
#include <nccl.h>

#include <filesystem>
#include <set>

#include "tests/cuda/device_memory.h"
#include "tests/nccl/process_rank.h"
#include "tests/support/temp_dir.h"

namespace sotto::test {
namespace {

constexpr int kSteps = 4;
constexpr size_t kCounts[] = {3000, 17};

struct Training {
  const char* name;
  const char* json;
};
// The 1-bit types compress from the third step on.
constexpr Training kTrainings[] = {
    {"Adam", R"({"optimizer": {"type": "Adam", "params": {"lr": 0.01}}})"},
    {"OneBitAdam",
     R"({"optimizer": {"type": "OneBitAdam", "params": {"lr": 0.01, "freeze_step": 2}}})"},
    {"OneBitLamb",
     R"({"optimizer": {"type": "OneBitLamb", "params": {"lr": 0.01, "freeze_step": 2}}})"},
};

// A kind of fault: from which step on it is due, how it is set and taken back.
struct Fault {
  const char* name;
  int step;
  void (*set)(uint64_t k);
  std::string (*met)();
  void (*clear)();
};
constexpr Fault kFaults[] = {
    {"nccl", 0, [](uint64_t k) { fake_nccl_fail_call(k, ncclSystemError); },
     [] { return std::string(fake_nccl_failed_call()); },
     [] { fake_nccl_fail_call(UINT64_MAX, ncclSuccess); }},
    {"cuda", kSteps - 1, [](uint64_t k) { fake_cuda::fail_call(k); }, fake_cuda::failed_call,
     fake_cuda::clear_faults},
};

template <class T, size_t N>
const T& named(const T (&all)[N], const char* variable) {
  const char* const name = std::getenv(variable);
  for (const T& one : all) {
    if (name != nullptr && std::string(one.name) == name) return one;
  }
  throw RankError(std::string(variable) + " names nothing");
}

struct Outcome {
  std::string error;  // of the step that has failed
  std::string met;    // what was made to fail; empty: nothing
  std::string bits;   // of the parameters, if no step has failed
};

// With the k-th thing failing on rank 0, if there is a fault.
Outcome train(const ProcessRank& place, const Training& training, const Fault* fault, uint64_t k) {
  Outcome outcome;
  Rank r(place, 60'000'000);
  ok(r.created, "sotto_comm_create");
  {
    Tensors tensors(Where::kCuda);
    std::vector<float> p[2], g[2];
    sotto_param params[2] = {};
    for (size_t t = 0; t < 2; ++t) {
      for (size_t i = 0; i < kCounts[t]; ++i) {
        p[t].push_back(0.01f * static_cast<float>(i % 97) - 0.3f);
        g[t].push_back(static_cast<float>((i * 7 + static_cast<size_t>(place.rank) * 5) % 41) -
                       20.0f);
      }
      params[t].struct_size = sizeof(sotto_param);
      params[t].param = tensors.add(p[t]);
      params[t].grad = tensors.add(g[t]);
    }
    tensors.sync();
    sotto_optim* optim = nullptr;
    OK(sotto_optim_create(r.comm, training.json, params, 2, &optim));
    sotto_status status = SOTTO_OK;
    for (int step = 0; step < kSteps && status == SOTTO_OK; ++step) {
      status = sotto_barrier(r.comm, nullptr, nullptr);
      if (status != SOTTO_OK) break;
      if (fault != nullptr && place.rank == 0 && step == fault->step) fault->set(k);
      const sotto_call call = tensors.call();
      status = sotto_optim_step(optim, &call, nullptr);
    }
    if (status != SOTTO_OK) outcome.error = sotto_last_error();
    if (fault != nullptr && place.rank == 0) {
      outcome.met = fault->met();
      fault->clear();
      // A call that was refused has failed nobody else.
      if (status != SOTTO_OK) OK(sotto_comm_abort(r.comm, "the step has failed"));
    }
    OK(sotto_optim_destroy(optim));
    if (status == SOTTO_OK) {
      tensors.download();
      outcome.bits = bytes_of(p[0]) + bytes_of(p[1]);
    }
  }
  (void)sotto_comm_destroy(r.comm);
  OK(sotto_context_destroy(r.context));
  require_nothing_left();
  return outcome;
}

ProcessRank at_place(const ProcessRank& self, const std::string& name) {
  const std::string folder = self.argument + "/" + name;
  std::filesystem::create_directories(folder);
  return {self.rank, self.size, folder, {}};
}

// Calls of NCCL itself, the last one not of its alone: it does not say which has failed.
bool is_nccls(const std::string& call) {
  return call == "cudaLaunchHostFunc" || call == "cudaStreamGetDevice" ||
         call == "cudaStreamIsCapturing";
}

void check_error(const Fault& fault, const Outcome& outcome, uint64_t k) {
  const auto says = [&](const std::string& text) {
    return outcome.error.find(text) != std::string::npos;
  };
  require(says(outcome.met) || (is_nccls(outcome.met) && says("unhandled cuda error")),
          fmt::format("{} {}: the error does not name {}: {}", fault.name, k, outcome.met,
                      outcome.error));
}

SOTTO_RANK_MAIN(nccl_faulty_training) {
  const Training& training = named(kTrainings, "TEST_TRAINING");
  const Fault& fault = named(kFaults, "TEST_FAULT");
  const Outcome before = train(at_place(self, "before"), training, nullptr, 0);
  const std::string& want = before.bits;
  require(!want.empty(), "a training without faults: " + before.error);
  std::set<std::string> names;
  uint64_t reported = 0;
  for (uint64_t k = 0;; ++k) {
    require(k < 2000, "there is no end of things that can fail");
    const ProcessRank place = at_place(self, std::to_string(k));
    const Outcome outcome = train(place, training, &fault, k);
    char more = 1;
    if (self.rank == 0) {
      more = outcome.met.empty() ? 0 : 1;
      publish(place.argument + "/more", &more, 1);
    } else {
      require(await_published(place.argument + "/more", &more, 1, 60'000), "word of rank 0");
    }
    if (more == 0) {  // a whole training, and nothing was left that could fail
      require(outcome.bits == want, "the bits of a training without faults: " + outcome.error);
      break;
    }
    if (self.rank != 0) continue;  // its part may have been done already
    names.insert(outcome.met);
    check_error(fault, outcome, k);
    ++reported;
  }
  if (self.rank != 0) return 0;
  std::string all;
  for (const std::string& name : names) all += name + " ";
  self.say(fmt::format("{} {}", reported, all));
  return 0;
}

// How many faults were reported, and the names of what has failed.
std::string faults(const char* training, const char* fault) {
  const TempDir directory;
  Processes ranks("nccl_faulty_training", 2,
                  {.argument = directory.path(),
                   .environment = {"SOTTO_TRANSPORT=nccl", std::string("TEST_FAULT=") + fault,
                                   std::string("TEST_TRAINING=") + training},
                   .timeout_ms = 300'000});
  ranks.wait_all();
  EXPECT_EQ(ranks.failure(), "") << ranks.prefixed_output();
  return ranks.failure().empty() ? ranks.message(0) : "";
}

class NcclFaults : public testing::TestWithParam<Training> {
 protected:
  static void expect(const char* fault, int at_least, const std::vector<std::string>& names) {
    const std::string found = faults(GetParam().name, fault);
    EXPECT_GE(std::atoi(found.c_str()), at_least) << found;
    for (const std::string& name : names) {
      EXPECT_NE(found.find(name + " "), std::string::npos) << name << " is not among " << found;
    }
  }
};

TEST_P(NcclFaults, AnyCallOfNcclMayFail) {
  expect("nccl", 40, {"ncclGroupStart", "ncclSend", "ncclRecv", "ncclGroupEnd"});
}

TEST_P(NcclFaults, AnyCallOfCudaMayFail) {
  expect("cuda", 20,
         {"cudaLaunchKernelExC", "cudaEventRecord", "cudaStreamWaitEvent",
          "cudaPointerGetAttributes"});
}

INSTANTIATE_TEST_SUITE_P(Trainings, NcclFaults, testing::ValuesIn(kTrainings),
                         [](const auto& of) { return std::string(of.param.name); });

}  // namespace
}  // namespace sotto::test
