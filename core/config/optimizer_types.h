// The types of optimizers: one row each, and what the configuration has to know of them.
#pragma once

#include <span>

#include "core/config/config.h"

namespace sotto {

struct OptimizerType {
  OptimizerKind kind = OptimizerKind::kNone;
  std::string_view name;      // as DeepSpeed writes it
  bool one_bit = false;       // later steps send compressed data
  bool variance = true;       // keeps a second moment
  bool narrow_state = false;  // moments may be bfloat16 or 8-bit floats
  bool has_betas = true;
  bool scales_all = false;  // 1 bit, granularity "flat": one scale for everything, not for a group
  bool freezes_at_step = false;  // freeze_step is the last update in full precision
};

// Without kNone, in the order of documents.
std::span<const OptimizerType> optimizer_types();
// kNone: a row without a name of a type.
const OptimizerType& optimizer_type(OptimizerKind kind);

}  // namespace sotto
