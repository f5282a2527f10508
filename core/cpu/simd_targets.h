// Targets of the vector kernels: AVX-512 (AVX3), AVX2, SSE4. Included before anything of Highway.
#pragma once

// Processors that have it but not SSE4 are served by the scalar table.
#define HWY_DISABLED_TARGETS HWY_SSSE3

#include <hwy/detect_targets.h>
