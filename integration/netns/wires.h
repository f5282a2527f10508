// The wires of a network lab: a star of hosts, every host behind a link of its own. A packet waits
// for the token bucket of its sender's link, travels for the delay, and waits for the bucket of the
// receiver's link. No system calls and no clock: the caller brings packets and the time, so equal
// calls have equal results.
//
// Times are nanoseconds of any monotonic clock. One thread.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <vector>

namespace sotto_netns {

// An IPv6 address, or an IPv4 address mapped into IPv6 (::ffff:a.b.c.d).
using Address = std::array<uint8_t, 16>;

struct WireSettings {
  double bits_per_second = 0;  // of both directions of every link; 0: no limit
  uint64_t burst_bytes = 0;    // that a bucket holds
  uint64_t queue_bytes = 0;    // that may wait in front of a bucket; what comes then is dropped
  int64_t delay_ns = 0;        // from the sender's bucket to the receiver's: half a round trip
  uint32_t loss_ppm = 0;       // of the packets of every sender, drawn when they leave it
};

struct WireCounters {
  uint64_t delivered = 0;
  uint64_t lost = 0;  // drawn
  uint64_t queue_full = 0;
  uint64_t cut = 0;      // between hosts that are parted
  uint64_t unknown = 0;  // to an address that no host has
};

class Wires {
 public:
  using Deliver = std::function<void(size_t host, const uint8_t* frame, size_t bytes)>;

  explicit Wires(uint64_t seed) : seed_(seed) {}

  // Adds a host, whose index is the number of hosts before. Its losses depend on the seed, this
  // index and the number of packets it has sent, not on what other hosts do.
  void add_host(const std::vector<Address>& addresses);
  size_t hosts() const { return hosts_.size(); }

  // What is under way stays under way, in the order it has.
  void set(const WireSettings& settings, int64_t now);
  // These hosts reach each other and no other host; the others reach each other. Packets between
  // the two groups are dropped, also those under way. An empty list heals.
  void part(const std::vector<bool>& is_apart);

  // What a host has sent. It leaves with the next advance().
  void send(size_t from, const uint8_t* frame, size_t bytes);
  // Moves what may move, and calls `deliver` for what has arrived. Returns when it should be called
  // again if nothing is sent before; -1: nothing is under way.
  int64_t advance(int64_t now, const Deliver& deliver);

  const WireCounters& counters() const { return counters_; }

 private:
  struct Sent {
    std::vector<uint8_t> frame;
    uint64_t packets = 0, wire_bytes = 0;
    size_t from = 0, to = 0;
    int64_t due = 0;  // on the delay line
  };
  // First in, first out; holds at most `limit` bytes as the wire counts them.
  struct Queue {
    std::deque<Sent> frames;
    uint64_t bytes = 0;
    bool push(Sent&& sent, uint64_t limit);
    Sent pop();
  };
  struct Bucket {
    double tokens = 0;  // bytes
    int64_t filled = 0;
    // 0: `bytes` may pass, and their tokens are taken; else nanoseconds until they may.
    int64_t take(uint64_t bytes, const WireSettings& settings, int64_t now);
  };
  struct Host {
    Queue up, line, down;
    Bucket up_bucket, down_bucket;
    std::mt19937_64 random;
    bool apart = false;
  };

  uint64_t queue_limit() const;
  bool parted(const Sent& sent) const;
  void onto_line(Host& host, int64_t now, int64_t* next);
  void off_line(Host& host, int64_t now, int64_t* next);
  void arrive(size_t index, int64_t now, int64_t* next, const Deliver& deliver);

  const uint64_t seed_;
  WireSettings settings_;
  std::vector<Host> hosts_;
  std::map<Address, size_t> host_of_;
  WireCounters counters_;
};

}  // namespace sotto_netns
