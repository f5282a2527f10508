#include "transports/tcp/fork_guard.h"

#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

#include <mutex>
#include <vector>

namespace sotto::tcp {
namespace {

// Never destroyed: threads may still close sockets at exit.
class ForkGuard {
 public:
  static ForkGuard& get() {
    static ForkGuard* const guard = new ForkGuard;
    return *guard;
  }
  void set(int fd, bool kept) {
    if (fd < 0) return;
    const std::lock_guard lock(mutex_);
    const auto at = static_cast<size_t>(fd);
    if (at >= kept_.size()) kept_.resize(at + 64);
    kept_[at] = kept;
  }
  // No fork comes in between.
  void close(int fd) {
    const std::lock_guard lock(mutex_);
    kept_[static_cast<size_t>(fd)] = false;
    ::close(fd);
  }

 private:
  ForkGuard() {
    ::pthread_atfork([] { get().mutex_.lock(); }, [] { get().mutex_.unlock(); },
                     [] {
                       get().replace_all();
                       get().mutex_.unlock();
                     });
  }

  // In the child.
  void replace_all() const {
    int null = ::open("/dev/null", O_RDWR | O_CLOEXEC);
    for (size_t i = 0; i < kept_.size(); ++i) {
      const int fd = static_cast<int>(i);
      if (!kept_[i]) continue;
      if (null >= 0) {
        ::dup3(null, fd, O_CLOEXEC);
      } else {  // no descriptors are left: this one is the next to be opened
        ::close(fd);
        null = ::open("/dev/null", O_RDWR | O_CLOEXEC);
      }
      if (null == fd) null = -1;
    }
    if (null >= 0) ::close(null);
  }

  std::mutex mutex_;
  std::vector<bool> kept_;  // by descriptor
};

}  // namespace

void keep_from_children(int fd) { ForkGuard::get().set(fd, true); }
void close_kept(int fd) { ForkGuard::get().close(fd); }
void forget_kept(int fd) { ForkGuard::get().set(fd, false); }

}  // namespace sotto::tcp
