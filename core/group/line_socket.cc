#include "core/group/line_socket.h"

#include <errno.h>
#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>

#include "core/base/text.h"

namespace sotto {
namespace {

constexpr size_t kLongestLine = 8192;
constexpr int64_t kLongestPollMs = 3'600'000;

// False: the deadline has passed.
Result<bool> wait_for(int fd, short events, const Clock& clock, Deadline deadline) {
  for (;;) {
    const int64_t left_us = deadline.left_us(clock);
    const int64_t ms = std::min(left_us / 1000 + 1, kLongestPollMs);
    pollfd entry{fd, events, 0};
    const int ready = ::poll(&entry, 1, left_us == 0 ? 0 : static_cast<int>(ms));
    if (ready > 0) return true;
    if (ready < 0 && errno != EINTR)
      return error(Code::kTransport, "poll: {}", std::strerror(errno));
    if (deadline.passed(clock)) return false;
  }
}

Status waited_for(int fd, short events, const Clock& clock, Deadline deadline) {
  SOTTO_ASSIGN(const bool ready, wait_for(fd, events, clock, deadline));
  if (ready) return ok_status();
  return error(Code::kTimeout, "nothing came within the time limit");
}

bool again(int failure) { return failure == EAGAIN || failure == EWOULDBLOCK || failure == EINTR; }

// The socket, or why not: errno.
std::pair<int, int> connect_to(const addrinfo& address, const Clock& clock, Deadline deadline) {
  const int fd = ::socket(address.ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) return {-1, errno};
  int failure = ::connect(fd, address.ai_addr, address.ai_addrlen) == 0 ? 0 : errno;
  if (failure == EINPROGRESS) {
    const Result<bool> ready = wait_for(fd, POLLOUT, clock, deadline);
    socklen_t size = sizeof failure;
    failure = ETIMEDOUT;
    if (ready.ok() && *ready) ::getsockopt(fd, SOL_SOCKET, SO_ERROR, &failure, &size);
  }
  if (failure == 0) return {fd, 0};
  ::close(fd);
  return {-1, failure};
}

}  // namespace

Result<LineSocket> LineSocket::lent(int fd) {
  sockaddr_storage peer{};
  socklen_t size = sizeof peer;
  if (::getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &size) != 0) {
    return invalid_argument(
        "descriptor {} of this process is no connection ({}); a program between the launcher and "
        "this one has closed it",
        fd, std::strerror(errno));
  }
  return LineSocket(fd, false);
}

Result<LineSocket> LineSocket::connect(const std::string& host, const std::string& port,
                                       const Clock& clock, Deadline deadline) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (const int failed = ::getaddrinfo(host.c_str(), port.c_str(), &hints, &found); failed != 0)
    return error(Code::kTransport, "the host \"{}\" is not known: {}", printable(host),
                 ::gai_strerror(failed));
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> all(found, &::freeaddrinfo);
  int why = 0;
  for (const addrinfo* address = found; address != nullptr; address = address->ai_next) {
    const auto [fd, failure] = connect_to(*address, clock, deadline);
    if (fd >= 0) return LineSocket(fd, true);
    why = failure;
  }
  return error(deadline.passed(clock) ? Code::kTimeout : Code::kTransport, "cannot connect: {}",
               std::strerror(why));
}

LineSocket::~LineSocket() {
  if (owned_) ::close(fd_);
}

LineSocket::LineSocket(LineSocket&& other) noexcept
    : fd_(other.fd_), owned_(std::exchange(other.owned_, false)), read_(std::move(other.read_)) {}

Status LineSocket::send(const std::string& text, const Clock& clock, Deadline deadline) {
  for (size_t sent = 0; sent < text.size();) {
    SOTTO_TRY(waited_for(fd_, POLLOUT, clock, deadline));
    const ssize_t n =
        ::send(fd_, text.data() + sent, text.size() - sent, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n >= 0) sent += static_cast<size_t>(n);
    if (n < 0 && !again(errno))
      return error(Code::kTransport, "cannot be sent: {}", std::strerror(errno));
  }
  return ok_status();
}

Result<std::string> LineSocket::line(const Clock& clock, Deadline deadline) {
  for (;;) {
    if (const size_t end = read_.find('\n'); end != std::string::npos) {
      std::string line = read_.substr(0, end);
      read_.erase(0, end + 1);
      return line;
    }
    if (read_.size() > kLongestLine) {
      return error(Code::kProtocol, "a line of more than {} bytes came: \"{}\"", kLongestLine,
                   printable(read_));
    }
    SOTTO_TRY(waited_for(fd_, POLLIN, clock, deadline));
    char bytes[1024];
    const ssize_t n = ::recv(fd_, bytes, sizeof bytes, MSG_DONTWAIT);
    if (n > 0) read_.append(bytes, static_cast<size_t>(n));
    if (n == 0) return error(Code::kTransport, "the other end has closed the connection");
    if (n < 0 && !again(errno))
      return error(Code::kTransport, "the connection is lost: {}", std::strerror(errno));
  }
}

}  // namespace sotto
