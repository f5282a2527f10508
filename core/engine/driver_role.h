// The driver's role: exactly one thread at a time has it and does all the work. A thread that waits
// takes the role itself. The progress thread has it only while no other thread wants it: at once if
// operations are in flight, else after a moment, since the next call would have to get the role
// back from a thread that sleeps in a poller.
//
// Here is what threads share: the role, and what they hand to the driver and get from it. Threads:
// any, unless said otherwise.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "core/base/clock.h"
#include "core/base/small_vector.h"
#include "core/iface/device.h"

namespace sotto {

class Op;
using OpRef = std::shared_ptr<Op>;

// What a thread hands to the driver: an operation to start, or one of its inputs that has arrived.
struct Handover {
  static constexpr uint32_t kStart = 0xffffffffu;
  OpRef op;
  uint32_t input = kStart;
  EventId event = 0;  // of the operation's device: behind which the input is there; 0: it is there
  SmallVector<void*> memory;  // where it is, by slot; empty: where it was bound
};

// What the driver does.
class DriverWork {
 public:
  // False: there was nothing to do.
  virtual bool progress() = 0;
  // Waits at most so long for something to do.
  virtual void block(int64_t wait_us) = 0;
  // Ends a block, or the next one. Threads: any.
  virtual void wake() = 0;

 protected:
  ~DriverWork() = default;
};

class DriverRole {
 public:
  using Task = std::function<void()>;

  // Both outlive the role.
  DriverRole(DriverWork& work, const Clock& clock) : work_(work), clock_(clock) {}
  ~DriverRole() { stop(); }
  DriverRole(const DriverRole&) = delete;
  DriverRole& operator=(const DriverRole&) = delete;

  // nice: its niceness, 0 to 19.
  void start_progress_thread(int nice) {
    thread_ = std::thread([this, nice] { progress_thread_main(nice); });
  }
  // There is something that the progress thread can wait on.
  void set_serving();
  // Ends the progress thread.
  void stop();

  // ---- The role ----

  // The thread has the role for the lock's lifetime. Threads get it in the order in which they
  // came, so one that locks again and again keeps none out.
  class Lock {
   public:
    explicit Lock(DriverRole& role);
    ~Lock();
    bool nested() const { return nested_; }

   private:
    DriverRole& role_;
    bool nested_ = false;  // this thread had the role before
  };
  // Drives until done() (true) or the deadline has passed (false). The thread with the role alone.
  bool run_until(const std::function<bool()>& done, Deadline deadline);
  // Waits until done() holds; it is evaluated with and without locks held, so it only reads
  // atomics. False: the time is over.
  bool wait_until(const std::function<bool()>& done, int64_t timeout_us);
  // Runs f as the driver if the role is free and no thread asks for it.
  template <class F>
  void try_drive(F&& f) {
    {
      std::lock_guard lock(mutex_);
      if (driving_ || claims_.any()) return;
      take();
    }
    f();
    std::lock_guard lock(mutex_);
    leave();
  }
  // A thread waits for the role.
  bool claimed();

  // ---- Operations and tasks ----

  uint32_t ops_in_flight() const { return ops_in_flight_.load(std::memory_order_relaxed); }
  // An operation that is new. `waits`: the caller will drive itself.
  void submit(OpRef op, bool waits);
  // More for an operation in flight.
  void hand_over(Handover item);
  // One more operation is in flight, of which the driver knows.
  void add_op();
  // Runs f on the driver soon, and returns when it has run.
  void run_on_driver(const Task& f);
  // What was handed over since the last time; false: nothing. Driver.
  bool take_inbox(std::vector<Handover>* items, std::vector<Task>* tasks);
  void notify() { changed_.notify_all(); }
  // One operation less is in flight: publish() makes that visible before waiting threads look.
  // `callback`: the operation, if a function is to be called for it on a thread of the caller's; or
  // null.
  template <class Publish>
  void end_op(OpRef callback, Publish&& publish) {
    {
      std::lock_guard lock(mutex_);
      --ops_in_flight_;
      if (callback != nullptr) {
        callbacks_.ops.push_back(std::move(callback));
        callbacks_.due.fetch_add(1, std::memory_order_release);
      }
      publish();
    }
    notify();
  }
  // The operation that has ended first of those whose function is due; or null.
  OpRef take_callback();
  // publish() makes visible that a function has returned.
  template <class Publish>
  void end_callback(Publish&& publish) {
    {
      std::lock_guard lock(mutex_);
      publish();
    }
    notify();
    work_.wake();  // a thread that waits for it may be in a poller
  }

 private:
  void progress_thread_main(int nice) noexcept;
  // Under mutex_.
  void take() {
    driving_ = true;
    driver_ = std::this_thread::get_id();
  }
  void leave();
  bool background_due() const;

  DriverWork& work_;
  const Clock& clock_;
  std::mutex mutex_;                 // guards what follows
  std::condition_variable changed_;  // threads that want the role or wait for an operation
  std::condition_variable parked_;   // the progress thread, while there is nothing for it to do
  int64_t left_ns_ = 0;              // when the role was last left
  bool driving_ = false;
  std::thread::id driver_;  // which thread, while driving_
  uint32_t waiters_ = 0;    // threads that want the role or sleep until an operation ends
  // Threads that want the role for something else than waiting, in turn.
  struct Claims {
    uint64_t next = 0;  // turn of the next thread that comes
    uint64_t now = 0;   // turn of the one that gets the role next
    bool any() const { return next != now; }
  };
  Claims claims_;
  bool serving_ = false;
  bool stop_ = false;
  std::atomic<uint32_t> ops_in_flight_{0};  // written under mutex_
  struct Inbox {
    std::vector<Handover> items;
    std::vector<Task> tasks;
    std::atomic<bool> filled{false};
  };
  Inbox inbox_;
  struct Callbacks {
    std::deque<OpRef> ops;
    std::atomic<size_t> due{0};
  };
  Callbacks callbacks_;
  std::thread thread_;
};

}  // namespace sotto
