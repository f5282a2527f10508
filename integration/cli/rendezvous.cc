#include "integration/cli/rendezvous.h"

#include <fmt/format.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdlib>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <vector>

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

// In digits; empty if it is no address that other machines could reach.
std::string reachable(const sockaddr* address, socklen_t length) {
  if (address->sa_family == AF_INET) {
    const auto* const v4 = reinterpret_cast<const sockaddr_in*>(address);
    if (ntohl(v4->sin_addr.s_addr) >> 24 == IN_LOOPBACKNET) return {};
  } else {
    const auto* const v6 = reinterpret_cast<const sockaddr_in6*>(address);
    if (IN6_IS_ADDR_LOOPBACK(&v6->sin6_addr) || IN6_IS_ADDR_LINKLOCAL(&v6->sin6_addr)) return {};
  }
  char digits[NI_MAXHOST];
  if (getnameinfo(address, length, digits, sizeof digits, nullptr, 0, NI_NUMERICHOST) != 0)
    return {};
  return digits;
}

// IPv4 first.
std::vector<std::string> addresses_of(const std::string& name, int flags) {
  std::vector<std::string> all;
  const Addresses found = look_up(name, flags);
  for (const int family : {AF_INET, AF_INET6}) {
    for (const addrinfo* entry = found.get(); entry != nullptr; entry = entry->ai_next) {
      if (entry->ai_family != family) continue;
      const std::string address = reachable(entry->ai_addr, entry->ai_addrlen);
      if (!address.empty()) all.push_back(address);
    }
  }
  return all;
}

// The third word of "client-address client-port server-address server-port".
std::string address_of_sshd() {
  const char* const connection = std::getenv("SSH_CONNECTION");
  std::istringstream words(connection == nullptr ? "" : connection);
  std::string word;
  for (int i = 0; i < 3; ++i) words >> word;
  return words ? word : std::string();
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

std::string reserve_for_others(const std::string& host, bool others, ReservedPort& port) {
  std::vector<std::string> candidates;
  if (!others) {
    candidates.emplace_back("127.0.0.1");
  } else if (look_up(host, AI_NUMERICHOST) != nullptr) {
    candidates.push_back(host);
  } else {
    candidates = addresses_of(host, 0);
    const std::vector<std::string> more = addresses_of(address_of_sshd(), AI_NUMERICHOST);
    candidates.insert(candidates.end(), more.begin(), more.end());
  }
  for (const std::string& address : candidates) {
    const uint16_t number = port.reserve(address);
    if (number == 0) continue;
    const bool v6 = address.find(':') != std::string::npos;
    return fmt::format("tcp://{}:{}", v6 ? "[" + address + "]" : address, number);
  }
  throw std::runtime_error(fmt::format(
      "no address there at which the other hosts reach rank 0: {}; name one with --rendezvous "
      "tcp://address:port",
      candidates.empty() ? "the name means none, or loopback"
                         : fmt::format("{} is not one of its addresses, or has no free port",
                                       fmt::join(candidates, ", "))));
}

}  // namespace sotto_cli
