// Which kernel table runs: what the build has, what the processor has, what the caller allows.
#include <hwy/targets.h>

#include <algorithm>
#include <array>

#include "core/cpu/cpu_device.h"
#include "core/cpu/simd_tables.h"

namespace sotto {
namespace {

constexpr std::array<std::string_view, 5> kNames = {"auto", "scalar", "sse4", "avx2", "avx512"};
constexpr std::array<SimdLevel, 4> kDescending = {SimdLevel::kAvx512, SimdLevel::kAvx2,
                                                  SimdLevel::kSse4, SimdLevel::kScalar};

std::string name_of(SimdLevel level) { return std::string(kNames[static_cast<size_t>(level)]); }

// nullptr: not in this build.
const KernelTable* table_of(SimdLevel level) {
  switch (level) {
    case SimdLevel::kAuto:
    case SimdLevel::kScalar: return &scalar_kernels();
    case SimdLevel::kSse4: return sse4_kernels();
    case SimdLevel::kAvx2: return avx2_kernels();
    case SimdLevel::kAvx512: return avx512_kernels();
  }
  return nullptr;
}

bool processor_has(SimdLevel level) {
  const int64_t targets = hwy::SupportedTargets();
  switch (level) {
    case SimdLevel::kAuto:
    case SimdLevel::kScalar: return true;
    case SimdLevel::kSse4: return (targets & HWY_SSE4) != 0;
    case SimdLevel::kAvx2: return (targets & HWY_AVX2) != 0;
    case SimdLevel::kAvx512: return (targets & HWY_AVX3) != 0;
  }
  return false;
}

}  // namespace

Result<SimdLevel> simd_level_from_name(std::string_view name) {
  const auto found = std::find(kNames.begin(), kNames.end(), name);
  if (found == kNames.end()) {
    return invalid_argument("SIMD level '{}': auto, scalar, sse4, avx2 or avx512 expected", name);
  }
  return static_cast<SimdLevel>(found - kNames.begin());
}

SimdLevel simd_level_in_use(SimdLevel limit) {
  for (const SimdLevel level : kDescending) {
    if (limit != SimdLevel::kAuto && level > limit) continue;
    if (processor_has(level) && table_of(level) != nullptr) return level;
  }
  return SimdLevel::kScalar;
}

std::string simd_in_use(SimdLevel limit) { return name_of(simd_level_in_use(limit)); }

std::vector<std::string> simd_levels_available() {
  std::vector<std::string> names;
  for (auto level = kDescending.rbegin(); level != kDescending.rend(); ++level) {
    if (simd_level_in_use(*level) == *level) names.push_back(name_of(*level));
  }
  return names;
}

const KernelTable& kernels_of(SimdLevel level) { return *table_of(level); }

}  // namespace sotto
