// Which programs the library takes, by the ABI version of the header that they were compiled with.
#pragma once

#include <cstdint>
#include <string_view>

#include "core/base/status.h"
#include "sotto/sotto.h"

namespace sotto::capi {

// The earliest version of this major that nothing has been broken of since. A minor that breaks
// something sets it to itself.
inline constexpr uint32_t kOldestClient = 0u << 16 | 1u;
static_assert(kOldestClient >> 16 == SOTTO_ABI_MAJOR && kOldestClient <= SOTTO_ABI_VERSION);

// `ours` is the version of the library, `oldest` the earliest one that it takes; `release` is the
// library's own version, for the text.
inline Status check_abi_version(uint32_t client, uint32_t ours, uint32_t oldest,
                                std::string_view release) {
  if (client >= oldest && client <= ours) return ok_status();
  const auto text = [](uint32_t v) { return fmt::format("{}.{}", v >> 16, v & 0xffffu); };
  return unsupported(
      "the program was compiled with sotto.h of ABI {}, the library that it loaded (version {}) "
      "has "
      "ABI {} and takes programs of ABI {}",
      text(client), release, text(ours),
      oldest == ours ? text(ours) + " only" : fmt::format("{} to {}", text(oldest), text(ours)));
}

}  // namespace sotto::capi
