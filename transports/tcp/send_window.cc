#include "transports/tcp/send_window.h"

#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>

// Not in every C library's headers; the kernel has it since 5.14.
#ifndef SO_BUF_LOCK
#define SO_BUF_LOCK 72
#endif

namespace sotto::tcp {
namespace {

// What is on its way in the kernel besides, whatever the path. Small messages wait for it on slow
// links, and nothing is faster with 128 KiB.
constexpr uint64_t kBeside = 32 * 1024;
// A process that fills the buffer may be off its core for so long. More lets connections to one
// receiver share its link less evenly, and small messages wait longer: with 5 ms four ranks take 5
// % longer for a large float32 all-reduce at 1 Gbit/s. With half of it 4 bytes beside that wait
// half as long, but it takes 8 to 12 % longer (n = 25 000 000; a fifth of the elements, no
// difference).
constexpr uint64_t kAwayUs = 500;
// The rate is that of at least so long, since buckets let bursts pass at once, and of no pause.
constexpr int64_t kSampleNs = 20'000'000, kPauseNs = 200'000'000;
// Before anything is known of the path.
constexpr uint64_t kFirst = 256 * 1024;

}  // namespace

uint64_t SendWindow::bytes_for(uint64_t rate, uint64_t rtt_us) {
  const double path = 2.0 * static_cast<double>(rate) * static_cast<double>(rtt_us + kAwayUs) / 1e6;
  return kBeside + static_cast<uint64_t>(std::min(path, 1e15));
}

void SendWindow::start(int fd, bool enabled) {
  enabled_ = enabled;
  if (enabled) bound(fd, kFirst);
}

void SendWindow::look(int fd, int64_t now_ns) {
  unseen_ = 0;
  tcp_info info{};
  socklen_t size = sizeof info;
  if (::getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return;
  const int64_t passed = now_ns - mark_ns_;
  if (passed < kSampleNs) return;
  const uint64_t acked = info.tcpi_bytes_acked - acked_;
  acked_ = info.tcpi_bytes_acked;
  mark_ns_ = now_ns;
  if (passed > kPauseNs) return;
  // Samples are low while the peer or this rank has nothing to say, so the highest counts; it fades
  // over some tens of them, since paths change.
  const auto sample =
      static_cast<uint64_t>(static_cast<double>(acked) * 1e9 / static_cast<double>(passed));
  const uint64_t before = rate_;
  rate_ = std::max(sample, rate_ - rate_ / 32);
  shares_.changed(before, rate_);
  const uint64_t wanted = bytes_for(shares_.rate_for(rate_), info.tcpi_min_rtt);
  if (wanted > most_) {
    if (bounded_) unbound(fd);
    return;
  }
  const bool close = bounded_ && wanted > window_ / 4 * 3 && wanted < window_ / 4 * 5;
  if (!close) bound(fd, wanted);
}

// The kernel doubles what it is told and counts its own bookkeeping, so that about as many bytes of
// data fit as `bytes` says if it is told half.
void SendWindow::bound(int fd, uint64_t bytes) {
  const auto half = static_cast<int>(std::min<uint64_t>(bytes / 2, INT32_MAX / 2));
  if (::setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &half, sizeof half) != 0) return;
  int got = 0;
  socklen_t size = sizeof got;
  window_ = bytes;
  bounded_ = true;
  if (::getsockopt(fd, SOL_SOCKET, SO_SNDBUF, &got, &size) != 0 || got >= 2 * half) return;
  most_ = static_cast<uint64_t>(got);
  unbound(fd);
}

void SendWindow::unbound(int fd) {
  const int none = 0;
  // Without this call the buffer stays what it is, the largest that may be set.
  if (::setsockopt(fd, SOL_SOCKET, SO_BUF_LOCK, &none, sizeof none) == 0) bounded_ = false;
}

}  // namespace sotto::tcp
