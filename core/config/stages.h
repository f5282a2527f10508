// The stages of a run: what an optimizer's updates send, as far as the configuration alone says.
// Each type of optimizer names its own in optimizers.def.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>

#include "core/config/config.h"

namespace sotto {

// How many of a run's updates are of each kind.
struct UpdateCounts {
  uint64_t full_precision = 0;
  uint64_t compressed = 0;  // gradients or momentum
  uint64_t sync = 0;        // compressed averages of local updates
  uint64_t local = 0;       // nothing is sent
  uint64_t total() const { return full_precision + compressed + sync + local; }
};

// What an update in full precision and a compressed one send, and the share of an inner step in the
// launches of outer steps, if it is known.
struct UpdateBytes {
  std::optional<uint64_t> full, compressed, share;
};

class Stages {
 public:
  virtual ~Stages() = default;
  // Updates in full precision before the first compressed one; UINT64_MAX: all of them.
  virtual uint64_t full_precision_updates(const Config& config) const = 0;
  // Among the first `updates`, at most 2^53. Here: full precision, then compression for good.
  virtual UpdateCounts count(const Config& config, uint64_t updates) const;
  // As a report shows them. updates: length of the run; 0: unknown.
  virtual nlohmann::json report(const Config& config, uint64_t updates,
                                const UpdateBytes& bytes) const = 0;
};

// All averages are alike: in full precision, or compressed with sotto.gradient_codec.
const Stages& one_stage();
// Full precision up to freeze_step, compressed behind it (1-bit Adam, 1-bit LAMB).
const Stages& freeze_stages();
// 0/1 Adam: until the variance is frozen, variance updates in full precision at growing intervals
// and compressed ones between them; then local steps between compressed synchronisations, at
// growing intervals too.
const Stages& interval_stages();
// Under outer steps, whatever the inner optimizer is: averages of every step, then local steps. A
// launch belongs to the step before it.
const Stages& outer_stages();

// Launches of a fragment, in full precision and with the codec.
struct OuterLaunches {
  uint64_t dense = 0, compressed = 0;
};
// Among the first `updates`.
OuterLaunches outer_launches(const OuterConfig& outer, uint64_t updates);

}  // namespace sotto
