// The event loop of Asio behind a reactor: accepts, connects and posted calls, and the one wait
// that covers these, an epoll set and a time.
//
// Threads: the driving thread.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "core/base/status.h"
#include "transports/tcp/asio.h"

namespace sotto::tcp {

class AsioWait {
 public:
  // Throws boost::system::system_error when no descriptors are left.
  AsioWait() = default;
  AsioWait(const AsioWait&) = delete;
  AsioWait& operator=(const AsioWait&) = delete;

  // Takes an epoll set, which ends a wait when it has events.
  Status watch(int epoll_fd);
  asio::io_context& io() { return io_; }
  // Runs what is ready, unless that was done of late. True if anything ran.
  bool run(int64_t now_ns);
  // Waits until something is ready or wait_us have passed, and not much longer than until until_ns
  // (INT64_MAX: no such time), which has the clock of now_ns.
  void block(int64_t wait_us, int64_t now_ns, int64_t until_ns);

 private:
  struct EpollReady;
  void arm_epoll();
  void arm_timer(int64_t now_ns, int64_t until_ns);

  // Memory of the one wait for the set that is armed at a time, for which Asio would allocate.
  alignas(std::max_align_t) std::array<std::byte, 256> epoll_wait_;
  asio::io_context io_{1};
  asio::executor_work_guard<asio::io_context::executor_type> work_{io_.get_executor()};
  asio::posix::stream_descriptor epoll_{io_};
  asio::steady_timer timer_{io_};
  bool epoll_armed_ = false;
  int64_t timer_at_ns_ = INT64_MAX;  // INT64_MAX: not armed
  int64_t last_run_ns_ = 0;
};

}  // namespace sotto::tcp
