#include "transports/tcp/reactor.h"

#include <sched.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <map>
#include <new>

namespace sotto::tcp {
namespace {

// Accepts, connects and timers may wait this long while sockets are busy.
constexpr int64_t kAsioEveryNs = 100'000;

}  // namespace

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

struct Reactor::Ticker {
  Ticker(asio::io_context& io, int64_t ms, std::function<void()> f)
      : timer(io), period_ms(ms), tick(std::move(f)) {}
  asio::steady_timer timer;
  int64_t period_ms;
  std::function<void()> tick;

  static void arm(const std::shared_ptr<Ticker>& self) {
    self->timer.expires_after(std::chrono::milliseconds(self->period_ms));
    self->timer.async_wait([weak = std::weak_ptr<Ticker>(self)](const error_code& failed) {
      const std::shared_ptr<Ticker> ticker = weak.lock();
      if (failed || !ticker) return;
      arm(ticker);
      ticker->tick();
    });
  }
};

// Handler of the wait for the epoll descriptor.
struct Reactor::EpollReady {
  template <class T>
  struct WaitAllocator {
    using value_type = T;
    Reactor* reactor;

    explicit WaitAllocator(Reactor* r) : reactor(r) {}
    template <class U>
    WaitAllocator(const WaitAllocator<U>& other)
        : reactor(other.reactor) {}  // NOLINT: as allocators have to
    T* allocate(size_t n) {
      if (n * sizeof(T) > reactor->epoll_wait_.size()) throw std::bad_alloc();
      return reinterpret_cast<T*>(reactor->epoll_wait_.data());
    }
    void deallocate(T* /*memory*/, size_t /*n*/) noexcept {}
    template <class U>
    bool operator==(const WaitAllocator<U>& other) const {
      return reactor == other.reactor;
    }
  };
  using allocator_type = WaitAllocator<void>;

  Reactor* reactor;
  allocator_type get_allocator() const noexcept { return allocator_type(reactor); }
  void operator()(const error_code& /*failed*/) const { reactor->epoll_armed_ = false; }
};

Reactor::Reactor(const ReactorOptions& options)
    : clock_(options.clock != nullptr ? options.clock : &Clock::monotonic()),
      spin_us_(options.spin_us),
      sockets_(options.sockets) {
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
  error_code failed;
  epoll_in_asio_.assign(epoll_fd_, failed);  // Asio closes it
  if (failed) return error(Code::kTransport, "epoll in the event loop: {}", failed.message());
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
  pollable.registered_ = true;
  return {};
}

void Reactor::remove(int fd, Pollable& pollable) {
  if (!pollable.registered_) return;
  pollable.registered_ = false;
  ::epoll_ctl(epoll_fd_, EPOLL_CTL_DEL, fd, nullptr);
  std::replace(turns_.begin(), turns_.end(), &pollable, static_cast<Pollable*>(nullptr));
  std::replace(serving_.begin(), serving_.end(), &pollable, static_cast<Pollable*>(nullptr));
  std::erase_if(delayed_, [&](const Delayed& d) { return d.pollable == &pollable; });
  pollable.queued_ = false;
}

void Reactor::want_turn(Pollable& pollable) {
  if (pollable.queued_ || !pollable.registered_) return;
  pollable.queued_ = true;
  turns_.push_back(&pollable);
}

void Reactor::want_turn_at(Pollable& pollable, int64_t at_ns) {
  if (!pollable.registered_) return;
  for (Delayed& d : delayed_) {
    if (d.pollable == &pollable) {
      d.at_ns = std::min(d.at_ns, at_ns);
      return;
    }
  }
  delayed_.push_back({&pollable, at_ns});
}

void Reactor::release_delayed() {
  if (delayed_.empty()) return;
  const int64_t now = now_ns();
  for (const Delayed& d : delayed_) {
    if (d.at_ns <= now) want_turn(*d.pollable);
  }
  std::erase_if(delayed_, [&](const Delayed& d) { return d.at_ns <= now; });
}

std::shared_ptr<void> Reactor::every(int64_t period_ms, std::function<void()> tick) {
  auto ticker = std::make_shared<Ticker>(io_, period_ms, std::move(tick));
  Ticker::arm(ticker);
  return ticker;
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

bool Reactor::collect() {
  std::array<epoll_event, 64> events;
  const int n = ::epoll_wait(epoll_fd_, events.data(), static_cast<int>(events.size()), 0);
  for (int i = 0; i < n; ++i) {
    auto* pollable = static_cast<Pollable*>(events[static_cast<size_t>(i)].data.ptr);
    pollable->events_ |= events[static_cast<size_t>(i)].events;
    want_turn(*pollable);
  }
  return n > 0;
}

bool Reactor::serve_turns() {
  if (turns_.empty()) return false;
  serving_.swap(turns_);
  for (size_t i = 0; i < serving_.size(); ++i) {
    Pollable* pollable = serving_[i];
    if (pollable == nullptr) continue;
    pollable->queued_ = false;
    const uint32_t events = std::exchange(pollable->events_, 0);
    if (pollable->serve(events) && serving_[i] != nullptr) want_turn(*pollable);
  }
  serving_.clear();
  return true;
}

bool Reactor::run_asio() {
  last_asio_ns_ = now_ns();
  error_code failed;
  return io_.poll(failed) > 0;
}

bool Reactor::pass() {
  release_delayed();
  collect();
  bool ran = serve_turns();
  if (now_ns() - last_asio_ns_ > kAsioEveryNs) ran = run_asio() || ran;
  return ran;
}

void Reactor::arm_epoll() {
  if (epoll_armed_) return;
  epoll_armed_ = true;
  epoll_in_asio_.async_wait(asio::posix::stream_descriptor::wait_read, EpollReady{this});
}

void Reactor::arm_turn_timer() {
  if (delayed_.empty()) return;
  int64_t at = INT64_MAX;
  for (const Delayed& d : delayed_) at = std::min(at, d.at_ns);
  if (at == turn_timer_at_) return;
  turn_timer_at_ = at;
  turn_timer_.expires_after(std::chrono::nanoseconds(std::max<int64_t>(0, at - now_ns())));
  turn_timer_.async_wait([this](const error_code& failed) {
    if (!failed) turn_timer_at_ = INT64_MAX;
  });
}

void Reactor::block(int64_t wait_us) {
  arm_epoll();
  arm_turn_timer();
  io_.run_one_for(std::chrono::microseconds(wait_us));
}

bool Reactor::poll(int64_t wait_us) {
  if (wake_requested_.exchange(false, std::memory_order_acq_rel)) wait_us = 0;
  if (pass()) return true;
  if (wait_us <= 0) return false;
  const int64_t start = now_ns();
  const int64_t spin_until = start + std::min(spin_us_, wait_us) * 1000;
  while (now_ns() < spin_until) {
    ::sched_yield();
    if (pass()) return true;
    if (wake_requested_.load(std::memory_order_acquire)) return false;
  }
  const int64_t left = wait_us - (now_ns() - start) / 1000;
  if (left > 0) block(left);
  return pass();
}

}  // namespace sotto::tcp
