// Functions without a handle: the loaded library, its log, and what can be asked without a group.
#ifndef SOTTO_CPP_LIBRARY_HPP
#define SOTTO_CPP_LIBRARY_HPP

#include <cstdint>
#include <string>

#include "handle.hpp"

namespace sotto {
inline namespace SOTTO_CPP_ABI {

// major << 16 | minor of the loaded library.
inline std::uint32_t abi_version() noexcept { return sotto_abi_version(); }
inline const char* version_string() noexcept { return sotto_version_string(); }
// JSON.
inline const char* build_info() noexcept { return sotto_build_info(); }

// `fn` must not throw. NULL: standard error again. level: 0 to 5.
inline outcome<void> set_log(sotto_log_fn fn, void* user, std::int32_t level) {
  return detail::finish(sotto_set_log(fn, user, level));
}

// JSON: what a DeepSpeed configuration will do, key by key.
inline outcome<std::string> config_report(text json, std::int32_t world_size = 0,
                                          std::uint64_t n_params = 0) {
  return detail::read_text([=](char* buf, std::uint64_t cap, std::uint64_t* length) {
    return sotto_config_report(json.c_str(), world_size, n_params, buf, cap, length);
  });
}

// The configuration as plain JSON on one line, with `values` in place of "auto".
inline outcome<std::string> config_resolve(text json, text values = text()) {
  return detail::read_text([=](char* buf, std::uint64_t cap, std::uint64_t* length) {
    return sotto_config_resolve(json.c_str(), values.c_str(), buf, cap, length);
  });
}

// JSON: what outer steps would cost on a link.
inline outcome<std::string> predict_report(text json) {
  return detail::read_text([=](char* buf, std::uint64_t cap, std::uint64_t* length) {
    return sotto_predict_report(json.c_str(), buf, cap, length);
  });
}

}  // namespace SOTTO_CPP_ABI
}  // namespace sotto

#endif  // SOTTO_CPP_LIBRARY_HPP
