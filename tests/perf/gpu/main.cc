// sotto-perf-gpu: the benchmarks of CUDA devices; `sotto bench gpu` starts it.
#include <cstdio>
#include <fstream>
#include <iostream>

#include "cuda/cuda_device.h"
#include "tests/perf/command_line.h"
#include "tests/perf/gpu/gpu_benchmarks.h"

namespace sotto::perf {
namespace {

constexpr int kSkipped = 77;

const std::map<std::string, GpuBenchmark> kBenchmarks = {{"gpu_codec", gpu_codec},
                                                         {"gpu_optim", gpu_optim}};

const std::map<std::string, GpuTurn> kTurns = {{"codec", gpu_codec_turn},
                                               {"large_step", gpu_large_step_turn},
                                               {"small_step", gpu_small_step_turn}};

// One turn per line of standard input, from the one that says that all is ready on.
int take_turns(const Turn& turn) {
  std::puts("ready");
  std::fflush(stdout);
  for (std::string line; std::getline(std::cin, line);) {
    std::printf("%.6f\n", turn());
    std::fflush(stdout);
  }
  return 0;
}

int run(int argc, char** argv) {
  CLI::App app(
      "Benchmarks of Sotto on a CUDA device: kernels as ratios to a copy within the device. "
      "Results are compared with the processor's, bit for bit.",
      typed_name(argv));
  Options options;
  options.n = 340'000'000;
  options.pairs = 21;
  std::vector<std::string> names, known, turns_known;
  std::string json, turns;
  int32_t index = 0;
  for (const auto& [name, unused] : kBenchmarks) known.push_back(name);
  for (const auto& [name, unused] : kTurns) turns_known.push_back(name);
  app.add_option("benchmark", names, "which to run (default: all)")->check(CLI::IsMember(known));
  app.add_option("--n", options.n, "elements")
      ->transform(sotto_cli::whole_number_from(int64_t{1} << 16, int64_t{1} << 33))
      ->capture_default_str();
  app.add_option("--pairs", options.pairs, "measured pairs")
      ->transform(sotto_cli::whole_number_from(7, 1001))
      ->capture_default_str();
  app.add_option("--device", index, "number of the device")->capture_default_str();
  app.add_option("--json", json, "append one JSON line per measurement to this file");
  app.add_option("--turns", turns,
                 "instead of all that: do this once for every line that comes, and answer with "
                 "its milliseconds")
      ->check(CLI::IsMember(turns_known));
  if (const std::optional<int> exit_code = parse(app, argc, argv)) return *exit_code;

  Result<std::shared_ptr<Device>> device = make_cuda_device(index);
  if (!device.ok()) {
    std::printf("SKIPPED: %s\n", device.status().text().c_str());
    return kSkipped;
  }
  if (!turns.empty()) return take_turns(kTurns.at(turns)(*device, options));
  options.device = cuda_device_texts()[static_cast<size_t>(index)];
  std::printf("%s\n", options.device.c_str());
  std::vector<Measurement> all;
  for (const std::string& name : names.empty() ? known : names)
    kBenchmarks.at(name)(*device, options, &all);
  if (!print(app, table(all, options))) return kExitWrong;
  const bool wrong = std::any_of(all.begin(), all.end(),
                                 [](const Measurement& m) { return !m.info.error.empty(); });
  if (json.empty()) return wrong ? 1 : 0;
  std::ofstream lines(json, std::ios::app);
  for (const Measurement& m : all) lines << json_line(m, options) << '\n';
  lines.flush();
  if (!lines) {
    std::fprintf(stderr, "%s: cannot write %s\n", app.get_name().c_str(), json.c_str());
    return kExitWrong;
  }
  return wrong ? 1 : 0;
}

}  // namespace
}  // namespace sotto::perf

int main(int argc, char** argv) {
  try {
    return sotto::perf::run(argc, argv);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s: %s\n", sotto::perf::typed_name(argv).c_str(), e.what());
    return 2;
  }
}
