// sotto_config_report, sotto_config_resolve
#include <string>

#include "capi/src/convert.h"
#include "capi/src/guard.h"
#include "capi/src/handles.h"
#include "core/config/config.h"

using namespace sotto;        // NOLINT: the definition below is the border itself
using namespace sotto::capi;  // NOLINT

namespace {

Status report(const char* json, int32_t world_size, uint64_t n_params, char* buf, uint64_t cap,
              uint64_t* out_len) {
  SOTTO_TRY(check_pointer(json, "json"));
  if (world_size < 0)
    return invalid_argument("world_size is {}; allowed: 1 and more, or 0 if unknown", world_size);
  SOTTO_ASSIGN(const std::string text,
               config_report(json, static_cast<uint64_t>(world_size), n_params));
  return write_text(text, buf, cap, out_len);
}

Status resolve(const char* json, const char* values, char* buf, uint64_t cap, uint64_t* out_len) {
  SOTTO_TRY(check_pointer(json, "json"));
  SOTTO_ASSIGN(const std::string text, config_resolve(json, values == nullptr ? "" : values));
  return write_text(text, buf, cap, out_len);
}

}  // namespace

extern "C" sotto_status sotto_config_report(const char* json, int32_t world_size, uint64_t n_params,
                                            char* buf, uint64_t cap, uint64_t* out_len) {
  return guarded("sotto_config_report",
                 [&] { return report(json, world_size, n_params, buf, cap, out_len); });
}

extern "C" sotto_status sotto_config_resolve(const char* json, const char* values, char* buf,
                                             uint64_t cap, uint64_t* out_len) {
  return guarded("sotto_config_resolve", [&] { return resolve(json, values, buf, cap, out_len); });
}
