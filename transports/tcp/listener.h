// A listening socket whose connections begin with one frame, by which they are admitted or refused.
//
// Until that frame is complete a connection is pending, and may be anybody's: it gets
// kFirstFrameMs, and there are at most `limit` of them. When there are more the oldest is closed,
// but not before it had kLeastMs; meanwhile new ones wait in the kernel's queue. When the process
// has no descriptors left the oldest makes room, too, and one descriptor is kept in reserve, so
// that there is always one connection that can be looked at.
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

// For the first frame of a connection that was accepted.
inline constexpr int64_t kFirstFrameMs = 5000;
// What a pending connection gets when others want its place.
inline constexpr int64_t kLeastMs = 500;
// Pending connections of one listener: a quarter of the descriptors that the process may have,
// within these bounds.
inline constexpr size_t kFewestPending = 16, kMostPending = 256;

class FrameListener {
 public:
  struct Entrance {
    std::string_view place;  // for logs: "rendezvous", "rank 2: data connections"
    wire::FrameKind kind = wire::FrameKind::kJoin;
    uint64_t max_payload = 0;
    size_t expected = 0;  // connections that ranks may make at once, on top of the limit
    // Called when connections wait that this process has no descriptors for, and nobody who is
    // pending could make room.
    std::function<void(const Status& why)> on_full = {};
  };
  // Admits a connection: takes the stream and gives it an owner. Else returns why it is refused;
  // the other side is told with a failure frame.
  using AdmitFn = std::function<std::optional<Refusal>(
      std::unique_ptr<FrameStream>& stream, const wire::FrameHeader& first, wire::Bytes payload)>;

  // Port 0: any. TRANSPORT names address and cause.
  static Result<std::unique_ptr<FrameListener>> open(Reactor& reactor, const Endpoint& at,
                                                     const Entrance& entrance, AdmitFn admit);
  ~FrameListener();
  FrameListener(const FrameListener&) = delete;
  FrameListener& operator=(const FrameListener&) = delete;

  uint16_t port() const { return port_; }
  // From now on nobody is expected: fewer pending connections, not many in a second, no descriptor
  // in reserve.
  void expect_nobody();
  // Refuses a connection that was admitted and to which nothing was sent.
  void refuse(std::unique_ptr<FrameStream> stream, const Refusal& refusal);
  // Those who were refused have been told.
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
