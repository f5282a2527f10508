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

// "" or where an array of the device first differs from the processor's.
std::string device_difference(GpuWork& gpu, const char* what, const void* on_device,
                              const void* on_host, uint64_t bytes);

}  // namespace sotto::perf
