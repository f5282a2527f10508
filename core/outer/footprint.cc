#include "core/outer/footprint.h"

#include <algorithm>
#include <utility>

#include "core/codec/compressed_state.h"

namespace sotto {
namespace {

Result<uint64_t> run_bytes(OuterPlan made, const LoweringTarget& target) {
  SOTTO_ASSIGN(const std::shared_ptr<const Plan> plan, lower(std::move(made.plan), target));
  return plan->arenas.scratch + plan->arenas.host;
}

// Kinds of launches that a fragment makes.
struct Launches {
  bool dense, coded;
  bool parameters;  // steps before outer steps begin
};

Launches launches_of(const OuterShape& shape) {
  const OuterConfig& c = *shape.config;
  const bool coded = shape.codes();
  return {.dense = !coded || c.dense_rounds > 0,
          .coded = coded,
          .parameters = c.schedule.synchronous_steps() > 0 && !c.schedule.averages_gradients()};
}

uint64_t array_bytes(const OuterShape& shape) {
  uint64_t sum = 0;
  for (size_t i = 0; i < kOuterArrays; ++i) {
    const auto which = static_cast<OuterArray>(i);
    if (which != OuterArray::kSwapped) sum += shape.bytes_of(which);
  }
  if (shape.codes())
    sum +=
        CompressedState::bytes_of(*shape.layout, *shape.config->codec, shape.keeps_launch_errors());
  return sum;
}

}  // namespace

Result<OuterAverage> outer_average(const OuterShape& shape, const LoweringTarget& target,
                                   bool compressed) {
  OuterPlan made = build_outer_reduction(shape, compressed);
  SOTTO_ASSIGN(const std::shared_ptr<const Plan> plan, lower(std::move(made.plan), target));
  OuterAverage out{.traffic = plan->traffic.total, .arenas = plan->arenas, .hops = 0};
  const auto has = [&plan](Stage stage) {
    return std::ranges::any_of(plan->steps, [stage](const Step& step) {
      return is_send(step) && step.message()->stage == stage;
    });
  };
  if (out.traffic.messages_sent != 0)
    out.hops = has(Stage::kScatter) && has(Stage::kGather) ? 2 : 1;
  return out;
}

Result<uint64_t> outer_state_bytes(const OuterShape& shape, const LoweringTarget& target,
                                   const OuterAverages& averages) {
  const OuterConfig& c = *shape.config;
  const Launches launches = launches_of(shape);
  uint64_t sum = array_bytes(shape);
  const auto add = [&](bool there, OuterPlan (*build)(const OuterShape&),
                       const OuterShape& of) -> Status {
    if (!there) return ok_status();
    SOTTO_ASSIGN(const uint64_t bytes, run_bytes(build(of), target));
    sum += bytes;
    return ok_status();
  };
  // An average may be launched while the one before it is on its way (FragmentPlans::get).
  const uint64_t runs = c.schedule.delay != 0 ? 2 : 1;
  const auto add_average = [&](bool there, const OuterAverage& average) {
    if (there) sum += runs * (average.arenas.scratch + average.arenas.host);
  };
  const auto update = [](const OuterShape& s) { return build_outer_update(s, false); };
  const auto coded_update = [](const OuterShape& s) { return build_outer_update(s, true, true); };
  const auto first_coded = [](const OuterShape& s) { return build_outer_update(s, false, true); };
  const auto hold = [](const OuterShape& s) {
    return build_outer_hold(s, s.codes() && s.config->dense_rounds == 0);
  };
  const bool holds = c.schedule.delay != 0 && c.schedule.delay == c.schedule.period;
  add_average(launches.dense || launches.parameters, averages.dense);
  add_average(launches.coded, averages.coded);
  SOTTO_TRY(add(true, build_outer_start, shape));
  SOTTO_TRY(add(c.penalty.kind == OuterPenalty::kGapInner, build_outer_inner_sum, shape));
  SOTTO_TRY(add(!shape.launches(), build_outer_launch, shape));
  // The average before the first one with a codec has an update of its own (FragmentOp).
  const bool dense_first = shape.keeps_sent() && launches.dense;
  SOTTO_TRY(add(launches.dense && !(dense_first && c.dense_rounds == 1), update, shape));
  SOTTO_TRY(add(dense_first, first_coded, shape));
  SOTTO_TRY(add(launches.coded, coded_update, shape));
  SOTTO_TRY(add(holds, hold, shape));
  if (!launches.parameters) return sum;
  const OuterConfig mean = outer_mean_of_parameters();
  OuterShape before = shape;
  before.config = &mean;
  SOTTO_TRY(add(true, build_outer_launch, before));
  SOTTO_TRY(add(true, update, before));
  return sum;
}

}  // namespace sotto
