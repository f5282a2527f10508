// The turns of connections: whose is next, and who waits for a time.
//
// Threads: the driving thread.
#pragma once

#include <cstdint>
#include <vector>

#include "core/base/clock.h"

namespace sotto::tcp {

// The owner of a descriptor that the reactor serves. Unregister before destruction.
class Pollable {
 public:
  virtual ~Pollable() = default;
  // events: of epoll (EPOLLIN, EPOLLOUT, ...); 0: another turn without events. True: another turn
  // is wanted at once.
  virtual bool serve(uint32_t events) = 0;

 private:
  friend class TurnQueue;
  uint32_t events_ = 0;
  bool queued_ = false;
  bool registered_ = false;
};

class TurnQueue {
 public:
  explicit TurnQueue(const Clock& clock) : clock_(clock) {}

  // From now on `pollable` has turns.
  void add(Pollable& pollable) { pollable.registered_ = true; }
  // It has no turns any more, also those that it waits for. Legal inside a turn. False: it had none
  // already.
  bool remove(Pollable& pollable);
  // A turn in the next call of serve, with `events` and those of earlier calls.
  void want(Pollable& pollable, uint32_t events = 0);
  // A turn at a time of the clock. The earliest counts.
  void want_at(Pollable& pollable, int64_t at_ns);
  // Those whose time has come want a turn now.
  void release();
  // Serves those that want a turn, in order. What they want meanwhile is for the next call. True if
  // there was a turn.
  bool serve();
  // The earliest time that a turn waits for; INT64_MAX: none.
  int64_t next_ns() const;

 private:
  struct Delayed {
    Pollable* pollable;
    int64_t at_ns;
  };

  const Clock& clock_;
  std::vector<Pollable*> turns_, serving_;  // null: removed
  std::vector<Delayed> delayed_;
};

}  // namespace sotto::tcp
