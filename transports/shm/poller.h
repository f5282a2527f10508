// Serves the rings of one context inside poll(), without a thread of its own.
//
// A rank that sleeps has said so in all of its rings (arm), and peers then ring its bell. So a rank
// that waits costs nothing, and one that is awake is not rung for.
//
// Threads: the driving thread; wake() from any.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "core/base/clock.h"
#include "core/iface/transport.h"
#include "transports/framed/ticks.h"
#include "transports/shm/bell.h"

namespace sotto::shm {

// Rings that the poller serves.
class Served {
 public:
  virtual ~Served() = default;
  // Reads and sends what there is, for one turn. True: something moved.
  virtual bool serve() = 0;
  // Whether serve would move anything, by the rings alone. Cheap.
  virtual bool has_work() const = 0;
  // The next change by the peer rings this rank's bell. False: there is something to do now.
  virtual bool arm() = 0;
  virtual void disarm() = 0;
};

class ShmPoller final : public Poller {
 public:
  ShmPoller(const Clock& clock, Bell bell) : clock_(clock), bell_(std::move(bell)) {}

  bool poll(int64_t wait_us) override;
  std::optional<bool> peek() const override;
  int64_t poll_interval_us() const override;
  void wake() override;
  int descriptor() const override { return bell_.descriptor(); }
  bool arm() override;

  // Served until they are removed. Both are legal inside serve.
  void add(Served& rings) { served_.push_back(&rings); }
  void remove(Served& rings);

  framed::Ticks& ticks() { return ticks_; }
  const Clock& clock() const { return clock_; }
  const Bell& bell() const { return bell_; }

 private:
  bool pass();

  const Clock& clock_;
  const Bell bell_;              // this rank's
  std::vector<Served*> served_;  // null: removed inside serve
  framed::Ticks ticks_{clock_};
  bool serving_ = false;
  bool armed_ = false;
  std::atomic<bool> woken_{false};
};

}  // namespace sotto::shm
