// Which kind of update 0/1 Adam makes at which step (specification 6.3, 6.4). Depends on counters
// alone, so all ranks agree without a message.
#pragma once

#include <cstdint>

#include "core/config/config.h"

namespace sotto {

enum class ZeroOneUpdate : uint8_t {
  kVariance,    // gradient averaged in full precision, variance updated
  kCompressed,  // gradient averaged in 1 bit
  kLocal,       // frozen variance, nothing is averaged
  kSync,        // frozen variance, sum of local updates averaged in 1 bit
};

struct ZeroOneCounters {
  uint64_t var_interval = 1;
  uint64_t var_counter = 0;
  uint64_t local_interval = 1;
  uint64_t local_counter = 0;
  bool frozen = false;
  bool operator==(const ZeroOneCounters&) const = default;
};

class ZeroOneSchedule {
 public:
  explicit ZeroOneSchedule(const IntervalParams& params)
      : var_freeze_step_(params.var_freeze_step),
        var_update_scaler_(params.var_update_scaler),
        local_step_scaler_(params.local_step_scaler),
        local_step_clipper_(params.local_step_clipper) {}

  // Kind of the update with state step t. `moved`: the sum of learning rates since the last
  // synchronisation, this step's included, is above 0; a synchronisation without is left out.
  ZeroOneUpdate kind(uint64_t t, bool moved) const;
  // The update with state step t is done. True if the variance is frozen from now on and was not.
  bool advance(uint64_t t);

  const ZeroOneCounters& counters() const { return counters_; }
  // INVALID_ARGUMENT if the counters cannot have come from such a schedule, or, whatever its
  // numbers were, not within `updates` updates that ended with state step `t`.
  Status restore(const ZeroOneCounters& counters, uint64_t updates, uint64_t t);

 private:
  uint64_t var_freeze_step_, var_update_scaler_, local_step_scaler_, local_step_clipper_;
  ZeroOneCounters counters_;
};

}  // namespace sotto
