// Who decides how much is logged: sotto_set_log with a level, else SOTTO_LOG as read when a context
// is created.
#pragma once

#include <string_view>

namespace sotto::capi {

// The value of SOTTO_LOG ("error" ... "trace") takes effect unless sotto_set_log has fixed a level.
void apply_log_parameter(std::string_view value);

}  // namespace sotto::capi
