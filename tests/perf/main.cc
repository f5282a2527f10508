// sotto-perf: runs the benchmarks and prints a table; `sotto bench` starts it.
#include <fmt/core.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <map>
#include <string_view>

#include "tests/perf/benchmarks.h"
#include "tests/perf/command_line.h"
#include "tests/perf/net.h"

namespace sotto::perf {

namespace {

const std::map<std::string, Benchmark>& benchmarks() {
  static const std::map<std::string, Benchmark> all = {
      {"codec_encode", codec_encode},
      {"codec_decode", codec_decode},
      {"codec_server", codec_server},
      {"codec_blocks", codec_blocks},
      {"codec_topk", codec_topk},
      {"optim_adam", optim_adam},
      {"optim_adam_low_precision", optim_adam_low_precision},
      {"optim_lamb", optim_lamb},
      {"optim_1bit_adam", optim_onebit_adam},
      {"optim_1bit_lamb", optim_onebit_lamb},
      {"outer_step", outer_step},
      {"wire_bytes", wire_bytes},
      {"zeroone_bits", zeroone_bits},
      {"overheads", overheads},
      {"scale", scale}};
  return all;
}

const std::map<std::string, std::string>& scripts() {
  static const std::map<std::string, std::string> all = {
      {"net", "net/run.py"},
      {"overlap", "net/overlap.py"},
      {"overlap_bucket", "net/overlap_bucket.py"},
      {"step_ddp", "net/step_ddp.py"},
      {"python_step", "python_step.py"},
      {"library", "library.py"}};
  return all;
}

// These count, and take none of the options of a measurement.
constexpr std::string_view kOfOwnSizes[] = {"scale", "wire_bytes", "zeroone_bits"};
constexpr const char* kOptions[] = {"--n", "--pairs", "--threads", "--simd", "--cpu-clock"};

// Why options do not suit the named benchmarks; empty: they do.
std::string check_options(const CLI::App& app, const std::vector<std::string>& names) {
  for (const std::string_view name : kOfOwnSizes) {
    if (std::ranges::count(names, name) == 0) continue;
    for (const char* option : kOptions) {
      if (app.count(option) != 0)
        return fmt::format("{} has no effect on {}, which has sizes of its own", option, name);
    }
  }
  return "";
}

int run(int argc, char** argv) {
  CLI::App app(
      "Benchmarks of Sotto: kernels as ratios to yardsticks with the same memory traffic; "
      "wire_bytes and zeroone_bits count bytes on the network",
      typed_name(argv));
  app.footer(
      "With options of their own (sotto bench NAME --help):\n"
      "  net             all-reduces over links of a given rate, next to other libraries\n"
      "  overlap         outer steps that hide their averages over such links\n"
      "  overlap_bucket  gradients that travel during a backward pass over such links\n"
      "  step_ddp        training steps in PyTorch over such links, next to others\n"
      "  python_step     what Python costs in a step over many small tensors\n"
      "  library         collectives and steps with two builds of libsotto.so in turns\n"
      "  gpu             codec and Adam on a CUDA device");
  Options options;
  std::vector<std::string> names;
  std::string simd = "auto", json;
  double floor = 0;
  std::vector<std::string> known;
  for (const auto& [name, unused] : benchmarks()) known.push_back(name);
  app.add_option("benchmark", names,
                 "which to run (default: all but scale, which has many ranks: tests/perf/scale.sh)")
      ->check(CLI::IsMember(known));
  app.add_option("--n", options.n, "elements")
      ->transform(sotto_cli::whole_number_from(int64_t{1} << 16, int64_t{1} << 33))
      ->capture_default_str();
  app.add_option("--pairs", options.pairs, "measured pairs")
      ->transform(sotto_cli::whole_number_from(7, 1001))
      ->capture_default_str();
  app.add_option("--threads", options.threads, "threads for kernels and yardsticks")
      ->transform(sotto_cli::whole_number_from(1, 4096))
      ->capture_default_str();
  app.add_option("--simd", simd, "upper limit of vector instructions")
      ->check(CLI::IsMember({"auto", "scalar", "sse4", "avx2", "avx512"}))
      ->capture_default_str();
  app.add_flag("--cpu-clock", options.cpu_clock,
               "processor time instead of wall time, for busy machines");
  app.add_option("--json", json, "append one JSON line per measurement to this file");
  app.add_option("--fail-above", floor,
                 "exit 1 if a ratio exceeds its target by more than this factor (1.25: 80 % of the "
                 "target speed)")
      ->transform(sotto_cli::number_from(1, 1000));
  if (const std::optional<int> exit_code = parse(app, argc, argv)) return *exit_code;
  const std::string wrong = check_options(app, names);
  if (!wrong.empty()) return usage_error(app, wrong);
  options.simd = *simd_level_from_name(simd);
  if (names.empty()) {
    names = known;
    std::erase(names, "scale");
  }

  std::ofstream lines;
  if (!json.empty()) {
    lines.open(json, std::ios::app);
    if (!lines) {
      std::fprintf(stderr, "%s: cannot write %s\n", app.get_name().c_str(), json.c_str());
      return kExitWrong;
    }
  }
  std::vector<Measurement> all;
  for (const std::string& name : names) benchmarks().at(name)(options, &all);
  bool failed = false;
  for (const Measurement& m : all) {
    if (lines.is_open()) lines << json_line(m, options) << '\n';
    failed |= !m.info.error.empty();
    if (m.wire) {
      // What TCP sent again is not what the plans have sent.
      failed |= m.wire->skipped.empty() && m.wire->resent_segments == 0 && m.info.target != 0 &&
                m.ratio > m.info.target;
    } else if (m.schedule) {
      failed |= m.ratio > m.info.target;
    } else {
      failed |= floor != 0 && m.info.target != 0 && m.ratio > floor * m.info.target;
    }
  }
  lines.flush();
  if (!json.empty() && !lines) {
    std::fprintf(stderr, "%s: writing %s failed\n", app.get_name().c_str(), json.c_str());
    return kExitWrong;
  }
  if (!all.empty() && !print(app, table(all, options))) return kExitWrong;
  return failed ? 1 : 0;
}

}  // namespace
}  // namespace sotto::perf

int main(int argc, char** argv) {
  const std::vector<std::string> words(argv + 1, argv + argc);
  const std::string name = sotto::perf::typed_name(argv);
  try {
    if (!words.empty() && words[0] == "gpu")
      sotto::perf::run_gpu(name, {words.begin() + 1, words.end()});
    const auto& scripts = sotto::perf::scripts();
    if (!words.empty() && scripts.contains(words[0]))
      sotto::perf::run_script(scripts.at(words[0]), {words.begin() + 1, words.end()});
    if (words.size() == 2 && words[0] == "net_rank") return sotto::perf::run_net_rank(words[1]);
    if (words.size() == 2 && words[0] == "overlap_rank")
      return sotto::perf::run_overlap_rank(words[1]);
    return sotto::perf::run(argc, argv);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s: %s\n", name.c_str(), e.what());
    return sotto::perf::kExitWrong;
  }
}
