#include "transports/tcp/signs_of_life.h"

#include <algorithm>
#include <utility>

namespace sotto::tcp {
namespace {

constexpr int64_t kBeatTickMs = 50;
// Ticks further apart than this: the process was stopped, or polls only now and then.
constexpr int64_t kSleptMs = 200;

}  // namespace

SignsOfLife::SignsOfLife(ControlPeers& peers, const AllGather& gather, const Clock& clock,
                         int64_t heartbeat_ms)
    : peers_(peers),
      gather_(gather),
      clock_(clock),
      heartbeat_ms_(heartbeat_ms),
      last_beat_ns_(clock.now_ns()),
      last_tick_ns_(last_beat_ns_),
      awake_since_ns_(last_beat_ns_) {}

void SignsOfLife::set_limit(int64_t limit_ms) {
  limit_ms_ = limit_ms;
  if (limit_ms > 0) heartbeat_ms_ = std::min(heartbeat_ms_, limit_ms / 4);
}

int64_t SignsOfLife::tick_ms() const { return std::min(kBeatTickMs, heartbeat_ms_); }

void SignsOfLife::tick() {
  const int64_t now = clock_.now_ns();
  if (ms_between(last_tick_ns_, now) > std::max(kSleptMs, limit_ms_ / 2)) awake_since_ns_ = now;
  last_tick_ns_ = now;
}

bool SignsOfLife::beat() {
  if (ms_between(last_beat_ns_, clock_.now_ns()) < heartbeat_ms_) return false;
  ask();
  return true;
}

void SignsOfLife::ask() {
  last_beat_ns_ = clock_.now_ns();
  wire::Heartbeat beat;
  if (peers_.coordinates()) {
    beat.waiting = gather_.waiting();
    for (int32_t r = 0; r < peers_.size(); ++r)
      beat.silent_ms.push_back(static_cast<uint32_t>(silent_ms(r)));
  }
  const std::string text = beat.encode();
  for (int32_t r = 0; r < peers_.size(); ++r) peers_.send_sign(r, text);
}

void SignsOfLife::on_word(wire::Heartbeat word) {
  const int64_t now = clock_.now_ns();
  if (peers_.send_sign(peers_.coordinator(), wire::Heartbeat{}.encode())) last_beat_ns_ = now;
  if (word.silent_ms.size() != static_cast<size_t>(peers_.size())) return;
  told_silent_ = std::move(word.silent_ms);
  told_ns_ = now;
}

int64_t SignsOfLife::silent_ms(int32_t rank) const {
  if (rank == peers_.rank()) return 0;
  const int64_t now = clock_.now_ns();
  if (const auto heard = peers_.heard_ns(rank))
    return std::max<int64_t>(0, ms_between(*heard, now));
  if (told_silent_.empty()) return 0;
  return told_silent_[static_cast<size_t>(rank)] + ms_between(told_ns_, now);
}

// The silence that counts against the limit.
int64_t SignsOfLife::counted_ms(int32_t rank) const {
  if (!peers_.open(rank) || peers_.left(rank)) return 0;
  return std::min(silent_ms(rank), ms_between(awake_since_ns_, clock_.now_ns()));
}

std::vector<int32_t> SignsOfLife::overdue() const {
  if (limit_ms_ == 0 || !peers_.established()) return {};
  std::vector<int32_t> ranks;
  if (!peers_.coordinates()) {
    if (counted_ms(peers_.coordinator()) >= limit_ms_ + limit_ms_ / 2)
      ranks.push_back(peers_.coordinator());
    return ranks;
  }
  for (int32_t r = 0; r < peers_.size(); ++r) {
    if (counted_ms(r) >= limit_ms_) ranks.push_back(r);
  }
  return ranks;
}

}  // namespace sotto::tcp
