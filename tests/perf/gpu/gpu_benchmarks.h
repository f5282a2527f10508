// The benchmarks of CUDA devices: rows 29 and 30.
#pragma once

#include <memory>
#include <vector>

#include "tests/perf/gpu/gpu_work.h"

namespace sotto::perf {

using GpuBenchmark = void (*)(const std::shared_ptr<Device>& device, const Options& options,
                              std::vector<Measurement>* out);

void gpu_codec(const std::shared_ptr<Device>& device, const Options& options,
               std::vector<Measurement>* out);
void gpu_optim(const std::shared_ptr<Device>& device, const Options& options,
               std::vector<Measurement>* out);

// Does the work once and returns its milliseconds: for callers that let another library take turns.
using Turn = std::function<double()>;
using GpuTurn = Turn (*)(const std::shared_ptr<Device>& device, const Options& options);

// One rank's part of a 1-bit all-reduce among 4, by the device's clock.
Turn gpu_codec_turn(const std::shared_ptr<Device>& device, const Options& options);
// AdamW steps through the C API, by the host's clock, of one tensor or of a thousand small ones.
Turn gpu_large_step_turn(const std::shared_ptr<Device>& device, const Options& options);
Turn gpu_small_step_turn(const std::shared_ptr<Device>& device, const Options& options);

// "" or where an array of the device first differs from the processor's.
std::string device_difference(GpuWork& gpu, const char* what, const void* on_device,
                              const void* on_host, uint64_t bytes);

}  // namespace sotto::perf
