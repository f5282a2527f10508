// Memory, random data and kernel calls of the benchmarks, as the engine would make them: through
// the device, cut to its split size.
#pragma once

#include <cstring>
#include <initializer_list>
#include <memory>
#include <string>
#include <vector>

#include "core/cpu/cpu_device.h"
#include "core/kernels/pieces.h"
#include "tests/perf/harness.h"

namespace sotto::perf {

class Workload {
 public:
  explicit Workload(const Options& options, SimdLevel level);
  ~Workload();
  Workload(const Workload&) = delete;
  Workload& operator=(const Workload&) = delete;

  // Zeroed; lives as long as the workload. Throws std::bad_alloc.
  template <class T>
  T* zeros(uint64_t count) {
    return static_cast<T*>(allocate(count * sizeof(T)));
  }
  // Sums of uniform numbers, mean 0, standard deviation `sigma`; the same for the same seed.
  float* random(uint64_t count, uint64_t seed, float sigma = 1.0f);
  // |random| + low.
  float* positive(uint64_t count, uint64_t seed, float sigma, float low);
  uint8_t* random_bits(uint64_t bytes, uint64_t seed);
  // A list operand.
  void* list_of(std::vector<void*> tensors);

  // Pieces of one tensor of n elements in chunks of `chunk` elements, block and lane counted from
  // the tensor's start, cut for the device.
  std::vector<std::vector<Piece>> pieces(uint64_t n, uint64_t chunk) const;
  // The same for a device that splits calls at so many elements (0: not at all).
  static std::vector<std::vector<Piece>> pieces(uint64_t n, uint64_t chunk, uint64_t split);
  // Copies into the workload's memory.
  static void put(void* to, const void* from, uint64_t bytes) { std::memcpy(to, from, bytes); }

  uint64_t split_elements() const { return device_.caps().split_elements; }

  // Launches one call per table.
  void run(KernelId id, std::initializer_list<void*> operands, const void* args,
           const std::vector<std::vector<Piece>>& tables);
  // Kernels without pieces.
  void run(KernelId id, std::initializer_list<void*> operands, const void* args);

 private:
  void* allocate(uint64_t bytes);
  void launch(KernelId id, std::initializer_list<void*> operands, const void* args,
              std::span<const Piece> pieces);

  struct Block {
    void* memory;
    uint64_t bytes;
  };
  CpuDevice device_;
  std::vector<Block> blocks_;
  std::vector<std::unique_ptr<std::vector<void*>>> lists_;
};

// Calls f(first, count) for equal shares of 0 .. n on `options.threads` threads, as the yardsticks
// need it.
void in_shares(const Options& options, uint64_t n,
               const std::function<void(uint64_t, uint64_t)>& f);

// "" or where two arrays first differ in their bytes.
std::string difference(const char* what, const void* a, const void* b, uint64_t bytes);

}  // namespace sotto::perf
