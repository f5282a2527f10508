#include "transports/tcp/refusals.h"

#include <algorithm>

#include "core/base/log.h"
#include "core/base/text.h"

namespace sotto::tcp {
namespace {

constexpr size_t kSummarized = 4;
constexpr size_t kTextBytes = 400;

std::string host_of(const std::string& peer) { return peer.substr(0, peer.rfind(':')); }

}  // namespace

std::string printable(std::string_view text, size_t most) {
  std::string out(cut_text(text, most));
  for (char& c : out) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = '?';
  }
  return out;
}

void RefusalLog::add(std::string_view cause, bool from_rank, const std::string& peer,
                     const std::string& text) {
  ++count_;
  const std::string host = host_of(peer);
  const bool known = std::any_of(entries_.begin(), entries_.end(), [&](const LoggedRefusal& e) {
    return e.cause == cause && e.host == host;
  });
  // A quarter is kept for refusals of ranks, which a user looks for.
  const size_t most = from_rank ? kMaxEntries : kMaxEntries / 4 * 3;
  if (known || entries_.size() >= most) {
    log(LogLevel::kDebug, "{}: connection refused: {}", place_, printable(text, kTextBytes));
    return;
  }
  entries_.push_back({cause, from_rank, host, printable(text, kTextBytes)});
  log(LogLevel::kWarn, "{}: connection refused: {} (logged once per cause and host)", place_,
      entries_.back().text);
  if (entries_.size() == most)
    log(LogLevel::kWarn, "{}: what else is refused here is logged at level debug only", place_);
}

std::string RefusalLog::summary() const {
  std::vector<const LoggedRefusal*> order;
  for (const LoggedRefusal& e : entries_) order.push_back(&e);
  std::stable_partition(order.begin(), order.end(),
                        [](const LoggedRefusal* e) { return e->from_rank; });
  std::string text;
  for (size_t i = 0; i < std::min(order.size(), kSummarized); ++i)
    text += (text.empty() ? "" : "; ") + order[i]->text;
  if (order.size() > kSummarized)
    text += fmt::format("; and {} other causes", order.size() - kSummarized);
  return text;
}

}  // namespace sotto::tcp
