#include "tests/support/kernel_targets.h"

#include "core/cpu/cpu_device.h"

namespace sotto::test {

std::vector<KernelTarget> kernel_targets() {
  std::vector<KernelTarget> made;
  const std::vector<std::string> levels = simd_levels_available();
  for (const std::string& level : levels) {
    const SimdLevel limit = *simd_level_from_name(level);
    made.push_back({level, make_cpu_device(1, limit).take(), {0, kNormBlock}, {}});
    // Threads share pieces in one way for all levels; the first and the last show it.
    if (level == levels.front() || level == levels.back()) {
      made.push_back({level + ", 3 threads", make_cpu_device(3, limit).take(), {0}, {}});
    }
  }
  return made;
}

uint64_t kernel_layout_limit() { return 0; }

}  // namespace sotto::test
