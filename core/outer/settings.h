// What ranks, and a state and its restore, must have alike.
#pragma once

#include <string>

#include "core/config/outer.h"
#include "core/optim/parameter_set.h"

namespace sotto {

// Whether inner learning rates take part in a boundary.
inline bool uses_lr(const OuterConfig& c) {
  return c.rule.lr_normalised || c.clip.units == OuterClipUnits::kGrad;
}

// Everything that changes what a boundary does, as lines "key=value". all: also what may change
// between a state and its restore.
std::string outer_settings_text(const OuterConfig& c, const ParameterSet& parameters, bool all);

}  // namespace sotto
