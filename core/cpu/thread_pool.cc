#include "core/cpu/thread_pool.h"

#include <pthread.h>
#include <signal.h>

#include <system_error>

#include "core/base/clock.h"

namespace sotto {
namespace {

constexpr int64_t kSpinNs = 20'000;  // kernels of one plan follow each other within this time

// Waits until `value` is not `old`: polls, then sleeps. Yields while it polls, as ranks may
// outnumber cores.
void wait_for_change(const std::atomic<uint32_t>& value, uint32_t old) {
  const Clock& clock = Clock::monotonic();
  const int64_t end = clock.now_ns() + kSpinNs;
  while (value.load(std::memory_order_acquire) == old) {
    if (clock.now_ns() >= end) return value.wait(old, std::memory_order_acquire);
    std::this_thread::yield();
  }
}

}  // namespace

ThreadPool::~ThreadPool() {
  stop_.store(true, std::memory_order_relaxed);
  generation_.fetch_add(1, std::memory_order_release);
  generation_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::start() {
  started_ = true;
  if (threads_ <= 1) return;
  workers_.reserve(threads_ - 1);
  // The application's signals are for its own threads.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    for (uint32_t index = 1; index < threads_; ++index) {
      workers_.emplace_back([this, index] { work(index); });
    }
  } catch (const std::system_error&) {
    // run() covers the missing ones.
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void ThreadPool::work(uint32_t index) noexcept {
  uint32_t seen = 0;
  while (true) {
    wait_for_change(generation_, seen);
    seen = generation_.load(std::memory_order_acquire);
    if (stop_.load(std::memory_order_relaxed)) return;
    task_(context_, index);
    if (pending_.fetch_sub(1, std::memory_order_acq_rel) == 1) pending_.notify_one();
  }
}

void ThreadPool::run(Task task, void* context) {
  if (!started_) start();
  const uint32_t workers = static_cast<uint32_t>(workers_.size());
  if (workers != 0) {
    task_ = task;
    context_ = context;
    pending_.store(workers, std::memory_order_relaxed);
    generation_.fetch_add(1, std::memory_order_release);
    generation_.notify_all();
  }
  task(context, 0);
  for (uint32_t index = workers + 1; index < threads_; ++index) task(context, index);
  for (uint32_t left = pending_.load(std::memory_order_acquire); left != 0;
       left = pending_.load(std::memory_order_acquire)) {
    wait_for_change(pending_, left);
  }
}

}  // namespace sotto
