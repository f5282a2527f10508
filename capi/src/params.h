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

// Where parameters and model copies lie from now on, checked.
struct Places {
  std::vector<ParameterPlace> params, copies;  // no copies: they stay
  std::vector<MemoryRange> written;            // in the order of addresses
};

// written: of the registration, or of the last places.
Result<Places> take_places(const sotto_buffer* params, const sotto_buffer* model_copies, uint64_t n,
                           const std::vector<MemoryRange>& written);

}  // namespace sotto::capi
