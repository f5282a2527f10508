// What a rank of a large group costs beside its work: memory, threads, descriptors, start-up. This
// process is one rank of a job (tests/perf/scale.sh), or has 64 of them as threads.
#include <dirent.h>
#include <fmt/core.h>
#include <sys/resource.h>

#include <algorithm>
#include <barrier>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "sotto/sotto.h"
#include "tests/perf/benchmarks.h"
#include "tests/perf/capi_rank.h"
#include "tests/perf/wire_world.h"

namespace sotto::perf {
namespace {

constexpr int32_t kThreadRanks = 64;
constexpr int kWarmUp = 20, kLater = 1000;
constexpr uint64_t kElements = 1024;
constexpr int kStarts = 7;

// Of this process. Memory that belongs to no file; the kernel's for sockets is not in it.
struct Usage {
  double kib = 0, threads = 0, descriptors = 0;
};

Usage usage() {
  Usage u;
  std::ifstream file("/proc/self/status");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("RssAnon:")) u.kib = std::stod(line.substr(8));
    if (line.starts_with("Threads:")) u.threads = std::stod(line.substr(8));
  }
  DIR* const directory = ::opendir("/proc/self/fd");
  if (directory == nullptr) throw std::runtime_error("cannot read /proc/self/fd");
  while (const dirent* entry = ::readdir(directory)) u.descriptors += entry->d_name[0] != '.';
  ::closedir(directory);
  --u.descriptors;  // of the directory itself
  return u;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

using Clock = std::chrono::steady_clock;
double ms_since(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

// What one rank as a process has found.
enum Found : size_t {
  kDescriptors,
  kThreads,
  kConnected,  // KiB of the connected comm
  kWorked,     // KiB more after the first operations
  kGrown,      // KiB more after kLater further ones
  kFirstMs,    // from nothing to the end of the first barrier, with the wait for other processes
  kStartMs,    // of another comm, median of kStarts
  kFound
};

std::vector<double> find(CapiRank& self, int32_t* size) {
  const Clock::time_point first = Clock::now();
  self.context = new_context();
  const Usage before = usage();
  sotto_comm_config config = SOTTO_COMM_CONFIG_INIT;
  must(sotto_comm_create(self.context, &config, &self.comm), "comm");
  must(sotto_comm_rank(self.comm, &self.rank), "rank");
  must(sotto_comm_size(self.comm, size), "size");
  self.size = *size;
  const auto barrier = [&] { must(sotto_barrier(self.comm, nullptr, nullptr), "barrier"); };
  barrier();
  const double first_ms = ms_since(first);
  const Usage connected = usage();
  const CapiKind kind{"all_reduce", kElements, "", ""};
  CapiWork work(self, kind);
  for (int i = 0; i < kWarmUp; ++i) work.run();
  const Usage worked = usage();
  for (int i = 0; i < kLater; ++i) work.run();
  const Usage later = usage();
  std::vector<double> starts;
  for (int i = 0; i < kStarts; ++i) {
    barrier();
    const Clock::time_point start = Clock::now();
    sotto_comm* another = nullptr;
    must(sotto_comm_create(self.context, &config, &another), "another comm");
    starts.push_back(ms_since(start));
    must(sotto_comm_destroy(another), "destroying it");
  }
  return {connected.descriptors - before.descriptors,
          later.threads,
          connected.kib - before.kib,
          worked.kib - connected.kib,
          later.kib - worked.kib,
          first_ms,
          median(starts)};
}

Measurement row(const std::string& variant) {
  Measurement m;
  m.info.row = 27;
  m.info.benchmark = "scale";
  m.info.variant = variant;
  return m;
}

void as_process(std::vector<Measurement>* out) {
  CapiRank self;
  int32_t size = 0;
  std::vector<double> mine = find(self, &size);
  std::vector<double> all(kFound * static_cast<size_t>(size));
  const sotto_buffer in = {mine.data(), kFound, SOTTO_FLOAT64, SOTTO_DEVICE_CPU, 0, 0};
  const sotto_buffer gathered = {all.data(), all.size(), SOTTO_FLOAT64, SOTTO_DEVICE_CPU, 0, 0};
  must(sotto_all_gather(self.comm, &in, &gathered, 1, nullptr, nullptr), "all-gather");
  must(sotto_comm_destroy(self.comm), "destroying the comm");
  must(sotto_context_destroy(self.context), "destroying the context");
  if (self.rank != 0) return;
  const auto others = [&](Found what) {
    std::vector<double> values;
    for (size_t r = 1; r < static_cast<size_t>(size); ++r) values.push_back(all[r * kFound + what]);
    return values;
  };
  const auto most = [&](Found what) {
    const std::vector<double> values = others(what);
    return std::max(all[what], *std::max_element(values.begin(), values.end()));
  };
  const double peers = size - 1;
  Measurement m = row(fmt::format("processes, W = {}", size));
  m.figures = {{"KiB per rank", median(others(kConnected)), {}},
               {"KiB, rank 0", all[kConnected], {}},
               {"KiB per peer", median(others(kConnected)) / peers, {}},
               {"KiB of first operations", median(others(kWorked)), {}},
               {"most KiB of 1000 more", most(kGrown), {}},
               {"threads", most(kThreads), {}},
               {"descriptors of the comm", median(others(kDescriptors)), {}},
               {"descriptors, rank 0", all[kDescriptors], {}},
               {"ms to the first barrier", most(kFirstMs), {}},
               {"ms to start another comm, slowest rank", most(kStartMs),
                size == 4 ? std::optional(200.0) : std::nullopt}};
  out->push_back(m);
}

// Two descriptors per pair of ranks and direction of control, and some per rank.
void allow_descriptors() {
  constexpr rlim_t kWanted = kThreadRanks * (kThreadRanks + 16);
  rlimit limit{};
  ::getrlimit(RLIMIT_NOFILE, &limit);
  if (limit.rlim_cur >= kWanted) return;
  limit.rlim_cur = kWanted;
  limit.rlim_max = std::max(limit.rlim_max, kWanted);
  if (::setrlimit(RLIMIT_NOFILE, &limit) != 0)
    throw std::runtime_error(fmt::format("{} descriptors are not allowed", kWanted));
}

// All of one process: divided by the number of ranks.
std::string as_threads() {
  allow_descriptors();
  std::barrier sync(kThreadRanks);
  Usage before = usage(), connected, worked, later;
  const Clock::time_point start = Clock::now();
  double start_ms = 0;
  const auto look = [&](const CapiRank& rank, Usage* out) {
    sync.arrive_and_wait();
    if (rank.rank == 0) *out = usage();
    sync.arrive_and_wait();
  };
  capi_world(kThreadRanks, [&](CapiRank& rank) {
    if (rank.rank == 0) start_ms = ms_since(start);
    look(rank, &connected);
    const CapiKind kind{"all_reduce", kElements, "", ""};
    CapiWork work(rank, kind);
    for (int i = 0; i < kWarmUp; ++i) work.run();
    look(rank, &worked);
    for (int i = 0; i < kLater / 10; ++i) work.run();
    look(rank, &later);
  });
  const auto each = [](double sum) { return sum / kThreadRanks; };
  const nlohmann::json found = {each(connected.kib - before.kib),
                                each(worked.kib - connected.kib),
                                each(later.kib - worked.kib),
                                each(connected.threads - before.threads),
                                each(connected.descriptors - before.descriptors),
                                start_ms};
  return found.dump();
}

}  // namespace

void scale(const Options& /*options*/, std::vector<Measurement>* out) {
  if (std::getenv("SOTTO_WORLD_SIZE") != nullptr) {
    as_process(out);
    return;
  }
  const auto found =
      nlohmann::json::parse(run_isolated([](const std::string&) { return as_threads(); }));
  Measurement m = row(fmt::format("threads, W = {}", kThreadRanks));
  m.figures = {{"KiB per rank", found[0], {}},
               {"KiB per peer", found[0].get<double>() / (kThreadRanks - 1), {}},
               {"KiB of first operations", found[1], {}},
               {"KiB of 100 more", found[2], {}},
               {"threads per rank, with the caller's", found[3], {}},
               {"descriptors per rank", found[4], {}},
               {"ms to start, once", found[5], {}}};
  out->push_back(m);
}

}  // namespace sotto::perf
