// Numbers in a launcher's environment variables.
#pragma once

#include <cstdint>
#include <string>

#include "core/base/status.h"

namespace sotto {

// INVALID_ARGUMENT names the variable, its value and what is allowed.
Result<int64_t> number_of(const std::string& name, const std::string& text, int64_t low,
                          int64_t high);

}  // namespace sotto
