#include "transports/inproc/mailbox.h"

#include <time.h>

#include <algorithm>

namespace sotto::inproc {
namespace {

// Longest sleep before the clock is read again.
constexpr int64_t kSleepUs = 200'000;

}  // namespace

Mailbox::Mailbox(const Clock& clock) : clock_(clock) {
  pthread_mutex_init(&mutex_, nullptr);
  pthread_condattr_t attributes;
  pthread_condattr_init(&attributes);
  pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
  pthread_cond_init(&condition_, &attributes);
  pthread_condattr_destroy(&attributes);
}

Mailbox::~Mailbox() {
  pthread_cond_destroy(&condition_);
  pthread_mutex_destroy(&mutex_);
}

bool Mailbox::poll(int64_t wait_us) {
  if (!pending_.load(std::memory_order_acquire)) {
    if (wait_us <= 0) return false;
    wait(Deadline::in_us(clock_, wait_us));
  }
  return run_sources();
}

void Mailbox::wake() {
  // The poller clears pending_ before it looks at the sources, so a wake that finds it set has
  // nothing to do. The exchange, unlike a load, orders this thread's work before that look.
  if (pending_.exchange(true, std::memory_order_acq_rel)) return;
  pthread_mutex_lock(&mutex_);  // the poller is either before its check or inside the wait
  pthread_cond_signal(&condition_);
  pthread_mutex_unlock(&mutex_);
  if (!forwards_.load(std::memory_order_acquire)) return;
  std::lock_guard lock(forward_mutex_);
  if (forward_ != nullptr) forward_->wake();
}

void Mailbox::forward_wakes(Poller* other) {
  std::lock_guard lock(forward_mutex_);
  forward_ = other;
  forwards_.store(other != nullptr, std::memory_order_release);
}

void Mailbox::add(MailboxSource* source) {
  sources_.push_back(source);
  wake();  // it may have work that came before it was added
}

void Mailbox::remove(MailboxSource* source) {
  sources_.erase(std::remove(sources_.begin(), sources_.end(), source), sources_.end());
}

bool Mailbox::run_sources() {
  if (!pending_.exchange(false, std::memory_order_acq_rel)) return false;
  for (MailboxSource* const source : sources_) source->run();
  return true;
}

void Mailbox::wait(Deadline deadline) {
  pthread_mutex_lock(&mutex_);
  while (!pending_.load(std::memory_order_acquire) && !deadline.passed(clock_))
    sleep(std::min(deadline.left_us(clock_), kSleepUs));
  pthread_mutex_unlock(&mutex_);
}

// Real time, with the mutex held.
void Mailbox::sleep(int64_t us) {
  timespec until{};
  clock_gettime(CLOCK_MONOTONIC, &until);
  until.tv_nsec += static_cast<long>(us) * 1000;
  until.tv_sec += until.tv_nsec / 1'000'000'000;
  until.tv_nsec %= 1'000'000'000;
  pthread_cond_timedwait(&condition_, &mutex_, &until);
}

}  // namespace sotto::inproc
