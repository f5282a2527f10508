#include "tests/support/reserved_port.h"

#include <errno.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>

#include "tests/support/ranks.h"

namespace sotto::test {

ReservedPort::ReservedPort() {
  fd_ = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const int on = 1;
  sockaddr_in at{};
  at.sin_family = AF_INET;
  at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof at;
  if (fd_ < 0 || ::setsockopt(fd_, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) != 0 ||
      ::bind(fd_, reinterpret_cast<sockaddr*>(&at), sizeof at) != 0 ||
      ::getsockname(fd_, reinterpret_cast<sockaddr*>(&at), &length) != 0) {
    const std::string why = std::strerror(errno);
    if (fd_ >= 0) ::close(fd_);
    throw RankError("reserving a port: " + why);
  }
  number_ = ntohs(at.sin_port);
}

ReservedPort::~ReservedPort() { ::close(fd_); }

}  // namespace sotto::test
