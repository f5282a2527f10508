#include "transports/tcp/rank_text.h"

#include <algorithm>

#include "core/base/status.h"

namespace sotto::tcp {

std::string member_text(int32_t rank, const wire::Members::Member& m) {
  return fmt::format("rank {} (pid {} on {}{}{})", rank, m.pid, m.host,
                     m.address.empty() ? "" : ", ", m.address);
}

std::string rank_list(const std::vector<int32_t>& ranks) {
  std::string text;
  for (size_t i = 0; i < ranks.size();) {
    size_t last = i;
    while (last + 1 < ranks.size() && ranks[last + 1] == ranks[last] + 1) ++last;
    text += text.empty() ? "" : ", ";
    text +=
        last > i + 1 ? fmt::format("{} to {}", ranks[i], ranks[last]) : fmt::format("{}", ranks[i]);
    i = last > i + 1 ? last + 1 : i + 1;
  }
  return text;
}

std::string did_not_come(const std::string& waiting) {
  const size_t more = std::min(waiting.find(" ("), waiting.size());
  return waiting.substr(0, more) + " did not come" + waiting.substr(more);
}

}  // namespace sotto::tcp
