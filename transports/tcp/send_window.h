// The send window of a data connection: the largest number of unacknowledged bytes that the kernel
// may hold. It is about twice what the path carries; the system would allow megabytes. Deep queues
// in front of a slow link cause drops, share the link unevenly between connections to one receiver,
// and delay urgent frames.
//
// The rate of a path is measured only while there is something to send. A trainer that computes
// between its steps sends little in a second, but each burst as fast as the path allows.
//
// A window holds at least some full packets. A receiver may delay the acknowledgement of the last
// packet for 40 ms (delayed acknowledgements), unless more than a packet follows it. So a sender
// with room for the next packets never waits for that. Loopback has packets of 64 KiB, and no more
// than three of them are under way where the congestion control paces them (BBR). Under a rate
// limit a packet is what the limit lets pass at once: full ones would fill the buffer of a receiver
// that may not read them yet.
//
// Connections that share this rank's link would keep unequal shares, since a smaller share gets a
// smaller window. So all windows aim at the mean of the rates.
//
// Acknowledged bytes, the shortest round-trip time and the packet size are the kernel's (TCP_INFO).
// A path that carries more than the largest socket buffer (net.core.wmem_max) is left to the
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
  // A rate of 0: not known yet, or the connection is closed.
  void changed(uint64_t before, uint64_t now) {
    sum_ = sum_ - before + now;
    connections_ = connections_ - (before != 0) + (now != 0);
  }
  uint64_t sum() const { return sum_; }
  // The rate for which a connection gets room: the mean, within half and twice its own rate, since
  // paths differ and windows are twice what a path carries.
  uint64_t rate_for(uint64_t own) const {
    return connections_ == 0 ? own : std::clamp(sum_ / connections_, own / 2, own * 2);
  }

 private:
  uint64_t sum_ = 0, connections_ = 0;
};

// The rate of a path, from samples of the acknowledged bytes. Time without bytes to send does not
// count.
class PathRate {
 public:
  // acked: bytes that the peer has acknowledged so far. No bytes are on the way.
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
  // on_path: bytes that are sent and not acknowledged. True: the figures are new.
  bool look(uint64_t acked, uint64_t on_path, int64_t now_ns);
  // All bytes have been sent for now.
  void idle() { busy_ = false; }

  uint64_t bytes_per_second() const { return rate_; }
  // The time that bytes are on the way.
  uint64_t wait_us() const { return wait_us_; }

 private:
  uint64_t rate_ = 0;     // largest of the last samples
  uint64_t wait_us_ = 0;  // smallest of the last samples, which are means
  uint64_t handed_ = 0;   // to the kernel, since the connection was made
  bool busy_ = false;
  uint64_t acked_ = 0;    // at the last look; when the connection became busy, if that was later,
  int64_t mark_ns_ = 0;   // all that had been handed over
  uint64_t bytes_ = 0;    // of the sample that is being taken
  double waited_ = 0;     // of the sample: bytes on the way times nanoseconds
  int64_t taken_ns_ = 0;  // duration of the sample so far
};

class SendWindow {
 public:
  explicit SendWindow(SendShares& shares) : shares_(shares) {}
  ~SendWindow() { shares_.changed(rate_.bytes_per_second(), 0); }
  SendWindow(const SendWindow&) = delete;
  SendWindow& operator=(const SendWindow&) = delete;

  // fd: a connected socket. enabled: false: the buffer has a size that was asked for. at_once:
  // largest number of bytes that are handed to the kernel in one call.
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
  // All bytes were handed to the kernel.
  void idle(int fd, int64_t now_ns) {
    if (!enabled_) return;
    // What fits into the buffer is too little to measure.
    if (unseen_ >= kLookEvery / 4) look(fd, now_ns);
    rate_.idle();
  }

  struct Path {
    uint64_t rate = 0;              // bytes per second
    uint64_t all = 0;               // of all connections of this rank
    uint64_t rtt_us = 0;            // the shortest
    uint64_t wait_us = 0;           // time that bytes are on the way
    uint64_t packet = 0;            // bytes of the largest
    uint64_t at_once = UINT64_MAX;  // bytes per call, which make a packet of their own
    bool paced = false;             // by its congestion control, BBR
  };
  static uint64_t bytes_for(const Path& path);

 private:
  static constexpr uint64_t kLookEvery = 128 * 1024;

  void look(int fd, int64_t now_ns);
  void bound(int fd, uint64_t bytes);
  void unbound(int fd);

  SendShares& shares_;
  PathRate rate_;
  Path path_;
  bool enabled_ = false;
  bool bounded_ = false;
  uint64_t most_ = UINT64_MAX;  // largest size of a buffer; beyond it the system tunes
  uint64_t unseen_ = 0;         // sent since the kernel was last asked
  uint64_t window_ = 0;         // in force while bounded
};

}  // namespace sotto::tcp
