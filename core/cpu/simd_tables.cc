#include "core/cpu/simd_tables.h"

#include <simd_files.h>
#include "core/cpu/simd_targets.h"

namespace sotto {

// Every file of vector kernels puts its own into a table (install_<name> in simd_<name>.cc), once
// per target; hence the namespaces, which are Highway's.
#define SOTTO_DECLARE_INSTALL(name) void install_##name(KernelTable& table);
#define SOTTO_INSTALL(name) install_##name(table);
#define SOTTO_DECLARE_TARGET(target)           \
  namespace target {                           \
  SOTTO_SIMD_FILES(SOTTO_DECLARE_INSTALL)      \
  [[maybe_unused]] static KernelTable make() { \
    KernelTable table = scalar_kernels();      \
    SOTTO_SIMD_FILES(SOTTO_INSTALL)            \
    return table;                              \
  }                                            \
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
  static const KernelTable table = N_SSE4::make();
  return &table;
#else
  return nullptr;
#endif
}

const KernelTable* avx2_kernels() {
#if HWY_TARGETS & HWY_AVX2
  static const KernelTable table = N_AVX2::make();
  return &table;
#else
  return nullptr;
#endif
}

const KernelTable* avx512_kernels() {
#if HWY_TARGETS & HWY_AVX3
  static const KernelTable table = N_AVX3::make();
  return &table;
#else
  return nullptr;
#endif
}

}  // namespace sotto
