// Parameters that a caller registers with an optimizer, inner or outer.
#pragma once

#include <cstdint>
#include <vector>

#include "capi/src/convert.h"
#include "core/optim/parameter_set.h"
#include "sotto/sotto.h"

namespace sotto::capi {

inline constexpr uint64_t kMaxParams = uint64_t{1} << 24;

enum class ParamUse : uint8_t {
  kTrained,   // by an optimizer: with gradients
  kAveraged,  // by an outer optimizer: values and model copies alone
};

// What the parameters of an optimizer have in common.
struct Registered {
  std::vector<MemoryRange> ranges;
  CommonDevice device;
};

Result<std::vector<ParamSpec>> take_params(const sotto_param* params, uint64_t n, ParamUse use,
                                           Registered* all);

// Memory that is written, in the order of addresses.
std::vector<MemoryRange> written_in_order(std::vector<MemoryRange> ranges);

}  // namespace sotto::capi
