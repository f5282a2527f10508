// How a launch by function pointer finds the emulated kernel and its parameter types. The launch
// function of the project registers what it launches; a plugin for a library that nvcc has built
// registers by mangled name.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <functional>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>

#include "tests/support/simt/simt.h"

namespace simt {

// A kernel with its arguments, copied: may run later, on another thread.
using Body = std::function<void()>;
// args: one pointer per parameter, as in cudaLaunchKernelExC.
using Binder = Body (*)(const void* function, void** args);

struct Kernel {
  const void* function = nullptr;  // the emulated one
  Binder bind = nullptr;
};

SIMT_API void register_kernel(const void* function, Binder bind);
SIMT_API void register_kernel_name(std::string_view mangled, const void* function, Binder bind);
// function null in the result: not registered.
SIMT_API Kernel find_kernel(const void* function);
SIMT_API Kernel find_kernel_name(std::string_view mangled);

template <class... P>
Body bind_arguments(const void* function, void** args) {
  const auto kernel = reinterpret_cast<void (*)(P...)>(const_cast<void*>(function));
  return [&]<size_t... I>(std::index_sequence<I...>) {
    std::tuple<P...> copies{*static_cast<std::remove_cv_t<P>*>(args[I])...};
    return Body([kernel, copies] { std::apply(kernel, copies); });
  }
  (std::index_sequence_for<P...>{});
}

template <class... P>
void register_kernel(void (*kernel)(P...)) {
  register_kernel(reinterpret_cast<const void*>(kernel), &bind_arguments<P...>);
}
template <class... P>
void register_kernel_name(std::string_view mangled, void (*kernel)(P...)) {
  register_kernel_name(mangled, reinterpret_cast<const void*>(kernel), &bind_arguments<P...>);
}

}  // namespace simt
