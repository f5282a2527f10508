// How a benchmark is measured: the work under test and a yardstick with the same traffic alternate
// in one process, and the median of the pairwise ratios counts.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "core/cpu/cpu_device.h"

namespace sotto::perf {

struct Options {
  uint64_t n = 25'000'000;  // elements
  uint32_t pairs = 9;       // A B pairs after the warm-up pair, at least 7
  uint32_t threads = 1;
  SimdLevel simd = SimdLevel::kAuto;
  bool cpu_clock = false;   // processor time of the process instead of wall time: for machines that
                            // others use too
  std::string device = {};  // that the cases run on; empty: the processor
};

// One comparison. ours and yardstick do the whole work once per call.
struct Case {
  int row = 0;            // row of the table of targets
  std::string benchmark;  // codec_encode, ...
  std::string variant;    // W=4, large, ...
  std::string yardstick_name;
  std::string dtype = "fp32";  // of the input
  uint64_t n = 0;
  double bytes_per_element = 0;  // traffic of ours, each array once per read and once per write
  double share = 1;              // ratio = ours / (share * yardstick)
  double target = 0;             // ratio is to be at most this; 0: no target
  std::function<void()> ours;
  std::function<void()> yardstick;
  // In place of the two: run the work once and return its milliseconds, where they are not those of
  // the host.
  std::function<double()> ours_ms;
  std::function<double()> yardstick_ms;
  std::string error;  // not empty: the result was wrong and nothing was timed
};

// What a row of bytes has counted, all ranks together. The row is not timed: its ratio is
// (interface - framing) / (payload + headers). A row without a target (0) is there for the equality
// of its bytes alone: of a few bytes, flow control is a large part.
struct WireFigures {
  int32_t ranks = 0;
  uint32_t operations = 0;
  uint64_t payload_bytes = 0;  // by the counters; equal to plan and formula, or there is an error
  uint64_t header_bytes = 0;   // frame headers, trailers and metadata messages
  uint64_t service_bytes = 0;  // flow control and control connections
  uint64_t interface_bytes = 0;
  uint64_t interface_packets = 0;
  uint64_t framing_bytes = 0;    // IP and TCP headers of these packets
  uint64_t resent_segments = 0;  // by TCP: on the interface, but not in the formulas
  std::string skipped;           // why the interface was not read
};

// What a schedule of steps sends, all ranks together. The ratio is bits per parameter and step,
// divided by 2 (W-1) / W.
struct ScheduleFigures {
  int32_t ranks = 0;
  uint64_t variance = 0, compressed = 0, sync = 0, local = 0;  // steps of each kind
  uint64_t payload_bytes = 0;
  uint64_t header_bytes = 0;
};

// A number with a name, of a row that is neither times nor bytes.
struct Figure {
  std::string name;  // with its unit
  double value = 0;
  std::optional<double> most = {};  // the target
};

struct Measurement {
  Case info;
  uint32_t pairs = 0;
  double ours_ms = 0;       // median
  double yardstick_ms = 0;  // median
  double ours_p99_ms = 0;
  double ratio = 0;      // median of pairwise ratios
  double ratio_iqr = 0;  // interquartile range over median
  double gb_per_s = 0;   // of ours
  std::optional<WireFigures> wire;
  std::optional<ScheduleFigures> schedule;
  std::vector<Figure> figures;
  bool timed() const { return !wire && !schedule && figures.empty(); }

  // The median meets the target and the spread is below 10 %.
  bool reached() const { return ratio <= info.target && ratio_iqr < 0.10; }
};

Measurement measure(const Case& work, const Options& options);
// Measures unless the case carries an error.
void measure_into(const Case& work, const Options& options, std::vector<Measurement>* out);

// One JSON object per measurement and line, columns fixed; machine and build in every line.
std::string json_line(const Measurement& m, const Options& options);
// Everything as a table for people.
std::string table(const std::vector<Measurement>& all, const Options& options);

}  // namespace sotto::perf
