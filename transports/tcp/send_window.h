// How much of a data connection's bytes the kernel may hold that the peer has not acknowledged:
// about twice what the path carries, and not the megabytes that the system would let gather. Deep
// queues in front of a slow link make its drops, let connections to one receiver share it unevenly,
// and keep urgent frames waiting.
//
// Connections that share this rank's link would keep whatever shares they have: who gets less is
// given a smaller window. So all windows aim at the mean of the rates.
//
// Acknowledged bytes and the shortest round-trip time are the kernel's (TCP_INFO). Paths that carry
// more than what a socket buffer may be set to (net.core.wmem_max) are left to the system, which
// tunes higher.
//
// Threads: the driving thread.
#pragma once

#include <algorithm>
#include <cstdint>

namespace sotto::tcp {

// The rates of a rank's connections.
class SendShares {
 public:
  // 0: nothing is known of the connection, or it is gone.
  void changed(uint64_t before, uint64_t now) {
    sum_ = sum_ - before + now;
    connections_ = connections_ - (before != 0) + (now != 0);
  }
  // What a connection gets room for. Paths differ: none is held below its own rate (windows are
  // twice what a path carries), nor flooded.
  uint64_t rate_for(uint64_t own) const {
    return connections_ == 0 ? own : std::clamp(sum_ / connections_, own / 2, own * 2);
  }

 private:
  uint64_t sum_ = 0, connections_ = 0;
};

class SendWindow {
 public:
  explicit SendWindow(SendShares& shares) : shares_(shares) {}
  ~SendWindow() { shares_.changed(rate_, 0); }
  SendWindow(const SendWindow&) = delete;
  SendWindow& operator=(const SendWindow&) = delete;

  // fd: a connected socket. enabled: false: the buffer is what somebody has asked for.
  void start(int fd, bool enabled);
  // The window stays as it is.
  void stop() { enabled_ = false; }
  // After `bytes` were handed to the kernel.
  void sent(int fd, uint64_t bytes, int64_t now_ns) {
    if (!enabled_) return;
    unseen_ += bytes;
    if (unseen_ >= kLookEvery) look(fd, now_ns);
  }

  // Bytes for a path of `rate` bytes per second and `rtt_us`.
  static uint64_t bytes_for(uint64_t rate, uint64_t rtt_us);

 private:
  static constexpr uint64_t kLookEvery = 128 * 1024;

  void look(int fd, int64_t now_ns);
  void bound(int fd, uint64_t bytes);
  void unbound(int fd);

  SendShares& shares_;
  bool enabled_ = false;
  bool bounded_ = false;
  uint64_t most_ = UINT64_MAX;  // that a buffer may be set to; more: the system tunes it
  uint64_t unseen_ = 0;         // sent since the kernel was last asked
  uint64_t rate_ = 0;           // the largest of late, bytes per second
  uint64_t acked_ = 0;          // at mark_ns_
  int64_t mark_ns_ = 0;
  uint64_t window_ = 0;  // in force while bounded
};

}  // namespace sotto::tcp
