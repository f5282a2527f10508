#include "transports/tcp/turn_queue.h"

#include <algorithm>
#include <utility>

namespace sotto::tcp {

bool TurnQueue::remove(Pollable& pollable) {
  if (!pollable.registered_) return false;
  pollable.registered_ = false;
  std::replace(turns_.begin(), turns_.end(), &pollable, static_cast<Pollable*>(nullptr));
  std::replace(serving_.begin(), serving_.end(), &pollable, static_cast<Pollable*>(nullptr));
  std::erase_if(delayed_, [&](const Delayed& d) { return d.pollable == &pollable; });
  pollable.queued_ = false;
  return true;
}

void TurnQueue::want(Pollable& pollable, uint32_t events) {
  pollable.events_ |= events;
  if (pollable.queued_ || !pollable.registered_) return;
  pollable.queued_ = true;
  turns_.push_back(&pollable);
}

void TurnQueue::want_at(Pollable& pollable, int64_t at_ns) {
  if (!pollable.registered_) return;
  for (Delayed& d : delayed_) {
    if (d.pollable == &pollable) {
      d.at_ns = std::min(d.at_ns, at_ns);
      return;
    }
  }
  delayed_.push_back({&pollable, at_ns});
}

void TurnQueue::release() {
  if (delayed_.empty()) return;
  const int64_t now = clock_.now_ns();
  for (const Delayed& d : delayed_) {
    if (d.at_ns <= now) want(*d.pollable);
  }
  std::erase_if(delayed_, [&](const Delayed& d) { return d.at_ns <= now; });
}

bool TurnQueue::serve() {
  if (turns_.empty()) return false;
  serving_.swap(turns_);
  for (size_t i = 0; i < serving_.size(); ++i) {
    Pollable* pollable = serving_[i];
    if (pollable == nullptr) continue;
    pollable->queued_ = false;
    const uint32_t events = std::exchange(pollable->events_, 0);
    if (pollable->serve(events) && serving_[i] != nullptr) want(*pollable);
  }
  serving_.clear();
  return true;
}

int64_t TurnQueue::next_ns() const {
  int64_t at = INT64_MAX;
  for (const Delayed& d : delayed_) at = std::min(at, d.at_ns);
  return at;
}

}  // namespace sotto::tcp
