// The counterpart of Workload on a CUDA device: memory, data, kernel calls, times by events. What
// is written for one of them runs on the other.
#pragma once

#include <cuda_runtime_api.h>

#include <functional>
#include <initializer_list>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "tests/perf/workload.h"

namespace sotto::perf {

class GpuWork {
 public:
  explicit GpuWork(std::shared_ptr<Device> device);
  ~GpuWork();
  GpuWork(const GpuWork&) = delete;
  GpuWork& operator=(const GpuWork&) = delete;

  // As Workload's, in memory of the device.
  template <class T>
  T* zeros(uint64_t count) {
    return static_cast<T*>(allocate(count * sizeof(T)));
  }
  float* random(uint64_t count, uint64_t seed, float sigma = 1.0f);
  float* positive(uint64_t count, uint64_t seed, float sigma, float low);
  void* list_of(const std::vector<void*>& tensors);
  std::vector<std::vector<Piece>> pieces(uint64_t n, uint64_t chunk) const;
  void run(KernelId id, std::initializer_list<void*> operands, const void* args,
           const std::vector<std::vector<Piece>>& tables);
  void run(KernelId id, std::initializer_list<void*> operands, const void* args);
  // Prepared once: tables and arguments must stay what they are.
  void put(void* to, const void* from, uint64_t bytes);
  void get(void* to, const void* from, uint64_t bytes);

  // Queues a copy within the device: the yardstick.
  void copy(void* to, const void* from, uint64_t bytes);
  // Milliseconds that the device took for what `queue` has queued.
  double milliseconds(const std::function<void()>& queue);

 private:
  void* allocate(uint64_t bytes);
  float* tiled(const float* block, uint64_t block_count, uint64_t count);
  void run(KernelId id, std::initializer_list<void*> operands, const void* args,
           const std::vector<std::vector<Piece>>* tables);

  struct Prepared {
    std::shared_ptr<const CallTables> tables;
    std::vector<KernelCall> calls;
  };
  std::shared_ptr<Device> device_;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
  std::vector<std::pair<void*, uint64_t>> blocks_;
  std::map<std::pair<KernelId, const void*>, Prepared> prepared_;  // by tables, or arguments
};

// Ends the benchmark with the runtime's text.
void cuda_must(cudaError_t error, const char* what);

}  // namespace sotto::perf
