// On the fake CUDA runtime: every wait between streams is needed, any call may fail, steps neither
// allocate nor hold up the host, and without a driver the library says so.
//
// Rank 0 has its tensors on a CUDA device, the others have theirs on the host, so that calls of the
// runtime are those of one rank.
#include <array>
#include <chrono>
#include <cmath>
#include <map>
#include <set>
#include <thread>

#include "tests/cuda/device_memory.h"
#include "tests/cuda/on_fake_cuda.h"
#include "tests/emulation/cuda/fake_cuda.h"
#include "tests/support/sanitized.h"

namespace sotto::test {
namespace {

// ThreadSanitizer prepares a report for each element of a race, which takes milliseconds.
constexpr uint64_t kCounts[] = {kThreadSanitizer ? 40 : 1000, 17, kThreadSanitizer ? 100 : 9000};

// A training has three stages, in each of which 1-bit LAMB has another plan: warm-up, its last
// step, and after it. Steps fail in each for a NaN of either rank.
constexpr int kMaxSteps = 11;
constexpr int kStage[kMaxSteps] = {0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 2};
constexpr int kNanOfRank[kMaxSteps] = {-1, 0, 1, -1, 0, 1, -1, -1, 0, 1, -1};

struct Model {
  Tensors tensors;
  std::vector<float> p[3], g[3];
  std::vector<float> gradients[kMaxSteps][3];  // what g is before a step
  std::vector<float> seen[kMaxSteps][3];       // what the caller's stream finds in p behind it
  std::string errors;
  std::vector<sotto_param> params = std::vector<sotto_param>(3);

  const bool nan_steps;  // with those of kNanOfRank

  Model(const Member& self, int steps, bool with_nan)
      : tensors(self.rank == 0 ? Where::kCuda : Where::kHost), nan_steps(with_nan) {
    for (size_t t = 0; t < 3; ++t) {
      for (uint64_t i = 0; i < kCounts[t]; ++i)
        p[t].push_back(0.01f * static_cast<float>(i % 97) - 0.3f);
      g[t].resize(kCounts[t]);
      params[t].struct_size = sizeof(sotto_param);
      params[t].param = tensors.add(p[t]);
      params[t].grad = tensors.add(g[t]);
      for (int step = 0; step < steps; ++step) {
        for (uint64_t i = 0; i < kCounts[t]; ++i)
          gradients[step][t].push_back(gradient(i, self.rank, step));
        seen[step][t].resize(kCounts[t]);
        tensors.add(gradients[step][t]);
        tensors.add(seen[step][t]);
      }
    }
    tensors.sync();
  }
  float gradient(uint64_t i, int rank, int step) const {
    // In the part of the elements that this rank looks at.
    if (fails(step) && i == (rank == 0 ? 5 : kCounts[2] - 5) && rank == kNanOfRank[step])
      return NAN;
    const uint64_t x =
        i * 7 + static_cast<uint64_t>(rank) * 5 + static_cast<uint64_t>(step) * (i % 5 + 3);
    return static_cast<float>(x % 41) - 20.0f;
  }
  bool fails(int step) const { return nan_steps && kNanOfRank[step] >= 0; }
  // What the caller queues before a step, on its stream.
  void queue_gradients(int step) {
    for (size_t t = 0; t < 3; ++t) tensors.copy(g[t], gradients[step][t]);
  }
  // What it queues behind one.
  void queue_look(int step) {
    for (size_t t = 0; t < 3; ++t) tensors.copy(seen[step][t], p[t]);
  }
};

constexpr const char* kConfigs[] = {
    R"({"optimizer": {"type": "AdamW", "params": {"lr": 0.01}}, "gradient_clipping": 1.0})",
    R"({"optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "sotto": {"gradient_codec": {"type": "onebit", "granularity": "bucket",
                                     "bucket_elements": 8192}}})",
    R"({"optimizer": {"type": "OneBitLamb", "params": {"lr": 0.01, "freeze_step": 3}}})",
};

// Steps of a training; what rank 0 has seen of its parameters behind each, and both ranks' at the
// end.
std::string train(const char* json, int steps,
                  const std::function<void(Member&, sotto_optim*, Model&, int step)>& do_step,
                  bool nan_steps = false) {
  std::string results[2];
  WorldOptions options;
  options.timeout_us = kSanitized ? 30'000'000 : 5'000'000;
  const std::string failure = run_world(2, options, [&](Member& self) {
    Model model(self, steps, nan_steps);
    std::string& result = results[self.rank];
    sotto_optim* optim = nullptr;
    OK(sotto_optim_create(self.comm, json, model.params.data(), 3, &optim));
    try {
      for (int step = 0; step < steps; ++step) do_step(self, optim, model, step);
    } catch (const std::exception& failed) {  // a fault that shows: give everything back
      result = failed.what();
      (void)sotto_comm_abort(self.comm, "a step has failed");
    }
    OK(sotto_optim_destroy(optim));
    model.tensors.download();
    if (!result.empty()) return;
    for (int step = 0; step < steps && self.rank == 0; ++step) {
      for (const auto& seen : model.seen[step]) result += bytes_of(seen);
    }
    for (const auto& p : model.p) result += bytes_of(p);
    result += model.errors;
  });
  return failure.empty() ? results[0] + results[1] : failure;
}

struct OpHandle {
  OpHandle() = default;
  OpHandle(const OpHandle&) = delete;
  OpHandle& operator=(const OpHandle&) = delete;
  ~OpHandle() { sotto_op_release(op); }
  sotto_op* op = nullptr;
};

void step_on_stream(Member& self, sotto_optim* optim, Model& model, int step) {
  model.queue_gradients(step);
  const sotto_call call = model.tensors.call();
  OpHandle handle;
  OK(sotto_optim_step(optim, &call, &handle.op));
  if (self.rank == 0) OK(sotto_op_stream_wait(handle.op, model.tensors.stream()));
  if (self.rank == 0) model.queue_look(step);
  const sotto_status status = sotto_op_wait(handle.op, -1);
  if (status != SOTTO_OK) model.errors += sotto_last_error();
  require(status == (model.fails(step) ? SOTTO_E_NONFINITE : SOTTO_OK),
          "step " + std::to_string(step) + ": " + sotto_status_name(status));
}

class CudaFaults : public OnFakeCuda<testing::TestWithParam<int>> {
 protected:
  static const char* json() { return kConfigs[GetParam()]; }
};

constexpr uint64_t result_bytes(int steps) {
  return 4 * (kCounts[0] + kCounts[1] + kCounts[2]) * (static_cast<uint64_t>(steps) + 2);
}

// A wait between streams as the plan has it: the same in every step of one stage.
struct WaitSite {
  int stage;
  uint32_t stream, awaited;
  uint64_t record;  // of those of the step
  auto operator<=>(const WaitSite&) const = default;
};
using WaitSites = std::map<WaitSite, std::set<int>>;  // in which steps it was seen

std::string text_of(const WaitSite& site) {
  return fmt::format("stage {}, stream {} for record {} of stream {}", site.stage, site.stream,
                     site.record, site.awaited);
}

// Adds the waits of a training. Which are made depends on how far the streams are.
void add_waits(const char* json, uint64_t seed, WaitSites* sites) {
  fake_cuda::Options options;
  options.max_delay_us = 500;
  options.seed = seed;
  fake_cuda::clear_faults();
  fake_cuda::configure(options);
  constexpr uint32_t kStreams = 8;
  std::vector<size_t> first;                           // wait of each step
  std::vector<std::array<uint64_t, kStreams>> before;  // records of each stream
  train(
      json, kMaxSteps,
      [&](Member& self, sotto_optim* optim, Model& model, int step) {
        if (self.rank == 0) {
          first.push_back(fake_cuda::waits());
          before.emplace_back();
          for (uint32_t s = 0; s < kStreams; ++s) before.back()[s] = fake_cuda::records(s);
        }
        step_on_stream(self, optim, model, step);
      },
      true);
  const std::vector<fake_cuda::Wait> made = fake_cuda::waits_made();
  first.push_back(made.size());
  for (size_t step = 0; step + 1 < first.size(); ++step) {
    for (size_t k = first[step]; k < first[step + 1]; ++k) {
      const fake_cuda::Wait& w = made[k];
      (*sites)[{kStage[step], w.stream, w.awaited, w.record - before[step].at(w.awaited)}].insert(
          static_cast<int>(step));
    }
  }
}

// All steps of the stage. It may have been seen only in some that change nothing.
std::vector<int> steps_to_try(const WaitSite& site, const std::set<int>& seen) {
  std::vector<int> steps(seen.begin(), seen.end());
  for (int step = 0; step < kMaxSteps; ++step) {
    if (kStage[step] == site.stage && !seen.contains(step)) steps.push_back(step);
  }
  return steps;
}

// A wait that can be left out is none that should be there: what is waited for is made late, so
// that what comes too early shows.
TEST_P(CudaFaults, EveryWaitOfAStreamIsNeeded) {
  if (kThreadSanitizer) GTEST_SKIP() << "RacesOfDroppedWaits leaves the same waits out";
  const std::string want = train(json(), kMaxSteps, step_on_stream, true);
  ASSERT_GT(want.size(), result_bytes(kMaxSteps)) << want;
  WaitSites sites;
  for (uint64_t seed = 1; seed <= 3; ++seed) add_waits(json(), seed, &sites);
  ASSERT_FALSE(sites.empty());
  for (const auto& known : sites) {
    const auto& [site, seen] = known;
    // Needed, but not to be seen here: the decision over the servers' messages waits for that of
    // rank 1, which says something only if the sums of a server overflow, and no finite gradients
    // do that.
    if (GetParam() == 1 && site.stream == 2 && site.awaited == 3 && site.record == 7) continue;
    const std::vector<int> steps = steps_to_try(site, seen);
    bool shows = false;
    uint64_t dropped = 0;
    const auto left_out = [&, &site = known.first](int late_step, int64_t late_us) {
      fake_cuda::clear_faults();
      fake_cuda::configure({});
      const auto do_step = [&](Member& self, sotto_optim* optim, Model& model, int step) {
        if (self.rank == 0 && step == late_step) {
          const uint64_t first = fake_cuda::records(site.awaited);
          fake_cuda::drop_wait({site.stream, site.awaited, first + site.record});
        }
        if (self.rank == 0) fake_cuda::make_late(site.awaited, step == late_step ? late_us : 0);
        step_on_stream(self, optim, model, step);
      };
      return train(json(), kMaxSteps, do_step, true);
    };
    // Later ones are for a machine with other work.
    for (const int64_t late_us : {5'000, 50'000, 300'000, 1'500'000}) {
      for (const int late_step : steps) {
        if (shows) break;
        shows = left_out(late_step, late_us) != want;
        dropped += fake_cuda::waits_dropped();
      }
    }
    EXPECT_TRUE(shows) << text_of(site) << ": left out " << dropped << " times; seen in "
                       << seen.size() << " of " << steps.size() << " steps";
  }
}

// Which calls fail, and how often a step asks at least.
struct CallFault {
  void (*set)(uint64_t k);
  uint64_t at_most;
};
// How often a step looks whether the device is done depends on time: some of the looks.
constexpr CallFault kCalls{[](uint64_t k) { fake_cuda::fail_call(k); }, 5000};
constexpr CallFault kLooks{[](uint64_t k) { fake_cuda::fail_query(k); }, 40};

// The k-th of them fails in a step: the step ends with an error that names the call, nothing is
// left behind, and the next group works.
void expect_errors(const char* json, const CallFault& fault) {
  constexpr int kSteps = 3;
  const std::string want = train(json, kSteps, step_on_stream);
  for (uint64_t k = 0; k < fault.at_most; ++k) {
    SCOPED_TRACE("call " + std::to_string(k));
    std::string text[2], call_that_failed;
    const Warnings log;
    const std::string broken = run_world(2, {}, [&](Member& self) {
      Model model(self, kSteps, false);
      sotto_optim* optim = nullptr;
      OK(sotto_optim_create(self.comm, json, model.params.data(), 3, &optim));
      sotto_status status = SOTTO_OK;
      for (int step = 0; step < kSteps && status == SOTTO_OK; ++step) {
        model.queue_gradients(step);
        model.tensors.sync();
        OK(sotto_barrier(self.comm, nullptr, nullptr));
        if (self.rank == 0 && step == kSteps - 1) fault.set(k);
        const sotto_call call = model.tensors.call();
        status = sotto_optim_step(optim, &call, nullptr);
      }
      if (status != SOTTO_OK) text[self.rank] = sotto_last_error();
      if (self.rank == 0) {
        call_that_failed = fake_cuda::failed_call();
        fake_cuda::clear_faults();
        // A call that was refused has failed no other.
        if (status != SOTTO_OK) OK(sotto_comm_abort(self.comm, "the step has failed"));
      }
      OK(sotto_optim_destroy(optim));
    });
    EXPECT_EQ(broken, "");
    EXPECT_EQ(fake_cuda::live(), fake_cuda::Live{}) << fake_cuda::live().text();
    if (call_that_failed.empty()) break;  // the step has no more calls
    // The log names memory that could not be given back; the step needs it no more.
    if (call_that_failed == "cudaFreeAsync" && text[0].empty()) {
      EXPECT_GT(log.with(call_that_failed), 0u);
      continue;
    }
    EXPECT_NE(text[0].find(call_that_failed), std::string::npos)
        << call_that_failed << ": " << text[0];
  }
  EXPECT_EQ(train(json, kSteps, step_on_stream), want);
}

TEST_P(CudaFaults, AnyCallMayFail) { expect_errors(json(), kCalls); }
TEST_P(CudaFaults, AnyLookMayFail) { expect_errors(json(), kLooks); }

// A kernel or copy of a step does not execute, and the device is in error from then on, as after an
// illegal address: the step fails, and everything can be taken down.
TEST_P(CudaFaults, AnyExecutionMayFail) {
  int tried = 0;
  for (uint64_t k = 0; k < 60; k += 3) {
    SCOPED_TRACE("execution " + std::to_string(k));
    std::string text;
    sotto_status status = SOTTO_OK;
    const std::string broken = run_world(2, {}, [&](Member& self) {
      Model model(self, 2, false);
      sotto_optim* optim = nullptr;
      OK(sotto_optim_create(self.comm, json(), model.params.data(), 3, &optim));
      model.queue_gradients(0);
      model.tensors.sync();
      OK(sotto_barrier(self.comm, nullptr, nullptr));
      if (self.rank == 0) fake_cuda::fail_execution(k);
      const sotto_call call = model.tensors.call();
      const sotto_status mine = sotto_optim_step(optim, &call, nullptr);
      if (self.rank == 0) {
        status = mine;
        if (mine != SOTTO_OK) text = sotto_last_error();
        (void)sotto_comm_abort(self.comm, "the device is gone");
      }
      OK(sotto_optim_destroy(optim));
    });
    const bool met = !fake_cuda::failed_call().empty();
    fake_cuda::drain();  // nothing that was queued executes later
    fake_cuda::clear_faults();
    if (!met) break;
    ++tried;
    EXPECT_EQ(broken, "");
    EXPECT_EQ(status, SOTTO_E_DEVICE) << text;
    EXPECT_NE(text.find("illegal"), std::string::npos) << text;
  }
  EXPECT_GT(tried, 2);
}

// The group is given up while a step is anywhere between its first kernel and its end, its update
// perhaps queued before its last message could be sent: the transport keeps nothing of it.
TEST_P(CudaFaults, AStepMayBeAbortedAtAnyTime) {
  for (int64_t after_us = 0; after_us < 40'000; after_us += 1'000) {
    fake_cuda::Options options;
    options.max_delay_us = 2'000;
    options.seed = static_cast<uint64_t>(after_us) + 1;
    fake_cuda::configure(options);
    const std::string failure = run_world(2, {}, [&](Member& self) {
      Model model(self, 1, false);
      sotto_optim* optim = nullptr;
      OK(sotto_optim_create(self.comm, json(), model.params.data(), 3, &optim));
      model.queue_gradients(0);
      const sotto_call call = model.tensors.call();
      OpHandle handle;
      // A rank that comes late finds the group given up before its step begins.
      sotto_status status = sotto_optim_step(optim, &call, &handle.op);
      if (self.rank == 0) {
        OK(status);
        std::this_thread::sleep_for(std::chrono::microseconds(after_us));
        OK(sotto_comm_abort(self.comm, "enough"));
      }
      if (status == SOTTO_OK) status = sotto_op_wait(handle.op, -1);
      require(status == SOTTO_OK || status == SOTTO_E_ABORTED, sotto_status_name(status));
      OK(sotto_optim_destroy(optim));
    });
    ASSERT_EQ(failure, "") << "after " << after_us << " us";
    ASSERT_EQ(fake_cuda::live(), fake_cuda::Live{}) << fake_cuda::live().text();
  }
}

// From the second step of a kind on.
TEST_P(CudaFaults, StepsNeitherAllocateNorWait) {
  const auto counted = [] {
    std::map<std::string, uint64_t> counts;
    for (const char* call :
         {"cudaMalloc", "cudaMallocAsync", "cudaMallocFromPoolAsync", "cudaFree", "cudaFreeAsync",
          "cudaHostAlloc", "cudaFreeHost", "cudaEventCreateWithFlags", "cudaStreamSynchronize",
          "cudaDeviceSynchronize"})
      counts[call] = fake_cuda::calls(call);
    counts["host waits"] = fake_cuda::host_waits();
    return counts;
  };
  const std::string result =
      train(json(), kMaxSteps, [&](Member& self, auto* optim, Model& model, int step) {
        model.queue_gradients(step);
        model.tensors.sync();
        const auto before = counted();
        const sotto_call call = model.tensors.call();
        sotto_op* op = nullptr;
        OK(sotto_optim_step(optim, &call, &op));
        if (self.rank == 0) OK(sotto_op_stream_wait(op, model.tensors.stream()));
        OK(sotto_op_wait(op, -1));
        OK(sotto_op_release(op));
        const auto after = counted();
        for (const auto& [what, count] : before) {
          require(self.rank != 0 || step < 5 || after.at(what) == count,
                  fmt::format("step {}: {} more of {}", step, after.at(what) - count, what));
        }
        OK(sotto_barrier(self.comm, nullptr, nullptr));
      });
  EXPECT_EQ(result.size(), result_bytes(kMaxSteps)) << result;
}

#if defined(__SANITIZE_THREAD__)

bool g_count_races = false;  // count them instead of reporting them
uint64_t g_races = 0;

// Every wait is left out in steps of its stage until ThreadSanitizer has seen a race in one. That
// takes neither luck with times nor data that show what came too early.
TEST_P(CudaFaults, RacesOfDroppedWaits) {
  constexpr int kTrainings = 60, kTries = 8;
  WaitSites made;
  for (uint64_t seed = 1; seed <= 3; ++seed) add_waits(json(), seed, &made);
  ASSERT_FALSE(made.empty());
  std::map<WaitSite, int> left;  // how often it was left out, without a race
  for (const auto& [site, waits] : made) left[site] = 0;
  const auto next_of = [&](int stage) {
    auto best = left.end();
    for (auto it = left.begin(); it != left.end(); ++it) {
      const bool open = it->first.stage == stage && it->second < kTries;
      if (open && (best == left.end() || it->second < best->second)) best = it;
    }
    return best;
  };
  const auto do_step = [&](Member& self, sotto_optim* optim, Model& model, int step) {
    const auto next = self.rank == 0 ? next_of(kStage[step]) : left.end();
    if (next == left.end()) {
      step_on_stream(self, optim, model, step);
      return;
    }
    const WaitSite& site = next->first;
    const uint64_t dropped = fake_cuda::waits_dropped();
    fake_cuda::drop_wait(
        {site.stream, site.awaited, fake_cuda::records(site.awaited) + site.record});
    g_races = 0;
    g_count_races = true;
    std::exception_ptr failure;
    try {
      step_on_stream(self, optim, model, step);
    } catch (...) {  // it shows in the result too
      failure = std::current_exception();
    }
    fake_cuda::drain();
    g_count_races = false;
    if (fake_cuda::waits_dropped() > dropped) ++next->second;  // else it was not made this time
    if (g_races > 0) left.erase(next);
    if (failure != nullptr) std::rethrow_exception(failure);
  };
  for (int training = 0; training < kTrainings && !left.empty(); ++training) {
    fake_cuda::clear_faults();
    fake_cuda::configure({});
    (void)train(json(), kMaxSteps, do_step, true);
  }
  for (const auto& [site, tries] : left)
    ADD_FAILURE() << text_of(site) << ": left out " << tries << " times without a race";
}

#endif

INSTANTIATE_TEST_SUITE_P(Configurations, CudaFaults, ::testing::Range(0, 3));

TEST(CudaMissing, TheLibrarySaysWhyAndGoesOnWithoutIt) {
  fake_cuda::Options options;
  options.driver = false;
  fake_cuda::configure(options);
  EXPECT_EQ(
      run_world(
          1, {},
          [](Member& self) {
            std::vector<float> a(8, 1.0f);
            sotto_buffer b = buffer(a);
            OK(sotto_all_reduce(self.comm, &b, &b, 1, nullptr, nullptr));
            b.device_type = SOTTO_DEVICE_CUDA;
            FAILS(sotto_all_reduce(self.comm, &b, &b, 1, nullptr, nullptr), SOTTO_E_DEVICE, "in[0]",
                  "there is no cuda:0", "cudaGetDeviceCount", "cudaErrorInsufficientDriver");
            const std::string report = read_all([&](char* buf, uint64_t cap, uint64_t* out_len) {
              return sotto_context_report(self.context, nullptr, buf, cap, out_len);
            });
            require(report.find("no CUDA device: cudaGetDeviceCount") != std::string::npos, report);
          }),
      "");
  fake_cuda::configure({});
}

}  // namespace

#if defined(__SANITIZE_THREAD__)
// Called in the middle of a report.
__attribute__((no_sanitize("thread"))) bool count_race() {
  if (g_count_races) __atomic_fetch_add(&g_races, 1, __ATOMIC_RELAXED);
  return g_count_races;
}
#endif

}  // namespace sotto::test

#if defined(__SANITIZE_THREAD__)
// ThreadSanitizer has weak definitions of these.
namespace __tsan {
class ReportDesc;
__attribute__((visibility("default"), no_sanitize("thread"))) bool OnReport(const ReportDesc*,
                                                                            bool suppressed) {
  return sotto::test::count_race() || suppressed;
}
}  // namespace __tsan

// Races of different waits may be of the same two kernels.
extern "C" __attribute__((visibility("default"))) const char* __tsan_default_options() {
  return "suppress_equal_stacks=0:suppress_equal_addresses=0";
}
#endif
