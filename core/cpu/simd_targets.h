// Targets of the vector kernels: AVX-512 (AVX3), AVX2, SSE4. Included before anything of Highway.
#pragma once

// Processors that have SSSE3 but not SSE4 are served by the scalar table. Sanitized builds have
// one target, since the others are the same source.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3)
#else
#define HWY_DISABLED_TARGETS HWY_SSSE3
#endif

#include <hwy/detect_targets.h>
