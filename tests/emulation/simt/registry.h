// How a launch by function pointer comes to run an emulated kernel: the launch function of the
// project registers what it launches with the fake CUDA runtime
// (tests/emulation/cuda/kernel_registry.h). For a library that nvcc has built the emulated kernels
// are registered by mangled name.
#pragma once

#include <tuple>
#include <type_traits>
#include <utility>

#include "tests/emulation/cuda/kernel_registry.h"
#include "tests/emulation/simt/simt.h"

namespace simt {

using sotto::fake_cuda::Job;
using sotto::fake_cuda::LaunchShape;

// args: one pointer per parameter, as in cudaLaunchKernelExC; what they point to is copied.
template <class... P>
Job bind_kernel(const void* function, void** args, const LaunchShape& shape) {
  const auto kernel = reinterpret_cast<void (*)(P...)>(const_cast<void*>(function));
  const Grid grid{shape.grid, shape.block, shape.dynamic_smem};
  return [&]<size_t... I>(std::index_sequence<I...>) {
    std::tuple<P...> copies{*static_cast<std::remove_cv_t<P>*>(args[I])...};
    return Job([=] { run_grid(grid, function, [&] { std::apply(kernel, copies); }); });
  }
  (std::index_sequence_for<P...>{});
}

template <class... P>
void register_kernel(void (*kernel)(P...)) {
  fake_cuda_register_kernel(reinterpret_cast<const void*>(kernel), &bind_kernel<P...>);
}
template <class... P>
void register_kernel_name(const char* mangled, void (*kernel)(P...)) {
  fake_cuda_register_kernel_name(mangled, reinterpret_cast<const void*>(kernel),
                                 &bind_kernel<P...>);
}

}  // namespace simt
