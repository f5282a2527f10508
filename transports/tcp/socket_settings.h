// What the kernel is told about sockets.
#pragma once

#include <cstdint>
#include <string>

#include "core/base/status.h"

namespace sotto::tcp {

struct SocketSettings {
  uint64_t send_buffer_bytes = 0;     // 0: the system tunes it
  uint64_t receive_buffer_bytes = 0;  // 0: the system tunes it
  std::string congestion_control;     // "cubic", "bbr", ...; empty: the system's or the route's
  // Of control connections: how long the other side's host may acknowledge nothing; 0: the system's
  // limits, a quarter of an hour while something is under way and for ever while nothing is.
  int64_t user_timeout_ms = 0;

  // INVALID_ARGUMENT if this machine cannot do that; names what it can.
  Status check() const;
  // On a connected socket. What fails costs only speed: check has found what can never work.
  void apply(int fd) const;
  // Besides, on a connected control socket: keepalive and TCP_USER_TIMEOUT.
  void watch(int fd) const;
};

}  // namespace sotto::tcp
