#include "core/engine/pollers.h"

#include <algorithm>
#include <thread>

namespace sotto {
namespace {

// Interval at which a descriptor is polled that the blocking poller cannot watch.
constexpr int64_t kUnwatchedUs = 20;

}  // namespace

Pollers::~Pollers() {
  for (Served& served : backends_) {
    if (&served.poller() != blocking_) tie(served, nullptr);
  }
}

void Pollers::tie(Served& other, Poller* blocking) {
  Poller& poller = other.poller();
  const int descriptor = poller.descriptor();
  if (descriptor < 0) {
    poller.forward_wakes(blocking);
    other.tied = true;
    return;
  }
  if (other.tied) blocking_.load()->watch(descriptor, false);
  other.tied = blocking != nullptr && blocking->watch(descriptor, true);
}

bool Pollers::add(std::unique_ptr<Backend> backend, bool blocking) {
  Served& added = backends_.emplace_back(Served{std::move(backend)});
  Poller* const poller = &added.poller();
  if (!blocking && blocking_ != nullptr) {
    tie(added, blocking_);
    return false;
  }
  for (Served& other : backends_) {
    if (&other != &added) tie(other, poller);
  }
  blocking_ = poller;
  return true;
}

bool Pollers::serve() {
  // The blocking one first, which takes wakes: what another forwards behind its turn ends the wait.
  Poller* const blocking = blocking_;
  bool any = blocking != nullptr && blocking->poll(0);
  for (const Served& served : backends_) {
    if (&served.poller() != blocking) any |= served.poller().poll(0);
  }
  return any;
}

void Pollers::wait(int64_t wait_us) {
  Poller* const blocking = blocking_;
  if (blocking == nullptr) {
    std::this_thread::yield();
    return;
  }
  for (const Served& served : backends_) {
    Poller& poller = served.poller();
    wait_us = std::min(wait_us, poller.poll_interval_us());
    if (&poller == blocking || poller.descriptor() < 0) continue;
    if (!served.tied) wait_us = std::min(wait_us, kUnwatchedUs);
    if (!poller.arm()) wait_us = 0;
  }
  blocking->poll(std::max<int64_t>(wait_us, 0));
}

void Pollers::wake() {
  if (Poller* const poller = blocking_; poller != nullptr) poller->wake();
}

}  // namespace sotto
