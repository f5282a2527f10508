// Payloads of the control frames (FORMAT.md, section 3). Decoders read untrusted bytes: they never
// read out of bounds and allocate at most in proportion to what has arrived.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/base/status.h"

namespace sotto::wire {

// Limits of one blob of an all-gather, and of one text.
inline constexpr uint64_t kMaxBlobBytes = uint64_t{1} << 20;
inline constexpr uint64_t kMaxTextBytes = 65536;
// Of the name of a host, and of an address.
inline constexpr uint64_t kMaxHostBytes = 255;

using Bytes = std::span<const uint8_t>;

// A rank presents itself to the coordinator.
struct Join {
  uint64_t token = 0;  // of the unique id; 0 when ranks meet at an address
  int32_t rank = 0;
  int32_t size = 0;
  uint32_t pid = 0;
  std::string host;
  std::string encode() const;
  static Result<Join> decode(Bytes bytes);
};

// The coordinator's answer when all ranks are there.
struct Members {
  struct Member {
    uint32_t pid = 0;
    std::string host;
    std::string address;  // as the coordinator sees it; may be empty for itself
  };
  int32_t coordinator = 0;
  uint64_t token = 0;           // of the group
  std::vector<Member> members;  // in rank order
  std::string encode() const;
  static Result<Members> decode(Bytes bytes);
};

struct Gather {
  uint64_t sequence = 0;  // counts the all-gathers of a group from 0
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
  // In a frame only if the reporter is known.
  int32_t reporter = -1;
  std::string waits = {};  // of a proposal
  std::string encode() const;
  static Result<Failure> decode(Bytes bytes);
};

// A sign of life. The coordinator adds what it knows of the others.
struct Heartbeat {
  std::string waiting;  // whom the set-up or exchange in progress waits for; empty: nobody
  std::vector<uint32_t> silent_ms;  // per rank; empty from members
  std::string encode() const;
  static Result<Heartbeat> decode(Bytes bytes);
};

// First frame of a data connection, in each direction.
struct Hello {
  uint64_t token = 0;  // of the group
  int32_t rank = 0;
  int32_t size = 0;
  std::string encode() const;
  static Result<Hello> decode(Bytes bytes);
};

}  // namespace sotto::wire
