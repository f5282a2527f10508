#include "integration/cli/rendezvous.h"

#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <memory>

namespace sotto_cli {
namespace {

struct FreeAddresses {
  void operator()(addrinfo* list) const { freeaddrinfo(list); }
};
using Addresses = std::unique_ptr<addrinfo, FreeAddresses>;

// Null if there are none.
Addresses look_up(const std::string& host, int flags) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags;
  addrinfo* found = nullptr;
  if (getaddrinfo(host.c_str(), "0", &hints, &found) != 0) return nullptr;
  return Addresses(found);
}

}  // namespace

ReservedPort::~ReservedPort() {
  if (fd_ >= 0) close(fd_);
}

uint16_t ReservedPort::reserve(const std::string& address) {
  const Addresses found = look_up(address, AI_NUMERICHOST | AI_NUMERICSERV);
  if (found == nullptr) return 0;
  if (fd_ >= 0) close(fd_);
  fd_ = socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const int on = 1;
  sockaddr_storage bound{};
  socklen_t length = sizeof bound;
  if (fd_ < 0 || setsockopt(fd_, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) != 0 ||
      bind(fd_, found->ai_addr, found->ai_addrlen) != 0 ||
      getsockname(fd_, reinterpret_cast<sockaddr*>(&bound), &length) != 0) {
    return 0;
  }
  return ntohs(bound.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(&bound)->sin6_port
                                           : reinterpret_cast<sockaddr_in*>(&bound)->sin_port);
}

}  // namespace sotto_cli
