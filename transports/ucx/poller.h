// Serves the workers of one context inside poll(), without a thread of its own.
//
// Threads: the driving thread; wake() from any.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "core/base/clock.h"
#include "core/iface/transport.h"
#include "transports/framed/ticks.h"

namespace sotto::ucx {

// A worker of UCX.
class Served {
 public:
  virtual ~Served() = default;
  // Becomes readable when there is something to do after arm.
  virtual int descriptor() const = 0;
  // False: there is something to do now.
  virtual bool arm() = 0;
  // Does what there is. True: something moved.
  virtual bool pass() = 0;
};

class UcxPoller final : public Poller {
 public:
  // clock: outlives the poller. TRANSPORT: no descriptors left.
  static Result<std::shared_ptr<UcxPoller>> make(const Clock& clock);
  explicit UcxPoller(const Clock& clock) : clock_(clock) {}  // for make
  ~UcxPoller() override;
  UcxPoller(const UcxPoller&) = delete;

  bool poll(int64_t wait_us) override;
  int64_t poll_interval_us() const override { return ticks_.interval_us(); }
  void wake() override;
  // An epoll of all workers' descriptors.
  int descriptor() const override { return epoll_; }
  bool arm() override;

  // Served until it is removed. Both are legal inside a pass.
  Status add(Served& worker);
  void remove(Served& worker);

  framed::Ticks& ticks() { return ticks_; }
  const Clock& clock() const { return clock_; }

 private:
  bool pass();

  const Clock& clock_;
  int epoll_ = -1;
  int bell_ = -1;                 // an eventfd, for wake
  std::vector<Served*> workers_;  // null: removed inside a pass
  framed::Ticks ticks_{clock_};
  bool passing_ = false;
  std::atomic<bool> woken_{false};
};

}  // namespace sotto::ucx
