// The plans of 0/1 Adam's steps (specification 6.3, 6.4).
#pragma once

#include "core/optim/algorithms/zeroone_schedule.h"
#include "core/optim/step_plan.h"

namespace sotto {

// A step that is no variance step.
struct ZeroOneRequest {
  StepShape shape;
  ScaleKind scale = ScaleKind::kL2;
  ZeroOneUpdate kind = ZeroOneUpdate::kCompressed;  // not kVariance
  bool refresh_mask = false;                        // v has changed: the mask is made anew
  bool mask_zero_variance = false;                  // elements with v = 0 leave it
  bool begin = false;  // the variance is frozen from now on: den, anchor and an empty sum are made,
                       // error feedback starts again
  bool own_masks = false;  // "base_valid" is there; else every element is valid in it
  bool gradients = true;   // kSync: false: only what has been summed up
};
StepPlan build_zeroone_step(const ZeroOneRequest& request);

}  // namespace sotto
