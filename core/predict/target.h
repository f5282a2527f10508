// The device and the links that plans are made for where there is no comm: one transport reaches
// every peer, and matches messages by their keys.
#pragma once

#include <cstdint>

#include "core/iface/device.h"
#include "core/outer/plans.h"
#include "core/plan/plan.h"

namespace sotto {

class PredictTarget {
 public:
  // The device lives longer.
  PredictTarget(const Device& device, uint64_t ranks, const TransportCaps& transport)
      : ranks_(static_cast<int32_t>(ranks)), caps_(transport) {
    link_.transport = &caps_;
    target_.device = &device.caps();
    target_.links = {&link_, 1};
    target_.comm_size = ranks_;
  }
  PredictTarget(const PredictTarget&) = delete;
  PredictTarget& operator=(const PredictTarget&) = delete;

  uint32_t ranks() const { return static_cast<uint32_t>(ranks_); }
  const LoweringTarget& target() const { return target_; }
  // A fragment of rank 0. Both live longer.
  OuterShape shape(const OuterConfig& config, const CompressedLayout& layout) const {
    OuterShape s;
    s.size = ranks_;
    s.layout = &layout;
    s.config = &config;
    s.sizes = {caps_.segment_bytes, caps_.held};
    return s;
  }

 private:
  const int32_t ranks_;
  const TransportCaps caps_;
  LinkTarget link_;
  LoweringTarget target_;
};

}  // namespace sotto
