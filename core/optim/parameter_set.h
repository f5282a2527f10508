// The registered parameters of an optimizer: where they, their gradients and model copies lie, and
// which of them are frozen.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/base/dtype.h"
#include "core/base/status.h"
#include "core/codec/compressed_layout.h"
#include "core/engine/device_array.h"
#include "core/group/comm.h"

namespace sotto {

struct ParamSpec {
  std::string name;
  uint64_t count = 0;
  uint32_t group = 0;
  float* param = nullptr;  // borrowed, as the following
  const void* grad = nullptr;
  const uint8_t* mask = nullptr;   // count values of 0 or 1; null: no mask
  Dtype grad_dtype = Dtype::kF32;  // float32, float16 or bfloat16; the same for all parameters
  void* copy = nullptr;            // the model's own parameter, written after each step; null: none
  Dtype copy_dtype = Dtype::kF16;  // float16 or bfloat16; the same for all that have a copy
};

// Memory of one parameter's gradient, borrowed.
struct GradientPlace {
  const void* data = nullptr;
  uint64_t count = 0;
  Dtype dtype = Dtype::kF32;
  DeviceId device;
};

// Memory of one parameter, or of its model copy, borrowed. No elements: there is no model copy.
struct ParameterPlace {
  void* data = nullptr;
  uint64_t count = 0;
  Dtype dtype = Dtype::kF32;
  DeviceId device;
};

class ParameterSet {
 public:
  // access: of the device on which everything lies.
  ParameterSet(std::vector<ParamSpec> specs, DeviceAccess access)
      : specs_(std::move(specs)), access_(std::move(access)) {}

  // INVALID_ARGUMENT: names, masks or types that cannot be registered. grad_accum_dtype: the type
  // that gradients have to have. From here on masks are in the host's memory.
  Status check(const std::optional<Dtype>& grad_accum_dtype);

  size_t size() const { return specs_.size(); }
  const ParamSpec& operator[](size_t i) const { return specs_[i]; }
  auto begin() const { return specs_.begin(); }
  auto end() const { return specs_.end(); }
  std::span<const ParamSpec> specs() const { return specs_; }
  Dtype gradients() const { return specs_[0].grad_dtype; }
  bool has_masks() const;

  // On error nothing has changed.
  Status set_gradients(std::span<const GradientPlace> grads);
  // copies: empty: they stay where they are.
  Status set_parameters(std::span<const ParameterPlace> params,
                        std::span<const ParameterPlace> copies);

  // Flags of all parameters; empty: none is frozen.
  const std::vector<uint8_t>& frozen() const { return frozen_; }
  bool frozen(uint32_t tensor) const { return tensor < frozen_.size() && frozen_[tensor] != 0; }
  uint64_t frozen_hash() const { return frozen_hash_; }  // 0: none is
  // INVALID_ARGUMENT: not one flag of 0 or 1 for every parameter. Else the flags as frozen() would
  // give them.
  Result<std::vector<uint8_t>> frozen_flags(std::span<const uint8_t> flags) const;
  void set_frozen(std::vector<uint8_t> flags);

  // Of names, sizes, groups and masks, in order.
  uint64_t registration_hash() const;
  // Of every parameter's bits.
  Result<std::vector<uint64_t>> value_hashes() const;
  // Writes values to a parameter and its model copy.
  Status write(uint32_t tensor, uint64_t at, std::span<const float> values) const;
  // All parameters become rank 0's, and model copies theirs. Collective.
  Status broadcast(Comm& comm, const CompressedLayout& layout) const;
  // "; here: gradient of ..." with the first element that is not finite; empty: none, or the host
  // cannot see them.
  std::string first_nonfinite_gradient() const;

 private:
  Status fetch_masks();
  Status check_dtypes(const std::optional<Dtype>& grad_accum_dtype) const;
  Status write_copy(const ParamSpec& p, uint64_t at, std::span<const float> values) const;

  std::vector<ParamSpec> specs_;
  DeviceAccess access_;
  std::vector<std::vector<uint8_t>> masks_;  // on the host, where the callers' are not
  std::vector<uint8_t> frozen_;
  uint64_t frozen_hash_ = 0;
};

}  // namespace sotto
