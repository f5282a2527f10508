// Row 27: what an operation costs beside its work, through the C interface: calls of the allocator
// per operation once everything has run before, resident memory beyond what is asked to be held,
// the time of an operation that has next to nothing to do, of looking a handle up, and of marking a
// gradient as ready.
#include <fmt/core.h>
#include <malloc.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <fstream>
#include <functional>
#include <thread>

#include "sotto/sotto.h"
#include "tests/perf/benchmarks.h"
#include "tests/perf/capi_rank.h"
#include "tests/perf/malloc_count.h"

namespace sotto::perf {
namespace {

constexpr int32_t kRanks = 4;
constexpr int kWarmUp = 50, kCounted = 100, kWarmUpLarge = 4;
constexpr uint64_t kElements = 100'000;
constexpr int kSeries = 9, kReplays = 20'000;
constexpr double kMostAllocations = 0, kMostMicroseconds = 5;
// A look-up under a lock took 25 (comm) and 37 (operation).
constexpr double kMostNanoseconds = 30;
constexpr double kMostReadyNanoseconds = 2000;
constexpr int kCalls = 200'000;
constexpr double kMiB = 1 << 20;

const std::vector<CapiKind>& kinds() {
  static const std::vector<CapiKind> all = {
      {"all_reduce, 4 bytes", 1, "", ""},
      {"all_reduce", kElements, "", ""},
      {"all_reduce 1bit", kElements, R"({"type": "1bit"})", ""},
      {"step Adam", kElements, "", R"("type": "Adam", "params": {"lr": 0.001})"},
      {"step 1-bit Adam", kElements, "",
       R"("type": "OneBitAdam", "params": {"lr": 0.001, "freeze_step": 2})"},
      {"step 1-bit LAMB", kElements, "",
       R"("type": "OneBitLamb", "params": {"lr": 0.001, "freeze_step": 2})"}};
  return all;
}

Measurement row(const std::string& variant, uint64_t n) {
  Measurement m;
  m.info.row = 27;
  m.info.benchmark = "overheads";
  m.info.variant = variant;
  m.info.n = n;
  return m;
}

// Calls of the allocator per operation and rank.
double allocations_of(const CapiKind& kind) {
  std::barrier sync(kRanks);
  uint64_t before = 0, after = 0;
  capi_world(kRanks, [&](CapiRank& rank) {
    CapiWork work(rank, kind);
    for (int i = 0; i < kWarmUp; ++i) work.run();
    sync.arrive_and_wait();
    if (rank.rank == 0) before = allocations();
    sync.arrive_and_wait();
    for (int i = 0; i < kCounted; ++i) work.run();
    sync.arrive_and_wait();
    if (rank.rank == 0) after = allocations();
    sync.arrive_and_wait();
  });
  return static_cast<double>(after - before) / (kRanks * kCounted);
}

double resident_bytes() {
  std::ifstream file("/proc/self/statm");
  double all = 0, resident = 0;
  file >> all >> resident;
  return resident * static_cast<double>(sysconf(_SC_PAGESIZE));
}

// Resident memory of a rank beyond what it has to hold, were it a process of its own.
double memory_beyond_state(const CapiKind& kind) {
  malloc_trim(0);
  const double program = resident_bytes();
  std::barrier sync(kRanks);
  double all = 0, held = 0;
  capi_world(kRanks, [&](CapiRank& rank) {
    CapiWork work(rank, kind);
    for (int i = 0; i < kWarmUpLarge; ++i) work.run();
    sync.arrive_and_wait();
    if (rank.rank == 0) {
      all = resident_bytes();
      held = static_cast<double>(work.held_bytes());
    }
    sync.arrive_and_wait();
  });
  return program + (all - program) / kRanks - held;
}

double now_us(bool cpu) {
  timespec now{};
  clock_gettime(cpu ? CLOCK_PROCESS_CPUTIME_ID : CLOCK_MONOTONIC, &now);
  return static_cast<double>(now.tv_sec) * 1e6 + static_cast<double>(now.tv_nsec) * 1e-3;
}

// Microseconds of one operation on one rank, of each series, ascending.
std::vector<double> replays_of(const CapiKind& kind, bool cpu) {
  std::vector<double> all;
  capi_world(1, [&](CapiRank& rank) {
    CapiWork work(rank, kind);
    for (int i = 0; i < kWarmUp; ++i) work.run();
    for (int s = 0; s < kSeries; ++s) {
      const double start = now_us(cpu);
      for (int i = 0; i < kReplays; ++i) work.run();
      all.push_back((now_us(cpu) - start) / kReplays);
    }
  });
  std::sort(all.begin(), all.end());
  return all;
}

// What a function that follows its handle unseen would be.
struct Plain {
  int32_t rank = 0;
};
sotto_status plain_rank(const void* handle, int32_t* out_rank) {
  if (handle == nullptr || out_rank == nullptr) return SOTTO_E_INVALID_ARGUMENT;
  *out_rank = static_cast<const Plain*>(handle)->rank;
  return SOTTO_OK;
}

double thread_cpu_ns() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) * 1e9 + static_cast<double>(now.tv_nsec);
}

// Nanoseconds of processor time that a call takes on each of `threads` threads at once, with one
// handle: the least of some series of the mean over threads.
double ns_per_call(uint32_t threads, const std::function<void()>& call) {
  double least = 1e9;
  for (int s = 0; s < kSeries; ++s) {
    std::barrier<> sync(threads);
    std::atomic<double> all{0};
    std::vector<std::jthread> team;
    for (uint32_t t = 0; t < threads; ++t) {
      team.emplace_back([&] {
        sync.arrive_and_wait();
        const double start = thread_cpu_ns();
        for (int i = 0; i < kCalls; ++i) call();
        all += (thread_cpu_ns() - start) / kCalls;
      });
    }
    team.clear();
    least = std::min(least, all / threads);
  }
  return least;
}

// Calls that do nothing but look their handle up.
void look_ups(std::vector<Measurement>* out) {
  capi_world(1, [&](CapiRank& rank) {
    sotto_op* op = nullptr;
    must(sotto_barrier(rank.comm, nullptr, &op), "barrier");
    must(sotto_op_wait(op, -1), "wait");
    float values[2] = {};
    sotto_param param = SOTTO_PARAM_INIT;
    param.param = {&values[0], 1, SOTTO_FLOAT32, SOTTO_DEVICE_CPU, 0, 0};
    param.grad = {&values[1], 1, SOTTO_FLOAT32, SOTTO_DEVICE_CPU, 0, 0};
    sotto_optim* optim = nullptr;
    must(sotto_optim_create(rank.comm, R"({"optimizer": {"type": "Adam"}})", &param, 1, &optim),
         "optim_create");
    const Plain object;
    sotto_status (*volatile plain)(const void*, int32_t*) = plain_rank;
    for (const uint32_t threads : {1u, 4u}) {
      const auto ns = [&](const auto& call) { return ns_per_call(threads, call); };
      const double cast = ns([&] {
        int32_t r;
        plain(&object, &r);
      });
      const double comm = ns([&] {
        int32_t r;
        sotto_comm_rank(rank.comm, &r);
      });
      const double operation = ns([&] { sotto_op_error(op, nullptr); });
      const double optimizer = ns([&] {
        uint64_t bytes;
        sotto_optim_get_user_state(optim, nullptr, 0, &bytes);
      });
      Measurement m = row(fmt::format("handle, {} thread(s)", threads), 0);
      m.figures = {{"ns per call by a plain pointer", cast, {}},
                   {"comm", comm, kMostNanoseconds},
                   {"operation", operation, kMostNanoseconds},
                   {"optim", optimizer, kMostNanoseconds}};
      out->push_back(m);
    }
    must(sotto_op_release(op), "release");
    must(sotto_optim_destroy(optim), "optim_destroy");
  });
}

// Marks of gradients in rounds of one rank, one a call and `batch` a bucket: time on this thread.
void ready_calls(uint64_t batch, std::vector<Measurement>* out) {
  constexpr uint64_t kGradients = 1000;
  constexpr int kRounds = 100;
  std::vector<double> ns;
  capi_world(1, [&](CapiRank& rank) {
    std::vector<float> values(kGradients);
    std::vector<sotto_buffer> like;
    for (float& v : values) like.push_back({&v, 1, SOTTO_FLOAT32, SOTTO_DEVICE_CPU, 0, 0});
    const std::string json =
        fmt::format(R"({{"first_bucket_bytes": {0}, "bucket_bytes": {0}}})", 4 * batch);
    sotto_overlap* overlap = nullptr;
    must(sotto_overlap_create(rank.comm, json.c_str(), like.data(), kGradients, &overlap),
         "overlap_create");
    for (int s = 0; s < kSeries * kRounds; ++s) {
      sotto_op* op = nullptr;
      must(sotto_overlap_begin(overlap, nullptr, &op), "overlap_begin");
      const double start = thread_cpu_ns();
      for (uint64_t i = kGradients; i-- > 0;)
        must(sotto_overlap_ready(overlap, &i, &like[i], 1, nullptr), "overlap_ready");
      if (s % kRounds == 0) ns.push_back(0);
      ns.back() += (thread_cpu_ns() - start) / (kRounds * kGradients);
      must(sotto_overlap_finish(overlap), "overlap_finish");
      must(sotto_op_wait(op, -1), "wait");
      must(sotto_op_release(op), "release");
    }
    must(sotto_overlap_destroy(overlap), "overlap_destroy");
  });
  std::sort(ns.begin(), ns.end());
  Measurement m = row(fmt::format("sotto_overlap_ready, {} gradient(s) a bucket", batch), batch);
  m.figures = {{"ns per call, median", ns[ns.size() / 2], kMostReadyNanoseconds},
               {"least", ns.front(), {}},
               {"most", ns.back(), {}}};
  out->push_back(m);
}

}  // namespace

void overheads(const Options& options, std::vector<Measurement>* out) {
  for (CapiKind kind : kinds()) {
    if (kind.elements == 1) continue;
    kind.elements = options.n;
    Measurement m = row(fmt::format("{}, W = {}, memory", kind.name, kRanks), kind.elements);
    const double n = static_cast<double>(kind.elements);
    m.figures = {{"MiB beyond state", memory_beyond_state(kind) / kMiB, 0.75 * n / kMiB + 32}};
    out->push_back(m);
  }
  for (const CapiKind& kind : kinds()) {
    if (!counts_allocations()) break;
    Measurement m = row(fmt::format("{}, W = {}", kind.name, kRanks), kind.elements);
    m.figures = {{"allocations per operation", allocations_of(kind), kMostAllocations}};
    out->push_back(m);
  }
  for (CapiKind kind : {kinds()[0], kinds()[3]}) {
    kind.elements = 1;
    const std::vector<double> us = replays_of(kind, options.cpu_clock);
    Measurement m = row(fmt::format("{}, W = 1, n = 1", kind.name), 1);
    m.figures = {{"us per operation, median", us[us.size() / 2], kMostMicroseconds},
                 {"least", us.front(), {}},
                 {"most", us.back(), {}}};
    out->push_back(m);
  }
  look_ups(out);
  for (const uint64_t batch : {1, 25}) ready_calls(batch, out);
}

}  // namespace sotto::perf
