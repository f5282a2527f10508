// What the tests of TCP's rendezvous and addresses share.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <string>

#include "core/iface/unique_id.h"
#include "tests/conformance/transport_suite.h"

namespace sotto::test {

inline bool has_ipv6_loopback() {
  const int fd = ::socket(AF_INET6, SOCK_STREAM, 0);
  sockaddr_in6 at{};
  at.sin6_family = AF_INET6;
  at.sin6_addr = in6addr_loopback;
  const bool has = fd >= 0 && ::bind(fd, reinterpret_cast<sockaddr*>(&at), sizeof at) == 0;
  if (fd >= 0) ::close(fd);
  return has;
}

inline Status join(RankKit& kit, JoinRequest request, int64_t timeout_us) {
  request.rank = kit.rank;
  request.size = kit.size;
  request.deadline = kit.in(timeout_us);
  auto joined = kit.backend->join(request, kit.driver);
  if (joined.ok()) kit.control = joined.take();
  return joined.status();
}

inline Status join_at(RankKit& kit, const std::string& address, int64_t timeout_us = 45'000'000) {
  JoinRequest request;
  request.address = address;
  return join(kit, std::move(request), timeout_us);
}

inline Status join_with(RankKit& kit, const UniqueId& id, int64_t timeout_us = 45'000'000) {
  JoinRequest request;
  request.id = id;
  return join(kit, std::move(request), timeout_us);
}

}  // namespace sotto::test
