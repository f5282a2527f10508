// Serves the sockets and timers of one backend inside poll(), without a thread of its own.
//
// Connected sockets are in one edge-triggered epoll set: a pass over all of them takes one system
// call. The set is itself a descriptor in Asio, so one wait in Asio covers sockets, accepts,
// connects and timers.
//
// Threads: the driving thread; wake() from any.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "core/base/clock.h"
#include "core/base/status.h"
#include "core/iface/transport.h"
#include "transports/tcp/asio.h"
#include "transports/tcp/rate_limiter.h"
#include "transports/tcp/send_window.h"
#include "transports/tcp/socket_settings.h"

namespace sotto::tcp {

class Reactor;

// The owner of a descriptor that the reactor serves. Unregister before destruction.
class Pollable {
 public:
  virtual ~Pollable() = default;
  // events: of epoll (EPOLLIN, EPOLLOUT, ...); 0: another turn without events. True: another turn
  // is wanted at once.
  virtual bool serve(uint32_t events) = 0;

 private:
  friend class Reactor;
  uint32_t events_ = 0;
  bool queued_ = false;
  bool registered_ = false;
};

struct ReactorOptions {
  double rate_limit_mbit = 0;
  int64_t spin_us = 30;
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
  void want_turn(Pollable& pollable);
  // Another turn at the time when the rate limiter allows bytes again.
  void want_turn_at(Pollable& pollable, int64_t at_ns);

  // Calls `tick` in poll about every `period_ms`, until the returned handle is destroyed.
  std::shared_ptr<void> every(int64_t period_ms, std::function<void()> tick);
  asio::io_context& io() { return io_; }
  RateLimiter& egress() { return egress_; }
  RateLimiter& ingress() { return ingress_; }
  SendShares& send_shares() { return send_shares_; }
  const SocketSettings& sockets() const { return sockets_; }
  const Clock& clock() const { return *clock_; }
  int64_t now_ns() const { return clock_->now_ns(); }

 private:
  class Waker;
  struct Ticker;
  struct EpollReady;

  explicit Reactor(const ReactorOptions& options);
  Status open();
  bool pass();
  bool collect();
  bool serve_turns();
  bool run_asio();
  void block(int64_t wait_us);
  void arm_epoll();
  void arm_turn_timer();
  void release_delayed();

  const Clock* clock_;
  int64_t spin_us_;
  RateLimiter egress_, ingress_;
  SendShares send_shares_;
  SocketSettings sockets_;
  // Memory of the one wait that is armed at a time, for which Asio would allocate.
  alignas(std::max_align_t) std::array<std::byte, 256> epoll_wait_;
  asio::io_context io_{1};
  asio::executor_work_guard<asio::io_context::executor_type> work_{io_.get_executor()};
  asio::posix::stream_descriptor epoll_in_asio_{io_};
  asio::steady_timer turn_timer_{io_};
  int epoll_fd_ = -1;
  bool epoll_armed_ = false;
  int64_t turn_timer_at_ = INT64_MAX;
  int64_t last_asio_ns_ = 0;
  std::atomic<bool> wake_requested_{false};
  std::unique_ptr<Waker> waker_;
  struct Delayed {
    Pollable* pollable;
    int64_t at_ns;
  };
  std::vector<Pollable*> turns_, serving_;
  std::vector<Delayed> delayed_;
};

}  // namespace sotto::tcp
