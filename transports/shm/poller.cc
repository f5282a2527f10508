#include "transports/shm/poller.h"

#include <algorithm>

#include "transports/framed/framed_transport.h"

namespace sotto::shm {
namespace {

constexpr int64_t kTickUs = framed::FramedTransport::kTickMs * 1000;

}  // namespace

void ShmPoller::remove(Served& rings) {
  std::ranges::replace(served_, &rings, static_cast<Served*>(nullptr));
  if (!serving_) std::erase(served_, nullptr);
}

std::shared_ptr<void> ShmPoller::every_tick(std::function<void()> call) {
  auto tick = std::make_shared<Tick>(std::move(call));
  ticks_.emplace_back(tick);
  return tick;
}

int64_t ShmPoller::poll_interval_us() const { return ticks_.empty() ? INT64_MAX : kTickUs; }

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
  if (pass()) return true;
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
  run_ticks();
  return moved;
}

void ShmPoller::run_ticks() {
  if (ticks_.empty()) return;
  const int64_t now = clock_.now_ns();
  if (now - last_tick_ns_ < kTickUs * 1000) return;
  last_tick_ns_ = now;
  std::erase_if(ticks_, [](const auto& tick) { return tick.expired(); });
  for (size_t i = 0; i < ticks_.size(); ++i) {
    if (const auto tick = ticks_[i].lock()) (*tick)();
  }
}

}  // namespace sotto::shm
