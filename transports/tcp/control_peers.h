// The ranks of a group, as the parts of its control plane know them.
//
// Threads: the driving thread.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "core/wire/control.h"
#include "core/wire/frame.h"
#include "transports/tcp/rank_text.h"

namespace sotto::tcp {

class ControlPeers {
 public:
  virtual ~ControlPeers() = default;
  virtual int32_t rank() const = 0;
  virtual int32_t size() const = 0;
  virtual int32_t coordinator() const = 0;
  bool coordinates() const { return rank() == coordinator(); }
  virtual const wire::Members::Member& member(int32_t rank) const = 0;
  // "rank 2 (pid 123 on host, 10.0.0.2:3456)"
  std::string describe(int32_t rank) const { return member_text(rank, member(rank)); }

  // Set-up is over.
  virtual bool established() const = 0;
  // The rank has said bye; this rank: it has begun to.
  virtual bool left(int32_t rank) const = 0;
  // Control connections are between the coordinator and each of the others. Other pairs have none,
  // which is not open.
  virtual bool open(int32_t rank) const = 0;
  // The last sign of life on the control connection to the rank; nothing: there is none.
  virtual std::optional<int64_t> heard_ns(int32_t rank) const = 0;

  // Sends on the control connection to the rank, if it is open.
  virtual void send(int32_t rank, wire::FrameKind kind, const std::string& payload) = 0;
  // Sends a heartbeat. False: not while earlier messages wait, since a rank that does not read must
  // not make their queue grow.
  virtual bool send_sign(int32_t rank, const std::string& heartbeat) = 0;
};

}  // namespace sotto::tcp
