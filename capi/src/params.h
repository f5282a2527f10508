// Parameters that a caller registers with an optimizer, inner or outer.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "capi/src/convert.h"
#include "capi/src/handles.h"
#include "core/optim/parameter_set.h"
#include "sotto/sotto.h"

namespace sotto::capi {

inline constexpr uint64_t kMaxParams = uint64_t{1} << 24;

enum class ParamUse : uint8_t {
  kTrained,   // by an optimizer: with gradients
  kAveraged,  // by an outer optimizer: values and model copies alone
};

// What a rank registers with an optimizer, checked.
struct Registration {
  std::vector<ParamSpec> specs;
  std::shared_ptr<Device> device;
  std::vector<MemoryRange> written;  // in the order of addresses
};

Result<Registration> take_registration(const sotto_comm& comm, const char* json,
                                       const sotto_param* params, uint64_t n, ParamUse use);

// Memory that is written, in the order of addresses.
std::vector<MemoryRange> written_in_order(std::vector<MemoryRange> ranges);

}  // namespace sotto::capi
