// A listening socket. The first frame of a connection decides whether it is admitted or refused.
//
// Until that frame is complete the connection is pending and its peer unknown. A pending connection
// has kFirstFrameMs. There are at most `limit` of them. Beyond that the oldest is closed when it is
// kLeastMs old, and meanwhile new ones wait in the kernel's queue. The oldest also makes room when
// the process has no descriptors left. One descriptor is kept in reserve, so that at least one
// connection can be accepted and read.
//
// Threads: the driving thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "core/base/status.h"
#include "core/wire/control.h"
#include "transports/tcp/reactor.h"
#include "transports/tcp/refusals.h"
#include "transports/tcp/stream.h"

namespace sotto::tcp {

// Time for the first frame of an accepted connection.
inline constexpr int64_t kFirstFrameMs = 5000;
// Time that a pending connection has before it makes room for others.
inline constexpr int64_t kLeastMs = 500;
// Bounds of the limit of pending connections, a quarter of the process's descriptors.
inline constexpr size_t kFewestPending = 16, kMostPending = 256;

class FrameListener {
 public:
  struct Entrance {
    std::string_view place;  // for logs: "rendezvous", "rank 2: data connections"
    wire::FrameKind kind = wire::FrameKind::kJoin;
    uint64_t max_payload = 0;
    size_t expected = 0;  // connections that ranks may make at once, on top of the limit
    // Called when connections wait, the process has no descriptors for them, and no pending
    // connection could make room.
    std::function<void(const Status& why)> on_full = {};
  };
  // Admits a connection: takes the stream and gives it an owner. Else returns the refusal, which is
  // sent to the peer as a failure frame.
  using AdmitFn = std::function<std::optional<Refusal>(
      std::unique_ptr<FrameStream>& stream, const wire::FrameHeader& first, wire::Bytes payload)>;

  // Port 0: any. TRANSPORT names address and cause.
  static Result<std::unique_ptr<FrameListener>> open(Reactor& reactor, const Endpoint& at,
                                                     const Entrance& entrance, AdmitFn admit);
  ~FrameListener();
  FrameListener(const FrameListener&) = delete;
  FrameListener& operator=(const FrameListener&) = delete;

  uint16_t port() const { return port_; }
  // No rank is expected any more: from now on fewer connections are pending and accepted per
  // second, and no descriptor is in reserve.
  void expect_no_rank();
  // Refuses a connection that was admitted and to which nothing was sent.
  void refuse(std::unique_ptr<FrameStream> stream, const Refusal& refusal);
  // All refusals were delivered.
  bool delivered() const;
  size_t pending() const;
  RefusalLog& refusals();

 private:
  class Pending;
  struct State;
  FrameListener() = default;
  std::shared_ptr<State> state_;
  uint16_t port_ = 0;
};

}  // namespace sotto::tcp
