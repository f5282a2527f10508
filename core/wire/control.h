// Payloads of the control frames (FORMAT.md, section 3). Decoders read untrusted bytes: never out
// of bounds, and with memory in proportion to what has arrived.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/base/status.h"
#include "core/iface/service.h"

namespace sotto::wire {

// Limits of one blob of an all-gather, and of one text.
inline constexpr uint64_t kMaxBlobBytes = uint64_t{1} << 20;
inline constexpr uint64_t kMaxTextBytes = 65536;
// Of the name of a host, and of an address.
inline constexpr uint64_t kMaxHostBytes = 255;

using Bytes = std::span<const uint8_t>;

// From a rank to the coordinator: its place in the group.
struct Join {
  uint64_t token = 0;  // of the unique id; 0: rendezvous at an address
  int32_t rank = 0;
  int32_t size = 0;
  uint32_t pid = 0;
  std::string host;
  std::string encode() const;
  static Result<Join> decode(Bytes bytes);
};

// From the coordinator, once all ranks have joined.
struct Members {
  struct Member {
    uint32_t pid = 0;
    std::string host;
    std::string address;  // as the coordinator sees it; of itself it may be empty
  };
  int32_t coordinator = 0;
  uint64_t token = 0;           // of the group
  std::vector<Member> members;  // in rank order
  std::string encode() const;
  static Result<Members> decode(Bytes bytes);
};

struct Gather {
  uint64_t sequence = 0;  // number of the all-gather in its group, from 0
  std::string what;
  std::string data;
  std::string encode() const;
  static Result<Gather> decode(Bytes bytes);
};

struct Gathered {
  uint64_t sequence = 0;
  std::vector<std::string> data;  // in rank order
  std::string encode() const;
  static Result<Gathered> decode(Bytes bytes);
};

struct Failure {
  int32_t code = 0;
  int32_t rank = -1;  // accused
  std::string text;
  // In the frame only if the reporter is known.
  int32_t reporter = -1;
  std::string waits = {};  // FailureCause::waits
  std::string encode() const;
  static Result<Failure> decode(Bytes bytes);
};

// A sign of life. The coordinator's has what it knows of the other ranks.
struct Heartbeat {
  std::string waiting;  // ranks that the set-up or exchange in progress waits for; empty: none
  std::vector<uint32_t> silent_ms;  // time since each rank was heard; empty from members
  std::string encode() const;
  static Result<Heartbeat> decode(Bytes bytes);
};

// A message between two ranks, of which one or both are members; the coordinator passes it on.
struct Service {
  ServiceMessage message;
  std::string encode() const;
  static Result<Service> decode(Bytes bytes);
};

// The handshake of a data connection: its first frame in each direction.
struct Hello {
  uint64_t token = 0;  // of the group
  int32_t rank = 0;
  int32_t size = 0;
  std::string encode() const;
  static Result<Hello> decode(Bytes bytes);
};

}  // namespace sotto::wire
