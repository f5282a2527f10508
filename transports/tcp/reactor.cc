#include "transports/tcp/reactor.h"

#include <sched.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <map>

namespace sotto::tcp {

// What ends a wait from outside: the eventfd behind wake(), and descriptors of other pollers.
class Reactor::Waker final : public Pollable {
 public:
  // Of another poller, which serves it.
  struct Watched final : Pollable {
    bool serve(uint32_t /*events*/) override { return false; }
  };

  explicit Waker(int fd) : fd_(fd) {}
  ~Waker() override { ::close(fd_); }
  int fd() const { return fd_; }
  void ring() {
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t n = ::write(fd_, &one, sizeof one);  // full: it rings already
  }
  bool serve(uint32_t /*events*/) override {
    uint64_t count;
    [[maybe_unused]] const ssize_t n = ::read(fd_, &count, sizeof count);
    return false;
  }
  std::map<int, Watched> watched;

 private:
  int fd_;
};

Reactor::Reactor(const ReactorOptions& options)
    : clock_(options.clock != nullptr ? options.clock : &Clock::monotonic()),
      sockets_(options.sockets),
      turns_(*clock_),
      timers_(*clock_) {
  egress_.set_rate(options.rate_limit_mbit, now_ns());
  ingress_.set_rate(options.rate_limit_mbit, now_ns());
}

Result<std::unique_ptr<Reactor>> Reactor::make(const ReactorOptions& options) {
  std::unique_ptr<Reactor> reactor;
  try {
    reactor.reset(new Reactor(options));
  } catch (const boost::system::system_error& e) {
    return error(Code::kTransport, "cannot make an event loop: {}", e.what());
  }
  SOTTO_TRY(reactor->open());
  return reactor;
}

Status Reactor::open() {
  epoll_fd_ = ::epoll_create1(EPOLL_CLOEXEC);
  if (epoll_fd_ < 0) return error(Code::kTransport, "epoll_create1: {}", std::strerror(errno));
  SOTTO_TRY(asio_.watch(epoll_fd_));
  const int event_fd = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (event_fd < 0) return error(Code::kTransport, "eventfd: {}", std::strerror(errno));
  waker_ = std::make_unique<Waker>(event_fd);
  return add(event_fd, *waker_);
}

Reactor::~Reactor() {
  if (!waker_) return;
  for (auto& [fd, watched] : waker_->watched) remove(fd, watched);
  remove(waker_->fd(), *waker_);
}

Status Reactor::add(int fd, Pollable& pollable) {
  epoll_event event{};
  event.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET;
  event.data.ptr = &pollable;
  if (::epoll_ctl(epoll_fd_, EPOLL_CTL_ADD, fd, &event) != 0) {
    return error(Code::kTransport, "epoll_ctl: {}", std::strerror(errno));
  }
  turns_.add(pollable);
  return {};
}

void Reactor::remove(int fd, Pollable& pollable) {
  if (turns_.remove(pollable)) ::epoll_ctl(epoll_fd_, EPOLL_CTL_DEL, fd, nullptr);
}

void Reactor::wake() {
  if (!wake_requested_.exchange(true, std::memory_order_acq_rel)) waker_->ring();
}

bool Reactor::watch(int descriptor, bool on) {
  if (on) return add(descriptor, waker_->watched[descriptor]).ok();
  const auto it = waker_->watched.find(descriptor);
  if (it == waker_->watched.end()) return false;
  remove(descriptor, it->second);
  waker_->watched.erase(it);
  return true;
}

void Reactor::collect() {
  std::array<epoll_event, 64> events;
  const int n = ::epoll_wait(epoll_fd_, events.data(), static_cast<int>(events.size()), 0);
  for (int i = 0; i < n; ++i) {
    const epoll_event& event = events[static_cast<size_t>(i)];
    turns_.want(*static_cast<Pollable*>(event.data.ptr), event.events);
  }
}

// Timers come behind all that has arrived.
bool Reactor::pass() {
  turns_.release();
  collect();
  bool ran = turns_.serve();
  const int64_t now = now_ns();
  ran = asio_.run(now) || ran;
  return timers_.run(now) || ran;
}

void Reactor::block(int64_t wait_us) {
  asio_.block(wait_us, now_ns(), std::min(turns_.next_ns(), timers_.next_ns()));
}

bool Reactor::poll(int64_t wait_us) {
  const bool woken = wake_requested_.load(std::memory_order_relaxed) &&
                     wake_requested_.exchange(false, std::memory_order_acq_rel);
  if (pass() || woken) return true;
  if (wait_us <= 0) return false;
  block(wait_us);
  return pass();
}

}  // namespace sotto::tcp
