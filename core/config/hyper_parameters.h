// Hyper-parameters of optimizers ("optimizer.params"), by what they belong to. each(p, f) calls
// f(key, value) with every one of a struct: from it they are read, reported and compared.
#pragma once

#include <cmath>
#include <cstdint>

namespace sotto {

// Whether kernels, which take numbers as float32, get neither infinity nor a 0 that it is not.
inline bool fits_float32(double value) {
  const auto rounded = static_cast<float>(value);
  return std::isfinite(rounded) && (rounded != 0 || value == 0);
}

struct AdamParams {
  bool w_mode = true;  // decay in the update (true) or added to the gradient (false)

  template <class Params, class F>
  static void each(Params& p, F&& f) {
    f("adam_w_mode", p.w_mode);
  }
};

// LAMB and 1-bit LAMB: bounds of the trust ratio, min_coeff <= max_coeff.
struct LambParams {
  double max_coeff = 10.0;
  double min_coeff = 0.01;

  template <class Params, class F>
  static void each(Params& p, F&& f) {
    f("max_coeff", p.max_coeff);
    f("min_coeff", p.min_coeff);
  }
};

// 1-bit Adam and 1-bit LAMB.
struct FreezeParams {
  // The state step whose update is the last one in full precision, >= 1.
  uint64_t freeze_step = 100000;
  // 1-bit Adam: keeps full-precision averages and goes on updating the variance in the compressed
  // stage. Set per group only.
  bool non_freeze = false;

  template <class Params, class F>
  static void each(Params& p, F&& f) {
    f("freeze_step", p.freeze_step);
    f("non_freeze", p.non_freeze);
  }
};

// 1-bit LAMB.
struct FactorParams {
  double coeff_beta = 0.9;  // of the average trust ratio; [0, 1)
  double factor_max = 4.0;  // factor_min <= factor_max
  double factor_min = 0.5;
  double factor_threshold = 0.1;  // (0, 1)

  template <class Params, class F>
  static void each(Params& p, F&& f) {
    f("coeff_beta", p.coeff_beta);
    f("factor_max", p.factor_max);
    f("factor_min", p.factor_min);
    f("factor_threshold", p.factor_threshold);
  }
};

// 0/1 Adam; all >= 1.
struct IntervalParams {
  uint64_t var_freeze_step = 100000;
  uint64_t var_update_scaler = 16;
  uint64_t local_step_scaler = 32678;
  uint64_t local_step_clipper = 16;

  template <class Params, class F>
  static void each(Params& p, F&& f) {
    f("var_freeze_step", p.var_freeze_step);
    f("var_update_scaler", p.var_update_scaler);
    f("local_step_scaler", p.local_step_scaler);
    f("local_step_clipper", p.local_step_clipper);
  }
};

struct SgdParams {
  double momentum = 0.0;
  double dampening = 0.0;
  bool nesterov = false;

  template <class Params, class F>
  static void each(Params& p, F&& f) {
    f("momentum", p.momentum);
    f("dampening", p.dampening);
    f("nesterov", p.nesterov);
  }
};

// Those in force, defaults filled in. What a type does not have keeps the default and plays no
// part.
struct OptimizerParams {
  double lr = 1e-3;  // >= 0; a scheduler overrides it
  double beta1 = 0.9;
  double beta2 = 0.999;          // betas in [0, 1)
  double eps = 1e-8;             // >= 0
  double weight_decay = 0.0;     // >= 0
  bool bias_correction = true;   // always false for the 1-bit types, whatever the file says
  bool eps_inside_sqrt = false;  // acted on by Lamb alone
  AdamParams adam;
  LambParams lamb;
  FreezeParams freeze;
  FactorParams factor;
  IntervalParams intervals;
  SgdParams sgd;

  // Betas one by one.
  template <class Params, class F>
  static void each(Params& p, F&& f) {
    f("lr", p.lr);
    f("betas[0]", p.beta1);
    f("betas[1]", p.beta2);
    f("eps", p.eps);
    f("weight_decay", p.weight_decay);
    f("bias_correction", p.bias_correction);
    f("eps_inside_sqrt", p.eps_inside_sqrt);
    AdamParams::each(p.adam, f);
    LambParams::each(p.lamb, f);
    FreezeParams::each(p.freeze, f);
    FactorParams::each(p.factor, f);
    IntervalParams::each(p.intervals, f);
    SgdParams::each(p.sgd, f);
  }
};

}  // namespace sotto
