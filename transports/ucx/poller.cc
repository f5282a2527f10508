#include "transports/ucx/poller.h"

#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace sotto::ucx {
namespace {

Status add_to(int epoll, int descriptor) {
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.fd = descriptor;
  if (::epoll_ctl(epoll, EPOLL_CTL_ADD, descriptor, &event) == 0) return ok_status();
  return error(Code::kTransport, "epoll_ctl: {}", std::strerror(errno));
}

}  // namespace

Result<std::shared_ptr<UcxPoller>> UcxPoller::make(const Clock& clock) {
  auto poller = std::make_shared<UcxPoller>(clock);
  poller->epoll_ = ::epoll_create1(EPOLL_CLOEXEC);
  poller->bell_ = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (poller->epoll_ < 0 || poller->bell_ < 0)
    return error(Code::kTransport, "no descriptors for UCX: {}", std::strerror(errno));
  SOTTO_TRY(add_to(poller->epoll_, poller->bell_));
  return poller;
}

UcxPoller::~UcxPoller() {
  if (epoll_ >= 0) ::close(epoll_);
  if (bell_ >= 0) ::close(bell_);
}

Status UcxPoller::add(Served& worker) {
  SOTTO_TRY(add_to(epoll_, worker.descriptor()));
  workers_.push_back(&worker);
  return ok_status();
}

void UcxPoller::remove(Served& worker) {
  ::epoll_ctl(epoll_, EPOLL_CTL_DEL, worker.descriptor(), nullptr);
  std::ranges::replace(workers_, &worker, static_cast<Served*>(nullptr));
  if (!passing_) std::erase(workers_, nullptr);
}

void UcxPoller::wake() {
  woken_.store(true, std::memory_order_release);
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t n = ::write(bell_, &one, sizeof one);  // full: it rings already
}

bool UcxPoller::arm() {
  uint64_t count;
  [[maybe_unused]] const ssize_t n = ::read(bell_, &count, sizeof count);
  if (woken_.exchange(false, std::memory_order_acq_rel)) return false;
  return std::ranges::all_of(workers_, [](Served* worker) { return worker->arm(); });
}

bool UcxPoller::poll(int64_t wait_us) {
  const bool woken = woken_.load(std::memory_order_relaxed) && woken_.exchange(false);
  if (pass() || woken) return true;
  if (wait_us <= 0) return false;
  if (!arm()) return pass();
  const int64_t us = std::min(wait_us, poll_interval_us());
  pollfd ready{epoll_, POLLIN, 0};
  const timespec limit{us / 1'000'000, (us % 1'000'000) * 1000};
  ::ppoll(&ready, 1, &limit, nullptr);
  return pass();
}

bool UcxPoller::pass() {
  if (passing_) return false;
  passing_ = true;
  bool moved = false;
  for (size_t i = 0; i < workers_.size(); ++i) {
    if (workers_[i] != nullptr) moved |= workers_[i]->pass();
  }
  passing_ = false;
  std::erase(workers_, nullptr);
  ticks_.run();
  return moved;
}

}  // namespace sotto::ucx
