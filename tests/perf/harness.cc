#include "tests/perf/harness.h"

#include <fmt/core.h>
#include <sys/utsname.h>
#include <time.h>

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>

#include "core/base/clock.h"

namespace sotto::perf {
namespace {

int64_t clock_ns(bool cpu) {
  if (!cpu) return Clock::monotonic().now_ns();
  timespec now{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return now.tv_sec * int64_t{1'000'000'000} + now.tv_nsec;
}

double milliseconds(const std::function<void()>& work, bool cpu) {
  const int64_t start = clock_ns(cpu);
  work();
  return static_cast<double>(clock_ns(cpu) - start) * 1e-6;
}

// q in [0, 1], between neighbours by their distance.
double quantile(std::vector<double> values, double q) {
  std::sort(values.begin(), values.end());
  const double at = q * static_cast<double>(values.size() - 1);
  const size_t low = static_cast<size_t>(at);
  const size_t high = std::min(low + 1, values.size() - 1);
  return values[low] + (at - static_cast<double>(low)) * (values[high] - values[low]);
}

std::string processor_name() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);) {
    if (line.rfind("model name", 0) == 0) return line.substr(line.find(':') + 2);
  }
  return "unknown";
}

std::string kernel_release() {
  utsname name{};
  return uname(&name) == 0 ? name.release : "unknown";
}

// Of times in milliseconds that were measured in pairs.
Measurement summarize(const Case& work, const std::vector<double>& ours,
                      const std::vector<double>& yardstick) {
  Measurement m;
  m.info = work;
  m.pairs = static_cast<uint32_t>(ours.size());
  std::vector<double> ratios;
  for (size_t i = 0; i < ours.size(); ++i) ratios.push_back(ours[i] / (work.share * yardstick[i]));
  m.ours_ms = quantile(ours, 0.5);
  m.ours_p99_ms = quantile(ours, 0.99);
  m.yardstick_ms = quantile(yardstick, 0.5);
  m.ratio = quantile(ratios, 0.5);
  m.ratio_iqr = (quantile(ratios, 0.75) - quantile(ratios, 0.25)) / m.ratio;
  m.gb_per_s = work.bytes_per_element * static_cast<double>(work.n) / (m.ours_ms * 1e6);
  return m;
}

}  // namespace

Measurement measure(const Case& work, const Options& options) {
  std::vector<double> ours, yardstick;
  for (uint32_t i = 0; i <= options.pairs; ++i) {
    const double a = work.ours_ms ? work.ours_ms() : milliseconds(work.ours, options.cpu_clock);
    const double b =
        work.yardstick_ms ? work.yardstick_ms() : milliseconds(work.yardstick, options.cpu_clock);
    if (i == 0) continue;  // warm-up
    ours.push_back(a);
    yardstick.push_back(b);
  }
  return summarize(work, ours, yardstick);
}

void measure_into(const Case& work, const Options& options, std::vector<Measurement>* out) {
  if (!work.error.empty()) {
    Measurement wrong;
    wrong.info = work;
    out->push_back(wrong);
    return;
  }
  out->push_back(measure(work, options));
}

namespace {

const char* verdict(const Measurement& m) {
  if (m.info.target == 0) return "no target";
  return m.reached() ? "reached" : "not reached";
}

void add_machine(nlohmann::ordered_json* line) {
  static const std::string processor = processor_name();
  static const std::string kernel = kernel_release();
  (*line)["version"] = SOTTO_PERF_VERSION;
  (*line)["build"] = SOTTO_PERF_BUILD;
  (*line)["processor"] = processor;
  (*line)["kernel"] = kernel;
}

std::string wire_json_line(const Measurement& m) {
  const WireFigures& w = *m.wire;
  nlohmann::ordered_json line = {
      {"row", m.info.row},
      {"benchmark", m.info.benchmark},
      {"variant", m.info.variant},
      {"n", m.info.n},
      {"ranks", w.ranks},
      {"operations", w.operations},
      {"payload_bytes", w.payload_bytes},
      {"header_bytes", w.header_bytes},
      {"service_bytes", w.service_bytes},
      {"interface_bytes", w.interface_bytes},
      {"interface_packets", w.interface_packets},
      {"framing_bytes", w.framing_bytes},
      {"resent_segments", w.resent_segments},
      {"ratio", m.ratio},
      {"target", m.info.target},
      {"reached", nullptr},
      {"skipped", w.skipped},
      {"error", m.info.error},
  };
  if (m.info.target != 0 && w.skipped.empty())
    line["reached"] = m.info.error.empty() && m.reached();
  add_machine(&line);
  return line.dump();
}

std::string schedule_json_line(const Measurement& m) {
  const ScheduleFigures& s = *m.schedule;
  nlohmann::ordered_json line = {
      {"row", m.info.row},
      {"benchmark", m.info.benchmark},
      {"variant", m.info.variant},
      {"n", m.info.n},
      {"ranks", s.ranks},
      {"variance_steps", s.variance},
      {"compressed_steps", s.compressed},
      {"sync_steps", s.sync},
      {"local_steps", s.local},
      {"payload_bytes", s.payload_bytes},
      {"header_bytes", s.header_bytes},
      {"ratio", m.ratio},
      {"target", m.info.target},
      {"reached", m.info.error.empty() && m.reached()},
      {"error", m.info.error},
  };
  add_machine(&line);
  return line.dump();
}

std::string schedule_table(const std::vector<Measurement>& all) {
  std::string text;
  for (const Measurement& m : all) {
    if (!m.schedule) continue;
    if (text.empty()) {
      text = fmt::format(
          "\nbytes of all ranks over a schedule; ratio = bits per parameter and step / (2 (W-1) / "
          "W), headers included\n\n{:<4}{:<14}{:<20}{:>9}{:>10}{:>12}{:>8}{:>8}{:>16}{:>14}{:>9}"
          "  {}\n",
          "row", "benchmark", "variant", "n", "variance", "compressed", "sync", "local", "payload",
          "headers", "ratio", "target, verdict");
    }
    const ScheduleFigures& s = *m.schedule;
    text += fmt::format("{:<4}{:<14}{:<20}{:>9}", m.info.row, m.info.benchmark, m.info.variant,
                        m.info.n);
    if (!m.info.error.empty()) {
      text += fmt::format("  WRONG: {}\n", m.info.error);
      continue;
    }
    text += fmt::format("{:>10}{:>12}{:>8}{:>8}{:>16}{:>14}{:>9.4f}  {:.2f} {}\n", s.variance,
                        s.compressed, s.sync, s.local, s.payload_bytes, s.header_bytes, m.ratio,
                        m.info.target, m.reached() ? "reached" : "not reached");
  }
  return text;
}

std::string figures_json_line(const Measurement& m) {
  nlohmann::ordered_json line = {{"row", m.info.row},
                                 {"benchmark", m.info.benchmark},
                                 {"variant", m.info.variant},
                                 {"n", m.info.n}};
  for (const Figure& f : m.figures) line[f.name] = f.value;
  for (const Figure& f : m.figures) {
    if (f.most) line[f.name + ", target"] = *f.most;
  }
  line["error"] = m.info.error;
  add_machine(&line);
  return line.dump();
}

std::string figures_table(const std::vector<Measurement>& all) {
  std::string text;
  for (const Measurement& m : all) {
    if (m.figures.empty()) continue;
    text += fmt::format("\nrow {}, {}: {}\n", m.info.row, m.info.benchmark, m.info.variant);
    for (const Figure& f : m.figures) {
      text += fmt::format("  {:<36}{:>12.2f}", f.name, f.value);
      if (f.most)
        text += fmt::format("  at most {:g}: {}", *f.most,
                            f.value <= *f.most ? "reached" : "not reached");
      text += '\n';
    }
  }
  return text;
}

std::string wire_table(const std::vector<Measurement>& all) {
  std::string text, reason;
  size_t skipped = 0, others = 0;
  for (const Measurement& m : all) {
    if (!m.wire) continue;
    if (text.empty()) {
      text = fmt::format(
          "\nbytes of all ranks per operation; ratio = (interface - framing) / (payload + "
          "headers), "
          "framing = packets x (IP + TCP header)\n\n{:<4}{:<12}{:<32}{:>9}{:>12}{:>10}{:>10}{:>12}"
          "{:>9}{:>10}{:>9}  {}\n",
          "row", "benchmark", "variant", "n", "payload", "headers", "service", "interface",
          "packets", "framing", "ratio", "target, verdict");
    }
    const WireFigures& w = *m.wire;
    if (!w.skipped.empty()) {
      reason = w.skipped;
      ++skipped;
    }
    if (m.info.target == 0 && m.info.error.empty()) {
      ++others;
      continue;
    }
    text += fmt::format("{:<4}{:<12}{:<32}{:>9}", m.info.row, m.info.benchmark, m.info.variant,
                        m.info.n);
    if (!m.info.error.empty()) {
      text += fmt::format("  WRONG: {}\n", m.info.error);
      continue;
    }
    const auto each = [&](uint64_t sum) { return static_cast<double>(sum) / w.operations; };
    text += fmt::format("{:>12.0f}{:>10.0f}{:>10.0f}", each(w.payload_bytes), each(w.header_bytes),
                        each(w.service_bytes));
    if (w.skipped.empty()) {
      text += fmt::format("{:>12.0f}{:>9.1f}{:>10.0f}{:>9.5f}  {:.3f} {}{}\n",
                          each(w.interface_bytes), each(w.interface_packets), each(w.framing_bytes),
                          m.ratio, m.info.target, m.reached() ? "reached" : "not reached",
                          w.resent_segments == 0
                              ? ""
                              : fmt::format(" (TCP sent {} segments again)", w.resent_segments));
    } else {
      text += "  as planned; interface not read\n";
    }
  }
  if (others > 0) {
    text +=
        fmt::format("and {} rows of other sizes, bytes as planned and by the formula\n", others);
  }
  if (skipped > 0)
    text += fmt::format("skipped: interface bytes of {} rows: {}\n", skipped, reason);
  return text;
}

}  // namespace

std::string json_line(const Measurement& m, const Options& options) {
  if (m.wire) return wire_json_line(m);
  if (m.schedule) return schedule_json_line(m);
  if (!m.figures.empty()) return figures_json_line(m);
  nlohmann::ordered_json line = {
      {"row", m.info.row},
      {"benchmark", m.info.benchmark},
      {"variant", m.info.variant},
      {"yardstick", m.info.yardstick_name},
      {"n", m.info.n},
      {"dtype", m.info.dtype},
      {"threads", options.threads},
      {"simd", simd_in_use(options.simd)},
      {"clock", options.cpu_clock ? "cpu" : "wall"},
      {"bytes_per_element", m.info.bytes_per_element},
      {"pairs", m.pairs},
      {"ours_ms_p50", m.ours_ms},
      {"ours_ms_p99", m.ours_p99_ms},
      {"yardstick_ms_p50", m.yardstick_ms},
      {"gb_per_s", m.gb_per_s},
      {"ratio", m.ratio},
      {"ratio_iqr", m.ratio_iqr},
      {"target", m.info.target},
      {"reached", m.info.error.empty() && m.reached()},
      {"error", m.info.error},
  };
  if (!options.device.empty()) line["device"] = options.device;
  add_machine(&line);
  return line.dump();
}

std::string table(const std::vector<Measurement>& all, const Options& options) {
  if (std::none_of(all.begin(), all.end(), [](const Measurement& m) { return m.timed(); }))
    return wire_table(all) + schedule_table(all) + figures_table(all);
  std::string text = fmt::format(
      "processor {}, {} thread(s), {}, {} clock\nratio = time / (share x yardstick), median of {} "
      "pairs "
      "after one warm-up pair\n\n"
      "{:<4}{:<17}{:<16}{:<12}{:>9}{:>9}{:>9}{:>9}{:>8}{:>8}{:>8}  {}\n",
      processor_name(), options.threads, simd_in_use(options.simd),
      options.cpu_clock ? "cpu" : "wall", options.pairs, "row", "benchmark", "variant", "yardstick",
      "n", "B/elem", "ours ms", "yard ms", "GB/s", "ratio", "target", "IQR, verdict");
  for (const Measurement& m : all) {
    if (!m.timed()) continue;
    if (!m.info.error.empty()) {
      text += fmt::format("{:<4}{:<17}{:<16}WRONG RESULT: {}\n", m.info.row, m.info.benchmark,
                          m.info.variant, m.info.error);
      continue;
    }
    text += fmt::format(
        "{:<4}{:<17}{:<16}{:<12}{:>9}{:>9.3f}{:>9.2f}{:>9.2f}{:>8.1f}{:>8.3f}{:>8.2f}  {:.1f} % "
        "{}\n",
        m.info.row, m.info.benchmark, m.info.variant, m.info.yardstick_name, m.info.n,
        m.info.bytes_per_element, m.ours_ms, m.yardstick_ms, m.gb_per_s, m.ratio, m.info.target,
        100 * m.ratio_iqr, verdict(m));
  }
  return text + wire_table(all) + schedule_table(all) + figures_table(all);
}

}  // namespace sotto::perf
