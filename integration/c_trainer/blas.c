#include "blas.h"

#include <stdlib.h>
#include <strings.h>
#include <unistd.h>

/* Weak: null with a BLAS that does not have them. */
extern char* openblas_get_corename(void) __attribute__((weak));
extern void openblas_set_num_threads(int n) __attribute__((weak));

const char* blas_kernels(void) {
  return openblas_get_corename ? openblas_get_corename() : "unknown";
}

#if defined(__x86_64__)
static int kernels_are_too_old(void) {
  static const char* const kWithAvx2[] = {"Haswell",        "Zen",      "SkylakeX", "Cooperlake",
                                          "Sapphirerapids", "Excavator"};
  for (size_t i = 0; i < sizeof kWithAvx2 / sizeof kWithAvx2[0]; ++i) {
    if (strcasecmp(blas_kernels(), kWithAvx2[i]) == 0) return 0;
  }
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}
#else
static int kernels_are_too_old(void) { return 0; }
#endif

void blas_prepare(char** argv) {
  if (openblas_get_corename && !getenv("OPENBLAS_CORETYPE") && kernels_are_too_old()) {
    setenv("OPENBLAS_CORETYPE", "Haswell", 1);
    setenv("OPENBLAS_NUM_THREADS", "1", 1);
    execv("/proc/self/exe", argv);
    unsetenv("OPENBLAS_CORETYPE"); /* could not start again: go on, slowly */
  }
  if (openblas_set_num_threads) openblas_set_num_threads(1);
}
