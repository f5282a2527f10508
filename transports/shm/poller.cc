#include "transports/shm/poller.h"

#include <algorithm>

namespace sotto::shm {

void ShmPoller::remove(Served& rings) {
  std::ranges::replace(served_, &rings, static_cast<Served*>(nullptr));
  if (!serving_) std::erase(served_, nullptr);
}

int64_t ShmPoller::poll_interval_us() const { return ticks_.interval_us(); }

std::optional<bool> ShmPoller::peek() const {
  return woken_.load(std::memory_order_acquire) ||
         std::ranges::any_of(
             served_, [](const Served* rings) { return rings != nullptr && rings->has_work(); });
}

void ShmPoller::wake() {
  woken_.store(true, std::memory_order_release);
  bell_.ring();
}

bool ShmPoller::arm() {
  bell_.silence();
  armed_ = true;
  if (woken_.exchange(false, std::memory_order_acq_rel)) return false;
  return std::ranges::all_of(served_, [](Served* rings) { return rings->arm(); });
}

bool ShmPoller::poll(int64_t wait_us) {
  const bool woken = woken_.load(std::memory_order_relaxed) && woken_.exchange(false);
  if (pass() || woken) return true;
  if (wait_us <= 0) return false;
  if (!arm()) return pass();
  bell_.wait(std::min(wait_us, poll_interval_us()));
  return pass();
}

bool ShmPoller::pass() {
  if (serving_) return false;
  serving_ = true;
  bool moved = false;
  const bool disarm = std::exchange(armed_, false);
  for (size_t i = 0; i < served_.size(); ++i) {
    if (served_[i] != nullptr && disarm) served_[i]->disarm();
    if (served_[i] != nullptr) moved |= served_[i]->serve();
  }
  serving_ = false;
  std::erase(served_, nullptr);
  ticks_.run();
  return moved;
}

}  // namespace sotto::shm
