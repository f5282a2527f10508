// The backend for ranks that reach each other over TCP.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "core/base/clock.h"
#include "core/base/params.h"
#include "core/iface/rendezvous.h"

namespace sotto {

struct TcpOptions {
  // Where to accept connections: "any", an address, or the name of an interface. Empty: where the
  // rendezvous leads, which is loopback unless its address is another machine's or another
  // interface's; a unique id made here is for this machine alone.
  std::string listen = {};
  // Port of data connections; 0: any. One comm at a time can be made in a process that fixes it.
  uint16_t listen_port = 0;
  // What other ranks are told instead of where this one listens, when something in between forwards
  // to it: an address ("203.0.113.5", "[2001:db8::5]"), address:port, or :port. The port is that of
  // data connections; a unique id made here carries the address only. Empty: nothing else.
  std::string advertise = {};
  // Limit of what this rank sends, and of what it receives, in 10^6 bit/s over all peers, headers
  // included; 0: none.
  double rate_limit_mbit = 0;
  // Messages up to this size are sent without waiting for the receiver, within the credit that it
  // grants each peer (its memory for messages that nobody expects yet; at least four times
  // eager_bytes). Ranks that differ use the smallest values among them.
  uint64_t eager_bytes = 65536;
  uint64_t credit_bytes = uint64_t{1} << 20;
  // Data connections to each peer, 1 to 64. The first of several carries small messages only; more
  // than 2 where a single flow cannot fill the link. Ranks that differ use the smallest number
  // among them.
  uint32_t connections = 2;
  // Of data connections: tcp::SocketSettings.
  uint64_t send_buffer_bytes = 0;
  uint64_t receive_buffer_bytes = 0;
  std::string congestion_control = {};
  int64_t heartbeat_ms = 1000;
  // How long the host at the other end of a control connection may acknowledge nothing; 0: 30
  // heartbeats, at least 2 s.
  int64_t user_timeout_ms = 0;
  // How long a poll that waits looks for work before it sleeps.
  int64_t spin_us = 30;
  const Clock* clock = nullptr;  // null: monotonic
};

// What the SOTTO_* variables say.
TcpOptions tcp_options(const Params& params);

// One per context; has no thread: everything happens inside poller().poll. INVALID_ARGUMENT:
// listen, advertise, congestion_control. TRANSPORT: no descriptors left. Control planes and
// transports may outlive it.
Result<std::unique_ptr<Backend>> make_tcp_backend(const TcpOptions& options);

}  // namespace sotto
