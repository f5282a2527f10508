// The types of optimizers, and what the configuration has to know of them. optimizers.def has the
// rows.
#pragma once

#include <array>
#include <span>
#include <string>

#include "core/config/stages.h"

namespace sotto {

struct OptimizerType {
  OptimizerKind kind = OptimizerKind::kNone;
  std::string_view name;             // as DeepSpeed writes it
  bool one_bit = false;              // later steps send compressed data
  bool variance = true;              // keeps a second moment
  bool low_precision_state = false;  // moments may be bfloat16 or 8-bit floats
  bool has_betas = true;             // keeps a first moment; without them only if it has a momentum
  bool scales_all = false;           // 1 bit, granularity "flat": one scale for everything
  bool averages_trust_ratio = false;
  // Steps in full precision keep a float32 per element of a group, in scratch, between two passes.
  bool directions = false;
  const Stages& (*stages)() = one_stage;
  // Arrays of float32 per element that a 1-bit type keeps beside its moments.
  std::array<std::string_view, 3> late_arrays = {};
};

// Without kNone, in the order of documents.
inline constexpr OptimizerType kOptimizerTypes[] = {
#define SOTTO_OPTIMIZER(type, number, name_of_type, algorithm, ...) \
  {.kind = OptimizerKind::k##type, .name = name_of_type, __VA_ARGS__},
#include "core/config/optimizers.def"
};

// kNone: a row without a name of a type.
const OptimizerType& optimizer_type(OptimizerKind kind);

// Names of the types that `has` is true of; `last` stands before the last one: "SGD, Adam, AdamW".
std::string optimizer_names(bool (*has)(const OptimizerType&), std::string_view last = ", ");

}  // namespace sotto
