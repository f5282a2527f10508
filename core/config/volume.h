// What a configuration costs: updates of each kind, bytes on the wire, bytes of memory; closed
// formulas, nothing is built or run.
#pragma once

#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

#include "core/config/stages.h"

namespace sotto {

// Bytes that one rank sends to average n elements in full precision: 2 (W-1)/W n, rounded up.
uint64_t full_precision_bytes(uint64_t n, uint64_t w, uint64_t element_bytes);

// One compressed all-reduce of n elements over w ranks, as if they were one tensor.
struct CompressedSizes {
  uint64_t flat = 0;     // N: elements with padding
  uint64_t chunk = 0;    // K = N / w
  uint64_t payload = 0;  // bytes that one rank sends, scales of 1 bit apart
};
CompressedSizes compressed_sizes(const CodecSettings& codec, uint64_t n, uint64_t w);

// Whether bytes depend on how many ranks share a host, which a file does not say.
inline bool depends_on_hosts(Hierarchy hierarchy, uint64_t world) {
  return hierarchy != Hierarchy::kFlat && world != 1;
}

// Bytes of one element of a gradient as the training program holds it, and as a full-precision
// average sends it.
uint64_t gradient_bytes(const Config& config);
uint64_t communication_bytes(const Config& config);

// What one launch of a fragment sends, and all launches of a period; fragments that are cut as the
// parameters come count as equal ones. Nothing: lists whose sizes are not known.
struct OuterBytes {
  std::optional<uint64_t> dense_launch, launch, period;
};
OuterBytes outer_bytes(const OuterConfig& outer, uint64_t n, uint64_t w);

// Those of the type, or of outer steps.
const Stages& stages_of(const Config& config);

// updates: length of the run, at most 2^53.
UpdateCounts count_updates(const Config& config, uint64_t updates);

// Windows of a full-precision average, and what messages are cut into: as in iface/transport.h.
inline constexpr uint64_t kHeldWindowBytes = 12 << 20, kHeldWindows = 4;
inline constexpr uint64_t kWindowUnitBytes = 256 * 1024;

// Bytes on one rank; 0: not there.
struct MemoryBytes {
  uint64_t parameters = 0;  // fp32, of the training program, as the following two
  uint64_t model_copy = 0;  // 16-bit
  uint64_t gradients = 0;
  uint64_t m = 0;
  uint64_t v = 0;
  uint64_t residuals = 0;
  uint64_t bits = 0;     // packed signs that stay: of the momentum, and of valid elements
  uint64_t scratch = 0;  // of the step that needs most
  // OptimizerType::late_arrays, with their names.
  std::vector<std::pair<std::string_view, uint64_t>> arrays;
  // What the library holds.
  uint64_t state() const;
};
// world >= 1.
MemoryBytes memory_bytes(const Config& config, uint64_t world, uint64_t n_params);

}  // namespace sotto
