#include "core/predict/rates.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "core/base/clock.h"
#include "core/engine/device_array.h"
#include "core/engine/launch.h"
#include "core/outer/plans.h"

namespace sotto {
namespace {

constexpr int kRepeats = 3;  // after one that is not counted

// A run of a plan whose bound slots have memory of their own.
class Sample {
 public:
  static Result<std::unique_ptr<Sample>> make(OuterPlan made, const LoweringTarget& target,
                                              const std::shared_ptr<Device>& device) {
    std::unique_ptr<Sample> sample(new Sample);
    SOTTO_ASSIGN(std::shared_ptr<const Plan> plan, lower(std::move(made.plan), target));
    SOTTO_ASSIGN(sample->plan_, PreparedPlan::make(std::move(plan), device));
    SOTTO_ASSIGN(sample->run_, sample->plan_->acquire());
    SOTTO_TRY(sample->bind(made, device));
    return sample;
  }
  ~Sample() {
    if (run_ != nullptr) plan_->give_back(std::move(run_));
  }
  Sample(const Sample&) = delete;
  Sample& operator=(const Sample&) = delete;

  // Kernels and copies, one after the other.
  Status run() const {
    for (const Step& step : plan_->plan().steps) {
      if (step.kernel() == nullptr && step.copy() == nullptr) continue;
      SOTTO_TRY(launch_step(*plan_, *run_, step, 0, false));
    }
    return ok_status();
  }

 private:
  Sample() = default;

  Status bind(const OuterPlan& made, const std::shared_ptr<Device>& device) {
    const std::vector<Slot>& slots = plan_->plan().slots;
    for (size_t s = 0; s < slots.size(); ++s) {
      if (slots[s].kind != SlotKind::kBound || slots[s].alias_of != kNoSlot) continue;
      SOTTO_ASSIGN(DeviceArray array, DeviceArray::make(device, slots[s].bytes));
      run_->bases[s] = array.data();
      memory_.push_back(std::move(array));
    }
    // Values of ordinary size, of both signs.
    const auto fill = [&](uint32_t slot, double size) {
      if (slot == kNoSlot) return;
      auto* const out = static_cast<float*>(run_->bases[slot]);
      uint32_t x = 1 + slot;
      for (uint64_t i = 0; i < slots[slot].bytes / 4; ++i) {
        x = x * 1664525u + 1013904223u;
        out[i] = static_cast<float>(size * (static_cast<double>(x) / 2147483648.0 - 1));
      }
    };
    fill(made.params, 0.1);
    fill(made.arrays[static_cast<size_t>(OuterArray::kAnchor)], 0.1);
    fill(made.arrays[static_cast<size_t>(OuterArray::kPayload)], 1e-3);
    fill(made.arrays[static_cast<size_t>(OuterArray::kResult)], 1e-3);
    tell(made);
    finish_binding(*run_);
    return ok_status();
  }

  // All ranks take part.
  void tell(const OuterPlan& made) {
    OuterMessage message{};
    message.delta_sum = message.weight = 1;
    message.version = kOuterMessageVersion;
    for (const OuterArray which : {OuterArray::kMessages, OuterArray::kMessage}) {
      const uint32_t slot = made.arrays[static_cast<size_t>(which)];
      if (slot == kNoSlot) continue;
      auto* const out = static_cast<std::byte*>(run_->bases[slot]);
      const uint64_t bytes = plan_->plan().slots[slot].bytes;
      for (uint64_t at = 0; at < bytes; at += sizeof message)
        std::memcpy(out + at, &message, sizeof message);
    }
    if (made.told != kNoSlot) std::memcpy(run_->bases[made.told], &message, sizeof message);
    const OuterInputs inputs{1, 10};
    if (made.inputs != kNoSlot) std::memcpy(run_->bases[made.inputs], &inputs, sizeof inputs);
  }

  std::shared_ptr<PreparedPlan> plan_;
  std::unique_ptr<Run> run_;
  std::vector<DeviceArray> memory_;
};

// The fastest of some runs: what else the machine does makes others longer.
Result<double> kernel_ns(OuterPlan made, const LoweringTarget& target,
                         const std::shared_ptr<Device>& device) {
  SOTTO_ASSIGN(const std::unique_ptr<Sample> sample, Sample::make(std::move(made), target, device));
  const Clock& clock = Clock::monotonic();
  int64_t best = std::numeric_limits<int64_t>::max();
  for (int i = 0; i <= kRepeats; ++i) {
    const int64_t start = clock.now_ns();
    SOTTO_TRY(sample->run());
    if (i > 0) best = std::min(best, clock.now_ns() - start);
  }
  return static_cast<double>(best);
}

}  // namespace

KernelRates::KernelRates(std::shared_ptr<Device> device, const PredictTarget& target,
                         uint64_t elements)
    : device_(std::move(device)), target_(target), elements_(elements) {}

Result<double> KernelRates::average(const OuterConfig& config, bool compressed) {
  if (target_.ranks() == 1) return 0.0;
  const CompressedLayout layout = outer_layout(config, {{elements_, 0}}, target_.ranks());
  OuterPlan made = build_outer_reduction(target_.shape(config, layout), compressed);
  SOTTO_ASSIGN(const double ns, kernel_ns(std::move(made), target_.target(), device_));
  return ns / static_cast<double>(elements_);
}

Result<double> KernelRates::boundary(const OuterConfig& config, bool compressed) {
  const CompressedLayout layout = outer_layout(config, {{elements_, 0}}, target_.ranks());
  const OuterShape shape = target_.shape(config, layout);
  double launch = 0;
  if (!shape.launches()) {
    SOTTO_ASSIGN(launch, kernel_ns(build_outer_launch(shape), target_.target(), device_));
  }
  SOTTO_ASSIGN(const double update,
               kernel_ns(build_outer_update(shape, compressed), target_.target(), device_));
  return (launch + update) / static_cast<double>(elements_);
}

}  // namespace sotto
