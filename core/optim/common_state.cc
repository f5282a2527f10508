// State of 0/1 Adam that any ranks may load, without a change of the optimizer's own.
#include <algorithm>
#include <cmath>

#include "core/iface/elements.h"
#include "core/optim/optimizer.h"

namespace sotto {
namespace {

// Means over ranks of host memory, in rank order. Collective.
Status average(Comm& comm, const std::vector<std::vector<float>*>& arrays) {
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

bool Optimizer::moved_since_synchronisation() const {
  return zeroone_.counters().frozen && stage_started_ &&
         std::any_of(lr_sums_.begin(), lr_sums_.end(), [](double s) { return s > 0; });
}

// What a synchronisation makes of the arrays, with a mean in full precision in place of the
// compressed one, so that error feedback has no part in it.
Status Optimizer::make_common(OptimSnapshot* s) {
  if (!moved_since_synchronisation()) return ok_status();
  SOTTO_ASSIGN(const std::vector<uint8_t> bits, valid_bits());
  const SmallVector<GroupScalars> scalars = scalars_of(Variant::kForcedSync);
  std::vector<float>& sums = s->local_sum;
  const auto den_of = [&](const ParamSpec& p, uint64_t i) {
    return std::sqrt(s->v[i]) + static_cast<float>(groups_[p.group].eps);
  };
  uint64_t first = 0;
  for (uint32_t t = 0; t < params_.size() && compat(); ++t) {
    const ParamSpec& p = params_[t];
    for (uint64_t i = first; i < first + p.count; ++i) {
      s->params[i] -= sums[i];  // replicas differ in it by rounding alone
      sums[i] *= den_of(p, i);
    }
    first += p.count;
  }
  std::vector<std::vector<float>*> averaged{&sums};
  if (compat()) averaged.push_back(&s->params);
  // A group whose rate is 0 keeps its momentum.
  if (std::any_of(lr_sums_.begin(), lr_sums_.end(), [](double sum) { return sum == 0; }))
    averaged.push_back(&s->m);
  SOTTO_TRY(average(*comm_, averaged));
  first = 0;
  for (uint32_t t = 0; t < params_.size(); ++t) {
    const ParamSpec& p = params_[t];
    const GroupScalars& group = scalars[p.group];
    for (const Piece& piece : layout_->tensor_pieces(t)) {
      for (uint64_t j = 0; j < piece.count; ++j) {
        const uint64_t i = first + piece.offset + j, f = piece.flat + j;
        float x = sums[i];
        if (compat()) {
          const bool masked = comm_->size() > 1 && p.mask != nullptr && p.mask[piece.offset + j] == 0;
          float none = 0;
          if (masked) x = 0;
          in_place_sync_element(group, x, &s->m[i], &none, den_of(p, i), &s->params[i]);
        } else {
          const bool masked = !bits.empty() && ((bits[f / 8] >> (7 - f % 8)) & 1u) == 0;
          local_sync_element(group, masked, x, &s->m[i], &sums[i], den_of(p, i), &s->anchor[i],
                             &s->params[i]);
        }
      }
    }
    first += p.count;
  }
  std::fill(sums.begin(), sums.end(), 0.0f);
  s->lr_sums.assign(groups_.size(), 0.0);
  s->anchor_decays.assign(groups_.size(), 1.0);
  return ok_status();
}

}  // namespace sotto
