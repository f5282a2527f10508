// The poller of a context whose ranks are threads: other threads give work to a source and wake its
// owner.
#pragma once

#include <pthread.h>

#include <atomic>
#include <mutex>
#include <vector>

#include "core/base/clock.h"
#include "core/iface/transport.h"

namespace sotto::inproc {

// A source of work that is done inside poll.
class MailboxSource {
 public:
  virtual void run() = 0;

 protected:
  ~MailboxSource() = default;
};

class Mailbox final : public Poller {
 public:
  // Waits end by the clock, which outlives the mailbox.
  explicit Mailbox(const Clock& clock);
  ~Mailbox() override;
  Mailbox(const Mailbox&) = delete;
  Mailbox& operator=(const Mailbox&) = delete;

  // Runs the sources if wake() was called since the last poll; waits for that if it was not.
  bool poll(int64_t wait_us) override;
  std::optional<bool> peek() const override { return pending_.load(std::memory_order_acquire); }
  void wake() override;
  void forward_wakes(Poller* other) override;

  // Driving thread, not from inside poll.
  void add(MailboxSource* source);
  void remove(MailboxSource* source);

 private:
  bool run_sources();
  void wait(Deadline deadline);
  void sleep(int64_t us);

  const Clock& clock_;
  // std::condition_variable waits with pthread_cond_clockwait, which the thread sanitizer of GCC 12
  // does not know.
  pthread_mutex_t mutex_;
  pthread_cond_t condition_;
  std::atomic<bool> pending_{false};
  std::atomic<bool> forwards_{false};
  std::mutex forward_mutex_;  // held while the other poller is woken, which may end afterwards
  Poller* forward_ = nullptr;
  std::vector<MailboxSource*> sources_;
};

}  // namespace sotto::inproc
