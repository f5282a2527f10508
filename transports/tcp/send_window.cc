#include "transports/tcp/send_window.h"

#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <string_view>

// Not in every C library's headers; the kernel has it since 5.14.
#ifndef SO_BUF_LOCK
#define SO_BUF_LOCK 72
#endif

namespace sotto::tcp {
namespace {

// What is on its way in the kernel besides, whatever the path. Small messages wait for it on slow
// links, and nothing is faster with 128 KiB.
constexpr uint64_t kBeside = 32 * 1024;
// A process that fills or empties a buffer may be off its core for so long, where a link is what
// bytes wait for. More lets connections to one receiver share its link less evenly, and small
// messages wait longer: with 5 ms four ranks take 5 % longer for a large float32 all-reduce at 1
// Gbit/s. With half of it 4 bytes beside that wait half as long, but it takes 8 to 12 % longer (n =
// 25 000 000; a fifth of the elements, no difference).
constexpr uint64_t kAwayUs = 500;
// On links that are faster than processes bytes wait for cores, so more of them cost nothing.
// There a rank sends kFreelyRate, and bytes are on the way for less than a round trip and
// kFreelyWaitUs. Loopback, known by its larger packets, is no such link.
constexpr uint64_t kFreelyRate = 250'000'000, kFreelyWaitUs = 900, kAwayFreelyUs = 2000;
constexpr uint64_t kLargestOfLinks = 16 * 1024;
// On loopback BBR takes the rate of two processes for that of a link and paces them below it, so
// that 20 MB take 1.4 times as long, unless the sender always waits for room: then no sample counts
// as the path's rate. More packets of buffer than these often end that.
constexpr uint64_t kPacketsPaced = 3;
// A rate is that of at least so long, since buckets let bursts pass at once.
constexpr int64_t kSampleNs = 20'000'000;
// Before the first sample of the path.
constexpr uint64_t kFirst = 256 * 1024;
// A window has room for so many full packets, with what the kernel counts for its bookkeeping. With
// less than two the sender waits for delayed acknowledgements, with four loopback is up to 15 %
// slower than with eight, and six still fit where net.core.wmem_max is what Linux makes it.
constexpr uint64_t kPackets = 6;

// On loopback the kernel cuts smaller packets than the path takes until the peer's receive window
// has grown.
uint64_t largest_packet(const tcp_info& info) {
  return std::max(info.tcpi_pmtu, info.tcpi_snd_mss);
}

bool has_pacing(int fd) {
  char name[16] = {};  // TCP_CA_NAME_MAX
  socklen_t size = sizeof name;
  return ::getsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name, &size) == 0 &&
         std::string_view(name, 3) == "bbr";
}

// A limit lets less than a packet pass at once, and is a link to wait for.
bool is_paced_loopback(const SendWindow::Path& path) {
  return path.paced && std::min(path.packet, path.at_once) > kLargestOfLinks;
}

bool ask(int fd, tcp_info* info) {
  socklen_t size = sizeof *info;
  return ::getsockopt(fd, IPPROTO_TCP, TCP_INFO, info, &size) == 0;
}

}  // namespace

bool PathRate::look(uint64_t acked, uint64_t on_path, int64_t now_ns) {
  bytes_ += acked - std::min(acked, acked_);
  taken_ns_ += now_ns - mark_ns_;
  waited_ += static_cast<double>(on_path) * static_cast<double>(now_ns - mark_ns_);
  acked_ = std::max(acked, acked_);
  mark_ns_ = now_ns;
  if (taken_ns_ < kSampleNs) return false;
  const auto sample =
      static_cast<uint64_t>(static_cast<double>(bytes_) * 1e9 / static_cast<double>(taken_ns_));
  // Little's law: the mean of what is on the way is rate times the time that it is there.
  // Receivers that are off their cores make it long, so the shortest counts.
  const double wait_us = waited_ / std::max(1.0, static_cast<double>(bytes_)) / 1e3;
  wait_us_ = std::min(static_cast<uint64_t>(std::min(wait_us, 1e12)), wait_us_ + wait_us_ / 4 + 50);
  bytes_ = 0;
  taken_ns_ = 0;
  waited_ = 0;
  // Samples are low while the peer does not read, so the highest counts; it fades over some tens of
  // them, since paths change.
  rate_ = std::max(sample, rate_ - rate_ / 32);
  return true;
}

uint64_t SendWindow::bytes_for(const Path& path) {
  const bool paced = is_paced_loopback(path);
  const bool freely = path.packet <= kLargestOfLinks && path.all >= kFreelyRate &&
                      path.wait_us < path.rtt_us + kFreelyWaitUs;
  const uint64_t away_us = paced ? 0 : freely ? kAwayFreelyUs : kAwayUs;
  const double carried =
      2.0 * static_cast<double>(path.rate) * static_cast<double>(path.rtt_us + away_us) / 1e6;
  return std::max(kBeside + static_cast<uint64_t>(std::min(carried, 1e15)),
                  (paced ? kPacketsPaced : kPackets) * std::min(path.packet, path.at_once));
}

void SendWindow::start(int fd, bool enabled, uint64_t at_once) {
  enabled_ = enabled;
  if (!enabled) return;
  tcp_info info{};
  ask(fd, &info);
  path_.packet = largest_packet(info);
  path_.at_once = at_once;
  path_.paced = has_pacing(fd);
  rate_.start(info.tcpi_bytes_acked);
  const uint64_t wanted = bytes_for(path_);
  bound(fd, is_paced_loopback(path_) ? wanted : std::max(kFirst, wanted));
}

void SendWindow::look(int fd, int64_t now_ns) {
  unseen_ = 0;
  tcp_info info{};
  if (!ask(fd, &info)) return;
  const uint64_t before = rate_.bytes_per_second();
  path_.packet = largest_packet(info);
  const uint64_t on_path = uint64_t{info.tcpi_unacked} * info.tcpi_snd_mss;
  // Acknowledgements of two packets may be late for other reasons.
  if (!rate_.look(info.tcpi_bytes_acked, on_path - std::min(on_path, 2 * path_.packet), now_ns))
    return;
  shares_.changed(before, rate_.bytes_per_second());
  path_.rate = shares_.rate_for(rate_.bytes_per_second());
  path_.all = shares_.sum();
  path_.rtt_us = info.tcpi_min_rtt;
  path_.wait_us = rate_.wait_us();
  const uint64_t wanted = bytes_for(path_);
  if (wanted > most_) {
    if (bounded_) unbound(fd);
    return;
  }
  const bool close = bounded_ && wanted > window_ / 4 * 3 && wanted < window_ / 4 * 5;
  if (!close) bound(fd, wanted);
}

// The kernel doubles the number and counts its own bookkeeping: with half of `bytes` about `bytes`
// of data fit.
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
