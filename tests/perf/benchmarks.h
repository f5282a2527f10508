// The benchmarks: rows of the table of targets.
#pragma once

#include <vector>

#include "tests/perf/harness.h"

namespace sotto::perf {

// Each runs its cases and appends the measurements. Names as in names().
using Benchmark = void (*)(const Options& options, std::vector<Measurement>* out);

void codec_encode(const Options& options, std::vector<Measurement>* out);
void codec_decode(const Options& options, std::vector<Measurement>* out);
void codec_server(const Options& options, std::vector<Measurement>* out);
void codec_blocks(const Options& options, std::vector<Measurement>* out);
void codec_topk(const Options& options, std::vector<Measurement>* out);
void optim_adam(const Options& options, std::vector<Measurement>* out);
void optim_adam_low_precision(const Options& options, std::vector<Measurement>* out);
void optim_lamb(const Options& options, std::vector<Measurement>* out);
void optim_onebit_adam(const Options& options, std::vector<Measurement>* out);
void optim_onebit_lamb(const Options& options, std::vector<Measurement>* out);
void outer_step(const Options& options, std::vector<Measurement>* out);
void overheads(const Options& options, std::vector<Measurement>* out);

// These have sizes of their own and take none of the options. The first two count bytes.
void wire_bytes(const Options& options, std::vector<Measurement>* out);
void zeroone_bits(const Options& options, std::vector<Measurement>* out);
// This process is one rank of several, or has many as threads.
void scale(const Options& options, std::vector<Measurement>* out);

}  // namespace sotto::perf
