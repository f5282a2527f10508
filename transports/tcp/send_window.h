// How much of a data connection's bytes the kernel may hold that the peer has not acknowledged:
// about twice what the path carries, and not the megabytes that the system would let gather. Deep
// queues in front of a slow link make its drops, let connections to one receiver share it unevenly,
// and keep urgent frames waiting.
//
// The rate of a path is what it carries while there is something to send: a trainer that computes
// between its steps sends little in a second, but each burst as fast as the path goes.
//
// A window holds some full packets of the path, whatever its rate. A receiver may hold back its
// acknowledgement of the last one for 40 ms (delayed acknowledgements), and does not once more than
// a packet has come behind it. So a sender that has room for the next ones never waits for that.
// Loopback has packets of 64 KiB. Under a rate limit they are what the limit lets pass at once:
// full ones would gather in front of a receiver that may not read them yet, until its buffer is
// full.
//
// Connections that share this rank's link would keep whatever shares they have: who gets less is
// given a smaller window. So all windows aim at the mean of the rates.
//
// Acknowledged bytes, the shortest round-trip time and the packet size are the kernel's (TCP_INFO).
// Paths that carry more than what a socket buffer may be set to (net.core.wmem_max) are left to the
// system, which tunes higher.
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
  uint64_t sum() const { return sum_; }
  // What a connection gets room for. Paths differ: none is held below its own rate (windows are
  // twice what a path carries), nor flooded.
  uint64_t rate_for(uint64_t own) const {
    return connections_ == 0 ? own : std::clamp(sum_ / connections_, own / 2, own * 2);
  }

 private:
  uint64_t sum_ = 0, connections_ = 0;
};

// What a path carries, from looks at how much of what was sent has been acknowledged. Time in which
// there was nothing to send does not count.
class PathRate {
 public:
  // acked: bytes that the peer has acknowledged so far. Nothing is on its way.
  void start(uint64_t acked) { handed_ = acked; }
  // After `bytes` were handed to the kernel.
  void sent(uint64_t bytes, int64_t now_ns) {
    if (!busy_) {
      busy_ = true;
      acked_ = handed_;
      mark_ns_ = now_ns;
    }
    handed_ += bytes;
  }
  // on_path: bytes that are sent and not acknowledged. True: there are new figures.
  bool look(uint64_t acked, uint64_t on_path, int64_t now_ns);
  // There is nothing to send for now.
  void idle() { busy_ = false; }

  uint64_t bytes_per_second() const { return rate_; }
  // How long bytes are on the way.
  uint64_t wait_us() const { return wait_us_; }

 private:
  uint64_t rate_ = 0;     // the largest of late
  uint64_t wait_us_ = 0;  // the shortest of late; a mean of each sample
  uint64_t handed_ = 0;   // to the kernel, since the connection was made
  bool busy_ = false;
  uint64_t acked_ = 0;    // at the last look; when the connection became busy, if that was later,
  int64_t mark_ns_ = 0;   // all that had been handed over
  uint64_t bytes_ = 0;    // of the sample that is being taken
  double waited_ = 0;     // of it: bytes on the way times nanoseconds
  int64_t taken_ns_ = 0;  // how long it has taken
};

class SendWindow {
 public:
  explicit SendWindow(SendShares& shares) : shares_(shares) {}
  ~SendWindow() { shares_.changed(rate_.bytes_per_second(), 0); }
  SendWindow(const SendWindow&) = delete;
  SendWindow& operator=(const SendWindow&) = delete;

  // fd: a connected socket. enabled: false: the buffer is what somebody has asked for. at_once: as
  // many bytes at most are handed to the kernel in one go.
  void start(int fd, bool enabled, uint64_t at_once);
  // The window stays as it is.
  void stop() { enabled_ = false; }
  // After `bytes` were handed to the kernel.
  void sent(int fd, uint64_t bytes, int64_t now_ns) {
    if (!enabled_) return;
    rate_.sent(bytes, now_ns);
    unseen_ += bytes;
    if (unseen_ >= kLookEvery) look(fd, now_ns);
  }
  // Everything has been handed to the kernel.
  void idle(int fd, int64_t now_ns) {
    if (!enabled_) return;
    // Of what fits into the buffer nothing can be learned.
    if (unseen_ >= kLookEvery / 4) look(fd, now_ns);
    rate_.idle();
  }

  struct Path {
    uint64_t rate;     // bytes per second
    uint64_t all;      // of all connections of this rank
    uint64_t rtt_us;   // the shortest
    uint64_t wait_us;  // how long bytes are on the way
    uint64_t packet;   // bytes of the largest
    uint64_t at_once;  // what is handed over in one go, which makes a packet of its own
  };
  static uint64_t bytes_for(const Path& path);

 private:
  static constexpr uint64_t kLookEvery = 128 * 1024;

  void look(int fd, int64_t now_ns);
  void bound(int fd, uint64_t bytes);
  void unbound(int fd);

  SendShares& shares_;
  PathRate rate_;
  bool enabled_ = false;
  uint64_t at_once_ = UINT64_MAX;
  bool bounded_ = false;
  uint64_t most_ = UINT64_MAX;  // that a buffer may be set to; more: the system tunes it
  uint64_t unseen_ = 0;         // sent since the kernel was last asked
  uint64_t window_ = 0;         // in force while bounded
};

}  // namespace sotto::tcp
