// A step of a run becomes a call of its device.
#pragma once

#include "core/engine/run.h"

namespace sotto {

// Launches a kernel or a copy on a lane. `prepared`: the run's. `paired_ran`:
// KernelCall::paired_ran.
Status launch_step(const PreparedPlan& prepared, const Run& run, const Step& step, uint32_t lane,
                   bool paired_ran);

// PROTOCOL if a message that has arrived is not what its step expects.
Status check_message(const Run& run, uint32_t step);

}  // namespace sotto
