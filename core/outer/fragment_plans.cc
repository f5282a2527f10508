#include "core/outer/fragment_plans.h"

#include <utility>

namespace sotto {
namespace {

std::vector<LayoutTensor> tensors_of(const ParameterSet& parameters,
                                     const std::vector<uint32_t>& tensors) {
  std::vector<LayoutTensor> out;
  for (const uint32_t t : tensors) out.push_back({parameters[t].count, 0});
  return out;
}

}  // namespace

FragmentPlans::FragmentPlans(const OuterContext& context, const std::vector<uint32_t>& tensors)
    : context_(context),
      layout_(outer_layout(context.config, tensors_of(*context.parameters, tensors),
                           context.levels.servers(), context.levels.shards())),
      mean_config_(outer_mean_of_parameters()) {
  const Comm& comm = *context_.comm;
  shape_.rank = comm.rank();
  shape_.size = comm.size();
  shape_.layout = &layout_;
  shape_.config = &context_.config;
  shape_.levels = context_.levels.two();
  shape_.sizes = comm.sizes();
  if (context_.shards != nullptr) shape_.shards = context_.sizes.at(tensors.front());
  for (uint32_t i = 0; i < tensors.size(); ++i) {
    const ParamSpec& p = (*context_.parameters)[tensors[i]];
    if (p.copy == nullptr) continue;
    shape_.copies.tensors.push_back(i);
    shape_.copies.type = p.copy_dtype;
  }
  mean_shape_ = last_shape_ = shape_;
  last_shape_.last = true;
  mean_shape_.config = &mean_config_;
}

OuterPlan FragmentPlans::build(FragmentOp op) const {
  switch (op) {
    case FragmentOp::kStart: return build_outer_start(shape_);
    case FragmentOp::kInner: return build_outer_inner_sum(shape_);
    case FragmentOp::kLaunch: return build_outer_launch(shape_);
    case FragmentOp::kReduce: return build_outer_reduction(shape_, false);
    case FragmentOp::kReduceCoded: return build_outer_reduction(shape_, true);
    case FragmentOp::kUpdate: return build_outer_update(shape_, false);
    case FragmentOp::kUpdateCoded: return build_outer_update(shape_, true, true);
    case FragmentOp::kUpdateToCoded: return build_outer_update(shape_, false, true);
    case FragmentOp::kHold: return build_outer_hold(shape_);
    case FragmentOp::kHoldToCoded: return build_outer_hold(shape_, true);
    case FragmentOp::kLastUpdate: return build_outer_update(last_shape_, false);
    case FragmentOp::kLastUpdateCoded: return build_outer_update(last_shape_, true);
    case FragmentOp::kLastHold: return build_outer_hold(last_shape_);
    case FragmentOp::kAgree: return build_outer_agreement(shape_);
    case FragmentOp::kMeanLaunch: return build_outer_launch(mean_shape_);
    case FragmentOp::kMeanUpdate: return build_outer_update(mean_shape_, false);
    case FragmentOp::kSwap: return build_outer_swap(shape_, false);
    case FragmentOp::kSwapBack: return build_outer_swap(shape_, true);
    case FragmentOp::kCount: break;
  }
  return {};
}

Result<const FragmentPlans::Prepared*> FragmentPlans::get(FragmentOp op) {
  std::optional<Prepared>& known = plans_[static_cast<size_t>(op)];
  if (known) return &*known;
  OuterPlan made = build(op);
  Comm& comm = made.over_shards ? *context_.shards : *context_.comm;
  SOTTO_ASSIGN(std::shared_ptr<PreparedPlan> plan,
               comm.prepare(std::move(made.plan), context_.access.device()));
  // An average may be launched while the one before it is still on its way. So that memory does not
  // depend on when it ends, there are runs for both from the start.
  const bool reduces = op == FragmentOp::kReduce || op == FragmentOp::kReduceCoded;
  if (reduces && context_.config.schedule.delay != 0) {
    SOTTO_ASSIGN(std::unique_ptr<Run> first, plan->acquire());
    SOTTO_ASSIGN(std::unique_ptr<Run> second, plan->acquire());
    plan->give_back(std::move(first));
    plan->give_back(std::move(second));
  }
  known.emplace(Prepared{std::move(plan), std::move(made)});
  return &*known;
}

uint64_t FragmentPlans::held_bytes() const {
  uint64_t bytes = 0;
  for (const std::optional<Prepared>& p : plans_) bytes += p ? p->plan->held_bytes() : 0;
  return bytes;
}

}  // namespace sotto
