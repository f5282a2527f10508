// What 1-bit Adam, 1-bit LAMB and 0/1 Adam have in common: a late stage in which the variance is
// frozen, masks that follow from it, and momentum that is exchanged for all parameters, so that of
// frozen ones it is put aside.
#pragma once

#include "core/optim/algorithm.h"

namespace sotto {

class OneBitAlgorithm : public Algorithm {
 public:
  using Algorithm::Algorithm;
  bool compresses_gradients() const override { return false; }
  bool masks_zero_variance() const override;
  Status check_setting(std::string_view name, size_t group, double value) const override;
  Status freeze(const std::vector<uint8_t>& flags) override;
  bool restored_with(const std::vector<uint8_t>& flags) const override {
    return restored_.step == d_.step && restored_.flags == flags;
  }
  Status start_stage() override;
  void report_tensor(const TensorState& state, nlohmann::ordered_json* tensor) const override;

  Status describe(StateErrors errors, OptimSnapshot* s) override;
  std::optional<Status> stream(std::string_view array, StateErrors errors,
                               const FloatSink& sink) override;
  Status check(const OptimSnapshot& s, StateErrors errors) const override;
  bool restores(std::string_view array, const OptimSnapshot& s) const override;
  Status restore(const OptimSnapshot& s) override;

 protected:
  // Whether the update after the one with state step t is of the late stage.
  virtual bool late_after(uint64_t t) const = 0;
  // Whether a snapshot says that it is of that stage.
  virtual bool says_late(const OptimSnapshot& s) const { return s.flag("compressed"); }
  // Momentum that is kept in another form becomes "m".
  virtual Status momentum_to_floats() { return ok_status(); }
  // What the late stage derives from the state, but for the denominator. valid: bits.
  virtual Status restore_stage(const std::vector<uint8_t>& valid);
  // Per-tensor numbers of a snapshot whose stage is this configuration's, or is not.
  virtual std::vector<TensorState> tensor_states(const OptimSnapshot& s) const;

  // Whether the next step after `step` updates is of the late stage. freeze_step counts on from a
  // state's step, and this configuration's may be another one than the state was made with.
  bool late_stage(uint64_t step) const;
  // A snapshot of the late stage goes on in it.
  bool keeps_stage(const OptimSnapshot& s) const {
    return late_stage(s.step) && s.flag("stage_started");
  }
  // Of a frozen parameter whose momentum was put aside; false: the run is of another.
  bool read_aside(const TensorRun& run, float* out) const;

  bool stage_started_ = false;  // the late stage has made a step

 private:
  // What a state says of frozen parameters: which they are, and what was exchanged for them.
  struct Frozen {
    std::optional<uint64_t> step;  // of the state; nothing: it does not say
    std::vector<uint8_t> flags;    // empty: none
    std::vector<float> exchanged;
  };
  Result<Frozen> frozen_now() const;
  Status check_frozen(const OptimSnapshot& s) const;
  // Says which parameters will train from now on by the flags, but cannot.
  Status warn_of_still(const std::vector<uint8_t>& flags) const;
  Status set_momentum_aside(const std::vector<uint8_t>& back, const std::vector<uint8_t>& flags,
                            std::span<const float> exchanged);

  std::vector<std::vector<float>> aside_m_;  // per parameter; empty: none is frozen
  Frozen restored_;
};

}  // namespace sotto
