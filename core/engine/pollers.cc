#include "core/engine/pollers.h"

#include <algorithm>
#include <thread>

#include "core/base/clock.h"

namespace sotto {
namespace {

// Interval at which a descriptor is polled that the blocking poller cannot watch.
constexpr int64_t kUnwatchedUs = 20;
// Looks into memory, about 30 ns each, for each poll of all, which takes a few system calls.
constexpr int kLooks = 32;
// Sockets are served at least so often between kernels, and while there is nothing in memory.
constexpr int64_t kServeEveryNs = 50'000;
constexpr int64_t kIdleServeEveryNs = 2'000;

}  // namespace

Pollers::~Pollers() {
  for (Served& served : backends_) {
    if (served.poller != blocking_) tie(served, nullptr);
  }
}

void Pollers::tie(Served& other, Poller* blocking) {
  const int descriptor = other.poller->descriptor();
  if (descriptor < 0) {
    other.poller->forward_wakes(blocking);
    other.tied = true;
    return;
  }
  if (other.tied) blocking_.load()->watch(descriptor, false);
  other.tied = blocking != nullptr && blocking->watch(descriptor, true);
}

bool Pollers::add(std::unique_ptr<Backend> backend, bool blocking) {
  Served& added = backends_.emplace_back(std::move(backend));
  Poller* const poller = added.poller;
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
    if (served.poller != blocking) any |= served.poller->poll(0);
  }
  return any;
}

bool Pollers::serve_due(int64_t now_ns, bool idle) {
  const std::optional<bool> found = idle ? look() : std::optional(false);
  int64_t every_ns = kServeEveryNs;
  if (idle && found != true) every_ns = found.has_value() ? kIdleServeEveryNs : 0;
  if (now_ns - served_ns_ < every_ns) return found == true;
  served_ns_ = now_ns;
  return serve() || found == true;
}

std::optional<bool> Pollers::look() {
  std::optional<bool> found;
  for (const Served& served : backends_) {
    const std::optional<bool> work = served.poller->peek();
    if (work == true) return served.poller->poll(0);
    if (work.has_value()) found = false;
  }
  return found;
}

bool Pollers::spin(int64_t limit_us) {
  const Clock& clock = Clock::monotonic();
  const int64_t until = clock.now_ns() + limit_us * 1000;
  do {
    for (int looks = 0; looks < kLooks; ++looks) {
      const std::optional<bool> found = look();
      if (found == true) return true;
      if (!found.has_value()) break;
    }
    if (serve()) return true;
    std::this_thread::yield();  // ranks may outnumber cores
  } while (clock.now_ns() < until);
  return false;
}

void Pollers::wait(int64_t wait_us) {
  Poller* const blocking = blocking_;
  if (blocking == nullptr) {
    std::this_thread::yield();
    return;
  }
  if (const int64_t limit_us = std::min(spin_us_, wait_us); limit_us > 0) {
    if (spin(limit_us) || limit_us == wait_us) return;
    wait_us -= limit_us;
  }
  for (const Served& served : backends_) {
    Poller& poller = *served.poller;
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
