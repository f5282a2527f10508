// The streams of each device that are blocked for work that the host has left (StreamBlocks), of
// all contexts of the process. A call that waits for a device may keep locks that the host needs
// for that work, and then it waits for ever: so the library makes its own such calls while no
// stream of the device is blocked, and blocks none meanwhile.
//
// Threads: any.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>

namespace sotto {

class BlockedStreams {
 public:
  static BlockedStreams& of(int32_t device);

  // Before a stream is blocked. Waits for the end of what NoneBlocked keeps it from, which takes
  // no more of the host: it need not be waited for by others.
  void add();
  // The device, or what the host has written, lets the stream go on.
  void remove();
  bool any();

 private:
  friend class NoneBlocked;
  std::mutex mutex_;
  std::condition_variable changed_;
  uint64_t blocked_ = 0;
  uint64_t kept_free_ = 0;  // by so many NoneBlocked
};

// While it lives no stream of the device gets blocked, and if it holds none is. Streams that get
// blocked before that come first, however many: who has one needs the driving thread, which may
// want to block the next.
class NoneBlocked {
 public:
  // Waits until none is blocked; with `patience` no longer than that.
  explicit NoneBlocked(int32_t device);
  NoneBlocked(int32_t device, std::chrono::milliseconds patience);
  ~NoneBlocked();
  NoneBlocked(const NoneBlocked&) = delete;
  NoneBlocked& operator=(const NoneBlocked&) = delete;

  bool holds() const { return holds_; }

 private:
  BlockedStreams& streams_;
  bool holds_ = false;
};

}  // namespace sotto
