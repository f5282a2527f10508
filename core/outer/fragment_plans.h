// The plans of a fragment's operations, each made when it is first needed.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "core/outer/context.h"
#include "core/outer/plans.h"

namespace sotto {

// Operations of a fragment.
enum class FragmentOp : uint8_t {
  kStart,
  kInner,
  kLaunch,
  kReduce,
  kReduceCoded,
  kUpdate,
  kUpdateCoded,
  kUpdateToCoded,  // the last one before averages have a codec, where what is sent is kept
  kHold,
  kHoldToCoded,
  kLastUpdate,  // of a flush, as the following
  kLastUpdateCoded,
  kLastHold,
  kAgree,
  kMeanLaunch,  // the mean of parameters
  kMeanUpdate,
  kSwap,
  kSwapBack,
  kCount
};

class FragmentPlans {
 public:
  struct Prepared {
    std::shared_ptr<PreparedPlan> plan;
    OuterPlan slots;  // without its plan
  };

  // tensors: numbers of parameters. The context lives longer.
  FragmentPlans(const OuterContext& context, const std::vector<uint32_t>& tensors);
  FragmentPlans(const FragmentPlans&) = delete;
  FragmentPlans& operator=(const FragmentPlans&) = delete;

  const CompressedLayout& layout() const { return layout_; }
  const OuterShape& shape() const { return shape_; }
  Result<const Prepared*> get(FragmentOp op);
  // Bytes held by runs that exist now.
  uint64_t held_bytes() const;

 private:
  OuterPlan build(FragmentOp op) const;

  const OuterContext& context_;
  const CompressedLayout layout_;
  const OuterConfig mean_config_;
  OuterShape shape_, last_shape_, mean_shape_;
  std::array<std::optional<Prepared>, static_cast<size_t>(FragmentOp::kCount)> plans_;
};

}  // namespace sotto
