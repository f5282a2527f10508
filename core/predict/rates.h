// How fast a device is at what outer averages and steps compute: their plans' kernels are run on a
// sample, and messages are left out.
#pragma once

#include <cstdint>
#include <memory>

#include "core/config/outer.h"
#include "core/iface/device.h"
#include "core/predict/target.h"

namespace sotto {

// Nanoseconds per element.
class KernelRates {
 public:
  // A synchronous device; the target is its, and lives longer. elements: of the sample, >= 1.
  KernelRates(std::shared_ptr<Device> device, const PredictTarget& target, uint64_t elements);

  // What a rank computes for an average: its sums, or (compressed: with the settings' codec)
  // encoding, serving and decoding. 0 with one rank.
  Result<double> average(const OuterConfig& config, bool compressed);
  // Launch and update: what inner steps wait for in a boundary.
  Result<double> boundary(const OuterConfig& config, bool compressed);

 private:
  std::shared_ptr<Device> device_;
  const PredictTarget& target_;
  const uint64_t elements_;
};

}  // namespace sotto
