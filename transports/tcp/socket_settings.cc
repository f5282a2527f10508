#include "transports/tcp/socket_settings.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>

namespace sotto::tcp {
namespace {

// The kernel takes no more than this beyond what the network takes, so that an urgent frame is not
// stuck behind megabytes that were handed over long ago.
constexpr int kUnsentBytes = 256 * 1024;

std::string first_line(const char* path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

int set_congestion_control(int fd, const std::string& name) {
  return ::setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name.data(),
                      static_cast<socklen_t>(name.size()));
}

void set_buffer(int fd, int option, uint64_t bytes) {
  if (bytes == 0) return;
  const int value = static_cast<int>(std::min<uint64_t>(bytes, INT32_MAX / 2));
  ::setsockopt(fd, SOL_SOCKET, option, &value, sizeof value);
}

}  // namespace

Status SocketSettings::check() const {
  if (congestion_control.empty()) return {};
  const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return error(Code::kTransport, "cannot make a socket: {}", std::strerror(errno));
  const bool known = set_congestion_control(fd, congestion_control) == 0;
  const int why = errno;
  ::close(fd);
  if (known) return {};
  return invalid_argument("SOTTO_CONGESTION_CONTROL is \"{}\": {}; this machine allows {}",
                          congestion_control, std::strerror(why),
                          first_line("/proc/sys/net/ipv4/tcp_allowed_congestion_control"));
}

void SocketSettings::apply(int fd) const {
  const int one = 1;
  ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  ::setsockopt(fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, &kUnsentBytes, sizeof kUnsentBytes);
  set_buffer(fd, SO_SNDBUF, send_buffer_bytes);
  set_buffer(fd, SO_RCVBUF, receive_buffer_bytes);
  if (!congestion_control.empty()) set_congestion_control(fd, congestion_control);
}

void SocketSettings::watch(int fd) const {
  if (user_timeout_ms <= 0) return;
  const auto set = [fd](int level, int option, int64_t value) {
    const int number = static_cast<int>(std::clamp<int64_t>(value, 1, INT32_MAX));
    ::setsockopt(fd, level, option, &number, sizeof number);
  };
  // The connection ends when data or probes are not acknowledged for this time. Three probes fit
  // into it, in whole seconds.
  set(IPPROTO_TCP, TCP_USER_TIMEOUT, user_timeout_ms);
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
  const int64_t probe_s = std::min<int64_t>(user_timeout_ms / 3000, 32767);
  set(IPPROTO_TCP, TCP_KEEPIDLE, probe_s);
  set(IPPROTO_TCP, TCP_KEEPINTVL, probe_s);
  set(IPPROTO_TCP, TCP_KEEPCNT, 2);
}

}  // namespace sotto::tcp
