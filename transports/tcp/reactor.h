// Serves the sockets and timers of one backend inside poll(), without a thread of its own.
//
// Connected sockets are in one edge-triggered epoll set: a pass over all of them takes one system
// call. The set is itself a descriptor in Asio, so one wait in Asio covers sockets, accepts,
// connects and timers.
//
// Timers and delayed turns have the times of the injected clock. Real time is only how long a poll
// waits at once.
//
// Threads: the driving thread; wake() from any.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>

#include "core/base/clock.h"
#include "core/base/status.h"
#include "core/iface/transport.h"
#include "transports/tcp/asio_wait.h"
#include "transports/tcp/rate_limiter.h"
#include "transports/tcp/send_window.h"
#include "transports/tcp/socket_settings.h"
#include "transports/tcp/timers.h"
#include "transports/tcp/turn_queue.h"

namespace sotto::tcp {

struct ReactorOptions {
  double rate_limit_mbit = 0;
  const Clock* clock = nullptr;
  SocketSettings sockets;
};

class Reactor final : public Poller {
 public:
  // TRANSPORT: no descriptors left.
  static Result<std::unique_ptr<Reactor>> make(const ReactorOptions& options);
  ~Reactor() override;
  Reactor(const Reactor&) = delete;
  Reactor& operator=(const Reactor&) = delete;

  bool poll(int64_t wait_us) override;
  void wake() override;
  bool watch(int descriptor, bool on) override;

  Status add(int fd, Pollable& pollable);
  void remove(int fd, Pollable& pollable);
  // Another turn for `pollable` in the next pass.
  void want_turn(Pollable& pollable) { turns_.want(pollable); }
  // Another turn at the time when the rate limiter allows bytes again.
  void want_turn_at(Pollable& pollable, int64_t at_ns) { turns_.want_at(pollable, at_ns); }

  // Calls from inside poll, until the timer is destroyed: Timers::after, Timers::every.
  [[nodiscard]] Timers::Timer after(int64_t ms, std::function<void()> call) {
    return timers_.after(ms, std::move(call));
  }
  [[nodiscard]] Timers::Timer every(int64_t ms, std::function<void()> call) {
    return timers_.every(ms, std::move(call));
  }
  asio::io_context& io() { return asio_.io(); }
  RateLimiter& egress() { return egress_; }
  RateLimiter& ingress() { return ingress_; }
  SendShares& send_shares() { return send_shares_; }
  const SocketSettings& sockets() const { return sockets_; }
  const Clock& clock() const { return *clock_; }
  int64_t now_ns() const { return clock_->now_ns(); }

 private:
  class Waker;

  explicit Reactor(const ReactorOptions& options);
  Status open();
  bool pass();
  void collect();
  void block(int64_t wait_us);

  const Clock* clock_;
  RateLimiter egress_, ingress_;
  SendShares send_shares_;
  SocketSettings sockets_;
  TurnQueue turns_;
  Timers timers_;
  AsioWait asio_;
  int epoll_fd_ = -1;  // Asio's
  std::atomic<bool> wake_requested_{false};
  std::unique_ptr<Waker> waker_;
};

}  // namespace sotto::tcp
