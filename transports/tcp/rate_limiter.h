// A token bucket in bytes: at most T x rate plus the burst passes in T seconds.
//
// It models a slow link with buffers in front of it. While bytes wait the link is busy, also when
// this process does not run, so no time is lost. An idle link saves up at most the burst.
//
// Threads: the driving thread.
#pragma once

#include <algorithm>
#include <cstdint>

namespace sotto::tcp {

class RateLimiter {
 public:
  // mbit: 10^6 bit/s; 0: no limit.
  void set_rate(double mbit, int64_t now_ns) {
    bytes_per_ns_ = mbit * 1e6 / 8 / 1e9;
    burst_ = std::max(kBurstBytes, bytes_per_ns_ * kBurstNs);
    tokens_ = burst_;
    last_ns_ = now_ns;
  }
  bool limited() const { return bytes_per_ns_ > 0; }

  // Bytes that may pass now.
  uint64_t available(int64_t now_ns) {
    if (!limited()) return UINT64_MAX;
    refill(now_ns);
    return tokens_ < 1 ? 0 : static_cast<uint64_t>(tokens_);
  }
  // The tokens may go below zero.
  void take(uint64_t bytes) {
    if (limited()) tokens_ -= static_cast<double>(bytes);
  }
  // The time when `bytes` (at most the burst) may pass.
  int64_t when_ns(uint64_t bytes, int64_t now_ns) {
    refill(now_ns);
    waiting_ = true;
    const double missing = std::min(static_cast<double>(bytes), burst_) - tokens_;
    return missing <= 0 ? now_ns : now_ns + static_cast<int64_t>(missing / bytes_per_ns_) + 1;
  }

 private:
  // The burst: large enough for a timer that fires late, small enough that messages take time.
  static constexpr double kBurstBytes = 64 * 1024;
  static constexpr double kBurstNs = 4e6;
  // Time for which a busy link has bytes in its buffers: some megabytes at usual limits.
  static constexpr double kBufferNs = 200e6;

  void refill(int64_t now_ns) {
    if (now_ns <= last_ns_) return;
    const double limit =
        waiting_ ? std::max(burst_, bytes_per_ns_ * kBufferNs) : std::max(burst_, tokens_);
    tokens_ = std::min(limit, tokens_ + static_cast<double>(now_ns - last_ns_) * bytes_per_ns_);
    last_ns_ = now_ns;
    waiting_ = false;
  }

  double bytes_per_ns_ = 0;
  double burst_ = 0;
  double tokens_ = 0;
  int64_t last_ns_ = 0;
  bool waiting_ = false;  // since last_ns_
};

}  // namespace sotto::tcp
