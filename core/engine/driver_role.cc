#include "core/engine/driver_role.h"

#include <pthread.h>
#include <sys/resource.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>

#include "core/base/log.h"

namespace sotto {
namespace {

// No thread waits: sockets and submissions wake the poller.
constexpr int64_t kIdleBlockUs = 200'000;
// How long the role stays free after a thread has left it when nothing is in flight, and how often
// the progress thread checks.
constexpr int64_t kLingerNs = 5'000'000;
constexpr auto kPark = std::chrono::milliseconds(10);
// Longest sleep of a thread that another one drives for, before it checks its deadline.
constexpr int64_t kSleepUs = 50'000;

// Ends of short sleeps. On the system clock, because thread sanitizers know the wait on it and not
// the one on the steady clock; a clock that is set makes one such sleep shorter or longer.
template <class Duration>
auto soon(Duration wait) {
  return std::chrono::system_clock::now() + wait;
}

}  // namespace

void DriverRole::set_serving() {
  std::lock_guard lock(mutex_);
  serving_ = true;
}

void DriverRole::stop() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  if (!thread_.joinable()) return;
  changed_.notify_all();
  parked_.notify_all();
  work_.wake();
  thread_.join();
}

DriverRole::Lock::Lock(DriverRole& role) : role_(role) {
  std::unique_lock lock(role_.mutex_);
  if (role_.driving_ && role_.driver_ == std::this_thread::get_id()) {
    nested_ = true;
    return;
  }
  ++role_.waiters_;
  const uint64_t turn = role_.claims_.next++;
  const auto mine = [&] { return !role_.driving_ && turn == role_.claims_.now; };
  while (!mine()) {
    if (role_.driving_) {
      lock.unlock();
      role_.work_.wake();
      lock.lock();
    }
    if (!mine()) role_.changed_.wait(lock);
  }
  role_.take();
  ++role_.claims_.now;
}

DriverRole::Lock::~Lock() {
  if (nested_) return;
  std::lock_guard lock(role_.mutex_);
  --role_.waiters_;
  role_.leave();
}

void DriverRole::leave() {
  driving_ = false;
  left_ns_ = clock_.now_ns();
  changed_.notify_all();
  if (waiters_ == 0 && ops_in_flight_ > 0) parked_.notify_one();
}

bool DriverRole::background_due() const {
  if (driving_ || waiters_ > 0 || !serving_) return false;
  return ops_in_flight_ > 0 || !inbox_.tasks.empty() || clock_.now_ns() - left_ns_ >= kLingerNs;
}

bool DriverRole::run_until(const std::function<bool()>& done, Deadline deadline) {
  while (!done()) {
    if (deadline.passed(clock_)) return false;
    if (!work_.progress()) work_.block(std::min<int64_t>(deadline.left_us(clock_), kIdleBlockUs));
  }
  return true;
}

bool DriverRole::wait_until(const std::function<bool()>& done, int64_t timeout_us) {
  const Deadline deadline = Deadline::in_us(clock_, timeout_us);
  std::unique_lock lock(mutex_);
  ++waiters_;
  bool result = true;
  while (!done()) {
    if (deadline.passed(clock_)) {
      result = false;
      break;
    }
    if (driving_ || claims_.any()) {
      // Another thread works; sleep until an operation ends or the role is free.
      if (driving_) {
        lock.unlock();
        work_.wake();  // a progress thread that sleeps in a poller hands the role over
        lock.lock();
      }
      if (!done() && (driving_ || claims_.any())) {
        const int64_t left = std::min<int64_t>(deadline.left_us(clock_), kSleepUs);
        changed_.wait_until(lock, soon(std::chrono::microseconds(left)));
      }
      continue;
    }
    take();
    while (!claims_.any()) {
      lock.unlock();
      const bool finished = done() || deadline.passed(clock_);
      if (!finished && !work_.progress())
        work_.block(std::min<int64_t>(deadline.left_us(clock_), kIdleBlockUs));
      lock.lock();
      if (finished) break;
    }
    leave();
  }
  --waiters_;
  if (waiters_ == 0 && !driving_ && ops_in_flight_ > 0) parked_.notify_one();
  return result;
}

void DriverRole::progress_thread_main(int nice) noexcept {
  pthread_setname_np(pthread_self(), "sotto-progress");
  // Of this thread alone: Linux counts threads as processes here.
  if (nice != 0 && setpriority(PRIO_PROCESS, 0, nice) != 0)
    log(LogLevel::kWarn, "SOTTO_PROGRESS_NICE={}: {}", nice, std::strerror(errno));
  std::unique_lock lock(mutex_);
  while (!stop_) {
    if (!background_due()) {
      parked_.wait_until(lock, soon(kPark));
      continue;
    }
    take();
    while (!stop_ && waiters_ == 0) {
      lock.unlock();
      if (!work_.progress()) work_.block(kIdleBlockUs);
      lock.lock();
    }
    driving_ = false;
    changed_.notify_all();
  }
}

bool DriverRole::claimed() {
  std::lock_guard lock(mutex_);
  return claims_.any();
}

void DriverRole::submit(OpRef op, bool waits) {
  bool driven = false;
  {
    std::lock_guard lock(mutex_);
    ++ops_in_flight_;
    inbox_.items.push_back(Handover{.op = std::move(op), .memory = {}});
    inbox_.filled.store(true, std::memory_order_release);
    driven = driving_;
  }
  if (driven) {
    work_.wake();
  } else if (!waits) {
    parked_.notify_one();
  }
}

void DriverRole::hand_over(Handover item) {
  {
    std::lock_guard lock(mutex_);
    inbox_.items.push_back(std::move(item));
    inbox_.filled.store(true, std::memory_order_release);
    if (!driving_) {
      parked_.notify_one();
      return;
    }
  }
  work_.wake();
}

void DriverRole::add_op() {
  std::lock_guard lock(mutex_);
  ++ops_in_flight_;
}

void DriverRole::run_on_driver(const Task& f) {
  std::atomic<bool> ran{false};
  {
    std::lock_guard lock(mutex_);
    inbox_.tasks.push_back([&] {
      f();
      ran.store(true, std::memory_order_release);
    });
    inbox_.filled.store(true, std::memory_order_release);
  }
  work_.wake();
  wait_until([&] { return ran.load(std::memory_order_acquire); }, -1);
}

bool DriverRole::take_inbox(std::vector<Handover>* items, std::vector<Task>* tasks) {
  if (!inbox_.filled.load(std::memory_order_acquire)) return false;
  std::lock_guard lock(mutex_);
  items->swap(inbox_.items);
  tasks->swap(inbox_.tasks);
  inbox_.filled.store(false, std::memory_order_release);
  return true;
}

OpRef DriverRole::take_callback() {
  if (callbacks_.due.load(std::memory_order_acquire) == 0) return nullptr;
  std::lock_guard lock(mutex_);
  if (callbacks_.ops.empty()) return nullptr;
  OpRef op = std::move(callbacks_.ops.front());
  callbacks_.ops.pop_front();
  callbacks_.due.fetch_sub(1, std::memory_order_relaxed);
  return op;
}

}  // namespace sotto
