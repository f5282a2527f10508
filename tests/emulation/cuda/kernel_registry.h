// How the fake CUDA runtime finds the code of a kernel: what can run a kernel on the CPU (the
// SIMT emulator) registers a binder for it.
//
// Threads: any.
#pragma once

#include <vector_types.h>

#include <cstddef>
#include <functional>

namespace sotto::fake_cuda {

struct LaunchShape {
  dim3 grid, block;
  size_t dynamic_smem = 0;  // bytes
};

// Runs the whole grid, on the thread of the launch's stream.
using Job = std::function<void()>;

// Called inside the launch: copies the arguments that `args` points to, as a launch does, and
// returns what runs the grid with them. `kernel` is the emulated kernel's address.
using Binder = Job (*)(const void* kernel, void** args, const LaunchShape& shape);

}  // namespace sotto::fake_cuda

extern "C" {
// A kernel whose launches name `kernel` itself: code that was compiled for the emulator.
void fake_cuda_register_kernel(const void* kernel, sotto::fake_cuda::Binder binder);
// A kernel whose launches name a host stub that nvcc made: found by the kernel's mangled name,
// which the stub's library has registered. `kernel` is what the binder is called with.
void fake_cuda_register_kernel_name(const char* mangled_name, const void* kernel,
                                    sotto::fake_cuda::Binder binder);
}
