#include "core/cpu/simd_tables.h"

#include "core/cpu/simd_targets.h"

namespace sotto {

// Every file of vector kernels puts its own into a table, once per target (hence the namespaces,
// which are Highway's).
#define SOTTO_DECLARE_TARGET(target)             \
  namespace target {                             \
  void install_reduce(KernelTable& table);       \
  void install_onebit(KernelTable& table);       \
  void install_server(KernelTable& table);       \
  void install_quant(KernelTable& table);        \
  void install_adam(KernelTable& table);         \
  void install_onebit_lamb(KernelTable& table);  \
  void install_convert(KernelTable& table);      \
  void install_sgd(KernelTable& table);          \
  void install_zeroone(KernelTable& table);      \
  }                                              \
  namespace {                                    \
  [[maybe_unused]] KernelTable make_##target() { \
    KernelTable table = scalar_kernels();        \
    target::install_reduce(table);               \
    target::install_onebit(table);               \
    target::install_server(table);               \
    target::install_quant(table);                \
    target::install_adam(table);                 \
    target::install_onebit_lamb(table);          \
    target::install_convert(table);              \
    target::install_sgd(table);                  \
    target::install_zeroone(table);              \
    return table;                                \
  }                                              \
  }

#if HWY_TARGETS & HWY_SSE4
SOTTO_DECLARE_TARGET(N_SSE4)
#endif
#if HWY_TARGETS & HWY_AVX2
SOTTO_DECLARE_TARGET(N_AVX2)
#endif
#if HWY_TARGETS & HWY_AVX3
SOTTO_DECLARE_TARGET(N_AVX3)
#endif

const KernelTable* sse4_kernels() {
#if HWY_TARGETS & HWY_SSE4
  static const KernelTable table = make_N_SSE4();
  return &table;
#else
  return nullptr;
#endif
}

const KernelTable* avx2_kernels() {
#if HWY_TARGETS & HWY_AVX2
  static const KernelTable table = make_N_AVX2();
  return &table;
#else
  return nullptr;
#endif
}

const KernelTable* avx512_kernels() {
#if HWY_TARGETS & HWY_AVX3
  static const KernelTable table = make_N_AVX3();
  return &table;
#else
  return nullptr;
#endif
}

}  // namespace sotto
