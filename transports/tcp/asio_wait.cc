#include "transports/tcp/asio_wait.h"

#include <algorithm>
#include <chrono>
#include <new>

namespace sotto::tcp {
namespace {

// Accepts, connects and posted calls may wait this long while sockets are busy.
constexpr int64_t kEveryNs = 100'000;

}  // namespace

// Handler of the wait for the epoll set.
struct AsioWait::EpollReady {
  template <class T>
  struct WaitAllocator {
    using value_type = T;
    AsioWait* owner;

    explicit WaitAllocator(AsioWait* o) : owner(o) {}
    template <class U>
    WaitAllocator(const WaitAllocator<U>& other)
        : owner(other.owner) {}  // NOLINT: as allocators have to
    T* allocate(size_t n) {
      if (n * sizeof(T) > owner->epoll_wait_.size()) throw std::bad_alloc();
      return reinterpret_cast<T*>(owner->epoll_wait_.data());
    }
    void deallocate(T* /*memory*/, size_t /*n*/) noexcept {}
    template <class U>
    bool operator==(const WaitAllocator<U>& other) const {
      return owner == other.owner;
    }
  };
  using allocator_type = WaitAllocator<void>;

  AsioWait* owner;
  allocator_type get_allocator() const noexcept { return allocator_type(owner); }
  void operator()(const error_code& /*failed*/) const { owner->epoll_armed_ = false; }
};

Status AsioWait::watch(int epoll_fd) {
  error_code failed;
  epoll_.assign(epoll_fd, failed);  // Asio closes it
  if (failed) return error(Code::kTransport, "epoll in the event loop: {}", failed.message());
  return {};
}

bool AsioWait::run(int64_t now_ns) {
  if (now_ns - last_run_ns_ <= kEveryNs) return false;
  last_run_ns_ = now_ns;
  error_code failed;
  return io_.poll(failed) > 0;
}

void AsioWait::block(int64_t wait_us, int64_t now_ns, int64_t until_ns) {
  arm_epoll();
  arm_timer(now_ns, until_ns);
  io_.run_one_for(std::chrono::microseconds(wait_us));
}

void AsioWait::arm_epoll() {
  if (epoll_armed_) return;
  epoll_armed_ = true;
  epoll_.async_wait(asio::posix::stream_descriptor::wait_read, EpollReady{this});
}

// A time that is armed already and is earlier stays: its end costs as much as its cancellation.
void AsioWait::arm_timer(int64_t now_ns, int64_t until_ns) {
  if (until_ns >= timer_at_ns_) return;
  timer_at_ns_ = until_ns;
  timer_.expires_after(std::chrono::nanoseconds(std::max<int64_t>(0, until_ns - now_ns)));
  timer_.async_wait([this](const error_code& failed) {
    if (!failed) timer_at_ns_ = INT64_MAX;
  });
}

}  // namespace sotto::tcp
