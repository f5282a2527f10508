// A test tool: runs CUDA kernels, compiled as plain C++ (shim.h), on the CPU. One fiber per CUDA
// thread; one OS thread runs one block at a time, to its end. What a kernel may not do ends the
// process with a message that begins with "simt:" and names block, thread, file and line:
//  - threads of one block that wait at different barriers, or some at a barrier and others for a
//    warp, so that none can go on
//  - a warp collective whose mask lacks the calling lane, or that lanes of its mask meet with
//    another mask or another collective; a shuffle of a width that is not a power of two up to 32
// A lane that a shuffle may not read gives 0xdeadbeef. Shared memory is full of 0xff when a block
// starts. Static __shared__ variables are thread-local storage: the shared object with the kernels
// must have no other. Memory outside the arrays is for guard pages or AddressSanitizer to find,
// vectors that are not aligned for -fsanitize=alignment, and missing barriers for ThreadSanitizer
// (a wrong result shows them too).
//
// Not emulated: PTX, CUB, textures, clusters, grid barriers, kernels that wait for another block,
// __activemask, and anything about speed. Memory is sequentially consistent: a missing fence is not
// found.
#pragma once

#include <vector_types.h>

#include <cstddef>
#include <cstdint>
#include <functional>

#define SIMT_API __attribute__((visibility("default")))

// Variables, since macros of these names would meet cudaLaunchConfig_t::gridDim.
extern constinit thread_local SIMT_API uint3 threadIdx, blockIdx;
extern constinit thread_local SIMT_API dim3 blockDim, gridDim;

namespace simt {

// Of this process; may change while no kernel runs.
struct Options {
  uint32_t seed = 0;     // 0: natural order; else blocks, warps and lanes in a random one
  uint32_t workers = 1;  // OS threads that a grid's blocks are shared by
};
SIMT_API Options& options();

// std::source_location is missing from clang 14 with libstdc++ 12.
struct Location {
  const char* file;
  int line;
  static constexpr Location current(const char* file = __builtin_FILE(),
                                    int line = __builtin_LINE()) {
    return {file, line};
  }
};

struct Grid {
  dim3 blocks, threads;
  size_t dynamic_shared = 0;  // bytes
};
// What CUDA refuses: empty or too large grids and blocks, more than 227 KiB of dynamic shared
// memory.
SIMT_API bool valid_grid(const Grid& grid);
// Runs body once per thread. code: any address in the shared object with the kernel.
SIMT_API void run_grid(const Grid& grid, const void* code, const std::function<void()>& body);
// Warp collectives that threads have come to, in all grids so far.
SIMT_API uint64_t collectives();
// Whether the calling code is a kernel.
SIMT_API bool in_kernel();

// What shim.h's intrinsics call.
enum class Collective : uint8_t { kBallot, kShuffle, kSync };
enum class BarrierResult : uint8_t { kNone, kCount, kAnd, kOr };
SIMT_API int block_barrier(BarrierResult kind, bool predicate, const Location& at);
// value: what the lane brings. Returns the ballot, or the value of lane `source`.
SIMT_API uint64_t warp_collective(Collective kind, uint32_t mask, uint64_t value, uint32_t source,
                                  const Location& at);
SIMT_API uint32_t lane_index();
SIMT_API void* dynamic_shared();
[[noreturn]] SIMT_API void misuse(const char* what, const Location& at);

}  // namespace simt
