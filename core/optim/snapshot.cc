#include "core/optim/snapshot.h"

namespace sotto {

std::vector<float>* OptimSnapshot::part(StatePart which) {
  switch (which) {
    case StatePart::kParams: return &params;
    case StatePart::kM: return &m;
    case StatePart::kV: return &v;
    case StatePart::kVf: return &vf;
    case StatePart::kPaddingM: return &padding_m;
    case StatePart::kLocalSum: return &local_sum;
    case StatePart::kAnchor: return &anchor;
    case StatePart::kWorkerError: return residual ? &residual->worker : nullptr;
    case StatePart::kServerError: return residual ? &residual->server : nullptr;
    case StatePart::kMeanWorkerError: return mean ? &mean->worker : nullptr;
    case StatePart::kMeanServerError: return mean ? &mean->server : nullptr;
  }
  return nullptr;
}

Status check_size(const char* what, uint64_t values, uint64_t want) {
  if (values == want) return ok_status();
  return invalid_argument("the state has {} values of {}, this optimizer {}", values, what, want);
}

}  // namespace sotto
