// Ranks in texts of errors and logs.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/wire/control.h"

namespace sotto::tcp {

// "rank 2 (pid 123 on host, 10.0.0.2:3456)".
std::string member_text(int32_t rank, const wire::Members::Member& member);
// "2, 5 to 7".
std::string rank_list(const std::vector<int32_t>& ranks);
// waiting: "rank 2 (turned away: ...)". Gives "rank 2 did not come (turned away: ...)".
std::string did_not_come(const std::string& waiting);

}  // namespace sotto::tcp
