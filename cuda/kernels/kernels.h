// The kernels of core/kernels for CUDA devices. A call is prepared once, on the host:
// everything about it that does not change from run to run (pieces, what each thread block does,
// ranges, arguments) becomes one block of bytes, which the device object uploads and keeps. A
// launch then allocates nothing, copies nothing and waits for nothing, so it can be captured in a
// graph.
//
// Operands, arithmetic and results are those of the contracts there, bit for bit.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/kernels/call.h"

namespace sotto::cuda {

inline constexpr size_t kMaxOperands = 15;
inline constexpr size_t kMaxArgBytes = 128;
// What a device copy of `tables` has to be aligned to.
inline constexpr size_t kTableAlignment = 16;

// A call without its operands and its predicate, as prepare() (prepare.h) makes it. A value: it may
// be copied and moved.
struct PreparedKernel {
  KernelId id = KernelId::kFill;
  uint32_t blocks = 0;        // thread blocks of the launch; 0: there is nothing to do
  uint32_t operands = 0;      // how many operands the call has
  uint32_t lists = 0;         // bit k: operand k is a list
  uint32_t list_tensors = 0;  // pointers that each list has: 1 + the largest tensor index
  uint64_t bytes = 0;         // kFill

  // Constant tables, relocatable: `offsets` are from their first byte. May be empty. A launch does
  // not look at them, so they may be given back when the device has a copy.
  std::vector<std::byte> tables;
  // Where the tables of the launch begin.
  struct Offsets {
    uint64_t pieces = 0, runs = 0, work = 0, ranges = 0, sections = 0;
  } offsets;
  alignas(8) std::byte args[kMaxArgBytes] = {};
};

// Operands of one launch, in the order of their description: device addresses. A list is a device
// array of list_tensors device addresses. Optional operands may be null.
struct Operands {
  void* data[kMaxOperands] = {};
};

// What may change from launch to launch beside the operands.
struct Condition {
  const uint32_t* predicate = nullptr;  // read on the device when the kernel is reached
  uint32_t expect = 0;
  bool paired_ran = false;  // undo kernels
};

// Queues the kernel. tables: the device copy of prepared.tables (null if they are empty). The
// bits that kFreezeVariance clears lie in memory that is whole 4-byte words. Returns what the
// launch returned; nothing was queued if it is not cudaSuccess.
cudaError_t launch_prepared(cudaStream_t stream, const PreparedKernel& prepared, const void* tables,
                            const Operands& operands, const Condition& condition);

// Copies bytes that the device can read to where it can write (pinned host memory too), if the
// predicate holds. The ranges do not overlap.
cudaError_t launch_copy(cudaStream_t stream, void* dst, const void* src, uint64_t bytes,
                        const Condition& condition);

// Adds 1 to a word that the host reads: it then sees what was queued before, and what it wrote
// before it saw the word as it was is seen by what is queued behind.
cudaError_t launch_count_up(cudaStream_t stream, uint32_t* word);

}  // namespace sotto::cuda
