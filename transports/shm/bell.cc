#include "transports/shm/bell.h"

#include <poll.h>
#include <sys/eventfd.h>

#include <cerrno>
#include <cstring>

namespace sotto::shm {

Result<Bell> Bell::make() {
  Descriptor made(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!made.valid()) return error(Code::kTransport, "eventfd: {}", std::strerror(errno));
  return Bell(std::move(made));
}

void Bell::ring() const {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t n =
      ::write(descriptor_.get(), &one, sizeof one);  // full: it rings already
}

void Bell::silence() const {
  uint64_t count;
  [[maybe_unused]] const ssize_t n = ::read(descriptor_.get(), &count, sizeof count);
}

void Bell::wait(int64_t wait_us) const {
  pollfd waited{descriptor_.get(), POLLIN, 0};
  const timespec limit{wait_us / 1'000'000, (wait_us % 1'000'000) * 1000};
  ::ppoll(&waited, 1, &limit, nullptr);
}

}  // namespace sotto::shm
