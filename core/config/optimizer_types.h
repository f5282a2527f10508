// The types of optimizers, and what the configuration has to know of them. optimizers.def has the
// rows.
#pragma once

#include <span>
#include <string>

#include "core/config/config.h"

namespace sotto {

struct OptimizerType {
  OptimizerKind kind = OptimizerKind::kNone;
  std::string_view name;         // as DeepSpeed writes it
  bool one_bit = false;          // later steps send compressed data
  bool variance = true;          // keeps a second moment
  bool narrow_state = false;     // moments may be bfloat16 or 8-bit floats
  bool has_betas = true;         // keeps a first moment; without them only if it has a momentum
  bool scales_all = false;       // 1 bit, granularity "flat": one scale for everything
  bool freezes_at_step = false;  // freeze_step is the last update in full precision
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

// f(key, value) with every hyper-parameter, betas one by one.
template <class Params, class F>
void each_hyper_parameter(Params& p, F&& f) {
  f("lr", p.lr);
  f("betas[0]", p.beta1);
  f("betas[1]", p.beta2);
  f("eps", p.eps);
  f("weight_decay", p.weight_decay);
  f("bias_correction", p.bias_correction);
  f("eps_inside_sqrt", p.eps_inside_sqrt);
  f("adam_w_mode", p.adam_w_mode);
  f("max_coeff", p.max_coeff);
  f("min_coeff", p.min_coeff);
  f("freeze_step", p.freeze_step);
  f("non_freeze", p.non_freeze);
  f("coeff_beta", p.coeff_beta);
  f("factor_max", p.factor_max);
  f("factor_min", p.factor_min);
  f("factor_threshold", p.factor_threshold);
  f("var_freeze_step", p.var_freeze_step);
  f("var_update_scaler", p.var_update_scaler);
  f("local_step_scaler", p.local_step_scaler);
  f("local_step_clipper", p.local_step_clipper);
  f("momentum", p.momentum);
  f("dampening", p.dampening);
  f("nesterov", p.nesterov);
}

}  // namespace sotto
