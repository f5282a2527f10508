// State of 0/1 Adam that any ranks may load, without a change of the optimizer's own.
#include <algorithm>
#include <cmath>

#include "core/kernels/elements.h"
#include "core/optim/optimizer.h"

namespace sotto {
namespace {

// Means over ranks of host memory, in rank order. Collective.
Status average(Comm& comm, std::span<std::vector<float>* const> arrays) {
  if (comm.size() == 1) return ok_status();
  Call call;
  CollectiveRequest& request = call.request;
  request.kind = OpKind::kAllReduce;
  request.reduce = ReduceOp::kMean;
  request.rank = comm.rank();
  request.size = comm.size();
  for (std::vector<float>* array : arrays) {
    request.counts.push_back(array->size());
    request.dtypes.push_back(Dtype::kF32);
    request.in_place.push_back(1);
    call.in.push_back(array->data());
    call.out.push_back(array->data());
  }
  return comm.run(std::move(call));
}

}  // namespace

struct Optimizer::CommonRun {
  std::vector<float> params, m, anchor, sums, v;
};

bool Optimizer::moved_since_synchronisation() const {
  return zeroone_.counters().frozen && stage_started_ &&
         std::any_of(lr_sums_.begin(), lr_sums_.end(), [](double s) { return s > 0; });
}

// What a synchronisation makes of a run, with a mean in full precision in place of the compressed
// one, so that error feedback has no part in it.
Status Optimizer::common_run(const TensorRun& run, const GroupScalars& group,
                             const std::vector<uint8_t>& valid, CommonRun* out) {
  const ParamSpec& p = params_[run.tensor];
  CommonRun& o = *out;
  for (std::vector<float>* array : {&o.params, &o.m, &o.anchor, &o.sums, &o.v})
    array->assign(run.count, 0.0f);
  const auto read_flat = [&](const DeviceArray& array, std::vector<float>* values) {
    return read_state(access_, {StateType::kF32, false, array.data(), nullptr}, run,
                      values->data());
  };
  SOTTO_TRY(access_.copy_and_wait(o.params.data(), p.param + run.at, run.count * sizeof(float)));
  SOTTO_TRY(read_flat(memory_.m, &o.m));
  SOTTO_TRY(read_flat(memory_.v, &o.v));
  SOTTO_TRY(read_flat(memory_.local_sum, &o.sums));
  if (!compat()) SOTTO_TRY(read_flat(memory_.anchor, &o.anchor));
  // A synchronisation leaves frozen parameters as they are, on all ranks.
  if (run.tensor < frozen_.size() && frozen_[run.tensor] != 0) {
    read_aside(run, o.m.data());
    return ok_status();
  }
  std::vector<float> den(run.count);
  for (uint64_t i = 0; i < run.count; ++i) {
    den[i] = std::sqrt(o.v[i]) + static_cast<float>(groups_[p.group].eps);
    if (!compat()) continue;
    o.params[i] -= o.sums[i];  // replicas differ in it by rounding alone
    o.sums[i] *= den[i];
  }
  // A group whose rate was 0 keeps its momentum.
  std::vector<float>* averaged[] = {&o.sums, compat() ? &o.params : &o.m, &o.m};
  const bool with_m = group.lr_sum == 0;
  SOTTO_TRY(average(*comm_, std::span(averaged).first(1u + (compat() ? 1 : 0) + (with_m ? 1 : 0))));
  return run.each_part([&](const Piece&, uint64_t flat, uint64_t at, uint64_t n) {
    for (uint64_t i = at; i < at + n; ++i) {
      const uint64_t f = flat + (i - at);
      if (compat()) {
        const bool masked = comm_->size() > 1 && p.mask != nullptr && p.mask[run.at + i] == 0;
        float none = 0;
        zeroone_in_place_sync_element(group, masked ? 0.0f : o.sums[i], &o.m[i], &none, den[i],
                                      &o.params[i]);
      } else {
        const bool masked = !valid.empty() && ((valid[f / 8] >> (7 - f % 8)) & 1u) == 0;
        zeroone_sync_element(group, masked, o.sums[i], &o.m[i], &o.sums[i], den[i], &o.anchor[i],
                             &o.params[i]);
      }
    }
    return ok_status();
  });
}

Status Optimizer::stream_common(StatePart part, const FloatSink& sink) {
  SOTTO_ASSIGN(const std::vector<uint8_t> valid, valid_bits());
  const SmallVector<GroupScalars> scalars = scalars_of(Variant::kForcedSync);
  CommonRun common;
  return for_each_run(*layout_, false, [&](const TensorRun& run) -> Status {
    SOTTO_TRY(common_run(run, scalars[params_[run.tensor].group], valid, &common));
    if (part == StatePart::kLocalSum) std::fill(common.sums.begin(), common.sums.end(), 0.0f);
    const std::vector<float>& values = part == StatePart::kParams   ? common.params
                                       : part == StatePart::kM      ? common.m
                                       : part == StatePart::kAnchor ? common.anchor
                                                                    : common.sums;
    return sink(values);
  });
}

}  // namespace sotto
