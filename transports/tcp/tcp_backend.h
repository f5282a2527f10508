// The backend for ranks that reach each other over TCP.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "core/base/clock.h"
#include "core/iface/rendezvous.h"
#include "transports/tcp/params.h"

namespace sotto {

struct TcpOptions {
  // Where to accept connections: "any", an address, or the name of an interface. Empty: the address
  // of this machine on the route to the rendezvous, which is loopback if all ranks are on one
  // machine, and all addresses in its place if the launcher says that they are on several. A unique
  // id that is made here without it is for this machine alone, unless Reach::kNetwork is asked for.
  std::string listen = {};
  // Port of data connections; 0: any. With a fixed port a process can make one comm at a time.
  uint16_t listen_port = 0;
  // Published instead of where this rank listens, for a forwarder in between: an address
  // ("203.0.113.5", "[2001:db8::5]"), address:port, or :port. The port is that of data connections;
  // a unique id that is made here carries the address only. Empty: the place where it listens.
  std::string advertise = {};
  // Limit of sent and of received bytes, each in 10^6 bit/s over all peers with headers; 0: none.
  double rate_limit_mbit = 0;
  // Messages up to this size are sent without a READY, within the credit that the receiver grants
  // each peer: its memory for messages before their receives, at least four times eager_bytes.
  // Where ranks differ the smallest values count.
  uint64_t eager_bytes = 65536;
  uint64_t credit_bytes = uint64_t{1} << 20;
  // Data connections to each peer, 1 to 64. The first of several carries small messages only. More
  // than 2 are for links that a single flow cannot fill. Where ranks differ the smallest number
  // counts.
  uint32_t connections = 2;
  uint32_t background_share = 10;  // percent; as framed::FlowLimits says
  // Of data connections: tcp::SocketSettings.
  uint64_t send_buffer_bytes = 0;
  uint64_t receive_buffer_bytes = 0;
  std::string congestion_control = {};
  int64_t heartbeat_ms = 1000;
  // Longest time in which the host at the other end of a control connection acknowledges nothing;
  // 0: 30 heartbeats, at least 2 s.
  int64_t user_timeout_ms = 0;
  const Clock* clock = nullptr;  // null: monotonic
};

// From the SOTTO_* variables: those that rooms share, and TCP's.
TcpOptions tcp_options(const Params& common, const tcp::Params& own);

// One per context, without a thread of its own: all work is done inside poller().poll.
// INVALID_ARGUMENT: listen, advertise, congestion_control. TRANSPORT: no descriptors left. Control
// planes and transports may outlive it.
Result<std::unique_ptr<Backend>> make_tcp_backend(const TcpOptions& options);

}  // namespace sotto
