// Socket options of connections.
#pragma once

#include <cstdint>
#include <string>

#include "core/base/status.h"

namespace sotto::tcp {

struct SocketSettings {
  uint64_t send_buffer_bytes = 0;     // 0: the system tunes it
  uint64_t receive_buffer_bytes = 0;  // 0: the system tunes it
  std::string congestion_control;     // "cubic", "bbr", ...; empty: the system's or the route's
  // Of control connections: longest time in which the peer's host acknowledges nothing; 0: the
  // system's limits, a quarter of an hour while bytes are on the way and none else.
  int64_t user_timeout_ms = 0;

  // INVALID_ARGUMENT: this machine cannot do that; lists what it can.
  Status check() const;
  // On a connected socket. A failure costs only speed, since check has found what can never work.
  void apply(int fd) const;
  // Also on a connected control socket: keepalive and TCP_USER_TIMEOUT.
  void watch(int fd) const;
};

}  // namespace sotto::tcp
